"""Builds a training state: the tables of this rank, dense parameters, and channels between ranks."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners, num_table_buckets, too_many_ranks
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.embedding.prefetch_buffer import PrefetchBuffer, RowAccess, rows_where_they_are
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.stale_rows import StaleRows
from nestpipe.embedding.table import Table
from nestpipe.errors import ConfigError
from nestpipe.models.contract import Model
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.stages import TrainState


def build_state(
    model: Model,
    *,
    embedding: EmbeddingConfig | None = None,
    dense: DenseConfig | None = None,
    pipeline: PipelineConfig | None = None,
    seed: int = 0,
    channels: Channels | None = None,
    skip_nonfinite: bool = False,
    dtype: torch.dtype = torch.float32,
    precision: torch.dtype = torch.float32,
) -> TrainState:
    """The state before the first step, on the rank of `channels` [default: a single process]. Raises ConfigError.

    `dtype` is that of weights and rows, `precision` that of matrix products (torch.bfloat16: mixed precision).
    `nestpipe.train_batches` trains it. `nestpipe.train` adds a run folder, checkpoints and evaluation.
    """
    embedding, pipeline = embedding or EmbeddingConfig(), (pipeline or PipelineConfig()).on_one_rank()
    channels = channels or Channels.of(World.single())
    num_ranks = channels.rows.world.size
    if problem := too_many_ranks(embedding, num_ranks):
        raise ConfigError(problem)
    tables = {}
    for spec in model.tables:
        settings = spec.optimizer or embedding
        tables[spec.name] = Table(
            spec,
            OPTIMIZERS[settings.optimizer](settings),
            seed=seed,
            config=embedding,
            dtype=dtype,
            device=channels.rows.device,
            num_tables=len(model.tables),
        )
    sharded = ShardedTables(
        tables, channels.keys, channels.rows, Owners(num_table_buckets(embedding), num_ranks), channels.replicas
    )
    sharded.row_access = {name: _row_access(table, pipeline) for name, table in tables.items()}
    return TrainState(
        model=model,
        embedding=sharded,
        dense=DenseParams(cast(nn.Module, model), dense or DenseConfig(), channels.dense),
        control=channels.control,
        flags=channels.flags,
        seed=seed,
        micro_batching=pipeline.micro_batching,
        skip_nonfinite=skip_nonfinite,
        precision=precision,
    )


def _row_access(table: Table, pipeline: PipelineConfig) -> RowAccess:
    is_copied = pipeline.advanced.rows == "buffer" and table.buffer is None  # rows in files have a buffer anyway
    access: RowAccess = PrefetchBuffer(table) if is_copied else rows_where_they_are(table)
    return StaleRows(access, sync_steps=pipeline.advanced.sync_steps) if pipeline.staleness else access
