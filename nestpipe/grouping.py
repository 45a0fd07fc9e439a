"""The groups of a run's ranks: as configured, as chosen before, or chosen now from a short measured profile.

How many groups there are decides the order of sums, hence bits, and here a clock would decide it. So a choice is made once for
a number of ranks and kept in RUN/run.json: a run that goes on with as many ranks has the same groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.comm import Lane
from nestpipe.embedding.groups import Grid, divisors
from nestpipe.embedding.held import InPlace
from nestpipe.embedding.ids import owner_of
from nestpipe.embedding.traffic import Demand, Wire, Wires, choose_groups
from nestpipe.jagged import Batch
from nestpipe.pipeline.stages import Rates, TrainState, read
from nestpipe.run import Lanes, Run, read_facts

GROUPS = "groups"  # in RUN/run.json: number of ranks -> number of groups
_PROBE_BYTES = 1 << 20  # of each rank
_NUM_PROBES = 3
_NUM_ROWS = 4096
_MOST_IDS = 1 << 17  # of a rank that all look at; of more, those of some hash buckets


@dataclass(frozen=True, slots=True)
class Grouped:
    """A run and its lanes in their groups."""

    run: Run
    lanes: Lanes
    chosen: Mapping[str, int] = field(default_factory=dict)  # so far, for its facts
    why: str = ""  # of a choice made now


def grouped(run: Run, lanes: Lanes, first_batch: Callable[[], Batch]) -> Grouped:
    """The run in its groups, the same on every rank; every rank must call it. The first batch is asked for if one must be measured."""
    control, wanted = lanes.control, run.config.pipeline.groups
    size, known, why = str(control.world.size), _known(run, control), ""
    if wanted == 0 and size not in known:
        settings = run.config.pipeline
        # Beside compute run the messages of all parts but the first rows and the last gradients.
        waited = 1 if settings.mode in ("frozen-window", "nested") else settings.parts
        wanted, why = choose(run.new_state(lanes), lanes, first_batch(), num_parts=waited)
        known = {**known, size: wanted}
    number = wanted or known[size]
    config = replace(run.config, pipeline=replace(run.config.pipeline, groups=number))
    return Grouped(replace(run, config=config), lanes.in_groups(number), known, why)


def _known(run: Run, control: Lane) -> dict[str, int]:
    """What was chosen before, as rank 0 reads it."""
    leads = control.world.rank == 0
    found = read_facts(run.folder).get(GROUPS, {}) if leads and Run.exists(run.folder) else {}
    said: dict[str, int] = json.loads(control.broadcast_bytes(json.dumps(found).encode(), 0, name="groups"))
    return said


def choose(state: TrainState, lanes: Lanes, batch: Batch, *, num_parts: int) -> tuple[int, str]:
    """How many groups fit the traffic of a batch, and why, the same on every rank; measured now, on a new state without groups.

    Of `num_parts` the messages are waited for.
    """
    num_ranks, control = lanes.control.world.size, lanes.control
    if num_ranks == 1:
        return 1, ""
    tables, wires = demand(state, batch, control), measured_wires(lanes)
    row_s = max(value for (value,) in control.all_gather_floats([_row_s(state)], name="row time"))
    return choose_groups(num_ranks, tables, wires, num_parts=num_parts, row_s=row_s)


def demand(state: TrainState, batch: Batch, control: Lane) -> list[Demand]:
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
        found.append(Demand(table.spec.dim * table.empty_rows(0).itemsize, distinct))
    return found


def _distinct(ranks: list[NDArray[np.int64]], size: int) -> float:
    """The mean number of distinct ids of so many neighbouring ranks."""
    counts = [len(np.unique(np.concatenate(ranks[first : first + size]))) for first in range(0, len(ranks), size)]
    return sum(counts) / len(counts)


def measured_wires(lanes: Lanes) -> dict[int, Wires]:
    """How fast exchanges are inside and between groups, for every number of groups, while all ranks have theirs."""
    world, found = lanes.control.world, {}
    for number in divisors(world.size):
        grid, wires = Grid(world.size, number), []
        for name, ranks in (("inside", grid.group_of(world.rank)), ("between", grid.replicas_of(world.rank))):
            lane = world.lane(f"probe {number} {name}", ranks=ranks)
            wires.append(_measured(lane, lanes.control))
            lane.close()
        found[number] = Wires(*wires)
    return found


def _measured(lane: Lane, control: Lane) -> Wire:
    """The slowest rank counts."""
    size = lane.world.size
    if size == 1:
        return Wire(0.0, float("inf"))

    def seconds(num_bytes: int) -> float:
        sends = [torch.zeros(num_bytes // (size - 1), dtype=torch.uint8) for _ in range(size)]
        rooms = [torch.empty_like(one) for one in sends]
        times = []
        for _ in range(1 + _NUM_PROBES):
            control.barrier()
            start = time.perf_counter()
            lane.exchange("probe", sends, rooms).wait()
            times.append(time.perf_counter() - start)
        slowest = control.all_gather_floats(times[1:], name="probe times")  # the first one connects
        return float(median(max(column) for column in zip(*slowest, strict=True)))

    start_s, all_s = seconds(0), seconds(_PROBE_BYTES)
    return Wire(start_s, _PROBE_BYTES / max(all_s - start_s, 1e-9))


def _row_s(state: TrainState) -> float:
    """What it takes to hold and update a row, by the slowest table."""
    worst = 0.0
    for table in state.embedding.tables.values():
        limits = table.config
        num = min(_NUM_ROWS, limits.max_rows_per_bucket * limits.num_buckets or _NUM_ROWS)
        holder, grads, ids = InPlace(table), torch.ones_like(table.empty_rows(num)), torch.arange(num)
        for step in range(limits.admit_after + 1):  # rows are made by those before the last
            start = time.perf_counter()
            held = holder.take(ids, step)
            holder.update(held, grads, 0.0)
            holder.release(held)
            seconds = time.perf_counter() - start
        worst = max(worst, seconds / num)
    return worst
