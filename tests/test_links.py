"""What the pages point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # code has links of its own
    linked = {page.parent / link for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)}
    named = {
        ROOT / name
        for name in re.findall(r"`((?:nestpipe|tests|docs|benchmarks|deploy|examples)/[\w/.-]+\.\w+)`", text)
    }
    missing = sorted(str(path.relative_to(ROOT)) for path in linked | named if not path.exists())
    assert not missing, f"docs/{page.name} points to what does not exist: {missing}"
