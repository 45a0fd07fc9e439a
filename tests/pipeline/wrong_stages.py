"""Pipelines that are wrong inside a stage rather than in the order of stages: each is a patch, put on for one run.

`WRONG` says for each what it is, the training that shows it, and an order that keeps every edge and in which it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch

from nestpipe.distributed.process_group import World
from nestpipe.embedding import admission, chunked_exchange, id_exchange, replica_groups, table
from nestpipe.embedding.prefetch_buffer import InPlaceRows, PrefetchBuffer
from nestpipe.embedding.routing import own_requests
from nestpipe.embedding.row_ops import ArrivedGrads, gather_rows
from nestpipe.embedding.skipped_steps import SkippedSteps
from nestpipe.embedding.table import WEIGHTS, Table
from nestpipe.embedding.unique_ids import among
from nestpipe.embedding.usage_ledger import TorchLedger
from nestpipe.embedding.window import Window
from nestpipe.pipeline import sequential, stages
from nestpipe.pipeline.schedule import Kind
from tests.pipeline import orders
from tests.pipeline.mutants import NUM_BATCHES, Arena, plain, schedule_of
from tests.pipeline.toy_training import NOT_FINITE, Case

Patch = Callable[[Case], AbstractContextManager[object]]


def state_not_taken(case: Case) -> AbstractContextManager[object]:
    """Only weights come from the table; optimizer state is new in the buffer."""

    def load(buffer, ids, table_slots, slots):
        buffer._write(slots, buffer.table.new_rows(ids))
        known = (table_slots >= 0).nonzero().flatten()
        weights = buffer.table.gather(table_slots.index_select(0, known))
        buffer._columns.scatter(WEIGHTS, slots.index_select(0, known), weights)

    return patch.object(PrefetchBuffer, "_load", load)


def state_not_written_back(case: Case) -> AbstractContextManager[object]:
    """Only weights are written back to the table."""
    write, release = Table.write, PrefetchBuffer.release

    def only_weights(table, slots, rows):
        write(table, slots, {WEIGHTS: rows[WEIGHTS]})

    def releasing(buffer, refs):
        with patch.object(Table, "write", only_weights):
            release(buffer, refs)

    return patch.object(PrefetchBuffer, "release", releasing)


def reordered(key: Callable[[int, int], Any]) -> AbstractContextManager[object]:
    """The owner adds the arrivals of a row in another order of (micro-batch, requesting rank)."""
    return patch.object(id_exchange, "own_requests", _sorted_by(key))


def _sorted_by(key: Callable[[int, int], Any]) -> Callable[..., Any]:
    """`own_requests` with another order of sums."""

    def own(ids, last_use, first_counts):
        found = own_requests(ids, last_use, first_counts)
        keys = [
            key(micro_batch, requester)
            for micro_batch, counts in enumerate(found.arrival_counts)
            for requester, count in enumerate(counts)
            for _ in range(count)
        ]
        by_id = found.arrivals.split(found.starts.diff().tolist())
        order = [number for numbers in by_id for number in sorted(numbers.tolist(), key=keys.__getitem__)]
        return replace(found, arrivals=torch.tensor(order, dtype=torch.int64))

    return own


def ranks_backwards(case: Case) -> AbstractContextManager[object]:
    """Arrivals of a micro-batch are added from the last rank to the first."""
    return reordered(lambda micro_batch, requester: (micro_batch, -requester))


def rank_by_rank(case: Case) -> AbstractContextManager[object]:
    """Arrivals are added by (rank, micro-batch) instead of (micro-batch, rank)."""
    return reordered(lambda micro_batch, requester: (requester, micro_batch))


def micro_batches_backwards(case: Case) -> AbstractContextManager[object]:
    """The requester adds the gradients of its micro-batches from the last to the first."""
    seen: dict[int, list[Any]] = {}

    def add_grads(window, micro_batch, local_rows):
        (name, requester), *_ = window.requester.items()
        micro_batches = seen.setdefault(id(window), [window])  # kept, so that no other window gets its id
        grad = local_rows[name].grad
        micro_batches.append(torch.zeros_like(requester.local_rows[micro_batch]) if grad is None else grad)
        before = [
            dict(zip(repeated.tolist(), source.tolist(), strict=True))
            for repeated, source in zip(requester.plan.repeated, requester.plan.source, strict=True)
        ]
        requester.grads[micro_batch] = micro_batches[-1].clone()
        for position in before[micro_batch]:
            number, place = micro_batch, position
            while place in before[number]:
                number, place = divmod(before[number][place], 1 << 32)
                requester.grads[micro_batch][position] += micro_batches[1 + number][place]

    return patch.object(Window, "add_grads", add_grads)


def fused_optimizer(case: Case) -> AbstractContextManager[object]:
    """Rows are updated by the gradients of each micro-batch as they arrive, instead of once by their sum."""

    def collect(state, work, micro_batch):
        stages.collect(state, work, micro_batch)
        for name, owned in work.window.owner.items():
            dim, requests = state.embedding.tables[name].spec.dim, owned.requests
            arrived = [
                work.window.grad_messages[micro_batch, 0][name].received[requester]
                if number == micro_batch
                else torch.zeros(count, dim)
                for number, counts in enumerate(requests.arrival_counts)
                for requester, count in enumerate(counts)
            ]
            sums = ArrivedGrads(arrived, requests.starts, requests.arrivals).total()
            state.embedding.row_access[name].update(owned.row_refs, sums, work.rates.rows)
            owned.totals = torch.zeros_like(sums)

    return patch.dict(stages.MICRO_BATCH_STAGES, {"collect": collect})


def flag_ignored_by_rows(case: Case) -> AbstractContextManager[object]:
    """Rows are updated whatever the flags say."""

    def update(state, work):
        work.skipped = False
        stages.update(state, work)

    return patch.dict(stages.BATCH_STAGES, {"update": update})


def flag_ignored_by_chunks(case: Case) -> AbstractContextManager[object]:
    """The rows of all chunks but the first are updated whatever the flags say."""

    def next_update(state, work, number):
        skipped, work.skipped = work.skipped, False
        stages.chunk_update(state, work, number)
        work.skipped = skipped

    return patch.dict(stages.MICRO_BATCH_STAGES, {"chunk update": next_update})


def chunks_one_ahead(case: Case) -> AbstractContextManager[object]:
    """The first rows of a chunk are sent with those of the previous chunk, when that one is updated."""

    def rows(state, work, micro_batch):
        stages.rows(state, work, micro_batch)
        if micro_batch == 0:
            stages.chunk_rows(state, work, 0)

    return patch.dict(stages.MICRO_BATCH_STAGES, {"rows": rows, "chunk rows": lambda state, work, number: None})


def flag_of_own_rank(case: Case) -> AbstractContextManager[object]:
    """A rank skips a batch only if it saw the value itself."""

    def flag(state, work):
        stages.flag(state, work)
        work.skipped = bool(stages._flag_values(state, work)[0])

    return patch.dict(stages.BATCH_STAGES, {"flag": flag})


@contextmanager
def rate_not_captured(case: Case) -> Iterator[None]:
    """An update uses the learning rate of the step at which the loop is, not that of its batch."""

    def update(state, work):
        work.rates = case.rates(max(state.num_steps - 1, 0))
        stages.update(state, work)

    with patch.dict(stages.BATCH_STAGES, {"update": update}), patch.object(sequential, "update", update):
        yield


@contextmanager
def victims_pinned_by_flight(case: Case) -> Iterator[None]:
    """A row may be evicted unless it is in this batch or in the buffer at this moment."""
    take = PrefetchBuffer.take
    refs: list[torch.Tensor] = []

    def taking(buffer, ids, step):
        refs[:] = [buffer._index.export()[0]]
        return take(buffer, ids, step)

    class Pinning(TorchLedger):
        def _evict(self, counts, *, before):
            now = before + (case.depth + 1 if case.protect_steps is None else case.protect_steps)
            slots = self.index.find(torch.cat([torch.empty(0, dtype=torch.int64), *refs]))
            slots = slots[slots >= 0]
            kept = self._last_step[slots]
            self._last_step[slots] = now
            evicted = super()._evict(counts, before=now)
            self._last_step[slots] = kept
            return evicted

    def make_ledger(num_buckets, order, *, native=None):
        return Pinning(num_buckets, order)

    with patch.object(PrefetchBuffer, "take", taking), patch.object(admission, "make_ledger", make_ledger):
        yield


def mean_of_means(case: Case) -> AbstractContextManager[object]:
    """Each rank divides by its own weight, and ranks count alike."""

    def keys(state, work):
        own = work.window.weight
        stages.keys(state, work)
        work.window.weight = own * state.embedding.world_size or 1.0

    return patch.dict(stages.BATCH_STAGES, {"keys": keys})


@contextmanager
def admission_at_update(case: Case) -> Iterator[None]:
    """Whether an id has a row is looked up when its gradient is applied, not when the batch took its rows."""

    def late(update):
        def updating(access, refs, grads, lr):
            table_slots = access.table._index.find(refs.ids)
            slots = table_slots if isinstance(access, InPlaceRows) else refs.slots
            rowless = (table_slots < 0).nonzero().flatten()
            update(access, replace(refs, table_slots=table_slots, slots=slots, rowless=rowless), grads, lr)

        return updating

    with (
        patch.object(PrefetchBuffer, "update", late(PrefetchBuffer.update)),
        patch.object(InPlaceRows, "update", late(InPlaceRows.update)),
    ):
        yield


@contextmanager
def values_drawn_in_turn(case: Case) -> Iterator[None]:
    """Initial values come from a generator with a state, in the order in which ids arrive."""
    generators: dict[int, tuple[Table, torch.Generator]] = {}

    def initial(table, ids):
        _, generator = generators.setdefault(id(table), (table, torch.Generator().manual_seed(0)))
        return torch.randn(len(ids), table.spec.dim, generator=generator)

    with patch.object(Table, "initial", initial):
        yield


def _shared_by(requested: Callable[[Window], torch.Tensor]) -> AbstractContextManager[object]:
    """A row counts as shared by neighbouring batches only if it is among these ids of both windows."""
    exchange_shared = chunked_exchange.exchange_shared

    def exchanging(window, before, where):
        own = [requested(one) for one in (window, before)]

        def among_own(ids, others):
            both = torch.isin(ids, own[0]) & torch.isin(ids, own[1])
            return among(ids, others) & both.to(torch.uint8)

        with patch.object(chunked_exchange, "among", among_own):
            exchange_shared(window, before, where)

    return patch.object(chunked_exchange, "exchange_shared", exchanging)


def shared_by_one_rank(case: Case) -> AbstractContextManager[object]:
    """A row counts as shared by neighbouring batches only if rank 1 requests it in both; other ranks are ignored."""

    def requested(window):
        requests = window.owner["item"].requests
        begin, size = (sum(counts) for counts in requests.first_counts[:2])
        return requests.ids.index_select(0, requests.places[begin : begin + size])

    return _shared_by(requested)


def shared_by_one_group(case: Case) -> AbstractContextManager[object]:
    """A row counts as shared by neighbouring batches only if group 0 requests it in both; other groups are ignored."""

    def requested(window):
        union = window.owner["item"].union
        return union.requests.ids.index_select(0, union.places[: sum(union.counts[0])])

    return _shared_by(requested)


def chunks_merged_whole(case: Case) -> AbstractContextManager[object]:
    """A replica sends the sums of its last micro-batch in the order of ids, although others expect them chunk by chunk."""
    divide = replica_groups.GroupUnion.divide

    def dividing(union, chunk_of, num_chunks, arrivals):
        requests = union.requests
        divide(union, chunk_of, num_chunks, arrivals)
        union.requests = replace(requests, arrivals=arrivals)

    return patch.object(replica_groups.GroupUnion, "divide", dividing)


def groups_backwards(case: Case) -> AbstractContextManager[object]:
    """Replicas add the sums of groups from the last group to the first."""
    return patch.object(replica_groups, "own_requests", _sorted_by(lambda micro_batch, group: -group))


def own_group_first(case: Case) -> AbstractContextManager[object]:
    """Replicas add the sum of their own group first, so that replicas differ bitwise."""
    unite = replica_groups.GroupUnion.of

    def united(own, ids, counts, order, *, group):
        with patch.object(
            replica_groups, "own_requests", _sorted_by(lambda micro_batch, other: (other != group, other))
        ):
            return unite(own, ids, counts, order, group=group)

    return patch.object(replica_groups.GroupUnion, "of", united)


def weight_of_own_group(case: Case) -> AbstractContextManager[object]:
    """Each group divides by the weight of its own ranks."""
    unite = Window._unite_groups

    def united(window, replicas, flags, where):
        unite(window, replicas, flags, where)
        return flags

    return patch.object(Window, "_unite_groups", united)


def rows_not_caught_up(case: Case) -> AbstractContextManager[object]:
    """Exact Adam: rows are read as of their last update."""

    def gather(optimizer, rows, state, slots, out=None, *, batch, native=None):
        return gather_rows(rows, slots, out)

    return patch.object(table, "gather_slots", gather)


def caught_up_one_batch_short(case: Case) -> AbstractContextManager[object]:
    """Exact Adam: rows are read and updated one step behind."""
    at = SkippedSteps.at
    return patch.object(SkippedSteps, "at", lambda steps, batch: at(steps, max(batch - 1, 0)))


def skipped_batch_not_counted(case: Case) -> AbstractContextManager[object]:
    """Exact Adam: a batch that is not finite is no step for the rows."""
    at = SkippedSteps.at
    return patch.object(SkippedSteps, "at", lambda steps, batch: at(steps, batch - (batch > NOT_FINITE)))


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong pipeline, and the training and the order that show it."""

    patch: Patch
    case: Case
    order: tuple[Literal["late", "early"], Kind] = ("early", "retrieve")
    everywhere: bool = False  # patches sequential too, which stands up to it: what differs is due to the overlap alone
    min_ranks: int = 2  # the sum of two numbers is the same in either order


