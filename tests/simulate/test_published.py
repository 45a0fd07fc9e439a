"""The published table from its TorchRec row alone: what the page shows is what the model gives."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.simulate.cases import CASES, CaseSettings, results
from nestpipe.simulate.published import MICRO_BATCHES, ROWS, TORCHREC, WORKERS, by_group_size, fit, predictions, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "simulate.md"


def test_the_fitted_row_is_met():
    found = results(CASES[0], fit(), [WORKERS], CaseSettings(micro_batches=MICRO_BATCHES))[0]
    assert 1e3 * found.step_s == pytest.approx(TORCHREC.step)
    assert 1e3 * found.cause_s["lookup"] == pytest.approx(TORCHREC.lookup)
    assert 1e3 * found.cause_s["communication"] == pytest.approx(TORCHREC.communication)
    assert found.efficiency == pytest.approx(TORCHREC.efficiency)


def test_the_page_shows_every_figure_with_its_error():
    shown, page = table(), PAGE.read_text()
    assert shown in page, f"docs/how-to/simulate.md must hold this table:\n{shown}"
    assert by_group_size() in page, f"and these lines:\n{by_group_size()}"
    num_figures = sum(
        getattr(row, name) is not None
        for row in ROWS
        for name in ("step", "lookup", "communication", "raw", "efficiency")
    )
    errors = re.findall(r"\| ([+-]\d+\.\d)% \|$", shown, re.MULTILINE)
    assert len(errors) == num_figures
    for error, one in zip(errors, predictions(fit()), strict=True):
        assert float(error) / 100 == pytest.approx((one.model - one.published) / one.published, abs=5e-4)  # as rounded


def test_constants_come_from_one_row():
    """Twice the times of the fitted row, and every prediction is twice as long: no other row has a say."""
    names = ("step", "lookup", "communication", "raw")
    rows = [row for row in ROWS if row.case in ("2d", "nested") and row.step]
    doubled = fit(replace(TORCHREC, **{name: 2 * getattr(TORCHREC, name) for name in names}))
    for one, two in zip(predictions(fit(), rows=rows), predictions(doubled, rows=rows), strict=True):
        assert two.model == pytest.approx(one.model if one.figure == "efficiency" else 2 * one.model), one
    with pytest.raises(ValueError, match="row '2D-SP' lacks a figure"):
        fit(ROWS[0])
