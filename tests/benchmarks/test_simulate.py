"""benchmarks/simulate.py without its ranks: what it predicts, and what it says about errors."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulate.test_calibrate import KNOWN

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("benchmarks.simulate")


def test_errors_stand_beside_their_limits(benchmark, monkeypatch, capsys):
    options = benchmark.options_of(["--ranks", "4", "--dense-ms", "50", "--steps", "3", "--micro-batches", "2"])
    monkeypatch.setattr(benchmark, "relay_bytes_per_s", lambda delay_ms: 1e8)
    cases = list(benchmark.predicted(KNOWN, options))
    assert [(case.network, case.mode) for case in cases] == [
        ("1gbit", "sequential"),
        ("1gbit", "nested"),
        ("250mbit+5ms", "sequential"),
        ("250mbit+5ms", "nested"),
    ]
    assert cases[0].predicted_s < cases[2].predicted_s
    assert cases[1].predicted_s < cases[3].predicted_s
    slow = cases[3].predicted_s

    def ran(num_ranks, rate, delay_ms, given):
        """Everything takes 4 % less than predicted, and nested on the slow network 28 % more."""
        times = {case.mode: case.predicted_s / 1.04 for case in cases if case.rate == rate}
        if delay_ms:
            times["nested"] = slow / 0.72
        return {"times": {mode: [seconds] * 9 for mode, seconds in times.items()}}

    monkeypatch.setattr(benchmark, "ran", ran)
    figures = benchmark.report(list(benchmark.measured(cases, options)), options)
    out = capsys.readouterr().out
    assert "median error 4.0%, limit 10%: met" in out
    assert "worst error 28.0%, limit 20%: missed" in out
    assert (figures["median_error"], figures["worst_error"]) == (0.04, 0.28)
    assert figures["250mbit+5ms/4/nested"]["error"] == -0.28
    # Without the 50 ms that only wait, the same difference is a larger share.
    assert figures["1gbit/4/nested"]["error_beyond_dense"] > 0.04
    json.dumps(figures)


def test_another_network_changes_what_was_asked_of_it(benchmark):
    line = {"bytes_per_s": 31.25e6, "burst_bytes": 64_000, "delay_s": KNOWN.delay_s + 0.005, "fabric_bytes_per_s": 1e8}
    assert benchmark.on_network(KNOWN, "250mbit", 5.0, 1e8) == replace(KNOWN, **line)
    seen = replace(KNOWN, bytes_per_s=125e6, burst_bytes=125_000)
    assert benchmark.on_network(KNOWN, "1gbit", 0.0, 1e8) == seen