BUFFERED, IN_PLACE = Case(buffered=True), Case(buffered=False)
WRONG = [
    Wrong(state_not_taken, BUFFERED),
    Wrong(state_not_taken, replace(BUFFERED, optimizer="adam")),
    Wrong(state_not_written_back, BUFFERED),
    Wrong(state_not_written_back, replace(BUFFERED, optimizer="adam")),
    Wrong(rows_not_caught_up, replace(IN_PLACE, optimizer="adam")),
    Wrong(caught_up_one_batch_short, replace(IN_PLACE, optimizer="adam")),
    Wrong(skipped_batch_not_counted, replace(IN_PLACE, optimizer="adam")),
    Wrong(ranks_backwards, IN_PLACE, min_ranks=3),
    Wrong(rank_by_rank, replace(IN_PLACE, num_micro_batches=3, admit_after=1), min_ranks=3),
    Wrong(micro_batches_backwards, replace(IN_PLACE, num_micro_batches=3, admit_after=1)),
    Wrong(fused_optimizer, IN_PLACE),
    Wrong(flag_ignored_by_rows, IN_PLACE),
    Wrong(flag_of_own_rank, BUFFERED),
    Wrong(rate_not_captured, IN_PLACE, ("late", "dense step"), everywhere=True),
    Wrong(victims_pinned_by_flight, BUFFERED, everywhere=True),
    Wrong(mean_of_means, IN_PLACE),
    Wrong(admission_at_update, IN_PLACE, everywhere=True),
    Wrong(admission_at_update, BUFFERED, everywhere=True),
    Wrong(values_drawn_in_turn, BUFFERED, everywhere=True),
    Wrong(shared_by_one_rank, replace(IN_PLACE, chunks="shared"), ("early", "chunk rows")),
    Wrong(shared_by_one_rank, replace(BUFFERED, chunks="shared"), ("late", "chunk update")),
    Wrong(ranks_backwards, replace(IN_PLACE, chunks="shared"), min_ranks=3),
    Wrong(ranks_backwards, replace(IN_PLACE, chunks=2), min_ranks=3),
    Wrong(flag_ignored_by_chunks, replace(IN_PLACE, chunks=2)),
    Wrong(chunks_one_ahead, replace(IN_PLACE, chunks=2), ("late", "chunk update")),
    Wrong(chunks_one_ahead, replace(BUFFERED, chunks=2), ("late", "chunk update")),
    Wrong(groups_backwards, replace(IN_PLACE, groups=3, admit_after=1), min_ranks=3),
    Wrong(own_group_first, replace(IN_PLACE, groups=3, admit_after=1), min_ranks=3),
    Wrong(weight_of_own_group, replace(BUFFERED, groups=3), min_ranks=3),
    Wrong(groups_backwards, replace(IN_PLACE, groups=3, admit_after=1, chunks="shared"), min_ranks=3),
    Wrong(own_group_first, replace(IN_PLACE, groups=3, admit_after=1, chunks=2), min_ranks=3),
    Wrong(flag_ignored_by_chunks, replace(BUFFERED, groups=3, chunks="shared"), min_ranks=3),
    Wrong(chunks_merged_whole, replace(IN_PLACE, groups=3, chunks="shared"), min_ranks=3),
    Wrong(shared_by_one_group, replace(IN_PLACE, groups=3, chunks="shared"), ("early", "chunk rows"), min_ranks=3),
    Wrong(shared_by_one_group, replace(BUFFERED, groups=3, chunks="shared"), ("late", "chunk update"), min_ranks=3),
]


