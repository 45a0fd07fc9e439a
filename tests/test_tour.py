"""The tour keeps its word: the steps it lists are as short as it says, and what it points to is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOUR = (ROOT / "docs" / "tour.md").read_text()
LISTED = re.compile(r"^\d+\. `(nestpipe/[\w/]+\.py)`:", re.MULTILINE)


def files_of(title: str) -> list[Path]:
    """The files that a section of the tour lists, in reading order."""
    section = TOUR.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [ROOT / name for name in LISTED.findall(section)]


def functions_of(path: Path) -> list[tuple[int, str]]:
    """Lines and name of every function of a file."""
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    name = path.relative_to(ROOT)
    return [((node.end_lineno or 0) - node.lineno + 1, f"{name}:{node.lineno} {node.name}") for node in found]


@pytest.mark.parametrize(
    ("title", "max_files", "max_lines"), [("One training step", 12, 2500), ("One serving step", 6, 1200)]
)
def test_a_step_can_be_read_in_an_hour(title: str, max_files: int, max_lines: int) -> None:
    files = files_of(title)
    num_lines = sum(len(path.read_text().splitlines()) for path in files)
    longest = sorted((found for path in files for found in functions_of(path)), reverse=True)[:10]
    print(f"{title}: {len(files)} files, {num_lines:,} lines; the longest functions:")
    print("\n".join(f"{lines:4} {name}" for lines, name in longest))
    assert 5 <= len(files) == len(set(files)) <= max_files
    assert num_lines <= max_lines, f"'{title}' of docs/tour.md has {num_lines:,} lines; {max_lines:,} are promised"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # code has links of its own
    linked = {page.parent / link for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)}
    named = {
        ROOT / name
        for name in re.findall(r"`((?:nestpipe|tests|docs|benchmarks|deploy|examples)/[\w/.-]+\.\w+)`", text)
    }
    missing = sorted(str(path.relative_to(ROOT)) for path in linked | named if not path.exists())
    assert not missing, f"docs/{page.name} points to what does not exist: {missing}"
