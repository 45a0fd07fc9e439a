"""What ranks run to show that the tests of the pipeline can fail: orders that break an edge, and stages that are wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from unittest.mock import patch

import torch.distributed as dist

from nestpipe.distributed.process_group import World
from nestpipe.pipeline import semi_async, sequential, stages
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed, run_in_order
from nestpipe.pipeline.schedule import Event, Schedule
from tests.pipeline import orders
from tests.pipeline.orders import Edge
from tests.pipeline.recorded_runs import Log, content, one_update_old, tapped
from tests.pipeline.toy_training import Case, new_toy, toy_batches

NUM_BATCHES = 9
_DEADLINE_S = 3.0  # of messages that a mutant may never send
Result = tuple[Log, dict[str, bytes]]
Mutation = Callable[[], AbstractContextManager[object]]


class Arena:
    """The channels of one rank; all ranks create new ones after one of them has failed."""

    def __init__(self, world: World):
        self._world, self._verdicts = world, world.channel("verdicts")
        self._num_failures = 0
        self._hasty, self._channels = self._anew()
        self._grouped: dict[int, Channels] = {}

    def channels(self, case: Case) -> Channels:
        """Those of a training, in its groups."""
        if case.groups not in self._grouped:
            self._grouped[case.groups] = self._channels.in_groups(case.groups)
        return self._grouped[case.groups]

    def _anew(self) -> tuple[World, Channels]:
        """A world of the same ranks that knows nothing of those before it."""
        store = dist.PrefixStore(f"after {self._num_failures} failures", self._world.store)
        hasty = replace(self._world, deadline_s=_DEADLINE_S, store=store, _channels={})
        keys, rows, dense = (hasty.channel(name) for name in ("keys", "rows", "dense"))
        return hasty, Channels(control=self._verdicts, saves=self._verdicts, keys=keys, rows=rows, dense=dense)

    def verdict(self, expected: Result, case: Case, order: list[Event]) -> str:
        """What all ranks together say about a training in an order: 'equal', 'differs' or the name of an error."""
        try:
            own = "equal" if ordered(case, self.channels(case), order) == expected else "differs"
        except Exception as error:  # caught is caught: most broken orders meet an error of comm or of the index
            own = type(error).__name__
        found = {verdict.decode() for verdict in self._verdicts.all_gather_bytes(own.encode())}
        errors = sorted(found - {"equal", "differs"})
        if errors:
            self._num_failures += 1
            self._hasty.close()
            gc.collect()  # groups have threads of their own, which end when nothing refers to them any more
            self._hasty, self._channels = self._anew()
            self._grouped = {}
        return errors[0] if errors else "differs" if "differs" in found else "equal"


def plain(case: Case, channels: Channels) -> Result:
    """The sequential step, of the case's staleness, rows in place."""
    log: Log = []
    state = new_toy(replace(case, buffered=False), channels)
    batches = islice(toy_batches(state.control.world.rank), NUM_BATCHES)
    update = tapped(log).batch["update"]
    with patch.object(sequential, "update", update), patch.object(semi_async, "update", update):
        if case.stale:
            one_update_old(state, batches, case.rates)
        else:
            for number, batch in enumerate(batches):
                sequential.step(state, batch, case.rates(number))
    return sorted(log), content(state)


def ordered(case: Case, channels: Channels, order: list[Event]) -> Result:
    """The same stages in a given order."""
    log: Log = []
    state = new_toy(case, channels)
    feed = BatchFeed(batches=toy_batches(state.control.world.rank), rates=case.rates)
    for channel in state.channels:
        channel.hand_over()
    taps = tapped(log, stages.BATCH_STAGES, stages.MICRO_BATCH_STAGES)
    with patch.dict(stages.BATCH_STAGES, taps.batch), patch.dict(stages.MICRO_BATCH_STAGES, taps.micro_batch):
        run_in_order(state, order, feed, schedule_of(case))
    return sorted(log), content(state)


def schedule_of(case: Case) -> Schedule:
    named = {"depth": case.depth, "clip_rows": case.clip.rows, "stale": case.stale}
    named |= {"groups": case.groups > 1, "chunks": case.chunks}
    return Schedule.of("nested", case.num_micro_batches, **named)


def broken_edges(world: World, cases: list[Case], only: Collection[str] = ()) -> list[tuple[Case, str, dict[str, str]]]:
    """Every kind of edge that is not implied, broken in forced orders until one of them is caught: verdict by order.

    Of a training in groups or in chunks only those that the same training has not otherwise.
    """
    arena, found = Arena(world), []
    for case in cases:
        schedule, expected = schedule_of(case), plain(case, arena.channels(case))
        plainer = replace(case, groups=1, chunks=1)
        known = set(orders.edges_of(schedule_of(plainer))) if plainer != case else set()
        edges = [one for one in orders.edges_of(schedule) if one not in known and (not only or str(one) in only)]
        for edge in edges:
            tried: dict[str, str] = {}
            for name, order in () if orders.is_implied(schedule, edge) else forced_orders(schedule, edge):
                tried[name] = arena.verdict(expected, case, order)
                if tried[name] != "equal":
                    break
            found += [(case, str(edge), tried)] if tried else []
    return found


def forced_orders(schedule: Schedule, edge: Edge) -> Iterator[tuple[str, list[Event]]]:
    """Orders that keep all needs but this kind of edge; those that come too early by one event alone stand first."""
    for much, inherit in (("by one event", True), ("at will", False)):
        needs = orders.needs_without(schedule, NUM_BATCHES, edge, inherit=inherit)
        for order in (
            orders.late(needs, edge.before, edge.before_micro_batch),
            orders.early(needs, edge.after, edge.after_micro_batch),
        ):
            if orders.breaks(order, edge):
                yield much, order


def random_orders(world: World, case: Case, edge_names: list[str], count: int) -> list[tuple[str, int, int]]:
    """For each edge: how many of so many random orders that break it, by one event if that is enough, are caught."""
    arena, found = Arena(world), []
    schedule, expected = schedule_of(case), plain(case, arena.channels(case))
    for edge in orders.edges_of(schedule):
        if str(edge) in edge_names:
            inherit = (edge.before, edge.after) != ("write", "retrieve")
            needs = orders.needs_without(schedule, NUM_BATCHES, edge, inherit=inherit)
            drawn = (orders.random_order(needs, f"{edge}/{seed}") for seed in range(100 * count))
            broken = list(islice((order for order in drawn if orders.breaks(order, edge)), count))
            verdicts = [arena.verdict(expected, case, order) for order in broken]
            found.append((str(edge), sum(one != "equal" for one in verdicts), len(verdicts)))
    return found


def legal_orders(world: World, cases: list[Case], num_random: int) -> list[str]:
    """Orders that keep every edge: what differs from sequential, which must be nothing."""
    arena, found = Arena(world), []
    for case in cases:
        schedule, expected = schedule_of(case), plain(case, arena.channels(case))
        needs = orders.needs_without(schedule, NUM_BATCHES)
        tried = {f"random {seed}": orders.random_order(needs, seed) for seed in range(num_random)}
        chunks = ("chunk grads", "chunk update") if case.chunks != 1 else ()
        tried |= {f"late {kind}": orders.late(needs, kind, 0) for kind in ("update", "write", "dense step", *chunks)}
        early = ("chunk rows",) if case.chunks != 1 else ()
        tried |= {f"early {kind}": orders.early(needs, kind, 0) for kind in ("retrieve", "post", *early)}
        for name, order in tried.items():
            verdict = arena.verdict(expected, case, order)
            found += [f"{case}, {name}: {verdict}"] if verdict != "equal" else []
    return found
