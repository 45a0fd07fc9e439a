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
from nestpipe.embedding import chunked_exchange, id_exchange, replica_groups
from nestpipe.embedding.admission import UsageLedger
from nestpipe.embedding.prefetch_buffer import InPlaceRows, PrefetchBuffer
from nestpipe.embedding.routing import own_requests
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.table import WEIGHTS, Table
from nestpipe.embedding.unique_ids import among
from nestpipe.embedding.window import Window
from nestpipe.pipeline import sequential, stages
from nestpipe.pipeline.schedule import Kind
from tests.pipeline import orders
from tests.pipeline.mutants import NUM_BATCHES, Arena, plain, schedule_of
from tests.pipeline.toy_training import Case

Patch = Callable[[Case], AbstractContextManager[object]]


def state_not_taken(case: Case) -> AbstractContextManager[object]:
    """Only weights come from the table; optimizer state starts anew in the pool."""

    def load(pool, ids, homes, slots):
        pool._write(slots, pool.table.new_rows(ids))
        known = (homes >= 0).nonzero().flatten()
        weights = pool.table.gather(homes.index_select(0, known))
        pool._columns.scatter(WEIGHTS, slots.index_select(0, known), weights)

    return patch.object(PrefetchBuffer, "_load", load)


def state_not_brought_home(case: Case) -> AbstractContextManager[object]:
    """Only weights are written back to the table."""
    write, release = Table.write, PrefetchBuffer.release

    def only_weights(table, slots, rows):
        write(table, slots, {WEIGHTS: rows[WEIGHTS]})

    def releasing(pool, held):
        with patch.object(Table, "write", only_weights):
            release(pool, held)

    return patch.object(PrefetchBuffer, "release", releasing)


def reordered(key: Callable[[int, int], Any]) -> AbstractContextManager[object]:
    """The owner adds what arrives for a row by another key of (part, asking rank)."""
    return patch.object(id_exchange, "own_requests", _sorted_by(key))


def _sorted_by(key: Callable[[int, int], Any]) -> Callable[..., Any]:
    """`own_requests` with another order of sums."""

    def own(ids, last_micro_batch, first_counts):
        found = own_requests(ids, last_micro_batch, first_counts)
        keys = [
            key(micro_batch, requester)
            for micro_batch, counts in enumerate(found.arrival_counts)
            for requester, count in enumerate(counts)
            for _ in range(count)
        ]
        pieces = found.arrivals.split(found.starts.diff().tolist())
        order = [number for piece in pieces for number in sorted(piece.tolist(), key=keys.__getitem__)]
        return replace(found, arrivals=torch.tensor(order, dtype=torch.int64))

    return own


def ranks_backwards(case: Case) -> AbstractContextManager[object]:
    """Arrivals of a part are added from the last rank to the first."""
    return reordered(lambda micro_batch, requester: (micro_batch, -requester))


def rank_by_rank(case: Case) -> AbstractContextManager[object]:
    """Arrivals are added by (rank, part) instead of (part, rank)."""
    return reordered(lambda micro_batch, requester: (requester, micro_batch))


def micro_batches_backwards(case: Case) -> AbstractContextManager[object]:
    """The asker adds the gradients of its parts from the last to the first."""
    seen: dict[int, list[Any]] = {}

    def add_grads(window, micro_batch, leaves):
        (name, asked), *_ = window.requester.items()
        micro_batches = seen.setdefault(id(window), [window])  # kept, so that no other window gets its id
        grad = leaves[name].grad
        micro_batches.append(torch.zeros_like(asked.local_rows[micro_batch]) if grad is None else grad)
        before = [
            dict(zip(again.tolist(), source.tolist(), strict=True))
            for again, source in zip(asked.plan.repeated, asked.plan.source, strict=True)
        ]
        asked.grads[micro_batch] = micro_batches[-1].clone()
        for position in before[micro_batch]:
            number, place = micro_batch, position
            while place in before[number]:
                number, place = divmod(before[number][place], 1 << 32)
                asked.grads[micro_batch][position] += micro_batches[1 + number][place]

    return patch.object(Window, "add_grads", add_grads)


def fused_optimizer(case: Case) -> AbstractContextManager[object]:
    """Rows are updated by the gradients of each part as they come, instead of once by their sum."""

    def collect(state, work, micro_batch):
        stages.collect(state, work, micro_batch)
        for name, (owned,) in work.window.owner_chunks.items():
            dim, requests = state.embedding.tables[name].spec.dim, owned.requests
            came = [
                work.window.grad_messages[micro_batch, 0][name].received[requester]
                if number == micro_batch
                else torch.zeros(count, dim)
                for number, counts in enumerate(requests.arrival_counts)
                for requester, count in enumerate(counts)
            ]
            sums = ArrivedGrads(came, requests.starts, requests.arrivals).total()
            state.embedding.row_access[name].update(owned.row_refs, sums, work.rates.rows)
            owned.totals = torch.zeros_like(sums)

    return patch.dict(stages.MICRO_BATCH_STAGES, {"collect": collect})


