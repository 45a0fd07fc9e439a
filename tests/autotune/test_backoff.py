"""When a run looks at itself: plain numbers in, plain numbers out."""

from __future__ import annotations

import random

import pytest

from nestpipe.autotune.backoff import BatchSize, MeasurementTimer, steps_to_measurement
from nestpipe.autotune.search import PipelineChoice
from tests.autotune.test_search import LONG

PERIOD = 100
SEEN = LONG.observed(PipelineChoice(micro_batches=4))


def test_when_to_look_again():
    assert [steps_to_measurement(number, 100, 1) for number in (0, 18, 82, 83, 99, 100)] == [100, 82, 18, 117, 101, 100]
    assert [steps_to_measurement(number, 100, 4) for number in (0, 82, 83)] == [400, 318, 417]
    assert steps_to_measurement(90, 100, 0) == 18
    assert [steps_to_measurement(number, 10, 1) for number in (0, 5)] == [10, 15]
    assert steps_to_measurement(5, 10, 0) == 10


def settled(size):
    """After a first look at batches of one size, and a period."""
    looks = MeasurementTimer(period=PERIOD, number=0)
    for _ in range(looks.due):
        looks.record(size)
    looks.decide(looks.due, SEEN)
    for _ in range(PERIOD):
        looks.record(size)
    return looks


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (BatchSize(111, 1000), True),
        (BatchSize(89, 1000), True),
        (BatchSize(100, 1110), True),
        (BatchSize(109, 910), False),
    ],
    ids=["more rows", "fewer rows", "longer, of the same items", "nearly the same"],
)
def test_batches_that_have_become_others_are_noticed(size, wanted):
    looks = settled(BatchSize(100, 1000))
    for number in range(24):
        assert looks.is_requested == (wanted and number >= 12)
        looks.record(size)
    looks.restart(200)
    assert not looks.is_requested
    assert (looks.since, looks.due) == (200, 218)
    looks.record(size)
    assert looks.size == size, "what was before counts no more"


def test_nobody_is_asked_twice_in_a_period():
    """Batches that change to and fro all the time cost a barrier in a period, and no more."""
    looks = MeasurementTimer(period=PERIOD, number=0)
    for _ in range(looks.due):
        looks.record(BatchSize(100, 100))
    looks.decide(looks.due, SEEN)
    assert [looks.record(BatchSize(200, 100)) or looks.is_requested for _ in range(PERIOD)] == [False] * (
        PERIOD - 1
    ) + [True]


def test_an_odd_one_among_them_hides_no_change():
    looks = settled(BatchSize(100, 1000))
    for number in range(36):
        looks.record(BatchSize(100, 300 if number % 6 == 5 else 2000))
    assert looks.is_requested


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        (lambda chance: 100 if chance.random() < 0.8 else 500, 0),
        (lambda chance: chance.gauss(100, 30), 2),
        (lambda chance: chance.lognormvariate(5, 1), 8),
    ],
    ids=["few are large", "normal", "log-normal"],
)
def test_batches_that_differ_among_each_other_hardly_surprise_anybody(rows, most):
    chance, num_wanted = random.Random(0), 0
    looks = MeasurementTimer(period=PERIOD, number=0)
    for number in range(1, 20_000):
        looks.record(BatchSize(rows(chance), 1))
        if looks.is_requested:
            num_wanted += 1
            looks.restart(number)
        if number == looks.due:
            looks.decide(number, SEEN)
    assert num_wanted <= most


def test_steps_are_counted_from_look_to_look():
    """Also if one was put off, or a barrier came early: how long ago something was tried decides when it is tried again."""
    looks = MeasurementTimer(period=PERIOD, number=0)
    for barrier in (looks.restart, looks.postpone):
        looks.record(BatchSize(1, 1))
        barrier(30)
    looks.record(BatchSize(1, 1))
    looks.decide(500, SEEN)
    looks.record(BatchSize(1, 1))
    decision = looks.decide(518, SEEN)
    assert decision.choice.micro_batches == 2, "what else there is"
    looks.record(BatchSize(1, 1))
    looks.decide(536, LONG.observed(decision.choice))
    assert [(one.choice.micro_batches, one.num_steps, one.idle_steps) for one in looks.found] == [
        (4, 18, 18),
        (2, 18, 0),
    ]
    looks.forget()
    assert not looks.found
