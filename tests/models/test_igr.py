"""Selection from long histories: by definition, in time order, from a snapshot; and what the engine makes of it."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from nestpipe.config import Config
from nestpipe.data.config import DataConfig
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import EncDecConfig
from nestpipe.models.encdec import build_encdec
from nestpipe.models.igr import keep_events, same_instructions, top_of_rows
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, read
from nestpipe.rng import Rng
from tests.generative.known_trees import random_trie, state_of

TRIE = random_trie(20, (4, 3, 3))
TEXT = torch.nn.functional.normalize(torch.from_numpy(np.random.default_rng(5).normal(size=(20, 12))), dim=1).float()
SMALL = EncDecConfig(
    dim=8,
    num_encoder=1,
    num_decoder=1,
    num_heads=2,
    dropout=0.1,
    num_scenarios=3,
    reasoning_dim=12,
    reasoning_dropout=0.3,
    queries="last",
    igr="query",
    igr_recent=2,
    igr_related=3,
    igr_dim=16,
    igr_refresh_steps=2,
)


def model_of(dtype=torch.float64, **settings):
    return build_encdec(replace(SMALL, **settings), TRIE, max_len=40, seed=3, dtype=dtype, text=TEXT)


def batch_of(histories, *, groups=None):
    """Histories as catalogue positions, each with an instruction that is the text of an item."""
    items = Jagged.from_rows([TRIE.items[row].tolist() for row in histories])
    num, targets = len(items.values), TRIE.items[(items.values * 7 + 3) % 20]
    asked = torch.arange(num) * 3 % 20
    return Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.arange(len(histories)) + 50,
        items=items,
        times=items.with_values(torch.arange(num)),
        targets=items.with_values(targets),
        event_features={"number": Jagged.singles(torch.arange(num))},
        target_features={
            "reasoning": Jagged(TEXT[asked], torch.arange(num + 1), 1),
            "trigger": Jagged.singles(TRIE.items[asked]),
            "scenario": Jagged.singles(torch.arange(num) % 3),
        },
        groups=groups,
    )


HISTORIES = [[0, 5, 9, 2, 5, 7, 11, 3], [4], [], [1, 2, 3, 4, 5, 6, 1, 2, 3, 19], [8, 8, 8, 8, 8, 8, 8]]


def asked_scores(model, batch, sample):
    """q·h of a sample's events, by definition, with the weights as they are now."""
    last = int(batch.items.offsets[sample + 1]) - 1
    given = {name: one.select(torch.tensor([last])) for name, one in batch.target_features.items()}
    positions = TRIE.positions(batch.items.slice(sample, sample + 1).values)
    with torch.no_grad():
        every = model.igr.vectors(torch.arange(20), model._code_vectors(torch.arange(20)))
        query = model.igr.ask(given, every[TRIE.positions(given["trigger"].values)], 1)
    return (every[positions] * query[0]).sum(1).tolist()


def test_the_best_of_the_old_events_stay_in_time_order_and_everything_with_them():
    model, batch = model_of(reasoning_dropout=0.0), batch_of(HISTORIES)
    kept = model.select(batch, Rng(0, 0))
    for sample, history in enumerate(HISTORIES):
        old = max(0, len(history) - 2)
        scores = asked_scores(model, batch, sample)[:old] if history else []
        chosen = sorted(sorted(range(old), key=lambda place: (-scores[place], -place))[:3])
        places = [*chosen, *range(old, len(history))]
        first = int(batch.items.offsets[sample])
        for jagged in (kept.items, kept.times, kept.targets):
            assert jagged.lengths()[sample] == len(places)
        assert kept.times.slice(sample, sample + 1).values.tolist() == [first + place for place in places]
    numbers = kept.times.values
    assert torch.equal(kept.items.values, batch.items.values[numbers])
    assert torch.equal(kept.targets.values, batch.targets.values[numbers])
    assert torch.equal(kept.event_features["number"].values, numbers)
    assert torch.equal(kept.target_features["reasoning"].values, batch.target_features["reasoning"].values[numbers])
    assert kept.items.max_len == 5


