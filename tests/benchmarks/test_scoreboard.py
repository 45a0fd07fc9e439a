"""The figures of the README and of docs/performance.md are those of the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import headlines  # noqa: E402
import scoreboard  # noqa: E402


def test_the_pages_show_what_the_scripts_wrote():
    for path, text in scoreboard.pages().items():
        assert path.read_text() == text, "run 'python benchmarks/scoreboard.py --write'"


def test_there_are_figures():
    found = list(scoreboard.rows())
    assert len(found) > 5
    assert len({row[0] for row in found}) == len(found), "two rows answer one question"


def test_headlines_are_few_and_say_where_they_lose():
    found = list(headlines.headlines())
    assert 5 <= len(found) <= 15
    assert all(all(row) for row in found)
