"""Trainings for the fake accelerator, as functions of a world: the toy of the pipeline tests, and small retrieval models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import Chunking, DenseConfig, EmbeddingConfig
from nestpipe.embedding.row_buffer import RowBuffer
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.stale_rows import StaleRows
from nestpipe.embedding.table import Table
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import DCNConfig, FuXiConfig, HSTUConfig, LossConfig, SASRecConfig
from nestpipe.models.contract import Selecting
from nestpipe.models.dcn import build_dcn
from nestpipe.models.ranking import build_ranking
from nestpipe.models.retrieval import build_retrieval
from nestpipe.pipeline import semi_async, sequential
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig, PipelineConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Event, Mode, Schedule
from nestpipe.pipeline.stages import BatchWork, Clip, Rates, TrainState
from tests.fake_accelerator import accelerator
from tests.models import small_ranking
from tests.pipeline.toy_training import NO_CLIP, Toy, toy_batches

NUM_BATCHES = 8
_LATE_S = 0.003
_HOLD = RowBuffer._hold
Content = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """One training; without a mode its stages run one after the other."""

    mode: Mode | None = None
    depth: int = 1
    chunks: Chunking = 1
    stale: bool = False
    groups: int = 1
    clip: Clip = NO_CLIP
    optimizer: str = "lazy_adam"
    device_bytes: int = 0
    admit_after: int = 2
    num_batches: int = NUM_BATCHES
    barrier: int = 3  # training stops and continues after so many batches
    max_rows: int = 16
    tier: Literal["memory", "files"] = "memory"
    precision: torch.dtype = torch.float32
    tight: bool = False  # the device has room for the rows of batches in flight and no other
    held_back: str = ""  # the stream whose thread is late for every event, so that others free memory early

    def rates(self, number: int) -> Rates:
        return Rates(dense=0.02 / (number + 1), rows=0.05 / (number + 1), clip=self.clip)


def train_toy(world: World, case: DeviceCase) -> Content:
    """Trains the toy; returns the loss of each step, the dense part, and this rank's rows by id."""
    channels, model = Channels.of(world).in_groups(case.groups), Toy()
    config = EmbeddingConfig(
        num_buckets=4,
        admit_after=case.admit_after,
        max_rows=case.max_rows,
        protect_steps=4,
        device_bytes=case.device_bytes,
        tier=case.tier,
    )
    device = channels.rows.device
    table = Table(
        model.tables[0], OPTIMIZERS[case.optimizer](config), seed=0, config=config, num_buckets=4, device=device
    )
    owners = Owners(4, channels.rows.world.size)
    embedding = ShardedTables({"item": table}, channels.keys, channels.rows, owners, channels.replicas)
    if case.stale:
        embedding.row_access = {name: StaleRows(one) for name, one in embedding.row_access.items()}
    state = TrainState(
        model=model,
        embedding=embedding,
        dense=DenseParams(model, DenseConfig(optimizer="adagrad"), channels.dense),
        control=channels.control,
        flags=channels.flags,
        seed=0,
        micro_batching=MicroBatchConfig(micro_batches=2),
        skip_nonfinite=True,
    )
    with patch.object(RowBuffer, "_hold", _hold_tightly) if case.tight else nullcontext():
        return trained(state, case, toy_batches(world.rank))


def _hold_tightly(buffer: RowBuffer, slots: Tensor, **more: bool) -> Tensor:
    """Leaves no room for rows that no batch holds, so that they are downloaded at once."""
    positions = buffer._clock.find(slots)
    num_held = int(buffer._clock.is_held(positions[positions >= 0]).sum())
    buffer._capacity = buffer._clock.num_held + len(slots) - num_held
    return _HOLD(buffer, slots, **more)


def train_retrieval(world: World, case: DeviceCase, backbone: str, loss: str) -> Content:
    """Trains a small retrieval model."""
    sizes = {"dim": 8, "num_blocks": 1, "num_heads": 2}
    configs = {
        "sasrec": SASRecConfig(**sizes, dropout=0.2),
        "hstu": HSTUConfig(**sizes, qk_dim=4, v_dim=4, dropout=0.2),
        "fuxi": FuXiConfig(**sizes, qk_dim=4, v_dim=4, dropout=0.2),
    }
    model = build_retrieval(
        configs[backbone],
        LossConfig(kind=loss, num_negatives=4, segment=16),  # type: ignore[arg-type]
        catalogue=torch.arange(40),
        max_len=8,
        seed=0,
        counts=torch.arange(1, 41),
    )
    state = build_state(
        model,
        embedding=EmbeddingConfig(device_bytes=case.device_bytes),
        pipeline=PipelineConfig(micro_batches=2),
        channels=Channels.of(world),
        precision=case.precision,
    )
    return trained(state, case, history_batches(world.rank))


