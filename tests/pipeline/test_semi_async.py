"""Rows stale by one step: the nested pipeline is bitwise identical to the loop in semi_async.py, wherever barriers are."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from unittest.mock import patch

import pytest
import torch

from nestpipe.distributed.process_group import World
from nestpipe.embedding.stale_rows import PreviousRows, StaleRows
from nestpipe.pipeline import sequential
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.deadlock_check import check
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.stages import Clip
from tests.pipeline.mutants import broken_edges, legal_orders, schedule_of
from tests.pipeline.order_model import explore
from tests.pipeline.orders import edges_of, is_implied
from tests.pipeline.recorded_runs import content, differences, one_update_old, pipelined, sequential_stale
from tests.pipeline.recorded_runs import sequential as sequential_run
from tests.pipeline.row_model import RowModel, events_of, patterns, projected
from tests.pipeline.toy_training import Case, new_toy, toy_batches
from tests.rank_pool import run_ranks
from tests.small_runs import write_log

NUM_STEPS = 8
# What makes rows one update old, and no older.
STALE_EDGES = {"update(t-1) -> update(t)"}
STALE_EDGES |= {f"rows(t+1.{micro_batch}) -> update(t)" for micro_batch in (0, 1)} | {
    f"update(t-2) -> rows(t.{micro_batch})" for micro_batch in (0, 1)
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Batches of which neighbours share some items, second neighbours others, and that hold some alone."""
    histories = {user: [(31 * user + 7 * k) % 97 for k in range(3 + user % 9)] for user in range(60)}
    return write_log(tmp_path_factory.mktemp("semi") / "log", histories).path


@pytest.fixture(scope="module")
def wide_log(tmp_path_factory):
    """Enough items that a batch sees a small part of them, and rows must go."""
    histories = {user: [(31 * user + 7 * k) % 600 for k in range(3 + user % 13)] for user in range(80)}
    return write_log(tmp_path_factory.mktemp("semi") / "wide", histories).path


def arms_of(count, **more):
    """Random delays, depths, accesss and barriers."""
    barriers = ((), (3,), (1, 2, 6), (4, 5))
    return [
        {
            "mode": "nested",
            "buffered": seed % 2 == 0,
            "depth": 1 + seed % 3,
            "seed": seed,
            "barriers": barriers[seed % 4],
            **more,
        }
        for seed in range(count)
    ]


