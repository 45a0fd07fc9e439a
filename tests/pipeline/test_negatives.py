"""Every kind of negatives through the engine: all modes are bitwise identical to sequential, all numbers of ranks and micro-batches train alike."""

from __future__ import annotations

import pytest
import torch

from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.lookup import Lookup, Rows
from nestpipe.embedding.routing import route
from nestpipe.embedding.wire_format import NarrowRows, narrow_of
from nestpipe.jagged import Cursor
from nestpipe.pipeline.micro_batch import cut_batch
from nestpipe.rng import Rng
from tests.embedding.sharding_ranks import merged, new_state, train_steps
from tests.pipeline.recorded_runs import differences
from tests.rank_pool import run_ranks
from tests.small_runs import write_log

KINDS = {
    "sample": {},
    "pool": {},
    "shared": {},
    "shared in groups": {"group_size": 3, "batch_size": 12},
    "in batch": {"group_size": 4, "batch_size": 12},
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Enough items that many are negatives only."""
    histories = {user: [(31 * user + 7 * k) % 211 for k in range(3 + user % 9)] for user in range(60)}
    return write_log(tmp_path_factory.mktemp("negatives") / "log", histories).path


def settings_of(kind):
    return {"loss": kind, "batch_size": 7, "optimizer": "adagrad", **KINDS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_has_the_bits_of_sequential(log, kind):
    arms = [
        {"mode": "nested", "buffered": True, "depth": 2, "seed": 0},
        {"mode": "dual-buffer", "buffered": False, "depth": 1, "seed": 1},
        {"mode": "frozen-window", "buffered": False, "depth": 1, "seed": 2},
        {"mode": "nested", "buffered": False, "depth": 1, "seed": 3, "chunks": "shared"},
        {"mode": "nested", "buffered": False, "depth": 1, "seed": 4, "chunks": 2},
    ]
    found = run_ranks(3, differences, log, {**settings_of(kind), "micro_batches": 3}, 5, arms)
    assert [line for lines in found for line in lines] == []


# fp64: sums of the same numbers in another order.
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_ranks_and_micro_batches_trains_the_same(log, kind):
    one = merged(run_ranks(1, train_steps, log, settings_of(kind), 4))
    for world_size, micro_batches in ((2, 3), (3, 1)):
        other = merged(
            run_ranks(world_size, train_steps, log, {**settings_of(kind), "micro_batches": micro_batches}, 4)
        )
        for name, value in one.items():
            assert torch.allclose(value.double(), other[name].double(), rtol=1e-11, atol=1e-12), (
                world_size,
                micro_batches,
                name,
            )


def test_ids_that_are_only_negatives_travel_in_16_bits_and_all_others_whole(log):
    state, loader = new_state(World.single(), log, {"loss": "shared", "micro_batches": 2})
    micro_batches = cut_batch(loader.batch(Cursor(0, 0)), state.micro_batching)
    plan = route(
        [state.model.lookups(micro_batch, Rng(0, 0)) for micro_batch in micro_batches], ["item"], state.embedding.owners
    )
    item, narrow = plan.tables["item"], narrow_of(plan)["item"]
    assert narrow.wire == torch.bfloat16
    used = {
        name: {int(one) for lookups in plan.lookups for one in lookups[name].ids.flatten()}
        for name in ("history", "targets", "negatives")
    }
    thin = set(item.ids[narrow.mask].tolist())
    whole = set(item.ids[~narrow.mask].tolist())
    assert whole == used["history"] | used["targets"]
    assert thin == used["negatives"] - whole
    assert thin
    assert used["negatives"] & whole, "some must be both"
    assert len(item.ids) == len(whole) + len(thin), "each id travels once"


def test_a_row_that_came_whole_is_rounded_where_it_is_a_negative():
    rows = torch.tensor([[1.001, 2.0]], requires_grad=True)
    lookup = Lookup(table="item", ids=torch.tensor([5]), wire=torch.bfloat16)
    rounded = Rows(rows, torch.tensor([0]), lookup).rounded()
    assert torch.equal(Rows(rows, torch.tensor([0]), lookup).gather(), rounded[:1]), "however a model reads them"
    assert rounded.tolist() == [[1.0, 2.0]]
    rounded.sum().backward()
    assert rows.grad.tolist() == [[1.0, 1.0]]


def test_two_wires_for_a_table_are_refused():
    lookups = {
        str(wire): Lookup(table="item", ids=torch.tensor([1]), wire=wire) for wire in (torch.half, torch.bfloat16)
    }
    with pytest.raises(ValueError, match="several wire types"):
        narrow_of(route([lookups], ["item"], Owners(4, 1)))


def test_a_message_holds_whole_rows_and_narrow_ones_in_half_the_bytes():
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    narrow = NarrowRows(torch.float16, torch.tensor([True, False, True, True, False]), [[1, 4]])
    data, found = narrow.pack(rows[1:], 0, 1), torch.zeros(4, 3)
    assert data.numel() == narrow.buffers(1, [rows])[0].numel() == 3 * (2 * 4 + 2 * 2)
    narrow.unpack(data, 0, 1, found)
    rounded = rows[1:].clone()
    narrow.round_(rounded, 0, 1)
    assert torch.equal(found, rounded)
    assert torch.equal(found[[0, 3]], rows[[1, 4]])
    assert torch.equal(found[[1, 2]], rows[[2, 3]].half().float())
