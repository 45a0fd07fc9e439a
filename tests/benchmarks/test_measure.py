"""Blocks, spreads, verdicts and result files of the benchmarks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import measure, netlab
from benchmarks.measure import Spread


def test_arms_alternate_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = measure.alternate({"a": lambda: arm("a"), "b": lambda: arm("b")}, num_blocks=9)
    assert order == ["a", "b"] * 10
    assert found == {
        "a": [float(2 * block + 3) for block in range(9)],
        "b": [float(2 * block + 4) for block in range(9)],
    }
    with pytest.raises(ValueError, match="8 blocks are too few"):
        measure.alternate({}, num_blocks=8)


def test_spread_is_the_median_and_the_middle_eighty_percent() -> None:
    assert Spread.of([float(value) for value in range(11)]) == Spread(5.0, 1.0, 9.0)
    assert Spread.of([2.0, 2.0]) == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="at least 2 values"):
        Spread.of([1.0])


def test_ratios_are_taken_block_by_block() -> None:
    # The machine becomes ten times slower half way; both arms feel it, the ratio does not.
    slow = [1.0] * 5 + [10.0] * 5
    assert measure.ratio([2 * value for value in slow], slow) == Spread(2.0, 2.0, 2.0)
    assert measure.ratio([3.0, 3.0], 1.5).median == 2.0
    with pytest.raises(ValueError):
        measure.ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("low", "high", "at_most", "at_least"),
    [
        (1.0, 1.1, "met", "missed"),
        (1.2, 1.3, "missed", "met"),
        (1.1, 1.2, "undecided", "undecided"),
        (1.0, 1.15, "met", "undecided"),
        (1.15, 1.2, "undecided", "met"),
    ],
)
def test_a_verdict_needs_the_whole_range(low: float, high: float, at_most: str, at_least: str) -> None:
    found = Spread((low + high) / 2, low, high)
    assert measure.verdict(found, at_most=1.15) == at_most
    assert measure.verdict(found, at_least=1.15) == at_least
    with pytest.raises(ValueError, match="one of"):
        measure.verdict(found)


def test_records_are_appended_with_what_they_depend_on(tmp_path: Path) -> None:
    line = measure.record(seed=3, figures={"over_wire": 1.02}, settings={"num_blocks": 9})
    measure.append("exchange", line, folder=tmp_path)
    path = measure.append("exchange", line, folder=tmp_path)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == second == line
    assert {"time", "commit", "machine", "versions", "seed", "settings", "figures"} == set(first)
    assert first["machine"]["cores"] >= 1
    assert first["versions"]["torch"]


def test_the_table_lines_up() -> None:
    assert measure.table(["", "time"], [["ours", "1 ms"], ["theirs", "20 ms"]]).splitlines() == [
        "         time",
        "------  -----",
        "ours     1 ms",
        "theirs  20 ms",
    ]


def test_rates_of_the_network_lab() -> None:
    assert [netlab.bits_per_s(rate) for rate in ("1gbit", "2.5mbit", "8kbit")] == [1e9, 2.5e6, 8e3]
    with pytest.raises(netlab.LabError, match="cannot parse rate '1 GB'"):
        netlab.bits_per_s("1 GB")
    # What `python benchmarks/netlab.py` measured: 957 and 999 Mbit/s of a line of 1 Gbit/s.
    assert round(netlab.payload_share(0.0), 3) == 0.956
    assert round(netlab.payload_share(2.0), 3) == 0.999


def test_auto_is_compared_with_the_fastest_fixed_mode_round_by_round(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(measure.__file__).parent))
    auto = importlib.import_module("benchmarks.auto")
    times = {name: [2.0] * 7 for name in auto.FIXED} | {"sequential": [3.0] * 7, "nested 2": [1.0] * 6 + [9.0]}
    times["auto"] = [1.25] * 7
    found = {"times": times, "cpu": times, "chosen": {}, "bitwise_equal": True}
    figures = auto.figures_of("1gbit mlp", found)
    assert figures["best_fixed"] == "nested 2", "by the median: one slow round does not count"
    assert (figures["auto_over_best_fixed"], figures["auto_over_best_fixed_met"]) == (0.8, False)
    assert (figures["auto_over_sequential"], figures["auto_over_sequential_met"]) == (2.4, True)
    assert figures["auto_over_sequential_limit"] == 1.3
    assert not auto.figures_of("1gbit+2ms mlp", {**found, "times": times | {"sequential": [1.9] * 7}})[
        "auto_over_sequential_met"
    ]


def test_parts_of_a_long_run_are_kept_until_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "new" / "kept.jsonl", []

    def part(name: str) -> dict[str, float]:
        calls.append(name)
        return {name: 0.1 + len(calls)}

    first = measure.Kept(path, {"blocks": 9})
    found = first.once("a", lambda: part("a"))
    with pytest.raises(KeyboardInterrupt):
        first.once("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    again = measure.Kept(path, {"blocks": 9})
    assert again.once("a", lambda: part("a")) == found == {"a": 1.1}
    assert again.once("b", lambda: part("b")) == {"b": 2.1}
    assert calls == ["a", "b"], "a was there, b had not been measured to its end"
    measure.Kept(path, {"blocks": 3}).once("a", lambda: part("a"))
    assert calls == ["a", "b", "a"], "other settings: nothing is taken over"
    monkeypatch.setattr(measure, "commit", lambda: "another")
    last = measure.Kept(path, {"blocks": 3})
    last.once("a", lambda: part("a"))
    assert len(calls) == 4, "another commit: nothing is taken over"
    last.clear()
    assert not path.exists()