CROSS = {
    1: {"optimizer": "adam", "micro_batches": 3},
    2: {"optimizer": "adagrad", "micro_batches": 3},
    3: {
        "micro_batches": 2,
        "clip": Clip(0.05, rows=True),
        "limits": {"num_buckets": 8, "admit_after": 2, "max_rows": 243, "evict": "lfu", "protect_steps": 4},
        "batch_size": 3,
    },
    4: {"optimizer": "adam", "micro_batches": 1},
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_delays_and_barriers_change_no_bit(log, wide_log, scale, world_size):
    settings = {"batch_size": 5, "stale": True, "sync_steps": 2 if world_size == 2 else 0, **CROSS[world_size]}
    arms, evicts = arms_of(scale(4 if world_size < 4 else 2, 60)), "limits" in settings
    found = run_ranks(world_size, differences, wide_log if evicts else log, settings, 14 if evicts else 8, arms)
    assert [line for lines in found for line in lines] == []


def compared(world, log):
    """Whether these are bitwise identical to the synchronous loop: staleness 1, staleness 0, staleness 1 after the last step."""
    channels, settings = Channels.of(world), {"batch_size": 5, "micro_batches": 2, "mode": "nested", "stale": True}
    expected = sequential_run(world, log, settings, NUM_STEPS, channels)
    never = {**settings, "sync_steps": NUM_STEPS}
    return [
        run(world, log, one, NUM_STEPS, channels) == expected
        for run, one in ((sequential_stale, settings), (sequential_stale, never), (pipelined, never))
    ]


def test_staleness_0_is_sequential(log):
    assert run_ranks(2, compared, log) == [[False, True, True]] * 2


@pytest.mark.parametrize("period", [1, 2], ids=["shared", "apart"])
def test_where_neighbours_share_no_ids_nothing_is_stale(period):
    """Batches of even and of odd numbers have ids of their own; with one kind of batch the same loop differs."""
    channels, case = Channels.of(World.single()), Case(buffered=False, admit_after=1)

    def batches(start=0):
        for number, batch in enumerate(toy_batches(0), start):
            moved = batch.items.with_values(batch.items.values + 1000 * (number % period))
            yield replace(batch, items=moved)

    ends, rates = [], []
    plain, stale, nested = (new_toy(case, channels) for _ in range(3))
    for number, batch in enumerate(islice(batches(), 9)):
        sequential.step(plain, batch, case.rates(number))
    one_update_old(stale, islice(batches(), 9), case.rates)
    nested.embedding.row_access = {name: StaleRows(one) for name, one in nested.embedding.row_access.items()}
    feed = BatchFeed(
        batches=batches(),
        rates=case.rates,
        num_batches=9,
        on_step=lambda work: rates.append(work.means["collision_rate"]),
    )
    Runner(nested, Schedule.of("nested", 2, depth=1, stale=True)).run(feed)
    ends = [content(state) for state in (plain, stale, nested)]
    assert ends[1] == ends[2]
    assert (ends[0] == ends[1]) == (period == 2)
    ids = [set(batch.items.values.tolist()) for batch in islice(batches(), 9)]
    shared = [len(one & other) / len(other) for one, other in pairwise(ids)]
    assert rates == [0.0, *shared]
    assert any(rates) == (period == 1)


def stop_and_go_on(world):
    """A stop request ends a stale run at an unplanned barrier; resuming leaves no trace of it."""
    channels, case = Channels.of(world), Case(buffered=True, depth=2)
    state, plain = new_toy(case, channels), new_toy(case, channels)
    state.embedding.row_access = {name: StaleRows(one) for name, one in state.embedding.row_access.items()}
    runner, stop_flags = Runner(state, Schedule.of("nested", 2, depth=2, stale=True)), iter([False] * 4 + [True])
    stop = (lambda: next(stop_flags, True)) if world.rank == 1 else (lambda: False)
    done = runner.run(BatchFeed(batches=toy_batches(world.rank), rates=case.rates, stop_requested=stop))
    done += runner.run(BatchFeed(batches=toy_batches(world.rank, done), rates=case.rates, num_batches=4))
    one_update_old(plain, islice(toy_batches(world.rank), done), case.rates)
    assert content(state) == content(plain)
    return done


def test_a_stop_that_nobody_planned_leaves_no_trace():
    assert run_ranks(2, stop_and_go_on) == [9] * 2


def keep_late(access, refs, grads, lr, update=StaleRows.update):
    update(access, refs, grads, lr)
    if access.previous is not None:
        StaleRows.keep_previous(access, refs)


def gather_for_all(access, refs, out=None):
    kept = access._first[1] if access._first else PreviousRows(refs.ids[:0], access.table.empty_rows(0))
    return kept.overwrite(access.inner.gather(refs, out), refs.ids)


def keep_nothing(access, refs):
    pass


def caught(world, log, name, wrong):
    settings = {"batch_size": 5, "micro_batches": 2, "stale": True}
    with patch.object(StaleRows, name, wrong):
        return bool(differences(world, log, settings, 6, arms_of(2, barriers=(2, 3))))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("keep_previous", keep_nothing), ("update", keep_late), ("gather", gather_for_all)],
    ids=["nothing", "late", "for all"],
)
def test_mistakes_at_a_barrier_are_caught(log, name, wrong):
    """Nothing is kept, rows are kept after the update, later batches read what was kept for the first."""
    assert any(run_ranks(2, caught, log, name, wrong))


def test_no_stale_schedule_can_get_stuck(scale):
    for micro_batches, depth in ((1, 1), (3, 1), (2, 3), (5, 2)):
        for clip_rows in (False, True):
            schedule = Schedule.of("nested", micro_batches, depth=depth, clip_rows=clip_rows, stale=True)
            for num_batches in scale([1, 5], [1, 2, 3, 4, 5, 6]):
                check(schedule, num_batches, 3)


