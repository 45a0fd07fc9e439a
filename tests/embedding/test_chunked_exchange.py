"""Chunks are a function of the id and agree with a plain loop; row refs split like the batch."""

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
def test_chunk_counts_and_positions_agree_with_a_plain_loop(rows, world_size, num, num_buckets):
    owners = Owners(num_buckets, world_size)
    ids, sizes = torch.tensor([one for row in rows for one in row], dtype=torch.int64), [len(row) for row in rows]
    plan, _ = plan_table(ids, sizes, owners)
    fine = {one: int(owners.fine_chunks_of(torch.tensor([one]))) for row in rows for one in row}
    owner = {one: int(owners.owner_of(torch.tensor([one]))) for one in fine}
    assert all(fine[one] // FINE_CHUNKS == owner[one] for one in fine)
    chunk_of = {one: fine[one] % FINE_CHUNKS * num // FINE_CHUNKS for one in fine}
    first = {one: min(micro_batch for micro_batch, row in enumerate(rows) if one in row) for one in fine}
    last = {one: max(micro_batch for micro_batch, row in enumerate(rows) if one in row) for one in fine}
    in_order = sorted(fine, key=lambda one: (owner[one], first[one], fine[one], one))
    assert plan.ids.tolist() == in_order
    assert plan.fine_chunks.tolist() == [fine[one] % FINE_CHUNKS for one in in_order]

    chunks = Chunks.of(plan, num)
    for rank in range(world_size):
        assert chunks.first_counts[rank] == [
            sum((owner[one], first[one], chunk_of[one]) == (rank, micro_batch, number) for one in fine)
            for micro_batch in range(len(rows))
            for number in range(num)
        ]
    for micro_batch, row in enumerate(rows):
        local = [one for one in in_order if one in row]
        ending = sorted((one for one in local if last[one] == micro_batch), key=lambda one: (owner[one], chunk_of[one]))
        assert [local[position] for position in chunks.ending[micro_batch].tolist()] == ending
        assert chunks.last_counts[micro_batch] == [
            [sum((owner[one], chunk_of[one]) == (rank, number) for one in ending) for number in range(num)]
            for rank in range(world_size)
        ]
    local = [one for one in in_order if one in rows[-1]]
    for number, (positions, counts) in enumerate(chunks.of_last_micro_batch()):
        members = [local[position] for position in positions.tolist()]
        assert members == [one for one in local if chunk_of[one] == number]
        assert counts == [sum(owner[one] == rank for one in members) for rank in range(world_size)]


@pytest.mark.parametrize("access", [InPlaceRows, PrefetchBuffer])
def test_split_refs_know_which_ids_have_no_row(access):
    config = EmbeddingConfig(num_buckets=1, max_rows=3, protect_steps=1)
    table = Table(TableSpec(name="item", dim=2), OPTIMIZERS["sgd"](config), seed=0, config=config)
    refs = access(table).take(torch.tensor([3, 5, 7, 9, 11]), 0)
    assert refs.rowless.tolist() == [3, 4]
    for sizes in ([5], [2, 3], [0, 4, 1], [4, 0, 1], [1, 1, 1, 1, 1]):
        ranges = list(refs.split(sizes))
        begin = 0
        for size, own_refs in zip(sizes, ranges, strict=True):
            own = refs.at(torch.arange(begin, begin + size))
            for name in ("ids", "table_slots", "slots", "rowless", "initial", "row_slots"):
                assert getattr(own_refs, name).tolist() == getattr(own, name).tolist(), (sizes, begin, name)
            begin += size


def test_invalid_chunk_settings_are_named():
    assert list(PipelineConfig().changed(mode="nested", chunks=4).problems()) == []
    wrong = {
        "advanced.chunks is 0; it must be in 1 .. 8": {"chunks": 0},
        "advanced.chunks is 9; it must be in 1 .. 8": {"chunks": 9},
        "advanced.chunks is 2, which is for mode nested, but the mode is dual-buffer": {
            "chunks": 2,
            "mode": "dual-buffer",
        },
        "advanced.chunks is 2, but split divides the same messages in another way; use one of them": {
            "chunks": 2,
            "split": True,
        },
        "advanced.chunks is 2, but groups is 2, and groups exchange whole sums; use one of them": {
            "chunks": 2,
            "groups": 2,
        },
    }
    for message, settings in wrong.items():
        assert list(PipelineConfig().changed(**{"mode": "nested", **settings}).problems()) == [message]


def test_chunks_are_off_where_updates_are_stale_or_clipped():
    config = PipelineConfig().changed(mode="nested", chunks=4, staleness=1, sync_steps=3)
    assert schedule_for(config, 0, clip_rows=False).num_chunks == 4
    assert schedule_for(config, 0, clip_rows=True).num_chunks == 1
    assert schedule_for(config, 3, clip_rows=False).num_chunks == 1
