"""What the ranks of the sharding tests run; functions here are called by name in other processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.data.loader import Loader
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.row_snapshot import by_section
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.jagged import Cursor
from nestpipe.models.retrieval import build_retrieval
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Clip, Rates, TrainState
from tests.small_runs import small_config

State = dict[str, torch.Tensor]


def new_state(
    world: World, path: Path, settings: dict[str, Any], channels: Channels | None = None
) -> tuple[TrainState, Loader]:
    """A model on this rank: settings are model, loss, optimizer, micro_batches, dtype, batch_size, group_size, balance, native, limits."""
    config = small_config(path, settings.get("model", "hstu"), settings.get("loss", "sampled"))
    data = replace(
        config.data,
        batch_size=settings.get("batch_size", 11),
        group_size=settings.get("group_size", 1),
        balance=settings.get("balance", False),
    )
    optimizer = replace(config.embedding, optimizer=settings.get("optimizer", "adam"))
    limits = replace(optimizer, **{"num_buckets": 64, **settings.get("limits", {})})
    dense = replace(config.dense, optimizer=settings.get("optimizer", "adam"))
    dtype = settings.get("dtype", torch.float64)
    log, channels = Sequences.open(path), channels or Channels.of(world)
    loader = Loader(log, make_split(log, data), data, seed=0, rank=world.rank, world_size=world.size)
    model = build_retrieval(
        config.model,
        config.loss,
        catalogue=torch.from_numpy(np.array(log.catalogue)),
        max_len=8,
        seed=0,
        dtype=dtype,
        counts=torch.arange(len(log.catalogue)),
    )
    tables = {
        spec.name: Table(
            spec,
            OPTIMIZERS[optimizer.optimizer](optimizer),
            seed=0,
            config=limits,
            dtype=dtype,
            num_buckets=limits.num_buckets,
            native=settings.get("native"),
        )
        for spec in model.tables
    }
    state = TrainState(
        model=model,
        embedding=ShardedTables(
            tables,
            channels.keys,
            channels.rows,
            Owners(limits.num_buckets, channels.rows.world.size),
            channels.replicas,
        ),
        dense=DenseParams(model, dense, channels.dense),
        control=channels.control,
        seed=0,
        micro_batching=MicroBatchConfig(micro_batches=settings.get("micro_batches", 1)),
    )
    return state, loader


def resumed(old: TrainState, new: TrainState) -> TrainState:
    """A new state that resumes from another through bucket files, as a checkpoint does."""
    new.dense.load(old.dense.export())
    owners = old.embedding.owners
    for name, table in old.embedding.tables.items():
        own = owners.buckets_of(old.embedding.rank)
        buckets = [content for _, content in by_section(table.export(), owners, own, rows_per_section=1)]
        new.embedding.tables[name].load({key: torch.cat([one[key] for one in buckets]) for key in buckets[0]})
        new.embedding.tables[name].load_rates(table.rates(old.num_steps), old.num_steps)
    new.num_steps = old.num_steps
    return new


def train_steps(world: World, path: Path, settings: dict[str, Any], num_steps: int) -> dict[str, State]:
    """Trains from the first batch on; returns the losses, this rank's rows and the dense parameters."""
    channels = Channels.of(world).in_groups(settings.get("groups", 1))
    state, loader = new_state(world, path, settings, channels)
    rates = Rates(dense=0.002, rows=0.004, clip=settings.get("clip", Clip()))
    cursor, losses = Cursor(0, 0), []
    for number in range(num_steps):
        if number == settings.get("resume_at"):
            state = resumed(state, new_state(world, path, settings, channels)[0])
        losses.append(step(state, loader.batch(cursor), rates)["loss"])
        cursor = loader.next_cursor(cursor)
    table = state.embedding.tables["item"]
    owned = table.export()
    assert bool((state.embedding.owners.owner_of(owned["ids"]) == state.embedding.rank).all())
    return {
        "table": owned,
        "dense": state.dense.export(),
        "losses": {"loss": torch.tensor(losses, dtype=torch.float64)},
    }


def merged(results: list[dict[str, State]]) -> State:
    """All tensors of a run: rows of all ranks by id, and the dense parameters, which must be the same on every rank."""
    for other in results[1:]:
        for kind in ("dense", "losses"):
            assert all(torch.equal(a, b) for a, b in zip(results[0][kind].values(), other[kind].values(), strict=True))
    tables = [result["table"] for result in results]
    ids = torch.cat([table["ids"] for table in tables])
    order = ids.argsort()
    assert len(ids.unique()) == len(ids), "two ranks hold one id"
    pending = torch.cat([table.get("pending.ids", ids[:0]) for table in tables]).argsort()
    rows = {
        name: torch.cat([table[name] for table in tables]).index_select(0, pending if "pending." in name else order)
        for name in tables[0]
    }
    return {**rows, **results[0]["dense"], **results[0]["losses"]}
