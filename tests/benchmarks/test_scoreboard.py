"""The figures of the README and of docs/performance.md are those of the committed results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import baselines  # noqa: E402
import headlines  # noqa: E402
import quality_ml1m  # noqa: E402
import scoreboard  # noqa: E402
import scoreboard_quality  # noqa: E402


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


FIGURE = re.compile(r"(?<![0-9])0?\.[0-9]{4}(?![0-9])")


def test_every_figure_of_movielens_says_its_order():
    """On every page, and references are of the same order."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for line in path.read_text().splitlines():
            if "MovieLens-1M" in line and FIGURE.search(line):
                assert ("file order" in line) != ("Meta's order" in line) or "ties " in line, f"{path}: {line}"
    page = quality_ml1m.page({ties: [] for ties in quality_ml1m.ORDERS})
    for ties, order in quality_ml1m.ORDERS.items():
        table = page.partition(f"### {order}")[2].partition("\n### ")[0].partition("<!-- end")[0]
        shown = {name for found in quality_ml1m.PUBLISHED.values() for name in found if f"*{name}*" in table}
        assert shown == {*quality_ml1m.PUBLISHED[ties]}


def test_seeds_of_one_protocol_are_one_figure(tmp_path, monkeypatch):
    config = {"train": {"epochs": 101}, "data": {"validation": False}}
    runs = [(0, "file", 0.3), (1, "file", 0.32), (0, "meta", 0.2), (1, "file", 0.34)]
    lines = [
        {"seed": seed, "settings": {"model": "hstu", "config": config, "ties": ties}, "figures": {"hr@10": hits}}
        for seed, ties, hits in runs
    ]
    (tmp_path / "quality_ml1m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(scoreboard, "RESULTS", tmp_path)
    found = {ties: scoreboard_quality.ml1m("hstu", ties) for ties in ("file", "meta")}
    assert [one["hr@10"] for one in found["file"]] == [0.3, 0.34]
    assert [one["hr@10"] for one in found["meta"]] == [0.2]


def test_the_page_of_evaluation_shows_the_recorded_baselines():
    assert baselines.PAGE.read_text() == baselines.page(), "run 'python benchmarks/baselines.py --write'"
    (hits,) = [row[1] for row in baselines.rows() if row[0] == "`transitions`"]
    assert float(hits.partition(" ")[0]) >= baselines.LEAST_TRANSITIONS
