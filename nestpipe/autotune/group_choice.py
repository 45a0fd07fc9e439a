"""The groups of a run's ranks: as configured, as chosen before, or chosen now from a short measured profile.

How many groups there are decides the order of sums, hence bits, and here a clock would decide it. So a choice is made once for
a number of ranks and kept in RUN/run.json: a run that goes on with as many ranks has the same groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.distributed.process_group import Channel
from nestpipe.embedding.prefetch_buffer import InPlaceRows
from nestpipe.embedding.replica_groups import RankGrid, divisors
from nestpipe.embedding.unique_ids import owner_of
from nestpipe.jagged import Batch
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.stages import Rates, TrainState, read
from nestpipe.training.run_folder import Run, read_facts
from nestpipe.training.run_state import new_state

GROUPS = "groups"  # in RUN/run.json: number of ranks -> number of groups
_PROBE_BYTES = 1 << 20  # of each rank
_NUM_PROBES = 3
_NUM_ROWS = 4096
_MOST_IDS = 1 << 17  # of a rank that all look at; of more, those of some hash buckets


@dataclass(frozen=True, slots=True)
class GroupedRun:
    """A run and its lanes in their groups."""

    run: Run
    channels: Channels
    chosen: Mapping[str, int] = field(default_factory=dict)  # so far, for its facts
    why: str = ""  # of a choice made now


def grouped(run: Run, channels: Channels, first_batch: Callable[[], Batch]) -> GroupedRun:
    """The run in its groups, the same on every rank; every rank must call it. The first batch is asked for if one must be measured."""
    control, wanted = channels.control, run.config.pipeline.groups
    size, known, why = str(control.world.size), _known(run, control), ""
    if wanted == 0 and size not in known:
        settings = run.config.pipeline
        # Beside compute run the messages of all parts but the first rows and the last gradients.
        waited = 1 if settings.mode in ("frozen-window", "nested") else settings.micro_batches
        wanted, why = choose(new_state(run, channels), channels, first_batch(), num_micro_batches=waited)
        known = {**known, size: wanted}
    number = wanted or known[size]
    config = replace(run.config, pipeline=replace(run.config.pipeline, groups=number))
    return GroupedRun(replace(run, config=config), channels.in_groups(number), known, why)


def _known(run: Run, control: Channel) -> dict[str, int]:
    """What was chosen before, as rank 0 reads it."""
    leads = control.world.rank == 0
    found = read_facts(run.folder).get(GROUPS, {}) if leads and Run.exists(run.folder) else {}
    said: dict[str, int] = json.loads(control.broadcast_bytes(json.dumps(found).encode(), 0, name="groups"))
    return said


def choose(state: TrainState, channels: Channels, batch: Batch, *, num_micro_batches: int) -> tuple[int, str]:
    """How many groups fit the traffic of a batch, and why, the same on every rank; measured now, on a new state without groups.

    Of `num_parts` the messages are waited for.
    """
    num_ranks, control = channels.control.world.size, channels.control
    if num_ranks == 1:
        return 1, ""
    tables, wires = demand(state, batch, control), measured_links(channels)
    row_s = max(value for (value,) in control.all_gather_floats([_row_s(state)], name="row time"))
    return choose_groups(num_ranks, tables, wires, num_micro_batches=num_micro_batches, row_s=row_s)


def demand(state: TrainState, batch: Batch, control: Channel) -> list[TableTraffic]:
    """What a batch asks of every table: distinct ids of one rank, of two neighbours and so on, on average."""
    plan, found = read(state, batch, Rates(0.0, 0.0), 0).plan, []
    for name, table in state.embedding.tables.items():
        ids = plan.tables[name].ids
        most = max(row[0] for row in control.all_gather_ints([len(ids)], name="ids of a rank"))
        share = -(-most // _MOST_IDS) or 1
        sample = ids[owner_of(ids, share, share) == 0] if share > 1 else ids
        said = control.all_gather_bytes(sample.numpy().tobytes(), name="ids of a batch")
        ranks = [np.frombuffer(one, dtype=np.int64) for one in said]
        distinct = {size: share * _distinct(ranks, size) for size in divisors(len(ranks))}
        found.append(TableTraffic(table.spec.dim * table.empty_rows(0).itemsize, distinct))
    return found


def _distinct(ranks: list[NDArray[np.int64]], size: int) -> float:
    """The mean number of distinct ids of so many neighbouring ranks."""
    counts = [len(np.unique(np.concatenate(ranks[first : first + size]))) for first in range(0, len(ranks), size)]
    return sum(counts) / len(counts)


def measured_links(channels: Channels) -> dict[int, LinkModels]:
    """How fast exchanges are inside and between groups, for every number of groups, while all ranks have theirs."""
    world, found = channels.control.world, {}
    for number in divisors(world.size):
        grid, wires = RankGrid(world.size, number), []
        for name, ranks in (("inside", grid.group_of(world.rank)), ("between", grid.replicas_of(world.rank))):
            channel = world.channel(f"probe {number} {name}", ranks=ranks)
            wires.append(_measured(channel, channels.control))
            channel.close()
        found[number] = LinkModels(*wires)
    return found


def _measured(channel: Channel, control: Channel) -> LinkModel:
    """The slowest rank counts."""
    size = channel.world.size
    if size == 1:
        return LinkModel(0.0, float("inf"))

    def seconds(num_bytes: int) -> float:
        sends = [torch.zeros(num_bytes // (size - 1), dtype=torch.uint8) for _ in range(size)]
        rooms = [torch.empty_like(one) for one in sends]
        times = []
        for _ in range(1 + _NUM_PROBES):
            control.barrier()
            start = time.perf_counter()
            channel.exchange("probe", sends, rooms).wait()
            times.append(time.perf_counter() - start)
        slowest = control.all_gather_floats(times[1:], name="probe times")  # the first one connects
        return float(median(max(column) for column in zip(*slowest, strict=True)))

    start_s, all_s = seconds(0), seconds(_PROBE_BYTES)
    return LinkModel(start_s, _PROBE_BYTES / max(all_s - start_s, 1e-9))


def _row_s(state: TrainState) -> float:
    """What it takes to hold and update a row, by the slowest table."""
    worst = 0.0
    for table in state.embedding.tables.values():
        limits = table.config
        num = min(_NUM_ROWS, limits.max_rows_per_bucket * limits.num_buckets or _NUM_ROWS)
        holder, grads, ids = InPlaceRows(table), torch.ones_like(table.empty_rows(num)), torch.arange(num)
        for step in range(limits.admit_after + 1):  # rows are made by those before the last
            start = time.perf_counter()
            held = holder.take(ids, step)
            holder.update(held, grads, 0.0)
            holder.release(held)
            seconds = time.perf_counter() - start
        worst = max(worst, seconds / num)
    return worst


_ID_BYTES = 8


_MARGIN = 0.02  # more groups take more memory: they must be faster by this


@dataclass(frozen=True, slots=True)
class LinkModel:
    """An exchange of some ranks while all others have theirs: what it takes to start, and bytes per second of each rank."""

    start_s: float
    bytes_per_s: float

    def seconds(self, num_exchanges: int, num_bytes: float) -> float:
        return num_exchanges * self.start_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class LinkModels:
    """Those of one number of groups."""

    inside: LinkModel
    between: LinkModel


@dataclass(frozen=True, slots=True)
class TableTraffic:
    """What a batch asks of one table."""

    row_bytes: int
    distinct: Mapping[int, float]  # u: by number of neighbouring ranks, all divisors of their number


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Seconds of a step with a number of groups; a pipeline hides some of them."""

    inside_s: float
    between_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.inside_s + self.between_s + self.update_s


