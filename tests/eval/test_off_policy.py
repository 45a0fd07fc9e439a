"""Off-policy estimates against a simulation whose truth is known: intervals cover it as often as they say."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from nestpipe.eval.off_policy import (
    LoggedRequests,
    PolicyAnswers,
    doubly_robust,
    effective_number,
    mean_of,
    off_policy_report,
    snips,
)

LOGS, REQUESTS, KINDS, ITEMS = 1000, 300, 5, 8
# Of 1000 logs 95 % +- 2 % cover: three standard errors of a share are 2.1 %.
LOW, HIGH = 0.93, 0.97


class World:
    """Requests of some kinds, items with a known mean reward for each, and two policies; all arrays [logs, requests]."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        means = rng.random((KINDS, ITEMS))
        tastes = rng.normal(size=(2, KINDS, ITEMS))
        better = tastes[0] + 0.7 * tastes[1] + 2 * means
        shows, wants = (np.exp(one) / np.exp(one).sum(1, keepdims=True) for one in (tastes[0], better))
        kinds = rng.integers(0, KINDS, (LOGS, REQUESTS))
        items = (shows[kinds].cumsum(2) < rng.random((LOGS, REQUESTS, 1))).sum(2).clip(max=ITEMS - 1)
        self.rewards = (rng.random((LOGS, REQUESTS)) < means[kinds, items]).astype(float)
        self.shown, self.wanted = shows[kinds, items], wants[kinds, items]
        model = means + 0.2 * rng.normal(size=means.shape)  # wrong, and wrong in another way for each item
        self.modelled, self.direct = model[kinds, items], (wants * model).sum(1)[kinds]
        self.truth, self.truth_shown = (float((one * means).sum(1).mean()) for one in (wants, shows))

    def coverage(self, estimate) -> float:
        low, high = estimate.bounds()
        return float(((low <= self.truth) & (self.truth <= high)).mean())


@pytest.fixture(scope="module")
def world():
    return World(1)


def test_intervals_cover_the_truth_at_their_rate(world):
    weights = world.wanted / world.shown
    assert LOW <= world.coverage(snips(weights, world.rewards)) <= HIGH
    robust = doubly_robust(weights, world.rewards, world.modelled, world.direct)
    assert LOW <= world.coverage(robust) <= HIGH
    assert abs(robust.value.mean() - world.truth) < 0.003
    # The model, wrong as it is, takes some of the variance of plain importance sampling.
    assert robust.value.std() < (weights * world.rewards).mean(-1).std()
    difference = snips(weights, world.rewards).minus(mean_of(world.rewards))
    low, high = difference.bounds()
    gain = world.truth - world.truth_shown
    assert LOW <= ((low <= gain) & (gain <= high)).mean() <= HIGH


def wrong_denominator(world):
    return snips(world.wanted * ITEMS, world.rewards)  # as if every item had been shown equally often


def clipped(world):
    return snips(np.minimum(world.wanted / world.shown, 1.5), world.rewards)


def not_normalised(world):
    weights = world.wanted / world.shown
    found = snips(weights, world.rewards)
    return found._replace(value=(weights * world.rewards).mean(-1))  # with the error of the normalised estimate


def model_alone(world):
    return mean_of(world.direct)


@pytest.mark.parametrize("mutant", [wrong_denominator, clipped, not_normalised, model_alone])
def test_estimates_that_are_wrong_do_not_cover(world, mutant):
    assert world.coverage(mutant(world)) < LOW


def report(world, log, *, logged=None, aligned=None):
    logged = logged or LoggedRequests(
        rewards=world.rewards[log], modelled=world.modelled[log], propensities=world.shown[log]
    )
    wanted = world.wanted[log] if aligned is None else aligned
    return off_policy_report(
        logged,
        PolicyAnswers(probabilities=world.shown[log], direct=world.modelled[log]),
        PolicyAnswers(probabilities=wanted, direct=world.direct[log]),
    )


def test_the_report_of_one_log(world):
    found = report(world, 7)
    assert (found.num_requests, found.num_left_out, found.reason) == (REQUESTS, 0, "")
    # The start is what showed the items: all weights are 1, and its estimate is the mean of the log.
    assert found.start.snips == found.logged
    assert found.start.effective_requests == pytest.approx(REQUESTS)
    assert found.aligned.effective_requests == effective_number(world.wanted[7] / world.shown[7]) < REQUESTS
    assert found.snips.mean == pytest.approx(found.aligned.snips.mean - found.start.snips.mean)
    apart = (found.start.snips.high - found.start.snips.low) + (found.aligned.snips.high - found.aligned.snips.low)
    assert found.snips.high - found.snips.low < apart
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(found)
    assert "difference " in console.export_text()


def test_requests_without_reward_or_propensity_are_left_out(world):
    rewards, shown = world.rewards[0].copy(), world.shown[0].copy()
    rewards[:20], shown[20:30], shown[30:40] = np.nan, 0.0, 1.7
    found = report(world, 0, logged=LoggedRequests(rewards=rewards, modelled=world.modelled[0], propensities=shown))
    assert (found.num_requests, found.num_left_out) == (REQUESTS - 40, 40)
    assert found.logged.mean == pytest.approx(world.rewards[0, 40:].mean())


def test_no_estimate_comes_with_its_reason(world):
    few = np.zeros(REQUESTS)
    few[:30] = 0.9
    assert "are worth" in report(world, 0, aligned=few).reason
    assert "are worth 0 equal ones" in report(world, 0, aligned=np.zeros(REQUESTS)).reason
    none = LoggedRequests(rewards=world.rewards[0], modelled=world.modelled[0], propensities=np.zeros(REQUESTS))
    assert "none of 300 held-out requests" in report(world, 0, logged=none).reason