def flag_ignored_by_rows(case: Case) -> AbstractContextManager[object]:
    """Rows are updated whatever the flags say."""

    def update(state, work):
        work.skipped = False
        stages.update(state, work)

    return patch.dict(stages.BATCH_STAGES, {"update": update})


def flag_ignored_by_slices(case: Case) -> AbstractContextManager[object]:
    """The rows of all slices but the first are updated whatever the flags say."""

    def next_update(state, work, number):
        skipped, work.skipped = work.skipped, False
        stages.chunk_update(state, work, number)
        work.skipped = skipped

    return patch.dict(stages.MICRO_BATCH_STAGES, {"chunk update": next_update})


def slices_one_ahead(case: Case) -> AbstractContextManager[object]:
    """The first rows of a slice leave with those of the slice before, when that one is updated."""

    def rows(state, work, micro_batch):
        stages.rows(state, work, micro_batch)
        if micro_batch == 0:
            stages.chunk_rows(state, work, 0)

    return patch.dict(stages.MICRO_BATCH_STAGES, {"rows": rows, "chunk rows": lambda state, work, number: None})


def flag_of_own_rank(case: Case) -> AbstractContextManager[object]:
    """A rank skips a batch only if it saw the value itself."""

    def flag(state, work):
        stages.flag(state, work)
        work.skipped = bool(stages._not_finite(state, work)[0])

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
    """A row may be evicted unless it is in this batch or in the pool at this moment."""
    take, choose = PrefetchBuffer.take, UsageLedger.choose
    held: list[torch.Tensor] = []

    def taking(pool, ids, step):
        held[:] = [pool._index.export()[0]]
        return take(pool, ids, step)

    def choosing(ledger, counts, order, *, before):
        now = before + (case.depth + 1 if case.protect_steps is None else case.protect_steps)
        slots = ledger.index.find(torch.cat([torch.empty(0, dtype=torch.int64), *held]))
        slots = slots[slots >= 0]
        steps = ledger._columns["last_step"]
        kept = steps.index_select(0, slots)
        steps.index_fill_(0, slots, now)
        victims = choose(ledger, counts, order, before=now)
        steps.index_copy_(0, slots, kept)
        return victims

    with patch.object(PrefetchBuffer, "take", taking), patch.object(UsageLedger, "choose", choosing):
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
    """Whether an id has a row is looked up when its gradient is applied, not remembered from the batch's turn."""

    def late(update):
        def updating(holder, held, grads, lr):
            homes = holder.table._index.find(held.ids)
            slots = homes if isinstance(holder, InPlaceRows) else held.slots
            rowless = (homes < 0).nonzero().flatten()
            update(holder, replace(held, table_slots=homes, slots=slots, rowless=rowless), grads, lr)

        return updating

    with (
        patch.object(PrefetchBuffer, "update", late(PrefetchBuffer.update)),
        patch.object(InPlaceRows, "update", late(InPlaceRows.update)),
    ):
        yield


@contextmanager
def values_drawn_in_turn(case: Case) -> Iterator[None]:
    """Initial values come from a generator with a state, in the order in which ids ask for them."""
    generators: dict[int, tuple[Table, torch.Generator]] = {}

    def initial(table, ids):
        _, generator = generators.setdefault(id(table), (table, torch.Generator().manual_seed(0)))
        return torch.randn(len(ids), table.spec.dim, generator=generator)

    with patch.object(Table, "initial", initial):
        yield


def hot_by_one_rank(case: Case) -> AbstractContextManager[object]:
    """A row counts as shared by neighbouring batches only if rank 1 asks for it in both; other ranks are not looked at."""
    tell = chunked_exchange.exchange_shared

    def asked_by_one(window):
        requests = window.owner_chunks["item"][0].requests
        begin, size = (sum(counts) for counts in requests.first_counts[:2])
        return requests.ids.index_select(0, requests.places[begin : begin + size])

    def telling(window, before, where):
        own = [asked_by_one(one) for one in (window, before)]

        def among_own(ids, others):
            both = torch.isin(ids, own[0]) & torch.isin(ids, own[1])
            return among(ids, others) & both.to(torch.uint8)

        with patch.object(chunked_exchange, "among", among_own):
            tell(window, before, where)

    return patch.object(chunked_exchange, "exchange_shared", telling)


def groups_backwards(case: Case) -> AbstractContextManager[object]:
    """Replicas add the sums of groups from the last group to the first."""
    return patch.object(replica_groups, "own_requests", _sorted_by(lambda micro_batch, group: -group))


