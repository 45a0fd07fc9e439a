"""What the pages link to and name exists, and every page is in the navigation of the site."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]
_NAMED = r"`((?:nestpipe|tests|docs|benchmarks|deploy|examples)/[\w/.-]+\.\w+)`"


@pytest.fixture(scope="module")
def generated() -> set[Path]:
    """Pages that are made when the site is built."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "_generate" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    return {DOCS / name for name in reference.PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_exists(page: Path, generated: set[Path]) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # code has links of its own
    linked = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)}
    named = {ROOT / name for name in re.findall(_NAMED, text)}
    missing = sorted(str(path.relative_to(ROOT)) for path in (linked | named) - generated if not path.exists())
    assert not missing, f"{page.relative_to(ROOT)} points to what does not exist: {missing}"


def test_the_navigation_lists_every_page_once(generated: set[Path]) -> None:
    def paths(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [path for part in parts for path in paths(part)]  # type: ignore[attr-defined]

    listed = [DOCS / path for path in paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert len(listed) == len(set(listed))
    there = {*DOCS.rglob("*.md"), *generated}
    assert set(listed) == there, f"not there: {sorted(set(listed) - there)}; not listed: {sorted(there - set(listed))}"
