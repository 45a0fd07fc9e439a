"""The generative model: training and generation are one function, and every part of the instruction matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.routing import route
from nestpipe.generative.beam import search
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import EncDecConfig
from nestpipe.models.encdec import build_encdec
from nestpipe.rng import Rng, mix64_
from tests.generative.known_trees import random_trie

SIZES = (4, 3, 3)
TRIE = random_trie(20, SIZES)
SMALL = EncDecConfig(
    dim=8,
    num_encoder=1,
    num_decoder=2,
    num_heads=2,
    dropout=0.0,
    num_scenarios=3,
    reasoning_dim=4,
    reasoning_dropout=0.0,
)
PLACEMENTS = ("after", "before", "sum", "all", "none")


def model_of(**settings):
    return build_encdec(replace(SMALL, **settings), TRIE, max_len=6, seed=3, dtype=torch.float64)


def rows_of(lookups):
    """Any rows, a function of table and id."""
    plan = route([lookups], sorted({one.table for one in lookups.values()}), Owners(1, 1))
    tables = {
        name: torch.stack([torch.sin(float(one) + torch.arange(8, dtype=torch.float64)) for one in table.ids.tolist()])
        for name, table in plan.tables.items()
    }
    return plan.rows(0, {name: rows.requires_grad_() for name, rows in tables.items()})


def instructions(num, *, scenario=None, trigger=None, reasoning=None):
    given = {}
    if scenario is not None:
        given["scenario"] = Jagged.singles(torch.full((num,), scenario))
    if trigger is not None:
        given["trigger"] = Jagged.singles(TRIE.items[torch.full((num,), trigger)])
    if reasoning is not None:
        given["reasoning"] = Jagged(torch.full((num, 4), reasoning), torch.arange(num + 1), 1)
    return given


def batch_of(histories, *, targets=True, **instruction):
    """Histories as catalogue positions; with targets the last one of each is only a target."""
    events = [row[:-1] for row in histories] if targets else histories
    items = Jagged.from_rows([TRIE.items[row].tolist() for row in events])
    given = instructions(len(items.values) if targets else len(histories), **instruction)
    return Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.arange(len(histories)),
        items=items,
        targets=items.with_values(TRIE.items[[one for row in histories for one in row[1:]]]) if targets else None,
        sample_features={"user": Jagged.singles(torch.arange(len(histories))), **({} if targets else given)},
        target_features=given if targets else {},
    )


def losses_of(model, batch, rng=None):
    return model.target_losses(rows_of(model._lookups(batch, batch.target_features)), batch, rng).detach()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("user_rows", "softmax", "prefixes", "tied"),
    [(False, "legal", 0, False), (True, "full", 0, True), (False, "legal", 7, False), (False, "legal", 7, True)],
)
def test_the_search_gives_every_item_the_probability_it_was_trained_with(placement, user_rows, softmax, prefixes, tied):
    model = model_of(placement=placement, user_rows=user_rows, softmax=softmax, prefix_vectors=prefixes, tied=tied)
    for vectors in model.prefixes:
        torch.nn.init.normal_(vectors)
    instruction = {"scenario": 1, "trigger": 4, "reasoning": 0.5}
    histories = [[0, 5, 9, 2], [7], [3, 3]]
    asked = batch_of(histories, targets=False, **instruction)
    with torch.no_grad():
        decoding = model.decoding(rows_of(model.encode_lookups(asked)), asked)
    found = search(decoding, TRIE, width=20, softmax=softmax)
    for request, history in enumerate(histories):
        for target in (0, 19):
            trained = losses_of(model, batch_of([[*history, target]], **instruction))[-1].sum()
            if request and user_rows:
                continue  # the row of user 0 is that of another user in a batch of one
            place = found.leaves[request].tolist().index(int(TRIE.item_nodes[target, -1]))
            assert float(found.scores[request, place]) == pytest.approx(-float(trained), abs=1e-9)
    if softmax == "legal":
        assert found.scores.exp().sum(1).tolist() == pytest.approx([1.0] * 3, abs=1e-9)


def test_every_prefix_of_a_history_is_a_query_of_its_own():
    model, history = model_of(user_rows=True), [0, 5, 9, 2, 6]
    whole = losses_of(model, batch_of([history]))
    for end in range(2, 6):
        alone = losses_of(model, batch_of([history[:end]]))
        torch.testing.assert_close(alone, whole[: end - 1])


def test_a_request_without_events_can_be_answered():
    model = model_of()
    asked = batch_of([[], [3]], targets=False, scenario=0)
    with torch.no_grad():
        found = search(model.decoding(rows_of(model.encode_lookups(asked)), asked), TRIE, width=20)
    assert found.scores.exp().sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-9)
    empty = batch_of([[]], targets=False, scenario=0)
    empty = replace(empty, items=Jagged(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]), 0))
    with torch.no_grad():
        alone = search(model.decoding(rows_of({"trigger": _one()}) | _no_rows(), empty), TRIE, width=20)
    torch.testing.assert_close(alone.scores[0], found.scores[0])


def _one():
    from nestpipe.embedding.lookup import Lookup

    return Lookup(table="item", ids=TRIE.items[:1])


def _no_rows():
    from nestpipe.embedding.lookup import Lookup, Rows

    none = torch.empty(0, dtype=torch.int64)
    return {"history": Rows(torch.empty(0, 8, dtype=torch.float64), none, Lookup(table="item", ids=none))}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_instruction_steers_wherever_it_stands(placement):
    model, history = model_of(placement=placement), [[0, 5, 9]]
    plain = losses_of(model, batch_of(history))
    for part in ({"scenario": 2}, {"trigger": 6}, {"reasoning": 1.0}):
        changed = not torch.equal(plain, losses_of(model, batch_of(history, **part)))
        assert changed == (placement != "none"), part


def test_reasoning_dropout_trains_both_states():
    model = model_of(reasoning_dropout=0.2)
    batch = batch_of([[row % 20 for row in range(start, start + 7)] for start in range(200)], reasoning=1.0)
    with_it, without = losses_of(model, batch), losses_of(model, replace(batch, target_features={}))
    mixed = losses_of(model, batch, Rng(seed=1, step=1))
    kept = (mixed == with_it).all(1)
    assert bool((kept | (mixed - without).abs().lt(1e-12).all(1)).all())
    # 1200 targets: the standard deviation of the share is 0.012.
    assert float(kept.double().mean()) == pytest.approx(0.8, abs=0.05)


def test_targets_count_by_their_behaviour():
    model = model_of(behaviour="kind")
    batch = batch_of([[0, 5, 9, 2]])
    kinds = torch.tensor([0.0, 2.0, torch.nan])
    batch = replace(
        batch,
        event_features={"kind": Jagged.singles(torch.tensor([1.0, 0.0, 2.0]))},
        target_features={"kind": Jagged.singles(kinds)},
    )
    assert model.weight(batch) == 4.0
    losses = losses_of(model, batch).sum(1)
    output = model(rows_of(model.lookups(batch, Rng(0, 0))), batch, Rng(0, 0))
    assert float(output.loss_sum.detach()) == pytest.approx(float(losses[0] + 2 * losses[1] + losses[2]))
    other = replace(batch, event_features={"kind": Jagged.singles(torch.tensor([2.0, 0.0, 2.0]))})
    assert not torch.equal(losses_of(model, other), losses_of(model, batch))


def test_a_prefix_has_a_vector_that_counts_only_after_it():
    """Another vector for one prefix moves the losses of targets whose choice it was among, and no other."""
    batch, model = batch_of([[0, 5, 9, 2, 11, 14]]), model_of(prefix_vectors=4096)
    plain, targets = losses_of(model, batch), torch.tensor([5, 9, 2, 11, 14])
    node = TRIE.item_nodes[9, 1]
    row = int(mix64_(TRIE.prefixes(1, node.view(1)))) % 4096
    with torch.no_grad():
        model.prefixes[0][row] = 3.0
    moved = (losses_of(model, batch) != plain).nonzero().tolist()
    asked = (TRIE.item_nodes[targets, 0] == TRIE.item_nodes[9, 0]).nonzero().flatten().tolist()
    assert moved == [[place, 1] for place in asked]


def test_tied_items_are_read_by_the_vectors_that_score_them():
    model, places = model_of(prefix_vectors=64, tied=True), torch.tensor([3, 0, 19])
    for vectors in model.prefixes:
        torch.nn.init.normal_(vectors)
    assert not len(model.codes)
    scores, state = torch.zeros(3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    for level, head in enumerate(model.heads):
        hidden, nodes = state.expand(3, -1), TRIE.item_nodes[places, level]
        flat = torch.arange(3) * SIZES[level] + TRIE.item_codes[places, level]
        added = model.with_prefixes(head(hidden), hidden, level, nodes, flat).flatten()[flat]
        scores += added - head.bias[TRIE.item_codes[places, level]]
    read = model.item_vectors(torch.zeros(20, 8, dtype=torch.float64))[places]
    torch.testing.assert_close(read @ state, scores)


def test_smoothing_spreads_over_legal_codes_only():
    batch = batch_of([[0, 5, 9, 2, 11, 14]])
    plain, smooth = (losses_of(model_of(label_smoothing=one), batch) for one in (0.0, 0.1))
    _, places = TRIE.children(2, TRIE.item_nodes[[5, 9, 2, 11, 14], 1])
    alone = torch.bincount(places // SIZES[2]) == 1
    assert bool(alone.any())
    assert not smooth[alone, 2].any(), "a code without alternatives is certain, smoothed or not"
    assert bool(smooth.isfinite().all())
    assert not torch.equal(plain[:, 0], smooth[:, 0])


def test_rows_are_sharded_and_codes_are_dense():
    model = model_of(user_rows=True)
    assert [table.name for table in model.tables] == ["item", "user"]
    names = dict(model.named_parameters())
    assert [list(names[f"codes.{level}"].shape) for level in range(3)] == [[4, 8], [3, 8], [3, 8]]
    batch = batch_of([[0, 5, 9]], trigger=3)
    found = model.lookups(batch, Rng(0, 0))
    assert {name: one.ids.tolist() for name, one in found.items()} == {
        "history": TRIE.items[[0, 5]].tolist(),
        "user": [0],
        "trigger": TRIE.items[[3, 3]].tolist(),
    }