@pytest.mark.timeout(3600)
def test_every_dropped_edge_of_staleness_is_caught(scale):
    """Those that make rows old, and no older; with --soak every edge there is."""
    cases = [Case(buffered=True, stale=True), Case(buffered=False, depth=2, optimizer="adam", stale=True)]
    assert {str(edge) for edge in edges_of(schedule_of(cases[0]))} >= STALE_EDGES
    found = run_ranks(2, broken_edges, cases, scale(STALE_EDGES, set()), deadline_s=scale(120, 3000))[0]
    wrong = {(case, edge): tried for case, edge, tried in found if edge in STALE_EDGES}
    assert len(wrong) == 3 + 5, "at depth 1 the two from update(t-2) are implied"
    assert {tried["by one event"] for tried in wrong.values()} == {"differs"}
    for case, edge, tried in found:
        print(f"{'buffered' if case.buffered else 'in place'}, depth {case.depth}: {edge}: {tried}")


def test_any_order_that_keeps_the_edges_is_right(scale):
    cases = [Case(buffered=True, stale=True), Case(buffered=False, depth=2, optimizer="adam", stale=True)]
    assert run_ranks(2, legal_orders, cases, scale(2, 50), deadline_s=scale(120, 3000))[0] == []


class StaleRowModel(RowModel):
    """Rows without numbers, whose expected end is that of the loop with staleness 1."""

    def sequential(self):
        state = self.start
        events = {event: event for event in events_of(len(self.pattern))}
        for t in range(len(self.pattern) + 1):
            order = [
                ("retrieve", t),
                ("rows", t),
                ("update", t - 1),
                ("write", t - 1),
                ("compute", t),
                ("dense step", t),
            ]
            for kind, batch in order:
                if (event := events.get((kind, batch, 0))) is not None:
                    state = self.apply(state, event)
        return state


@pytest.mark.parametrize("depth", [1, 2])
def test_every_order_of_every_pattern_ends_like_the_loop(depth, scale):
    """All orders of four batches over two keys; without an edge of staleness some order does not."""
    schedule, differing = Schedule.of("nested", 1, depth=depth, stale=True), set()
    every = [(buffered, num_slots) for buffered in (True, False) for num_slots in (1, 2)]
    dropped = [
        edge
        for edge in edges_of(schedule)
        if edge.after in ("rows", "update") and edge.back and not is_implied(schedule, edge)
    ]
    orders = {edge: projected(schedule, 4, edge) for edge in (None, *dropped)}
    for number, pattern in enumerate(patterns(4, 2)):
        for buffered, num_slots in scale([every[number % 4]], every):
            model = StaleRowModel(pattern, 2, num_slots, depth + 1, buffered)
            for edge, order in orders.items():
                found = explore(events_of(4), order, model.apply, model.start).differing(model.sequential())
                assert edge or found is None, f"{pattern}, buffered {buffered}: {' '.join(map(str, found))}"
                differing |= {edge} if found else set()
    assert differing == set(dropped)
    # At depth 1 rows of t-2 are written back before those of t are retrieved, updated or not.
    assert [str(edge) for edge in dropped] == [
        *(["update(t-2) -> rows(t.0)"] if depth > 1 else []),
        "update(t-1) -> update(t)",
        "rows(t+1.0) -> update(t)",
    ]


def test_kept_rows_are_found_by_id():
    kept = PreviousRows.read({"kept.ids": torch.tensor([7, 3, 5]), "kept.rows": torch.tensor([[7.0], [3.0], [5.0]])})
    rows = kept.overwrite(torch.zeros(4, 1), torch.tensor([5, 4, 8, 3]))
    assert rows.flatten().tolist() == [5.0, 0.0, 0.0, 3.0]
    assert PreviousRows.read({}) is None
    none = PreviousRows(torch.empty(0, dtype=torch.int64), torch.empty(0, 1))
    assert none.overwrite(torch.ones(1, 1), torch.tensor([3])).tolist() == [[1.0]]
