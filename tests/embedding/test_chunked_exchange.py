"""Slices are a function of the id, and what is said of them agrees with a count by hand; a batch's rows divide among them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.buckets import FINE_CHUNKS, Owners
from nestpipe.embedding.chunked_exchange import Chunks
from nestpipe.embedding.config import MAX_CHUNKS, EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.prefetch_buffer import InPlaceRows, PrefetchBuffer
from nestpipe.embedding.routing import plan_table
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import Table
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.schedule import schedule_for

IDS = st.integers(-9, 9) | st.integers(-(2**63), 2**63 - 1)


@given(
    rows=st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=4),
    world_size=st.integers(1, 4),
    num=st.integers(2, MAX_CHUNKS),
    num_buckets=st.sampled_from([4, 7, 64]),
)
def test_slices_are_counted_and_sent_home_as_a_loop_would(rows, world_size, num, num_buckets):
    owners = Owners(num_buckets, world_size)
    ids, sizes = torch.tensor([one for row in rows for one in row], dtype=torch.int64), [len(row) for row in rows]
    plan, _ = plan_table(ids, sizes, owners)
    eighth = {one: int(owners.fine_chunks_of(torch.tensor([one]))) for row in rows for one in row}
    owner = {one: int(owners.owner_of(torch.tensor([one]))) for one in eighth}
    assert all(eighth[one] // FINE_CHUNKS == owner[one] for one in eighth)
    slice_of = {one: eighth[one] % FINE_CHUNKS * num // FINE_CHUNKS for one in eighth}
    first = {one: min(micro_batch for micro_batch, row in enumerate(rows) if one in row) for one in eighth}
    last = {one: max(micro_batch for micro_batch, row in enumerate(rows) if one in row) for one in eighth}
    in_order = sorted(eighth, key=lambda one: (owner[one], first[one], eighth[one], one))
    assert plan.ids.tolist() == in_order
    assert plan.fine_chunks.tolist() == [eighth[one] % FINE_CHUNKS for one in in_order]

    cut = Chunks.of(plan, num)
    for rank in range(world_size):
        assert cut.first_counts[rank] == [
            sum((owner[one], first[one], slice_of[one]) == (rank, micro_batch, number) for one in eighth)
            for micro_batch in range(len(rows))
            for number in range(num)
        ]
    for micro_batch, row in enumerate(rows):
        leaf = [one for one in in_order if one in row]
        home = sorted((one for one in leaf if last[one] == micro_batch), key=lambda one: (owner[one], slice_of[one]))
        assert [leaf[position] for position in cut.leaving[micro_batch].tolist()] == home
        assert cut.last_counts[micro_batch] == [
            [sum((owner[one], slice_of[one]) == (rank, number) for one in home) for number in range(num)]
            for rank in range(world_size)
        ]
    leaf = [one for one in in_order if one in rows[-1]]
    for number, (positions, counts) in enumerate(cut.of_last_micro_batch()):
        found = [leaf[position] for position in positions.tolist()]
        assert found == [one for one in leaf if slice_of[one] == number]
        assert counts == [sum(owner[one] == rank for one in found) for rank in range(world_size)]


@pytest.mark.parametrize("holder", [InPlaceRows, PrefetchBuffer])
def test_pieces_of_a_batch_know_which_ids_have_no_row(holder):
    config = EmbeddingConfig(num_buckets=1, max_rows_per_bucket=3, protect_steps=1)
    table = Table(TableSpec(name="item", dim=2), OPTIMIZERS["sgd"](config), seed=0, config=config)
    held = holder(table).take(torch.tensor([3, 5, 7, 9, 11]), 0)
    assert held.rowless.tolist() == [3, 4]
    for sizes in ([5], [2, 3], [0, 4, 1], [4, 0, 1], [1, 1, 1, 1, 1]):
        pieces = list(held.split(sizes))
        begin = 0
        for size, piece in zip(sizes, pieces, strict=True):
            own = held.at(torch.arange(begin, begin + size))
            for name in ("ids", "table_slots", "slots", "rowless", "initial", "row_slots"):
                assert getattr(piece, name).tolist() == getattr(own, name).tolist(), (sizes, begin, name)
            begin += size


def test_slices_that_cannot_be_are_named():
    assert list(PipelineConfig(mode="nested", chunks=4).problems()) == []
    wrong = {
        "chunks is 0; it must be in 1 .. 8": {"chunks": 0},
        "chunks is 9; it must be in 1 .. 8": {"chunks": 9},
        "chunks is 2, which is for mode nested, but the mode is dual-buffer": {"chunks": 2, "mode": "dual-buffer"},
        "chunks is 2, but split divides the same messages in another way; use one of them": {
            "chunks": 2,
            "split": True,
        },
        "chunks is 2, but groups is 2, and groups exchange whole sums; use one of them": {"chunks": 2, "groups": 2},
    }
    for message, settings in wrong.items():
        assert list(PipelineConfig(**{"mode": "nested", **settings}).problems()) == [message]


def test_slices_are_off_where_no_update_may_be_late():
    config = PipelineConfig(mode="nested", chunks=4, staleness=1, sync_steps=3)
    assert schedule_for(config, 0, clip_rows=False).num_chunks == 4
    assert schedule_for(config, 0, clip_rows=True).num_chunks == 1
    assert schedule_for(config, 3, clip_rows=False).num_chunks == 1
