"""Costs of each event of a schedule: its work, its messages, and what it waits for.

An exchange between n workers that send b bytes each costs (alpha-beta model with congestion)

    (n - 1) x peer_s  +  b x (n - 1) / n x max(congestion(n) / link, workers / fabric)  +  delay

A row is sent once per window: with the micro-batch that uses it first, and its gradient with the one that uses it last. With groups,
rows are exchanged inside a group, and the replicas of a shard then sum the gradients of each micro-batch (merge: reduce-scatter and
all-gather). The dense sum starts after the last compute, not during its backward: an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np

from nestpipe.pipeline.schedule import Event, Kind, Schedule
from nestpipe.simulate.constants import Constants
from nestpipe.simulate.cpu_model import CoreTurns
from nestpipe.simulate.event_simulator import Message, MessageWait, Phase, Send, SimulatedRun, StageWork

_GROWS: frozenset[Kind] = frozenset(("keys", "retrieve"))
_BY_SHARE: frozenset[Kind] = frozenset(("rows", "grads", "collect"))
_BY_USES: frozenset[Kind] = frozenset((*_BY_SHARE, *_GROWS, "update"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers of a training, and how they are grouped."""

    workers: int
    group_size: int | None = None  # workers that share one copy of the table; None: all of them
    cores: int | None = None  # shared by all workers (ranks on one machine); None: each stream has its own
    dedupe: bool = True

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"{self.workers} workers; there must be at least 1")
        if self.group_size is not None and not 1 <= self.group_size <= self.workers:
            raise ValueError(f"groups of {self.group_size} among {self.workers} workers")

    @property
    def own_group(self) -> int:
        return self.group_size or self.workers

    @property
    def replicas(self) -> float:
        """Number of copies of the table."""
        return self.workers / self.own_group


def run_of(schedule: Schedule, constants: Constants, cluster: Cluster, *, num_batches: int) -> SimulatedRun:
    """A simulation of the schedule on this cluster. Raises ValueError for chunked schedules."""
    if schedule.num_chunks > 1:
        raise ValueError("the model has no constants for chunks of messages; use a schedule without chunks")
    costs = StageCosts(schedule, constants, cluster)
    run = SimulatedRun(schedule, costs.phases, num_batches, world_size=cluster.workers)
    if cluster.cores is None:
        return run
    speed = 1 - constants.idle_share * cluster.workers / cluster.cores
    cores = partial(CoreTurns, cluster.cores, speed=speed)
    return replace(run, cores=cores, num_ranks=cluster.workers, late=costs.late)