def train_ranking(world: World, case: DeviceCase, kind: str) -> Content:
    """Trains a small ranking model, or a DCN, with features of every kind."""
    if kind == "dcn":
        config = DCNConfig(dim=4, hidden=(8,), num_cross=2, features=("item", "hour", "tags", "price", "age"))
        model: Any = build_dcn(config, small_ranking.SCHEMA, seed=0)
    else:
        config = replace(small_ranking.CONFIG, num_blocks=1, backbone=kind)
        model = build_ranking(config, small_ranking.SCHEMA, max_len=small_ranking.MAX_LEN, seed=0)
    state = build_state(
        model,
        embedding=EmbeddingConfig(device_bytes=case.device_bytes),
        pipeline=PipelineConfig(micro_batches=2),
        channels=Channels.of(world),
        precision=case.precision,
    )
    return trained(state, case, _ranking_batches(world.rank))


def _ranking_batches(rank: int) -> Iterator[Batch]:
    for number in range(100):
        batch = small_ranking.history([3, 5, 1, 4], seed=10 * number + rank)
        yield replace(batch, cursor=Cursor(0, number), target_features=batch.event_features, targets=batch.items)


def trained(state: TrainState, case: DeviceCase, batches: Iterator[Batch]) -> Content:
    """Trains up to a barrier and from there to the end, as a run does at a checkpoint."""
    losses: list[float] = []
    for num_batches in (case.barrier, case.num_batches - case.barrier):
        if isinstance(state.model, Selecting):
            state.model.refresh(state.num_steps)
        if case.mode is None:
            losses += _in_order(state, case, islice(batches, num_batches))
        else:
            read_ahead = list(islice(batches, num_batches))
            _overlapped(state, case, iter(read_ahead), num_batches, losses)
    return {"loss": torch.tensor(losses, dtype=torch.float64), **content_of(state)}


def _in_order(state: TrainState, case: DeviceCase, batches: Iterator[Batch]) -> list[float]:
    means = []
    before: BatchWork | None = None
    for batch in batches:
        rates = case.rates(state.num_steps)
        if case.stale:
            before = semi_async.step(state, batch, rates, before)
            means.append(before.means)
        else:
            means.append(sequential.step(state, batch, rates))
    if before is not None:
        semi_async.finish(state, before, at_barrier=True)
    return [one.get("loss", -1.0) for one in means]


def _overlapped(
    state: TrainState, case: DeviceCase, batches: Iterator[Batch], num_batches: int, losses: list[float]
) -> None:
    assert case.mode is not None
    clips = case.clip.rows and case.clip.norm > 0
    schedule = Schedule.of(
        case.mode,
        2,
        depth=case.depth + case.stale,
        clip_rows=clips,
        stale=case.stale,
        groups=case.groups > 1,
        chunks=case.chunks,
    )

    def before(stream: str, event: Event) -> None:
        if state.device.type != "cpu":
            accelerator.label(f"{event} of '{stream}'")
        if stream == case.held_back:
            time.sleep(_LATE_S)

    Runner(state, schedule, before=before).run(
        BatchFeed(
            batches=batches,
            rates=case.rates,
            num_batches=num_batches,
            on_step=lambda work: losses.append(work.means.get("loss", -1.0)),
        )
    )


def content_of(state: TrainState) -> Content:
    """The dense part, and this rank's rows with their optimizer state, by ascending id."""
    content = {f"dense.{name}": one for name, one in state.dense.export().items()}
    for table, own in state.embedding.tables.items():
        content |= {f"{table}.{name}": one for name, one in own.export().items()}
        access = state.embedding.row_access[table]
        if isinstance(access, StaleRows) and access.previous:
            content |= access.previous.export()
    return content


def history_batches(rank: int) -> Iterator[Batch]:
    """Histories of a few samples, with times, targets and groups."""
    for number in range(100):
        lengths = [(3 * sample + number + rank) % 6 + 2 for sample in range(6)]
        events = [
            [(7 * place * (place + sample) + number + rank) % 40 for place in range(n)]
            for sample, n in enumerate(lengths)
        ]
        targets = [[*row[1:], (row[0] + 1) % 40] for row in events]
        times = [[100 * place**2 for place in range(n)] for n in lengths]
        query_times = [[100 * (place + 1) ** 2 for place in range(n)] for n in lengths]
        items, after, at, asked = (Jagged.from_rows(one) for one in (events, targets, times, query_times))
        yield Batch(
            cursor=Cursor(0, number),
            sample_ids=torch.arange(6) + 100 * number + 10 * rank,
            items=items,
            times=at,
            query_times=asked,
            targets=after,
            groups=torch.arange(6) // 3,
        )
