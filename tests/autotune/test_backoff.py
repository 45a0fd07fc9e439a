"""When an adapting run measures itself: plain numbers in, plain numbers out."""

from __future__ import annotations

import random

import pytest

from nestpipe.autotune.backoff import BatchSize, MeasurementTimer, steps_to_measurement
from nestpipe.autotune.search import PipelineChoice
from tests.autotune.test_search import LONG

PERIOD = 100
SEEN = LONG.observed(PipelineChoice(micro_batches=4))


def test_when_to_measure_again():
    assert [steps_to_measurement(number, 100, 1) for number in (0, 18, 82, 83, 99, 100)] == [100, 82, 18, 117, 101, 100]
    assert [steps_to_measurement(number, 100, 4) for number in (0, 82, 83)] == [400, 318, 417]
    assert steps_to_measurement(90, 100, 0) == 18
    assert [steps_to_measurement(number, 10, 1) for number in (0, 5)] == [10, 15]
    assert steps_to_measurement(5, 10, 0) == 10


def settled(size):
    """After a first measurement of batches of one size, and a period."""
    timer = MeasurementTimer(period=PERIOD, number=0)
    for _ in range(timer.due):
        timer.record(size)
    timer.decide(timer.due, SEEN)
    for _ in range(PERIOD):
        timer.record(size)
    return timer


@pytest.mark.parametrize(
    ("size", "requested"),
    [
        (BatchSize(111, 1000), True),
        (BatchSize(89, 1000), True),
        (BatchSize(100, 1110), True),
        (BatchSize(109, 910), False),
    ],
    ids=["more rows", "fewer rows", "longer, of the same items", "nearly the same"],
)
def test_changed_batch_sizes_are_noticed(size, requested):
    timer = settled(BatchSize(100, 1000))
    for number in range(24):
        assert timer.is_requested == (requested and number >= 12)
        timer.record(size)
    timer.restart(200)
    assert not timer.is_requested
    assert (timer.since, timer.due) == (200, 218)
    timer.record(size)
    assert timer.size == size, "earlier batches do not count"


def test_at_most_one_request_per_period():
    """Batch sizes that alternate cost one barrier per period."""
    timer = MeasurementTimer(period=PERIOD, number=0)
    for _ in range(timer.due):
        timer.record(BatchSize(100, 100))
    timer.decide(timer.due, SEEN)
    assert [timer.record(BatchSize(200, 100)) or timer.is_requested for _ in range(PERIOD)] == [False] * (
        PERIOD - 1
    ) + [True]


def test_an_outlier_hides_no_change():
    timer = settled(BatchSize(100, 1000))
    for number in range(36):
        timer.record(BatchSize(100, 300 if number % 6 == 5 else 2000))
    assert timer.is_requested


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        (lambda chance: 100 if chance.random() < 0.8 else 500, 0),
        (lambda chance: chance.gauss(100, 30), 2),
        (lambda chance: chance.lognormvariate(5, 1), 8),
    ],
    ids=["few are large", "normal", "log-normal"],
)
def test_varying_batch_sizes_rarely_request_a_measurement(rows, most):
    chance, num_requested = random.Random(0), 0
    timer = MeasurementTimer(period=PERIOD, number=0)
    for number in range(1, 20_000):
        timer.record(BatchSize(rows(chance), 1))
        if timer.is_requested:
            num_requested += 1
            timer.restart(number)
        if number == timer.due:
            timer.decide(number, SEEN)
    assert num_requested <= most


def test_steps_are_counted_between_measurements():
    """Also if one was postponed or a barrier came early: the age of a measurement decides when it is repeated."""
    timer = MeasurementTimer(period=PERIOD, number=0)
    for barrier in (timer.restart, timer.postpone):
        timer.record(BatchSize(1, 1))
        barrier(30)
    timer.record(BatchSize(1, 1))
    timer.decide(500, SEEN)
    timer.record(BatchSize(1, 1))
    decision = timer.decide(518, SEEN)
    assert decision.choice.micro_batches == 2, "what else there is"
    timer.record(BatchSize(1, 1))
    timer.decide(536, LONG.observed(decision.choice))
    assert [(one.choice.micro_batches, one.num_steps, one.idle_steps) for one in timer.known] == [
        (4, 18, 18),
        (2, 18, 0),
    ]
    timer.forget()
    assert not timer.known
