"""Losses that mix samples: inside groups they are the same on every number of ranks and micro-batches and in every mode."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from nestpipe.data.loader import Loader
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.embedding.lookup import Lookup, TableSpec
from nestpipe.embedding.row_optimizer import AdaGrad
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.errors import ConfigError
from nestpipe.jagged import Cursor
from nestpipe.models.contract import Output
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.micro_batch import cut_batch
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from tests.pipeline.recorded_runs import batches_of, content
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

GROUP = 3


class InGroup(nn.Module):
    """The first item of a sample is to be told from the first items of the others in its group."""

    coupling = "group"

    def __init__(self):
        super().__init__()
        self.tables = (TableSpec(name="item", dim=4),)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def lookups(self, batch, rng):
        first, last = batch.items.offsets[:-1], batch.items.offsets[1:] - 1
        values = batch.items.values
        return {name: Lookup(table="item", ids=values[at]) for name, at in (("first", first), ("last", last))}

    def weight(self, batch):
        return float(batch.num_samples)

    def forward(self, rows, batch, rng):
        scores = rows["last"].gather() @ rows["first"].gather().T * self.scale
        other = batch.groups.unsqueeze(0) != batch.groups.unsqueeze(1)
        logits = scores.masked_fill(other, -torch.inf)
        return Output(-logits.log_softmax(1).diagonal().sum())


def new_state(world, channels, micro_batches, model):
    config = EmbeddingConfig(optimizer="adagrad", num_buckets=8)
    table = Table(model.tables[0], AdaGrad(config), seed=0, config=config, dtype=torch.float64)
    return TrainState(
        model=model,
        embedding=ShardedTables({"item": table}, channels.keys, channels.rows, Owners(8, world.size)),
        dense=DenseParams(model, DenseConfig(optimizer="sgd"), channels.dense),
        control=channels.control,
        seed=0,
        micro_batching=MicroBatchConfig(micro_batches=micro_batches),
    )


def loader_of(world, path, group_size=GROUP):
    data = replace(small_config(path).data, batch_size=12, group_size=group_size)
    log = Sequences.open(path)
    return Loader(log, make_split(log, data), data, seed=0, rank=world.rank, world_size=world.size)


def train(world, path, micro_batches):
    """Six steps, sequential and nested; what each left behind."""
    channels, loader, found = Channels.of(world), loader_of(world, path), []
    for mode in ("sequential", "nested"):
        state = new_state(world, channels, micro_batches, InGroup())
        if mode == "sequential":
            for batch in islice(batches_of(loader), 6):
                step(state, batch, Rates(0.1, 0.1))
        else:
            feed = BatchFeed(batches=batches_of(loader), rates=lambda number: Rates(0.1, 0.1), num_batches=6)
            Runner(state, Schedule.of("nested", micro_batches)).run(feed)
        found.append(content(state))
    assert found[0] == found[1]
    table = state.embedding.tables["item"].export()
    return table["ids"], table["rows"], state.model.scale.detach().clone()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("groups") / "log").path


def test_every_number_of_ranks_and_micro_batches_trains_the_same(log):
    (ids, rows, scale) = run_ranks(1, train, log, 1)[0]
    for world_size, micro_batches in ((1, 3), (2, 2), (3, 4)):
        results = run_ranks(world_size, train, log, micro_batches)
        other_ids, other = (torch.cat([result[place] for result in results]) for place in (0, 1))
        order = other_ids.argsort()
        assert torch.equal(other_ids[order], ids)
        assert float((other[order] - rows).abs().max() / rows.abs().max()) < 1e-12
        assert abs(float(results[0][2] - scale)) < 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_no_rank_and_no_micro_batch_divides_a_group(log, world_size):
    seen = {}
    for rank in range(world_size):
        batch = loader_of(World.from_store(World.single().store, rank, world_size), log).batch(Cursor(1, 2))
        for micro_batch, one in enumerate(cut_batch(batch, MicroBatchConfig(micro_batches=3))):
            for group, sample in zip(one.groups.tolist(), one.sample_ids.tolist(), strict=True):
                seen.setdefault(group, set()).add((rank, micro_batch))
                seen.setdefault("samples", []).append(sample)
    samples = seen.pop("samples")
    assert len(set(samples)) == len(samples) == 12
    assert all(len(places) == 1 for places in seen.values())
    assert len(seen) == 4


def test_a_loss_over_the_whole_batch_is_refused_where_it_would_be_divided(log):
    world = World.single()
    model = InGroup()
    model.coupling = "batch"
    state, batch = new_state(world, Channels.of(world), 2, model), loader_of(world, log).batch(Cursor(0, 0))
    with pytest.raises(
        ConfigError, match=r"the loss of InGroup mixes all samples of a batch.*--pipeline.micro-batches 1"
    ):
        step(state, batch, Rates(0.1, 0.1))
    model.coupling = "group"
    with pytest.raises(ConfigError, match=r"set --data.group-size"):
        step(state, replace(batch, groups=None), Rates(0.1, 0.1))
    assert state.num_steps == 0


def test_groups_are_whole_in_a_batch():
    data = small_config("x").data
    assert list(replace(data, batch_size=10, group_size=3).problems())
    assert list(replace(data, batch_size=9, batch_tokens=100, group_size=3).problems())
    assert not list(replace(data, batch_size=9, group_size=3).problems())
