"""Exact Adam on rows: equal to Adam on the dense table, whatever is looked up, read, skipped or resumed."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from nestpipe.embedding import row_adam, row_optimizer
from nestpipe.embedding.adam_series import Entries
from nestpipe.embedding.config import EmbeddingConfig, OptimizerConfig
from nestpipe.embedding.row_adam import SEEN, Adam
from nestpipe.embedding.row_optimizer import gather_slots, update_slots
from nestpipe.embedding.skipped_steps import SkippedSteps

NUM_ROWS, DIM = 60, 8
ALL = torch.arange(NUM_ROWS)


def new_rows(optimizer, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, DIM, generator=generator, dtype=torch.float64).mul_(0.02).to(dtype)
    state = optimizer.new_state(NUM_ROWS, DIM)
    return rows, {name: one.to(dtype) if one.is_floating_point() else one for name, one in state.items()}


def batch(number, share=0.2):
    """Some rows and their gradients, of which some are not much larger than eps."""
    generator = torch.Generator().manual_seed(number + 1)
    own = (torch.rand(NUM_ROWS, generator=generator) < share).nonzero().flatten()
    scale = 10.0 ** (torch.rand(len(own), 1, generator=generator, dtype=torch.float64) * 6 - 7)
    return own, torch.randn(len(own), DIM, generator=generator, dtype=torch.float64) * scale


def rate(number):
    """Rises and falls."""
    return 1e-3 * min((number + 1) / 30, 1.0) * max(1 - number / 900, 0.05)


def distance_from_dense(dtype, beta2=0.98, weight_decay=0.0):
    """The largest difference from Adam on the dense table, relative to its largest weight.

    After 200 batches, 80 % of the rows untouched in each; every fifth batch is skipped for all rows.
    """
    optimizer = Adam(OptimizerConfig(optimizer="adam", beta2=beta2, weight_decay=weight_decay))
    rows, state = new_rows(optimizer, dtype)
    dense = torch.nn.Parameter(rows.double().clone())
    theirs = torch.optim.AdamW([dense], lr=1.0, betas=(0.9, beta2), eps=1e-8, weight_decay=weight_decay)
    for number in range(200):
        own, grads = batch(number)
        optimizer.steps(dtype).record(number, rate(number))
        dense.grad = torch.zeros_like(dense)
        if not is_skipped(number):
            update_slots(optimizer, rows, state, own, grads.to(dtype), rate(number), batch=number)
            dense.grad[own] = grads
        theirs.param_groups[0]["lr"] = rate(number)
        theirs.step()
    ours = gather_slots(optimizer, rows, state, ALL, batch=200).double()
    assert int(state[SEEN].min()) < 190  # most rows are far behind
    moved = (dense.detach() - new_rows(optimizer, dtype)[0].double()).abs().max()
    assert float(moved) > 0.01
    return float((ours - dense.detach()).abs().max() / dense.detach().abs().max())


def is_skipped(number):
    return number % 5 == 4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("beta2", "weight_decay"), [(0.98, 0.0), (0.999, 0.3)])
def test_equals_torchs_adam_on_the_dense_table(dtype, tolerance, beta2, weight_decay):
    assert distance_from_dense(dtype, beta2, weight_decay) < tolerance


def without_catch_up(missed, rows, state):
    return rows


AT, STEP_TABLES = SkippedSteps.at, SkippedSteps._step_tables


def one_short(steps, batch):
    return AT(steps, max(batch - 1, 0))


def without_skipped(steps, batch):
    """Steps are those of batches that were not skipped."""
    return AT(steps, batch - sum(map(is_skipped, range(batch))))


def undecayed(steps, step):
    tables = STEP_TABLES(steps, step)
    return tables | {"powers": torch.ones_like(tables["powers"])}


MUTANTS = {
    "no catch-up at an update": lambda: patch.object(row_adam, "caught_up", without_catch_up),
    "no catch-up at a read": lambda: patch.object(row_optimizer, "caught_up", without_catch_up),
    "one batch short": lambda: patch.object(SkippedSteps, "at", one_short),
    "skipped batches not counted": lambda: patch.object(SkippedSteps, "at", without_skipped),
    "moments do not decay": lambda: patch.object(SkippedSteps, "_step_tables", undecayed),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_wrong_adam_is_far_from_the_dense_one(mutant):
    with mutant():
        assert distance_from_dense(torch.float64) > 1e-5


@pytest.mark.parametrize(("betas", "weight_decay"), [((0.9, 0.98), 0.3), ((0.8, 0.98), 0.0), ((0.0, 0.98), 0.0)])
def test_native_has_the_bits_of_torch_and_a_resumed_run_those_of_both(betas, weight_decay):
    """Gaps of one step to more than the horizon, rows of the first batches, rows never updated."""
    config = OptimizerConfig(optimizer="adam", beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)
    arms = [Adam(config), Adam(config)]
    contents = [new_rows(optimizer, torch.float32) for optimizer in arms]
    for number in range(300):
        for optimizer, (rows, state), native in zip(arms, contents, (None, False), strict=True):
            optimizer.steps(torch.float32).record(number, rate(number))
            own, grads = batch(number, 0.02 if number % 20 else 0.3)
            update_slots(
                optimizer, rows, state, own[own > 2], grads[own > 2].float(), rate(number), batch=number, native=native
            )
        if number % 60 == 59:
            resumed = Adam(config)
            resumed.steps(torch.float32).load(arms[0].steps(torch.float32).rates(number + 1), number + 1)
            reads = [
                gather_slots(optimizer, *content, ALL, batch=number + 1, native=native)
                for optimizer, content, native in zip(
                    [*arms, resumed], [*contents, contents[0]], (None, False, None), strict=True
                )
            ]
            assert torch.equal(reads[0], reads[1])
            assert torch.equal(reads[0], reads[2])
    for name, values in contents[0][1].items():
        assert torch.equal(values, contents[1][1][name])


@pytest.mark.parametrize(("betas", "weight_decay"), [((0.9, 0.999), 0.0), ((0.8, 0.98), 0.3), ((0.0, 0.98), 0.0)])
def test_native_series_have_the_bits_of_numpy(betas, weight_decay):
    """While entries are added, and once the oldest one leaves with every batch."""
    config = OptimizerConfig(optimizer="adam", beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)
    rates = np.array([rate(number) for number in range(90)])
    natively = in_numpy = Entries.empty(config, 0, 0, 0)
    for _ in rates:
        natively = natively.advance(rates, config, 40)
        in_numpy = in_numpy.advance(rates, config, 40, native=False)
        assert natively.step == in_numpy.step
        assert np.array_equal(natively.seen, in_numpy.seen)
        assert natively.state.tobytes() == in_numpy.state.tobytes()


def test_a_cut_advances_as_its_entries_do_among_all():
    """Also one that is not contiguous in memory, or that ends before the newest entry."""
    config = OptimizerConfig(optimizer="adam")
    rates = np.array([rate(number) for number in range(30)])
    entries = Entries.empty(config, 0, 0, 0)
    for _ in range(20):
        entries = entries.advance(rates, config, 40)
    whole = entries.advance(rates, config, 40, native=False)
    for begin, end in ((0, 20), (3, 20), (0, 5), (4, 9), (7, 7)):
        own = [*range(begin, end), 20]
        for native in (None, False):
            found = entries.cut(begin, end).advance(rates, config, 40, native=native)
            assert np.array_equal(found.seen, whole.seen[own])
            assert found.state.tobytes() == whole.state[:, own].tobytes()


def test_the_series_equals_the_steps_one_by_one():
    """At all gaps and second moments around eps, where a closed form without eps is wrong."""
    config = OptimizerConfig(optimizer="adam")
    steps, plain = SkippedSteps(config, torch.float32), SkippedSteps(config, torch.float32)
    plain.first_series = 1 << 31
    for number in range(700):
        steps.record(number, rate(number))
        plain.record(number, rate(number))
    seen = torch.arange(steps.first_series, 700, 7).int().repeat_interleave(12).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    root = 10.0 ** (torch.rand(len(seen), DIM, generator=generator) * 12 - 11)
    state = {"mean": root * torch.randn(len(seen), DIM, generator=generator), "square": root * root, SEEN: seen}
    fast, slow = Adam(config), Adam(config)
    fast._steps[torch.float32], slow._steps[torch.float32] = steps, plain
    read = [
        gather_slots(one, torch.zeros(len(seen), DIM), state, torch.arange(len(seen)), batch=700)
        for one in (fast, slow)
    ]
    assert float(read[1].abs().max()) > 1e-3
    # Both are fp32; the series itself is exact to 5e-7.
    assert torch.allclose(read[0], read[1], rtol=5e-6, atol=0)


def test_reading_changes_nothing_and_a_rate_may_be_recorded_again():
    optimizer = Adam(OptimizerConfig(optimizer="adam"))
    rows, state = new_rows(optimizer, torch.float32)
    own, grads = batch(0)
    update_slots(optimizer, rows, state, own, grads.float(), 0.1, batch=0)
    steps = optimizer.steps(torch.float32)
    steps.record(1, 0.1)
    before = rows.clone()
    first = gather_slots(optimizer, rows, state, ALL, batch=2)
    assert torch.equal(before, rows)
    assert not torch.equal(first, rows)
    steps.record(1, 0.0)  # the batch is read again, with another rate
    assert torch.equal(
        gather_slots(optimizer, rows, state, ALL, batch=2), gather_slots(optimizer, rows, state, ALL, batch=1)
    )


def test_a_batch_without_a_rate_is_refused():
    steps = SkippedSteps(OptimizerConfig(optimizer="adam"), torch.float32)
    steps.record(0, 0.1)
    with pytest.raises(ValueError, match="the learning rate of batch 2 comes after that of batch 0"):
        steps.record(2, 0.1)
    with pytest.raises(ValueError, match="learning rates of batches before it are unknown"):
        steps.at(2)


def test_betas_with_which_rows_would_run_away_are_refused():
    problems = list(EmbeddingConfig(optimizer="adam", beta1=0.99, beta2=0.9).problems())
    assert "beta1 ** 2 is not below beta2" in problems[0]
    assert not list(EmbeddingConfig(optimizer="lazy_adam", beta1=0.99, beta2=0.9).problems())
    assert np.isfinite(SkippedSteps(OptimizerConfig(beta1=0.0), torch.float32).horizon)
