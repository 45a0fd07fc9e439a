"""Training in every mode on real ranks, with a tap in each update: what ranks of the pipeline's tests run."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nestpipe.data.loader import Loader
from nestpipe.distributed.process_group import World
from nestpipe.embedding.admission import Admission, Turnover
from nestpipe.embedding.prefetch_buffer import PrefetchBuffer
from nestpipe.embedding.stale_rows import StaleRows
from nestpipe.embedding.window import Window
from nestpipe.jagged import Batch, Cursor
from nestpipe.pipeline import semi_async, stages
from nestpipe.pipeline import sequential as sequential_module
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Event, Schedule
from nestpipe.pipeline.stages import BatchStage, BatchWork, Clip, MicroBatchStage, Rates, TrainState
from tests.embedding.sharding_ranks import new_state

Log = list[tuple[int, str, bytes, bytes]]  # (batch, table, ids, bits of the new rows)


def batches_of(loader: Loader, start: int = 0) -> Iterator[Batch]:
    """Batches from a step on."""
    cursor = Cursor(0, 0)
    for number in count():
        if number >= start:
            yield loader.batch(cursor)
        cursor = loader.next_cursor(cursor)


def rates_of(settings: dict[str, Any]) -> Callable[[int], Rates]:
    """Rates that change from batch to batch, so that a late update with the wrong one shows."""
    return lambda number: Rates(
        dense=0.002 / (number + 1), rows=0.004 / (number + 1), clip=settings.get("clip", Clip())
    )


def peek(window: Window, name: str, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [K] that this rank owns in a window, ascending, their current weights [K, D], and which are in a chunk."""
    owned = window.owner[name]
    ids, rows = owned.requests.ids, window.tables.row_access[name].gather(owned.retrieved)
    is_own = torch.ones(len(ids), dtype=torch.bool) if window.num_chunks == 1 else owned.chunked.of_grads == chunk
    return ids, rows, is_own


class Taps(NamedTuple):
    """Updates that record the rows they write, as bytes."""

    batch: dict[str, BatchStage]
    micro_batch: dict[str, MicroBatchStage]


def tapped(
    log: Log,
    batch_stages: Mapping[str, BatchStage] = stages.BATCH_STAGES,
    micro_batch_stages: Mapping[str, MicroBatchStage] = stages.MICRO_BATCH_STAGES,
) -> Taps:
    """A batch in chunks is recorded when all of it is done, each row as its own update wrote it."""
    left: dict[tuple[int, str], torch.Tensor] = {}  # rows after the updates so far
    num_left: Counter[tuple[int, str]] = Counter()

    def record(work: BatchWork, chunk: int) -> None:
        window = work.window
        for name in window.owner:
            key, (ids, rows, is_own) = (work.number, name), peek(window, name, chunk)
            left[key] = torch.where(is_own.unsqueeze(1), rows, left.get(key, rows))
            num_left[key] += 1
            if num_left[key] == window.num_chunks:
                log.append((*key, ids.numpy().tobytes(), left.pop(key).numpy().tobytes()))

    change, change_chunk = batch_stages["update"], micro_batch_stages["chunk update"]  # as they are now

    def update(state: TrainState, work: BatchWork) -> None:
        change(state, work)
        record(work, 0)

    def next_update(state: TrainState, work: BatchWork, number: int) -> None:
        change_chunk(state, work, number)
        record(work, number + 1)

    return Taps({"update": update}, {"chunk update": next_update})


def delays(seed: int, longest_s: float) -> Callable[[str, Event], None]:
    """Random waits before events, most of them none."""
    sources: dict[str, random.Random] = {}

    def before(stream: str, event: Event) -> None:
        source = sources.setdefault(stream, random.Random(f"{seed}/{stream}"))
        if source.random() < 0.3:
            time.sleep(source.random() * longest_s)

    return before


def content(state: TrainState) -> dict[str, bytes]:
    """All that training leaves behind on this rank."""
    found = {f"dense/{name}": value.numpy().tobytes() for name, value in state.dense.export().items()}
    for table_name, table in state.embedding.tables.items():
        found |= {f"{table_name}/{name}": value.numpy().tobytes() for name, value in table.export().items()}
    return found


def prepared(world: World, path: Path, settings: dict[str, Any], channels: Channels) -> tuple[TrainState, Loader]:
    state, loader = new_state(world, path, {"dtype": torch.float32, **settings}, channels)
    row_access = state.embedding.row_access
    if settings.get("buffered"):
        row_access |= {name: PrefetchBuffer(table) for name, table in state.embedding.tables.items()}
    if settings.get("stale"):
        row_access |= {
            name: StaleRows(access, sync_steps=settings.get("sync_steps", 0)) for name, access in row_access.items()
        }
    return state, loader