def slowest(workers: int) -> float:
    """Expected maximum of n standard normal variables (Blom): how far the slowest worker is above the mean."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The phases of a schedule's events."""

    schedule: Schedule
    constants: Constants
    cluster: Cluster

    def phases(self, event: Event) -> Sequence[Phase]:
        """The waits, work and messages of an event, in order."""
        if self.cluster.workers == 1:
            return [self._work(event)]
        return [*self._before(event), self._work(event), *self._after(event)]

    def _before(self, event: Event) -> Sequence[Phase]:
        kind, batch, micro_batch = event
        if kind in ("compute", "collect"):
            sender: Kind = "rows" if kind == "compute" else "grads"
            return [MessageWait(Message(Event(sender, batch, micro_batch)), sender)]
        if kind == "merge":
            return self._replicas(event)
        if kind == "flag":  # flags are sent with the last gradients
            return [MessageWait(Message(Event("grads", batch, self.schedule.num_micro_batches - 1)), "flag")]
        if kind == "dense sum":  # reduce-scatter, all-gather
            num_bytes = self.constants.dense_bytes
            return [phase for trip in range(2) for phase in self._exchange(event, trip, num_bytes, "dense")]
        return self._exchange(event, 0, 0.0, "dense") if kind == "norm" else []

    def _after(self, event: Event) -> Sequence[Phase]:
        if event.kind in ("rows", "grads"):
            opened = Event("post", event.batch)
            return [self._rows(event, self._share(event), size=self.cluster.own_group, opened=opened)]
        if event.kind == "keys":  # the counts, then the ids
            num_bytes = self.constants.num_rows * self.constants.key_bytes * self._uses
            return [*self._exchange(event, 0, 0.0, "keys"), *self._exchange(event, 1, num_bytes, "keys")]
        return []

    def _work(self, event: Event) -> StageWork:
        seconds = self._cpu_s(event)
        if event.kind != "compute":
            return StageWork(seconds)
        alone, micro_batches = self.cluster.cores is None, self.schedule.num_micro_batches
        late = 1 + self.constants.jitter * slowest(self.cluster.workers) if alone else 1.0
        return StageWork(seconds * late, self.constants.device_s * late / micro_batches)

    def late(self, rank: int, event: Event) -> float:
        """Slowdown of one rank in one batch, where ranks are simulated one by one; deterministic."""
        if event.kind != "compute":
            return 1.0
        return max(1 + self.constants.jitter * float(np.random.default_rng([rank, event.batch]).standard_normal()), 0.0)

    def _cpu_s(self, event: Event) -> float:
        """Core seconds, with the cost of launching messages to each peer."""
        kind, constants, cluster = event.kind, self.constants, self.cluster
        seconds = constants.work_s.get(kind, 0.0)
        if kind == "compute":
            seconds = seconds / self.schedule.num_micro_batches + constants.micro_batch_s
        if kind in _GROWS:
            seconds *= (cluster.workers / constants.base_workers) ** constants.lookup_growth
        if kind in _BY_SHARE:
            seconds *= self._share(event)
        if kind in _BY_USES:
            seconds *= self._uses
        # Exchanges whose receives are opened when they are sent count twice, as in calibrate.py.
        num_messages = {
            "rows": 1,
            "grads": 1,
            "keys": 4,
            "dense sum": 4,
            "merge": 4,
            "post": 2 * self.schedule.num_micro_batches,
        }
        peers = {"dense sum": cluster.workers, "merge": cluster.replicas}.get(kind, cluster.own_group) - 1
        return seconds + num_messages.get(kind, 0) * constants.peer_s * peers

    def _share(self, event: Event) -> float:
        """Share of the batch's rows that a micro-batch uses first (rows) or last (gradients)."""
        micro_batches, power = self.schedule.num_micro_batches, self.constants.first_use
        place = event.micro_batch if event.kind == "rows" else micro_batches - 1 - event.micro_batch
        return float(((place + 1) / micro_batches) ** power - (place / micro_batches) ** power)

    @property
    def _uses(self) -> float:
        return 1.0 if self.cluster.dedupe else self.constants.duplicates

    def _rows(self, event: Event, share: float, *, size: float, opened: Event | None, number: int = 0) -> Send:
        num_rows = self.constants.num_rows * self._uses * share
        return self._send(Message(event, number), num_rows * self.constants.row_bytes, size, opened, round(num_rows))

    def _replicas(self, event: Event) -> list[Phase]:
        """Sum of a micro-batch's gradients over the replicas of a shard: two exchanges of its rows."""
        if self.cluster.replicas <= 1:
            return []
        share, phases = self._share(event), list[Phase]()
        for number in (1, 2):
            send = self._rows(event, share, size=self.cluster.replicas, opened=None, number=number)
            phases += [send, MessageWait(send.message, "grads")]
        return phases

    def _exchange(self, event: Event, number: int, num_bytes: float, name: str) -> list[Phase]:
        """A message that is sent and awaited at once, its receives opened at the same time."""
        size = self.cluster.own_group if event.kind == "keys" else self.cluster.workers
        rows = round(self.constants.num_rows * self._uses) if event.kind == "keys" and number else 0
        send = self._send(Message(event, number), num_bytes, size, None, rows)
        return [send, MessageWait(send.message, name)]

    def _send(self, message: Message, num_bytes: float, size: float, opened: Event | None, num_rows: int) -> Send:
        """A message of every worker to all others of an exchange; each keeps its own share."""
        constants = self.constants
        leaving, one_by_one = num_bytes * (size - 1) / size, self.cluster.cores is not None
        per_byte = (size / constants.base_workers) ** constants.congestion / constants.bytes_per_s
        if not one_by_one:  # all workers send at the same time
            per_byte = max(per_byte, self.cluster.workers / constants.fabric_bytes_per_s)
        return Send(
            message,
            wire_s=leaving * per_byte,
            delay_s=constants.delay_s,
            burst_s=constants.burst_bytes * per_byte,
            fabric_s=leaving / constants.fabric_bytes_per_s if one_by_one else 0.0,
            cpu_s=leaving * constants.wire_cpu_s,
            opened=opened,
            num_bytes=round(leaving),
            num_rows=num_rows,
        )
