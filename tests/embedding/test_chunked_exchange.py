"""Chunks are a function of the id, or of what neighbouring batches share, and agree with a plain loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.buckets import FINE_CHUNKS, Owners
from nestpipe.embedding.chunked_exchange import divided, in_chunks, requested_chunks
from nestpipe.embedding.config import MAX_CHUNKS
from nestpipe.embedding.routing import own_requests, plan_table
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.schedule import schedule_for

IDS = st.integers(-9, 9) | st.integers(-(2**63), 2**63 - 1)


@given(
    rows=st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=4),
    world_size=st.integers(1, 4),
    num=st.integers(2, MAX_CHUNKS),
    num_buckets=st.sampled_from([4, 7, 64]),
)
def test_chunks_by_bucket_agree_with_a_plain_loop(rows, world_size, num, num_buckets):
    owners = Owners(num_buckets, world_size)
    ids, sizes = torch.tensor([one for row in rows for one in row], dtype=torch.int64), [len(row) for row in rows]
    plan, _ = plan_table(ids, sizes, owners)
    fine = {one: int(owners.fine_chunks_of(torch.tensor([one]))) for row in rows for one in row}
    owner = {one: int(owners.owner_of(torch.tensor([one]))) for one in fine}
    assert all(fine[one] // FINE_CHUNKS == owner[one] for one in fine)
    chunk_of = {one: fine[one] % FINE_CHUNKS * num // FINE_CHUNKS for one in fine}
    first = {one: min(micro_batch for micro_batch, row in enumerate(rows) if one in row) for one in fine}
    in_order = sorted(fine, key=lambda one: (owner[one], first[one], fine[one], one))
    assert plan.ids.tolist() == in_order
    assert plan.fine_chunks.tolist() == [fine[one] % FINE_CHUNKS for one in in_order]

    found = requested_chunks(plan, num)
    for micro_batch, chunks in ((0, found.of_rows), (len(rows) - 1, found.of_grads)):
        local = [one for one in in_order if one in rows[micro_batch]]
        assert chunks.tolist() == [chunk_of[one] for one in local]
        counts = [own[micro_batch] for own in plan.local_counts]
        for number, part in enumerate(divided(chunks, num, counts)):
            members = [local[place] for place in part.places.tolist()]
            assert members == [one for one in local if chunk_of[one] == number]
            assert part.counts == [sum(owner[one] == rank for one in members) for rank in range(world_size)]
            if micro_batch == 0:  # rows of a chunk are received where they are used
                assert [own.stop - own.start for own in part.ranges() or []] == part.counts


@given(chunks=st.lists(st.integers(0, 2), max_size=12), cuts=st.lists(st.integers(0, 12), min_size=2, max_size=2))
def test_places_that_are_not_adjacent_have_no_ranges(chunks, cuts):
    low, high = sorted(min(cut, len(chunks)) for cut in cuts)
    counts = [low, high - low, len(chunks) - high]
    begins = [0, low, high]
    for number, part in enumerate(divided(torch.tensor(chunks, dtype=torch.uint8), 3, counts)):
        expected = [
            [place for place in range(begin, begin + count) if chunks[place] == number]
            for begin, count in zip(begins, counts, strict=True)
        ]
        assert part.places.tolist() == [place for own in expected for place in own]
        assert part.counts == [len(own) for own in expected]
        adjacent = all(not own or own == list(range(own[0], own[-1] + 1)) for own in expected)
        ranges = part.ranges()
        assert (ranges is not None) == adjacent
        if ranges is not None:
            assert [list(range(own.start, own.stop)) for own in ranges] == expected


@given(
    requests=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=6, unique_by=lambda one: one[0]),
        min_size=1,
        max_size=3,
    ),
    chunk_of=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_arrivals_in_chunks_are_added_in_the_same_order(requests, chunk_of):
    """Of two micro-batches the last one arrives in three messages; each sum has the rows it had, in their order."""
    ids = torch.tensor([one for own in requests for one, _ in own], dtype=torch.int64)
    last_use = torch.tensor([last for own in requests for _, last in own], dtype=torch.uint8)
    found = own_requests(ids, last_use, [[len(own), 0] for own in requests])
    whole = [(rank, one) for last in (0, 1) for rank, own in enumerate(requests) for one, use in own if use == last]
    places = torch.cat(found.ending())
    chunks = torch.tensor(chunk_of, dtype=torch.uint8).index_select(0, found.ids.index_select(0, places))
    parts = [part.places for part in divided(chunks, 3, found.arrival_counts[1])]
    before = sum(found.arrival_counts[0])
    arrived = whole[:before] + [whole[before + place] for part in parts for place in part.tolist()]
    ordered = in_chunks(found.arrivals, torch.cat(parts))
    assert [arrived[number] for number in ordered.tolist()] == [whole[number] for number in found.arrivals.tolist()]


def test_invalid_chunk_settings_are_named():
    for chunks in (4, "shared"):
        for groups in (1, 2):
            assert list(PipelineConfig().changed(mode="nested", chunks=chunks, groups=groups).problems()) == []
    wrong = {
        "advanced.chunks is 0; it must be in 1 .. 8, or shared": {"chunks": 0},
        "advanced.chunks is 9; it must be in 1 .. 8, or shared": {"chunks": 9},
        "advanced.chunks is 2, which is for mode nested, but the mode is dual-buffer": {
            "chunks": 2,
            "mode": "dual-buffer",
        },
        "advanced.chunks is shared, which is for mode nested, but the mode is auto": {
            "chunks": "shared",
            "mode": "auto",
        },
    }
    for message, settings in wrong.items():
        assert list(PipelineConfig().changed(**{"mode": "nested", **settings}).problems()) == [message]


def test_chunks_are_off_where_updates_are_stale_or_clipped():
    config = PipelineConfig().changed(mode="nested", chunks="shared", staleness=1, sync_steps=3)
    assert schedule_for(config, 0, clip_rows=False).chunks == "shared"
    assert schedule_for(config, 0, clip_rows=True).chunks == 1
    assert schedule_for(config, 3, clip_rows=False).chunks == 1