def own_group_first(case: Case) -> AbstractContextManager[object]:
    """Replicas add the sum of their own group first, so that each has bits of its own."""
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

    def united(window, replicas, told, where):
        unite(window, replicas, told, where)
        return told

    return patch.object(Window, "_unite_groups", united)


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong pipeline, and the training and the order that show it."""

    patch: Patch
    case: Case
    order: tuple[Literal["late", "early"], Kind] = ("early", "retrieve")
    everywhere: bool = False  # patches sequential too, which stands up to it: what differs is due to the overlap alone
    min_ranks: int = 2  # the sum of two numbers is the same in either order


POOL, IN_PLACE = Case(pool=True), Case(pool=False)
WRONG = [
    Wrong(state_not_taken, POOL),
    Wrong(state_not_taken, replace(POOL, optimizer="adam")),
    Wrong(state_not_brought_home, POOL),
    Wrong(state_not_brought_home, replace(POOL, optimizer="adam")),
    Wrong(ranks_backwards, IN_PLACE, min_ranks=3),
    Wrong(rank_by_rank, replace(IN_PLACE, num_micro_batches=3, admit_after=1), min_ranks=3),
    Wrong(micro_batches_backwards, replace(IN_PLACE, num_micro_batches=3, admit_after=1)),
    Wrong(fused_optimizer, IN_PLACE),
    Wrong(flag_ignored_by_rows, IN_PLACE),
    Wrong(flag_of_own_rank, POOL),
    Wrong(rate_not_captured, IN_PLACE, ("late", "dense step"), everywhere=True),
    Wrong(victims_pinned_by_flight, POOL, everywhere=True),
    Wrong(mean_of_means, IN_PLACE),
    Wrong(admission_at_update, IN_PLACE, everywhere=True),
    Wrong(admission_at_update, POOL, everywhere=True),
    Wrong(values_drawn_in_turn, POOL, everywhere=True),
    Wrong(hot_by_one_rank, replace(IN_PLACE, split=True), ("early", "unshared rows")),
    Wrong(hot_by_one_rank, replace(POOL, split=True), ("late", "unshared update")),
    Wrong(ranks_backwards, replace(IN_PLACE, split=True), min_ranks=3),
    Wrong(ranks_backwards, replace(IN_PLACE, chunks=2), min_ranks=3),
    Wrong(flag_ignored_by_slices, replace(IN_PLACE, chunks=2)),
    Wrong(slices_one_ahead, replace(IN_PLACE, chunks=2), ("late", "chunk update")),
    Wrong(slices_one_ahead, replace(POOL, chunks=2), ("late", "chunk update")),
    Wrong(groups_backwards, replace(IN_PLACE, groups=3, admit_after=1), min_ranks=3),
    Wrong(own_group_first, replace(IN_PLACE, groups=3, admit_after=1), min_ranks=3),
    Wrong(weight_of_own_group, replace(POOL, groups=3), min_ranks=3),
]


def wrong_stages(world: World) -> list[tuple[str, Case, str]]:
    """Runs every wrong pipeline that this many ranks can tell from a right one; (what, training, verdict)."""
    arena, found = Arena(world), []
    for wrong in (one for one in WRONG if one.min_ranks <= world.size):
        needs = orders.needs_without(schedule_of(wrong.case), NUM_BATCHES)
        order = getattr(orders, wrong.order[0])(needs, wrong.order[1], 0)
        expected = plain(wrong.case, arena.channels(wrong.case))
        right = arena.verdict(expected, wrong.case, order)
        assert right == "equal", f"{wrong} shows nothing: its order differs anyhow"
        with wrong.patch(wrong.case):
            if wrong.everywhere:
                expected = plain(wrong.case, arena.channels(wrong.case))
            said = arena.verdict(expected, wrong.case, order)
        found.append((wrong.patch.__name__, wrong.case, said))
    return found


def unprotected(world: World) -> str:
    """Eviction of rows that a batch in flight holds: `protect_steps` far below the depth."""
    arena, case = Arena(world), Case(pool=False, depth=2, protect_steps=1)
    order = orders.early(orders.needs_without(schedule_of(case), NUM_BATCHES), "retrieve", 0)
    return arena.verdict(plain(case, arena.channels(case)), case, order)


def weights_only_with_sgd(world: World) -> str:
    """A weights-only pool, where rows have no state: the mistake that SGD hides."""
    arena, case = Arena(world), Case(pool=True, optimizer="sgd")
    order = orders.early(orders.needs_without(schedule_of(case), NUM_BATCHES), "retrieve", 0)
    with state_not_brought_home(case), state_not_taken(case):
        return arena.verdict(plain(case, arena.channels(case)), case, order)
