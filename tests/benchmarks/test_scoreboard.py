"""The README's figures are those of the committed results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("scoreboard", ROOT / "benchmarks" / "scoreboard.py")
scoreboard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scoreboard)


def test_the_readme_shows_what_the_scripts_wrote():
    text = (ROOT / "README.md").read_text()
    assert scoreboard.BEGIN in text
    assert scoreboard.readme(text) == text, "run 'python benchmarks/scoreboard.py --write'"


def test_there_are_figures():
    found = list(scoreboard.rows())
    assert len(found) > 5
    assert len({row[0] for row in found}) == len(found), "two rows answer one question"
