"""Metrics of labels against their definitions, written as loops over pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.schema import Label
from nestpipe.errors import DataError
from nestpipe.eval.compare import compare_labels
from nestpipe.eval.label_metrics import (
    LabelPredictions,
    Ratio,
    auc,
    calibration_error,
    gauc,
    intervals,
    points,
    ratio_difference,
    ratios,
)
from nestpipe.eval.label_report import label_report
from nestpipe.eval.ranking_eval import item_mean, user_item_bias

CLICK = Label(name="click", kind="binary", feature="x")
STARS = Label(name="stars", kind="ordinal", feature="x", num_levels=4)
TIME = Label(name="time", kind="regression", feature="x")


def pairs(scores, answers):
    """Rightly ordered pairs and all pairs with different answers, one by one."""
    right = total = 0.0
    for i, a in enumerate(answers):
        for j, b in enumerate(answers):
            if a > b:
                total += 1
                right += 1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0
    return right, total


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_auc_and_gauc_count_pairs_with_ties(rows):
    scores, answers, users = (np.array([row[k] for row in rows], dtype=np.float64) for k in range(3))
    right, total = pairs(scores, answers)
    assert auc(scores, answers) == pytest.approx(right / total) if total else math.isnan(auc(scores, answers))
    top = bottom = 0.0
    for user in range(5):
        own = users == user
        right, total = pairs(scores[own], answers[own])
        if total:
            top, bottom = top + own.sum() * right / total, bottom + own.sum()
    found = gauc(scores, answers, users.astype(np.int64), 5)
    assert found.top.sum() == pytest.approx(top)
    assert found.bottom.sum() == bottom


def test_auc_of_a_continuous_answer_is_refused():
    with pytest.raises(DataError, match="100 different values"):
        auc(np.zeros(100), np.arange(100.0))


def predicted(label, num=600, seed=0):
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 20, num)
    chance = rng.random(num)
    answers = {
        "binary": (rng.random(num) < chance).astype(float),
        "ordinal": (chance * 4).astype(int).astype(float),
        "regression": chance * 3,
    }[label.kind]
    answers[rng.random(num) < 0.1] = np.nan
    return LabelPredictions(label=label, scores=chance, answers=answers, users=users, num_users=25)


def test_sizes_of_predictions():
    found = predicted(CLICK).observed()
    assert not np.isnan(found.answers).any()
    own = ratios(found)
    expected = -np.mean([math.log(p if y else 1 - p) for p, y in zip(found.scores, found.answers, strict=True)])
    assert own["log_loss"].value == pytest.approx(expected)
    assert own["calibration"].value == pytest.approx(found.scores.mean() / found.answers.mean())
    assert calibration_error(found.scores, found.answers) < 0.12, "the chances are true"
    assert calibration_error(found.scores**3, found.answers) > 0.2
    own = ratios(predicted(TIME).observed())
    assert own["mse"].value == pytest.approx(np.mean((predicted(TIME).observed().scores * 2) ** 2))
    assert "gauc" not in own
    assert points(predicted(STARS).observed())["auc"] == 1.0


def test_certain_and_wrong_predictions_have_a_finite_loss():
    sure = LabelPredictions(
        label=CLICK, scores=np.array([1.0, 0.0]), answers=np.array([0.0, 1.0]), users=np.array([0, 0]), num_users=1
    )
    assert 20 < ratios(sure)["log_loss"].value < 40


def test_intervals_hold_the_value_and_shrink_with_more_users():
    rng = np.random.default_rng(1)
    widths = []
    for num in (50, 800):
        found = intervals({"x": Ratio(rng.normal(3, 1, num), np.ones(num))}, seed=0, num=200)["x"]
        assert found.low < found.mean < found.high
        widths.append(found.high - found.low)
    assert 2 < widths[0] / widths[1] < 8, "about the square root of 16"
    one = Ratio(rng.normal(3, 1, 100), np.ones(100))
    shifted = Ratio(one.top + 0.1, one.bottom)
    gain = ratio_difference(one, shifted, seed=0)
    assert gain.low == pytest.approx(0.1)
    assert gain.high == pytest.approx(0.1), "paired: what both share cancels"


def test_intervals_of_ratios_cover_about_95_times_in_100():
    """Users have their own number of pairs, as in GAUC, and the share of right ones depends on it."""
    rng = np.random.default_rng(2)

    def sample(num):
        pairs = rng.integers(1, 9, num)
        return Ratio(rng.binomial(pairs, 0.5 + 0.04 * pairs).astype(float), pairs.astype(float))

    counts = np.arange(1, 9)
    truth = (counts * (0.5 + 0.04 * counts)).sum() / counts.sum()
    found = [intervals({"x": sample(200)}, seed=seed, num=200)["x"] for seed in range(100)]
    assert 89 <= sum(one.low <= truth <= one.high for one in found) <= 100  # 95 expected, deviation 2.2


def test_a_report_has_slices_and_compares_pairwise(tmp_path):
    parts = [predicted(CLICK), predicted(STARS), predicted(TIME)]
    before = np.arange(600)
    make = lambda ones: label_report(  # noqa: E731
        ones,
        num_before=before,
        masks={"odd": before % 2 == 1},
        user_ids=np.arange(25) + 100,
        seed=0,
        num_bootstrap=100,
    )
    report = make(parts)
    assert set(report.slices) == {"short 0-199", "medium 200-399", "long 400-599", "odd"}
    assert (
        sum(part["click"].num_events for name, part in report.slices.items() if name != "odd")
        == report.tasks["click"].num_events
    )
    assert report.num_users == 20
    assert {"auc/click", "gauc/click", "log_loss/click", "calibration/click", "mse/time"} <= set(report.scalars())
    report.save(tmp_path)
    assert (tmp_path / "report.json").exists()
    worse = make([LabelPredictions(**{**_fields(one), "scores": 1 - one.scores}) for one in parts])
    assert compare_labels(report, worse, 0).differences["click"][2].high < 0
    fewer = make([LabelPredictions(**{**_fields(one), "users": one.users // 2}) for one in parts])
    with pytest.raises(DataError, match="not about the same events"):
        compare_labels(report, fewer, 0)


def _fields(one):
    return {name: getattr(one, name) for name in ("label", "scores", "answers", "users", "num_users")}


def test_baselines_solve_their_equations():
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 30, 3000), rng.integers(0, 40, 3000)
    of_user, of_item = rng.normal(0, 1, 30), rng.normal(0, 1, 40)
    answers = 3 + of_user[users] + of_item[items]
    overall, found_user, found_item = user_item_bias(users, items, answers, num_users=31, num_items=41, prior=1e-6)
    assert np.abs(overall + found_user[users] + found_item[items] - answers).max() < 1e-3
    assert found_user[30] == found_item[40] == 0, "nobody's bias is zero"
    means = item_mean(items, answers, 41, prior=0.5)
    assert means[40] == pytest.approx(answers.mean())
    assert means[3] == pytest.approx((answers[items == 3].sum() + 0.5 * answers.mean()) / ((items == 3).sum() + 0.5))