def cost(
    num_ranks: int,
    num_groups: int,
    tables: Sequence[TableTraffic],
    wires: LinkModels,
    *,
    num_micro_batches: int,
    row_s: float,
) -> GroupCost:
    """What a step takes, beside compute, by the model above; of so many parts the messages are waited for."""
    shards = num_ranks // num_groups
    sent = sum(2 * one.distinct[1] * one.row_bytes for one in tables) * (shards - 1) / shards
    shared = sum(one.distinct[shards] / shards * (one.row_bytes + _ID_BYTES) for one in tables) * (num_groups - 1)
    updated = sum(one.distinct[num_ranks] for one in tables) / shards
    # Rows and gradients of every part, and ids with their last parts; sums of every part, and ids. Alone there is nobody to send to.
    exchanges = (
        len(tables) * (2 * num_micro_batches + 2) * (shards > 1),
        len(tables) * (num_micro_batches + 1) * (num_groups > 1),
    )
    return GroupCost(
        wires.inside.seconds(exchanges[0], sent), wires.between.seconds(exchanges[1], shared), updated * row_s
    )


def choose_groups(
    num_ranks: int,
    tables: Sequence[TableTraffic],
    wires: Mapping[int, LinkModels],
    *,
    num_micro_batches: int,
    row_s: float,
) -> tuple[int, str]:
    """The number of groups with which a step takes least, and why; `wires` has those of every number that may be chosen."""
    costs = {
        number: cost(num_ranks, number, tables, wires[number], num_micro_batches=num_micro_batches, row_s=row_s)
        for number in divisors(num_ranks)
        if number in wires
    }
    best = min(costs)
    for number, one in costs.items():
        if one.total_s < costs[best].total_s * (1 - _MARGIN):
            best = number
    return best, _why(num_ranks, best, costs)


def _why(num_ranks: int, best: int, costs: Mapping[int, GroupCost]) -> str:
    own = costs[best]
    shape = f"{best} group{'s' * (best > 1)} of {num_ranks // best} rank{'s' * (num_ranks > best)}"
    others = ", ".join(f"{_ms(one.total_s)} with {number}" for number, one in costs.items() if number != best)
    micro_batches = (
        f"{_ms(own.inside_s)} inside groups, {_ms(own.between_s)} between them, {_ms(own.update_s)} to update rows"
    )
    return f"{shape}: {_ms(own.total_s)} a step expected beside compute ({micro_batches})" + (
        f"; {others}" if others else ""
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