@hypothesis.given(st.lists(st.lists(st.integers(-2, 2), max_size=9), max_size=6), st.integers(0, 4))
def test_the_best_of_each_row_ties_to_the_later(rows, num):
    jagged = Jagged.from_rows(rows)
    found = top_of_rows(jagged.values.double(), jagged.row_of_value(), num).tolist()
    expected = []
    for row in rows:
        order = sorted(range(len(row)), key=lambda place: (-row[place], -place))[:num]
        expected += [place in order for place in range(len(row))]
    assert found == expected


def test_recency_and_random_are_what_they_say():
    batch = batch_of(HISTORIES)
    newest = model_of(igr="recency").select(batch, Rng(0, 0))
    assert newest.times.slice(0, 1).values.tolist() == [3, 4, 5, 6, 7]
    drawn = [model_of(igr="random").select(batch, Rng(0, one)).times.values.tolist() for one in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({tuple(one) for one in drawn[1:]}) > 1
    assert model_of(igr="off").select(batch, Rng(0, 0)) is batch


def test_lookups_ask_for_selected_rows_only():
    model, batch = model_of(torch.float32), batch_of(HISTORIES)
    work = read(state_of(model), batch, Rates(0.0, 0.0), 0)
    kept = model.select(batch, Rng(0, 0))
    asked = work.plan.lookups[0]
    assert torch.equal(asked["history"].ids, kept.items.values)
    assert len(asked["trigger"].ids) == 4, "one instruction for each history that is not empty"
    assert work.batch.num_tokens == batch.num_tokens, "events are counted as the plain loop counts them"


def test_text_decides_before_anything_was_learned():
    """Texts and reasoning of one encoder: an instruction with an item's text finds that item."""
    model = model_of(reasoning_dropout=0.0, igr_dim=256, igr_related=1)
    batch = batch_of([[one, *range(12), 3, 4] for one in range(12, 20)])
    given = {
        "reasoning": Jagged(TEXT[12:].repeat_interleave(15, 0), torch.arange(121), 1),
        "scenario": batch.target_features["scenario"],
    }
    kept = model.select(replace(batch, target_features=given), None)
    firsts = kept.items.values[kept.items.offsets[:-1]]
    # 256 random directions keep cosines to about 1/16; no other text is more than 0.7 alike.
    assert torch.equal(firsts, TRIE.items[12:])


def test_a_selection_depends_on_the_snapshot_alone():
    model, batch = model_of(), batch_of(HISTORIES * 4)
    before = model.select(batch, Rng(0, 0)).times.values
    with torch.no_grad():
        for parameter in model.igr.parameters():
            parameter.add_(torch.sin(torch.arange(parameter.numel()).view_as(parameter).double()))
    assert torch.equal(before, model.select(batch, Rng(0, 0)).times.values)
    model.refresh(7)
    assert int(model.igr.version) == 7
    assert not torch.equal(before, model.select(batch, Rng(0, 0)).times.values)


def test_a_selection_does_not_touch_what_another_thread_trains():
    """Batches are read while earlier ones compute, with the same module: its weights are the trained ones at every moment."""
    model, batch = model_of(torch.float32), batch_of(HISTORIES)
    trained, seen = dict(model.igr.ask.named_parameters()), []

    class Watched(dict):
        def __contains__(self, name):
            now = dict(model.igr.ask.named_parameters())
            seen.append(now.keys() == trained.keys() and all(now[key] is one for key, one in trained.items()))
            return super().__contains__(name)

    given = Watched({"scenario": Jagged.singles(torch.arange(5) % 3)})
    model.igr.select(batch, given, TRIE.positions(batch.items.values), torch.empty(0, dtype=torch.int64), None)
    assert len(seen) >= 3
    assert all(seen)


def test_the_snapshot_is_in_the_checkpoint():
    model = model_of(torch.float32)
    state = state_of(model)
    with torch.no_grad():
        model.igr.ask.up.weight.add_(1.0)
    model.refresh(42)
    other = state_of(model_of(torch.float32))
    other.dense.load(state.dense.export())
    assert int(other.model.igr.version) == 42
    for name, buffer in model.igr.named_buffers():
        assert torch.equal(buffer, dict(other.model.igr.named_buffers())[name]), name


def test_nothing_is_learned_through_a_selection():
    model = model_of(torch.float32)
    state = state_of(model)
    step(state, batch_of(HISTORIES), Rates(0.1, 0.1))
    grads = {name: one.grad.abs().sum().item() for name, one in model.igr.named_parameters()}
    assert not any(grads.values())
    assert model.codes[0].grad.abs().sum() > 0


def gradients(micro_batches, **settings):
    """Means and dense gradients of a step in groups of two samples."""
    model = model_of(torch.float64, q2i=0.5, **settings)
    state = state_of(model, cut=MicroBatchConfig(micro_batches=micro_batches))
    batch = batch_of([[(one * 3 + place) % 20 for place in range(3 + one)] for one in range(8)])
    means = step(state, replace(batch, groups=torch.arange(8) // 2), Rates(0.0, 0.0))
    return means, {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"igr": "off", "queries": "all"}])
def test_q2i_does_not_depend_on_the_number_of_micro_batches(settings):
    (one, grads), (four, others) = (gradients(micro_batches, **settings) for micro_batches in (1, 4))
    assert model_of(q2i=0.5).coupling == "group"
    # The same sums in another order, in fp64.
    assert one == pytest.approx(four, rel=1e-12)
    assert one["q2i"] != 0
    for name in grads:
        torch.testing.assert_close(grads[name], others[name], rtol=1e-11, atol=1e-12)
    assert grads["igr.ask.down.weight"].abs().sum() > 0
    assert grads["igr.item.weight"].abs().sum() > 0


def test_q2i_needs_declared_groups():
    from nestpipe.errors import ConfigError

    with pytest.raises(ConfigError, match=r"data\.group-size"):
        read(state_of(model_of(torch.float32, q2i=0.5)), batch_of(HISTORIES), Rates(0.0, 0.0), 0)


def test_equal_instructions_have_equal_numbers():
    reasoning = Jagged(torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 1, 2, 3, 3]), 1)
    given = {"reasoning": reasoning, "scenario": Jagged.singles(torch.tensor([1, 1, 1, 1]))}
    a, b, c, d = same_instructions(given, 4).tolist()
    assert a == b
    assert len({a, c, d}) == 3, "no reasoning is not a reasoning of zeros"
    other = {**given, "scenario": Jagged.singles(torch.tensor([1, 2, 1, 1]))}
    assert same_instructions(other, 4).unique().numel() == 4


def test_without_item_rows_no_item_row_is_asked_for():
    model = model_of(torch.float32, item_rows=False)
    batch = batch_of(HISTORIES)
    assert model.lookups(model.select(batch, None), Rng(0, 0)) == {}
    assert model.encode_lookups(replace(batch, targets=None)) == {}
    state = state_of(model)
    first = step(state, batch, Rates(0.05, 0.05))["loss"]
    for _ in range(5):
        last = step(state, batch, Rates(0.05, 0.05))["loss"]
    assert last < first
    assert len(state.embedding.tables["item"]) == 0


def test_events_can_be_dropped_from_a_batch_without_any():
    batch = batch_of([[], []])
    assert keep_events(batch, torch.empty(0, dtype=torch.bool)).num_samples == 2


def test_igr_needs_one_query_per_history():
    config = Config(data=DataConfig(path="x"), model=replace(SMALL, queries="all"))
    assert any("set queries to last" in problem for problem in config.problems())