def wrong_stages(world: World, least: int = 2) -> list[tuple[str, Case, str]]:
    """Runs the wrong pipelines that this many ranks tell from a right one, and fewer than `least` not; (what, training, verdict)."""
    arena, found = Arena(world), []
    for wrong in (one for one in WRONG if least <= one.min_ranks <= world.size):
        needs = orders.needs_without(schedule_of(wrong.case), NUM_BATCHES)
        order = getattr(orders, wrong.order[0])(needs, wrong.order[1], 0)
        expected = plain(wrong.case, arena.channels(wrong.case))
        right = arena.verdict(expected, wrong.case, order)
        assert right == "equal", f"{wrong} shows nothing: its order differs anyhow"
        with wrong.patch(wrong.case):
            if wrong.everywhere:
                expected = plain(wrong.case, arena.channels(wrong.case))
            verdict = arena.verdict(expected, wrong.case, order)
        found.append((wrong.patch.__name__, wrong.case, verdict))
    return found


def unprotected(world: World) -> str:
    """Eviction of rows that a batch in flight holds: `protect_steps` far below the depth."""
    arena, case = Arena(world), Case(buffered=False, depth=2, protect_steps=1)
    order = orders.early(orders.needs_without(schedule_of(case), NUM_BATCHES), "retrieve", 0)
    return arena.verdict(plain(case, arena.channels(case)), case, order)


def weights_only_with_sgd(world: World) -> str:
    """A weights-only buffer, where rows have no state: the mistake that SGD hides."""
    arena, case = Arena(world), Case(buffered=True, optimizer="sgd")
    order = orders.early(orders.needs_without(schedule_of(case), NUM_BATCHES), "retrieve", 0)
    with state_not_written_back(case), state_not_taken(case):
        return arena.verdict(plain(case, arena.channels(case)), case, order)
