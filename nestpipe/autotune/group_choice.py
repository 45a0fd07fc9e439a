"""The number of replica groups, from measured traffic and links.

step = messages inside groups + messages between groups + row updates         cost(), for every divisor of the ranks
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

_PROBE_BYTES = 1 << 20  # per rank
_NUM_PROBES = 3
_NUM_ROWS = 4096
_MAX_IDS = 1 << 17  # of a rank that are exchanged; of more, those of some hash buckets


def choose(state: TrainState, channels: Channels, batch: Batch, *, num_micro_batches: int) -> tuple[int, str]:
    """The best number of groups for the traffic of a batch, and why. Collective; `state` is new and without groups.

    `num_micro_batches`: those whose messages are exposed.
    """
    num_ranks, control = channels.control.world.size, channels.control
    if num_ranks == 1:
        return 1, ""
    tables, links = demand(state, batch, control), measured_links(channels)
    row_s = max(value for (value,) in control.all_gather_floats([_row_s(state)], name="row time"))
    return choose_groups(num_ranks, tables, links, num_micro_batches=num_micro_batches, row_s=row_s)


def demand(state: TrainState, batch: Batch, control: Channel) -> list[TableTraffic]:
    """The traffic of a batch per table: mean distinct ids of one rank, of two neighbouring ranks, and so on."""
    plan, traffic = read(state, batch, Rates(0.0, 0.0), 0).plan, []
    for name, table in state.embedding.tables.items():
        ids = plan.tables[name].ids
        most = max(row[0] for row in control.all_gather_ints([len(ids)], name="ids of a rank"))
        share = -(-most // _MAX_IDS) or 1
        sample = ids[owner_of(ids, share, share) == 0] if share > 1 else ids
        gathered = control.all_gather_bytes(sample.numpy().tobytes(), name="ids of a batch")
        ranks = [np.frombuffer(one, dtype=np.int64) for one in gathered]
        distinct = {size: share * _distinct(ranks, size) for size in divisors(len(ranks))}
        traffic.append(TableTraffic(table.spec.dim * table.empty_rows(0).itemsize, distinct))
    return traffic


def _distinct(ranks: list[NDArray[np.int64]], size: int) -> float:
    """The mean number of distinct ids of so many neighbouring ranks."""
    counts = [len(np.unique(np.concatenate(ranks[first : first + size]))) for first in range(0, len(ranks), size)]
    return sum(counts) / len(counts)


def measured_links(channels: Channels) -> dict[int, LinkModels]:
    """Measured links inside and between groups, for every number of groups; all ranks exchange at the same time."""
    world, links = channels.control.world, {}
    for number in divisors(world.size):
        grid, models = RankGrid(world.size, number), list[LinkModel]()
        for name, ranks in (("inside", grid.group_of(world.rank)), ("between", grid.replicas_of(world.rank))):
            channel = world.channel(f"probe {number} {name}", ranks=ranks)
            models.append(_measured(channel, channels.control))
            channel.close()
        links[number] = LinkModels(*models)
    return links


def _measured(channel: Channel, control: Channel) -> LinkModel:
    """The link of the slowest rank."""
    size = channel.world.size
    if size == 1:
        return LinkModel(0.0, float("inf"))

    def seconds(num_bytes: int) -> float:
        sends = [torch.zeros(num_bytes // (size - 1), dtype=torch.uint8) for _ in range(size)]
        receives = [torch.empty_like(one) for one in sends]
        times = []
        for _ in range(1 + _NUM_PROBES):
            control.barrier()
            start = time.perf_counter()
            channel.exchange("probe", sends, receives).wait()
            times.append(time.perf_counter() - start)
        slowest = control.all_gather_floats(times[1:], name="probe times")  # the first one connects
        return float(median(max(column) for column in zip(*slowest, strict=True)))

    start_s, all_s = seconds(0), seconds(_PROBE_BYTES)
    return LinkModel(start_s, _PROBE_BYTES / max(all_s - start_s, 1e-9))


def _row_s(state: TrainState) -> float:
    """Seconds to take, update and release a row of the slowest table."""
    worst = 0.0
    for table in state.embedding.tables.values():
        limits = table.config
        num = min(_NUM_ROWS, limits.max_rows or _NUM_ROWS)
        access, grads, ids = InPlaceRows(table), torch.ones_like(table.empty_rows(num)), torch.arange(num)
        for step in range(limits.admit_after + 1):  # the steps before the last create the rows
            start = time.perf_counter()
            refs = access.take(ids, step)
            access.update(refs, grads, 0.0)
            access.release(refs)
            seconds = time.perf_counter() - start
        worst = max(worst, seconds / num)
    return worst


_ID_BYTES = 8
_MARGIN = 0.02  # relative gain that more groups need, because they take more memory


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Latency of an exchange and bandwidth per rank, while all other ranks exchange too."""

    start_s: float
    bytes_per_s: float

    def seconds(self, num_exchanges: int, num_bytes: float) -> float:
        return num_exchanges * self.start_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class LinkModels:
    """The links for one number of groups."""

    inside: LinkModel
    between: LinkModel


@dataclass(frozen=True, slots=True)
class TableTraffic:
    """The traffic of a batch for one table."""

    row_bytes: int
    distinct: Mapping[int, float]  # ids, by number of neighbouring ranks (every divisor of all ranks)


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Seconds per step next to compute, before a pipeline hides some of them."""

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
    links: LinkModels,
    *,
    num_micro_batches: int,
    row_s: float,
) -> GroupCost:
    """The modelled cost of a step next to compute; messages of `num_micro_batches` are exposed."""
    shards = num_ranks // num_groups
    sent = sum(2 * one.distinct[1] * one.row_bytes for one in tables) * (shards - 1) / shards
    shared = sum(one.distinct[shards] / shards * (one.row_bytes + _ID_BYTES) for one in tables) * (num_groups - 1)
    updated = sum(one.distinct[num_ranks] for one in tables) / shards
    # Inside: rows and gradients per micro-batch, ids and last uses. Between: sums per micro-batch, and ids.
    exchanges = (
        len(tables) * (2 * num_micro_batches + 2) * (shards > 1),
        len(tables) * (num_micro_batches + 1) * (num_groups > 1),
    )
    return GroupCost(
        links.inside.seconds(exchanges[0], sent), links.between.seconds(exchanges[1], shared), updated * row_s
    )


def choose_groups(
    num_ranks: int,
    tables: Sequence[TableTraffic],
    links: Mapping[int, LinkModels],
    *,
    num_micro_batches: int,
    row_s: float,
) -> tuple[int, str]:
    """The number of groups with the cheapest step, and why; only numbers in `links` are considered."""
    costs = {
        number: cost(num_ranks, number, tables, links[number], num_micro_batches=num_micro_batches, row_s=row_s)
        for number in divisors(num_ranks)
        if number in links
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
    parts = f"{_ms(own.inside_s)} inside groups, {_ms(own.between_s)} between them, {_ms(own.update_s)} to update rows"
    return f"{shape}: {_ms(own.total_s)} a step expected next to compute ({parts})" + (f"; {others}" if others else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
