"""The smallest training in which every mistake of a pipeline shows: a few rows, two micro-batches, and batches made by hand.

Ids are shared with the next batch, with the one after it but not the next, at distances of three and four, or with none;
some come back after their row was evicted, most need two batches to be admitted. One batch is not finite on one rank and
is skipped, one has no sample on another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import Chunking, DenseConfig, EmbeddingConfig
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.embedding.prefetch_buffer import PrefetchBuffer
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.contract import Output
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.stages import Clip, Rates, TrainState
from nestpipe.rng import Rng

NOT_FINITE = 3  # the batch that is not finite on rank 0
EMPTY = 5  # the batch without samples on rank 1
NO_CLIP = Clip()
_SPOILED = -1  # the sample that is not finite


class Toy(nn.Module):
    """A dense layer over every row; whatever is in a row, and in the dense weights, changes every gradient."""

    tables = (TableSpec(name="item", dim=4, init_std=1.0),)
    coupling = "none"

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5).sin())
        self.out = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return {"items": Lookup(table="item", ids=batch.items.values)}

    def weight(self, batch: Batch) -> float:
        return float(batch.num_tokens)

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        loss = (torch.tanh(rows["items"].gather() @ self.mix) @ self.out).square().sum()
        return Output(loss * torch.nan if bool((batch.sample_ids == _SPOILED).any()) else loss)


@dataclass(frozen=True, slots=True)
class Case:
    """One training: what is kept where, how it is optimised, how far rows are ahead."""

    buffered: bool
    optimizer: str = "adagrad"
    depth: int = 1
    num_micro_batches: int = 2
    clip: Clip = NO_CLIP
    admit_after: int = 2
    protect_steps: int | None = None  # depth + 1 if not given
    skip_nonfinite: bool = True
    stale: bool = False  # rows always miss the update of the batch before
    groups: int = 1  # of ranks
    chunks: Chunking = 1  # of last gradients, update and first rows
    dtype: torch.dtype = torch.float32

    def rates(self, number: int) -> Rates:
        """They change from batch to batch, so that a late update with the wrong one shows."""
        return Rates(dense=0.02 / (number + 1), rows=0.05 / (number + 1), clip=self.clip)


def new_toy(case: Case, channels: Channels) -> TrainState:
    """A state at the start of training."""
    model = Toy().to(case.dtype)
    protect_steps = case.depth + 1 if case.protect_steps is None else case.protect_steps
    config = EmbeddingConfig(
        num_buckets=4,
        admit_after=case.admit_after,
        max_rows=12,
        protect_steps=protect_steps,
    )
    table = Table(
        model.tables[0], OPTIMIZERS[case.optimizer](config), seed=0, config=config, dtype=case.dtype, num_buckets=4
    )
    owners = Owners(4, channels.rows.world.size)
    embedding = ShardedTables({"item": table}, channels.keys, channels.rows, owners, channels.replicas)
    if case.buffered:
        embedding.row_access = {"item": PrefetchBuffer(table)}
    dense = DenseParams(model, DenseConfig(optimizer=case.optimizer), channels.dense)
    return TrainState(
        model=model,
        embedding=embedding,
        dense=dense,
        control=channels.control,
        seed=0,
        micro_batching=MicroBatchConfig(micro_batches=case.num_micro_batches),
        skip_nonfinite=case.skip_nonfinite,
    )


def ids_of(number: int) -> list[int]:
    """The ids that samples of a batch draw from."""
    shared = [0, 1, 2]
    for period in (2, 3, 4, 5):
        shared += [10 * period, 10 * period + 1] if number % period == 0 else []
    pairs = [base + (number + base % 2) // 2 for base in (60, 61, 80, 81)]  # new rows, so that old ones must go
    returning = [140, 141, 142, 143] if number in (0, 1, 7, 8) else []
    return [*shared, *pairs, *returning, 100 + number]


def toy_batches(rank: int, start: int = 0) -> Iterator[Batch]:
    """This rank's share of every batch from a number on, without end."""
    number = start
    while True:
        source = random.Random(f"{number}/{rank}")
        samples = [] if (number, rank) == (EMPTY, 1) else [1000 * number + 10 * rank + place for place in range(6)]
        if (number, rank) == (NOT_FINITE, 0):
            samples[1] = _SPOILED
        rows = [source.choices(ids_of(number), k=5 + (number + rank) % 3) for _ in samples]
        yield Batch(
            cursor=Cursor(0, number),
            sample_ids=torch.tensor(samples, dtype=torch.int64),
            items=Jagged.from_rows(rows),
        )
        number += 1