def sequential(
    world: World, path: Path, settings: dict[str, Any], num_steps: int, channels: Channels
) -> tuple[Log, dict[str, bytes]]:
    """The plain loop, with the tap where the update is; rows are used in place."""
    state, loader = prepared(world, path, {**settings, "buffered": False}, channels)
    log: Log = []
    plain, sequential_module.update = sequential_module.update, tapped(log).batch["update"]
    try:
        for number, batch in enumerate(islice(batches_of(loader), num_steps)):
            sequential_module.step(state, batch, rates_of(settings)(number))
    finally:
        sequential_module.update = plain
    return sorted(log), content(state)


def one_update_old(state: TrainState, batches: Iterator[Batch], rates: Callable[[int], Rates]) -> None:
    """The plain loop with staleness 1, from where the state is."""
    before = None
    for batch in batches:
        before = semi_async.step(state, batch, rates(state.num_steps), before)
    if before is not None:
        semi_async.finish(state, before)


def sequential_stale(
    world: World, path: Path, settings: dict[str, Any], num_steps: int, channels: Channels
) -> tuple[Log, dict[str, bytes]]:
    """The plain loop with staleness 1 after a synchronous warm-up, without barriers; rows are used in place."""
    state, loader = prepared(world, path, {**settings, "buffered": False, "stale": False}, channels)
    log: Log = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequential_module, "update", tapped(log).batch["update"])
        patch.setattr(semi_async, "update", tapped(log).batch["update"])
        batches, rates = islice(batches_of(loader), num_steps), rates_of(settings)
        for number, batch in enumerate(islice(batches, settings.get("sync_steps", 0))):
            sequential_module.step(state, batch, rates(number))
        one_update_old(state, batches, rates)
    return sorted(log), content(state)


def pipelined(
    world: World, path: Path, settings: dict[str, Any], num_steps: int, channels: Channels
) -> tuple[Log, dict[str, bytes]]:
    """The runner, with random delays if there is a seed; stops at barriers and resumes."""
    state, loader = prepared(world, path, settings, channels)
    clip_rows = settings.get("clip", Clip()).rows
    chosen = {"depth": settings.get("depth", 1), "clip_rows": clip_rows}
    chosen["chunks"] = 1 if clip_rows else settings.get("chunks", 1)
    chosen["groups"] = state.embedding.replicas is not None
    log: Log = []
    schedule = Schedule.of(settings["mode"], state.micro_batching.micro_batches, **chosen)
    taps = tapped(log)
    runner = Runner(
        state,
        schedule,
        batch_stages={**stages.BATCH_STAGES, **taps.batch},
        micro_batch_stages={**stages.MICRO_BATCH_STAGES, **taps.micro_batch},
    )
    sync_steps = settings.get("sync_steps", 0) if settings.get("stale") else num_steps
    if "seed" in settings:
        runner.before = delays(settings["seed"] * 97 + world.rank, settings.get("longest_s", 0.002))
    for end in sorted({*settings.get("barriers", ()), sync_steps, num_steps} - {0}):
        runner.schedule = Schedule.of(
            settings["mode"], state.micro_batching.micro_batches, **chosen, stale=state.num_steps >= sync_steps
        )
        feed = BatchFeed(
            batches=batches_of(loader, state.num_steps), rates=rates_of(settings), num_batches=end - state.num_steps
        )
        runner.run(feed)
        assert state.num_steps == end
        for access in state.embedding.row_access.values():
            inner = access.inner if isinstance(access, StaleRows) else access
            assert not isinstance(inner, PrefetchBuffer) or not len(inner), "a row was not written back"
    return sorted(log), content(state)


def differences(
    world: World, path: Path, settings: dict[str, Any], num_steps: int, arms: list[dict[str, Any]]
) -> list[str]:
    """Runs sequential once and then every arm; returns what differs in which arm."""
    channels = Channels.of(world).in_groups(settings.get("groups", 1))
    num_evicted, advance = 0, Admission.advance

    def counting(admission: Admission, ids: torch.Tensor, step: int) -> Turnover:
        nonlocal num_evicted
        change = advance(admission, ids, step)
        num_evicted += len(change.evicted.ids)
        return change

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "advance", counting)
        plain = sequential_stale if settings.get("stale") else sequential
        log, end = plain(world, path, settings, num_steps, channels)
    assert len(log) == num_steps
    assert num_evicted or not settings.get("limits"), "rows must have been evicted for this to mean anything"
    found = []
    for arm in arms:
        other_log, other_end = pipelined(world, path, {**settings, **arm}, num_steps, channels)
        if other_log != log:
            first = next((a for a, b in zip(log, other_log, strict=False) if a != b), log[-1])
            found.append(f"rank {world.rank}, {arm}: batch {first[0]} updated other rows or bits")
        found += [f"rank {world.rank}, {arm}: {name}" for name in end if end[name] != other_end.get(name)]
    return found
