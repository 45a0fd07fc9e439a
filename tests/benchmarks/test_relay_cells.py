"""Cells of relay.py: finished blocks are found again, and ratios, verdicts, records and picture follow from them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import relay_load


@pytest.fixture
def relay(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(relay_load.__file__).parent))
    return importlib.import_module("relay")


def reached(per_s: float) -> dict[str, object]:
    return {"per_s": per_s, "rate": per_s, "paths": {"full": 1, "hit_device": 3}, "cpu_ms": 9.0, "num_requests": 1000}


def goodput(full: float, everything: float) -> dict[str, object]:
    return {"budget_ms": 100.0, "full": reached(full), "everything": reached(everything)}


def test_important_cells_come_first_with_five_blocks_of_a_thousand_requests(relay):
    names = list(relay.CELLS)
    assert names[: len(relay.MUST)] == relay.MUST
    assert {relay.CELLS[name].requests for name in relay.MUST} == {1000}
    assert all(relay.CELLS[name].blocks >= 5 for name in relay.MUST)
    colds = {cell.cold for cell in relay.CELLS.values() if cell.kind == "goodput" and cell.budget == "2.0"}
    assert colds == {0.0, 0.1, 0.33, 1.0}
    lengths = relay.rungs()
    assert (lengths[0], lengths[-1]) == (1024, 16_384)
    assert lengths == sorted(set(lengths))


def test_blocks_are_appended_and_found_again(relay, tmp_path):
    file = relay.CellFile(tmp_path)
    file.add("ml1m", {"full": 1.0}, block=1)
    file.add("overload", {"full": 2.0}, block=1)
    again = relay.CellFile(tmp_path)
    assert again.blocks("ml1m") == [{"full": 1.0}]
    assert again.blocks("history-2.0-cold10") == []
    assert len(again.commits("overload")) == 1


@pytest.mark.parametrize(
    ("blocks", "verdict"),
    [
        ([(10, 40), (10, 38), (9, 36)], "met (median"),
        ([(10, 40), (10, 38), (10, 29)], "met (median"),  # the lowest tenth is above 3.0
        ([(10, 40), (10, 25), (10, 37)], "missed (median"),
        ([(10, 35), (10, 35), (10, 35)], "missed (median"),
    ],
)
def test_the_limit_of_goodput_is_on_median_and_range(relay, blocks, verdict, capsys):
    found = {name: [] for name in relay.CELLS}
    found["goodput-2.0-cold10"] = [goodput(*one) for one in blocks]
    relay.relay_report.summarise(found)
    assert verdict in capsys.readouterr().out


def test_full_inference_without_goodput_gives_no_ratio(relay, capsys):
    found = {name: [] for name in relay.CELLS}
    found["goodput-max1.2-cold33"] = [goodput(0.0, 12.0)]
    assert relay.relay_report.summarise(found) == {}
    assert "keeps the budget at no rate" in capsys.readouterr().out


def test_records_have_what_the_scoreboard_reads(relay, tmp_path, monkeypatch):
    report = relay.relay_report
    monkeypatch.setattr(report, "PICTURE", tmp_path / "relay.svg")
    lines: list[dict[str, object]] = []
    monkeypatch.setattr(report.measure, "append", lambda name, line: lines.append(line))
    found = {name: [] for name in relay.CELLS}
    found["goodput-2.0-cold10"] = [goodput(10, 40), goodput(10, 38)]
    found["length-2048"] = [goodput(5, 12)]
    found["history-2.0-cold10"] = [{"full": 2000, "everything": 3000}, {"full": 2000, "everything": 3450}]
    found["ml1m"] = [{"full": 5.0, "everything": 5.1, "signals": {}}, {"full": 5.0, "everything": 5.2, "signals": {}}]
    numbers = dict.fromkeys(("useful_over_capacity", "useful_p99_over_budget", "share_refused"), 0.9)
    numbers |= {"refused_p99_over_budget": 1.0, "num_failed": 0, "recovered_after_s": 0.5}
    found["overload"] = [numbers]
    report.record(found, commits=["abc"])
    figures = [json.loads(json.dumps(line["figures"])) for line in lines]
    assert figures[0]["goodput_ratio"] == 3.9
    assert figures[0]["hit_share everything"] == 0.75
    assert figures[1]["history_ratio"] == 1.613
    assert figures[2]["overload_ranked_p99_over_budget"] == 0.9
    assert figures[3]["idle_cpu_overhead"] == 0.03
    assert "polyline" in (tmp_path / "relay.svg").read_text()
