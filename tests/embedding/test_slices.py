"""Slices are a function of the id, and what is said of them agrees with a count by hand; a batch's rows divide among them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.held import InPlace, Pool
from nestpipe.embedding.optim import OPTIMIZERS
from nestpipe.embedding.owner import EIGHTHS, Owners
from nestpipe.embedding.route import plan_table
from nestpipe.embedding.slices import MOST_SLICES, Slices
from nestpipe.embedding.spec import TableSpec
from nestpipe.embedding.table import Table
from nestpipe.pipeline.config import PipelineConfig

IDS = st.integers(-9, 9) | st.integers(-(2**63), 2**63 - 1)


@given(
    rows=st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=4),
    world_size=st.integers(1, 4),
    num=st.integers(2, MOST_SLICES),
    num_buckets=st.sampled_from([4, 7, 64]),
)
def test_slices_are_counted_and_sent_home_as_a_loop_would(rows, world_size, num, num_buckets):
    owners = Owners(num_buckets, world_size)
    ids, sizes = torch.tensor([one for row in rows for one in row], dtype=torch.int64), [len(row) for row in rows]
    plan, _ = plan_table(ids, sizes, owners)
    eighth = {one: int(owners.eighths_of(torch.tensor([one]))) for row in rows for one in row}
    owner = {one: int(owners.owner_of(torch.tensor([one]))) for one in eighth}
    assert all(eighth[one] // EIGHTHS == owner[one] for one in eighth)
    slice_of = {one: eighth[one] % EIGHTHS * num // EIGHTHS for one in eighth}
    first = {one: min(part for part, row in enumerate(rows) if one in row) for one in eighth}
    last = {one: max(part for part, row in enumerate(rows) if one in row) for one in eighth}
    in_order = sorted(eighth, key=lambda one: (owner[one], first[one], eighth[one], one))
    assert plan.ids.tolist() == in_order
    assert plan.eighths.tolist() == [eighth[one] % EIGHTHS for one in in_order]

    cut = Slices.of(plan, num)
    for rank in range(world_size):
        assert cut.first_counts[rank] == [
            sum((owner[one], first[one], slice_of[one]) == (rank, part, number) for one in eighth)
            for part in range(len(rows))
            for number in range(num)
        ]
    for part, row in enumerate(rows):
        leaf = [one for one in in_order if one in row]
        home = sorted((one for one in leaf if last[one] == part), key=lambda one: (owner[one], slice_of[one]))
        assert [leaf[position] for position in cut.leaving[part].tolist()] == home
        assert cut.last_counts[part] == [
            [sum((owner[one], slice_of[one]) == (rank, number) for one in home) for number in range(num)]
            for rank in range(world_size)
        ]
    leaf = [one for one in in_order if one in rows[-1]]
    for number, (positions, counts) in enumerate(cut.of_last_part()):
        found = [leaf[position] for position in positions.tolist()]
        assert found == [one for one in leaf if slice_of[one] == number]
        assert counts == [sum(owner[one] == rank for one in found) for rank in range(world_size)]


@pytest.mark.parametrize("holder", [InPlace, Pool])
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
            for name in ("ids", "homes", "slots", "rowless", "initial", "row_slots"):
                assert getattr(piece, name).tolist() == getattr(own, name).tolist(), (sizes, begin, name)
            begin += size


def test_slices_that_cannot_be_are_named():
    assert list(PipelineConfig(mode="nested", slices=4).problems()) == []
    wrong = {
        "slices is 0; it must be in 1 .. 8": {"slices": 0},
        "slices is 9; it must be in 1 .. 8": {"slices": 9},
        "slices is 2, which is for mode nested, but the mode is dual-buffer": {"slices": 2, "mode": "dual-buffer"},
        "slices is 2, but split cuts the same messages otherwise; use one of them": {"slices": 2, "split": True},
        "slices is 2, but groups is 2, and groups exchange whole sums; use one of them": {"slices": 2, "groups": 2},
    }
    for message, settings in wrong.items():
        assert list(PipelineConfig(**{"mode": "nested", **settings}).problems()) == [message]


def test_slices_are_off_where_no_update_may_be_late():
    config = PipelineConfig(mode="nested", slices=4, staleness=1, sync_steps=3)
    assert config.schedule(0, clip_rows=False).slices == 4
    assert config.schedule(0, clip_rows=True).slices == 1
    assert config.schedule(3, clip_rows=False).slices == 1
