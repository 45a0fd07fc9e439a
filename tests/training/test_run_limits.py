"""Limits of a run: where the pipeline must drain, when a run stops, and how learning rates change."""

from dataclasses import replace

import pytest

from nestpipe import recipes
from nestpipe.jagged import Cursor
from nestpipe.training.run_limits import Best, LoopProgress, RunLimits


class FixedEpochs:
    """A loader of epochs with 10, 11, 12, ... batches."""

    def num_batches(self, epoch):
        return 10 + epoch


def limits(*, validation=False, batch_tokens=0, **train):
    base = recipes.tiny()
    data = replace(base.data, validation=validation, batch_tokens=batch_tokens)
    settings = {"epochs": 0, "steps": 0, "save_steps": 1000, **train}
    return RunLimits(replace(base, data=data, train=replace(base.train, **settings)), FixedEpochs())


@pytest.mark.parametrize(
    ("settings", "num_steps", "cursor", "others", "expected"),
    [
        ({"save_steps": 8}, 0, (0, 0), [], 8),
        ({"save_steps": 8}, 5, (0, 5), [], 3),
        ({"save_steps": 8}, 8, (0, 8), [], 8),  # over the end of an epoch
        ({"steps": 7}, 5, (0, 5), [], 2),
        ({"epochs": 1}, 4, (0, 4), [], 6),
        ({"epochs": 2}, 4, (0, 4), [], 6 + 11),
        ({"epochs": 3, "validation": True}, 4, (0, 4), [], 6),
        ({"epochs": 3, "validation": True, "eval_epochs": 2}, 4, (0, 4), [], 6 + 11),
        ({"epochs": 3}, 4, (0, 4), [5, 2], 2),
    ],
)
def test_batches_overlap_up_to_the_first_barrier(settings, num_steps, cursor, others, expected):
    assert limits(**settings).steps_to_barrier(num_steps, Cursor(*cursor), others) == expected


@pytest.mark.parametrize(
    ("settings", "num_steps", "epoch", "reason"),
    [
        ({"steps": 7}, 6, 0, None),
        ({"steps": 7}, 7, 0, "7 steps done"),
        ({"epochs": 2}, 20, 1, None),
        ({"epochs": 2}, 21, 2, "2 epochs done"),
        ({"epochs": 9, "patience": 3}, 20, 1, None),
        ({"epochs": 9, "patience": 2}, 20, 1, "ndcg@10 did not rise above 0.2500 (step 4) in 2 validations"),
    ],
)
def test_a_run_stops_at_the_first_limit(settings, num_steps, epoch, reason):
    progress = LoopProgress(best=Best(4, 0.25), num_stale=2)
    own = limits(**settings)
    assert own.reason_to_stop(num_steps, Cursor(epoch, 0), progress, out_of_time=False) == reason


def test_time_is_a_limit():
    own = limits(minutes=1.5)
    assert [own.is_out_of_time(seconds) for seconds in (89.9, 90.0)] == [False, True]
    assert own.reason_to_stop(3, Cursor(0, 3), LoopProgress(), out_of_time=True) == "1.5 minutes done"
    assert not limits(epochs=1).is_out_of_time(1e9)


def test_the_number_of_steps_is_known_unless_epochs_differ():
    assert limits(epochs=3).num_steps() == 30
    assert limits(epochs=3, steps=20).num_steps() == 20
    assert limits(epochs=3, batch_tokens=512).num_steps() is None
    assert limits(minutes=1).num_steps() is None


def test_rates_warm_up_and_decay():
    base = recipes.tiny()
    own = limits(steps=100, warmup_steps=4, decay_epochs=2)  # to step 20
    factors = [own.rates(number).dense / base.dense.lr for number in (0, 3, 9, 18, 30)]
    assert factors == pytest.approx([0.25 * 0.95, 0.8, 0.5, 0.05, 0.01])
    assert own.rates(9).rows / base.embedding.lr == pytest.approx(0.5)
