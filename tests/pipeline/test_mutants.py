"""The tests of the pipeline can fail: every edge that is dropped and every stage that is wrong is caught, every time."""

from __future__ import annotations

import pytest

from nestpipe.distributed.process_group import World
from nestpipe.errors import ConfigError
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.stages import Clip
from tests.pipeline import orders
from tests.pipeline.mutants import broken_edges, legal_orders, random_orders
from tests.pipeline.toy_training import Case, new_toy, toy_batches
from tests.pipeline.wrong_stages import WRONG, unprotected, weights_only_with_sgd, wrong_stages
from tests.rank_pool import run_ranks

# Other needs order these anyway: what computes has its rows, and what has computed has them behind it.
IMPLIED = {
    "post(t) -> grads(t.0)",
    "post(t) -> grads(t.1)",
    "rows(t.0) -> compute(t.1)",
    "rows(t.0) -> update(t)",
    "rows(t.1) -> update(t)",
}
IMPLIED_IN_CHUNKS = {"post(t) -> chunk grads(t.0)"}
IMPLIED_IF_SHARED = IMPLIED_IN_CHUNKS | {"rows(t.0) -> compute(t.0)", "chunk rows(t.0) -> compute(t.0)"}
IMPLIED_WITH_NORM = {"dense sum(t) -> dense step(t)", "collect(t.1) -> update(t)"}
# They bound how far reading and key routing run ahead, hence memory; no bit depends on them.
# Both of the last wait for the same messages: they must not at the same time, which no order of whole stages shows.
BOUNDS = {("dense step", "read"), ("dense step", "keys"), ("arrive", "compute")}
# One event too early is not enough to go wrong. Without the edge rows of t are retrieved, and victims chosen, while rows
# of t-d-1 are out; those are protected (P = d+1), but those of t-d-2 are not, and nothing else keeps them back.
ONE_TO_SPARE = {("write", "retrieve")}
# Where rows are used in place, nothing is written back. (Rows that the next batch does not share may be evicted by then.)
NOTHING_TO_WRITE = {("update", "write"), ("chunk update", "write"), ("write", "write")}

CASES = {
    2: [
        Case(buffered=True),
        Case(buffered=True, clip=Clip(0.05, rows=True)),
        Case(buffered=False, chunks="shared"),
        Case(buffered=False, chunks=2),
    ],
    3: [
        Case(buffered=True, depth=2, optimizer="adam"),
        Case(buffered=True, depth=2, chunks="shared"),
    ],
}
EVERY_CASE = [
    Case(buffered=buffered, depth=depth, optimizer=optimizer, clip=clip)
    for buffered in (True, False)
    for depth in (1, 2, 3)
    for optimizer in ("adagrad", "adam")
    for clip in (Clip(), Clip(0.05, rows=True))
]
EVERY_CASE += [
    Case(buffered=buffered, depth=depth, chunks=chunks)
    for buffered in (True, False)
    for depth in (1, 2, 3)
    for chunks in ("shared", 2)  # of three chunks of so few buckets one would be empty
]


def ends(name):
    """The two stages of an edge."""
    return tuple(one.partition("(")[0] for one in name.split(" -> "))


@pytest.mark.parametrize(
    ("named", "more"),
    [
        ({}, set()),
        ({"clip_rows": True}, IMPLIED_WITH_NORM),
        ({"groups": True}, set()),
        ({"chunks": "shared"}, IMPLIED_IF_SHARED),
        ({"chunks": 2}, IMPLIED_IN_CHUNKS),
        ({"chunks": "shared", "groups": True}, IMPLIED_IF_SHARED),
        ({"chunks": 2, "groups": True}, IMPLIED_IN_CHUNKS),
    ],
    ids=["plain", "clip rows", "groups", "shared", "chunks", "shared in groups", "chunks in groups"],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_edges_that_others_imply(depth, named, more):
    schedule = Schedule.of("nested", 2, depth=depth, **named)
    implied = {str(edge) for edge in orders.edges_of(schedule) if orders.is_implied(schedule, edge)}
    assert implied == IMPLIED | more


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dropped_edge_is_caught(world_size, scale):
    cases = scale(CASES[world_size], EVERY_CASE)
    found = run_ranks(world_size, broken_edges, cases, deadline_s=scale(280, 3000))[0]
    assert {case for case, *_ in found} == set(cases)
    for case, edge, tried in found:
        both = ends(edge)
        missed_by_one = tried["by one event"] == "equal"
        written = case.chunks == "shared" and both == ("chunk update", "write")
        spare = both in BOUNDS | ONE_TO_SPARE or (not case.buffered and both in NOTHING_TO_WRITE and not written)
        assert missed_by_one == spare, f"{edge} in {case}: {tried}"
        if both in ONE_TO_SPARE:
            assert tried["at will"] == "differs", f"{edge} in {case}: {tried}"
        if both in BOUNDS:
            assert tried["at will"] == "equal", f"{edge} in {case}: {tried}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_order_that_keeps_the_edges_is_right(world_size, scale):
    cases = scale(CASES[world_size], EVERY_CASE)
    assert run_ranks(world_size, legal_orders, cases, scale(2, 50), deadline_s=scale(280, 3000))[0] == []


@pytest.mark.timeout(3600)
def test_random_orders_without_an_edge(scale):
    """How often a race goes wrong by chance; with few orders only that they run."""
    edges = ["update(t-1) -> rows(t.0)", "write(t-2) -> retrieve(t)", "flag(t) -> update(t)"]
    count = scale(2, 200)
    for edge, num_caught, num_orders in run_ranks(2, random_orders, Case(buffered=True), edges, count, deadline_s=3000)[
        0
    ]:
        print(f"{edge}: {num_caught} of {num_orders}")
        assert num_orders == count
        if count >= 50:
            assert num_caught


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_wrong_stage_is_caught(world_size, scale):
    least = scale(world_size, 2)
    found = run_ranks(world_size, wrong_stages, least, deadline_s=280)[0]
    assert len(found) == sum(least <= wrong.min_ranks <= world_size for wrong in WRONG)
    assert [one for one in found if one[2] != "differs"] == [], "wrong results, not exceptions"


def test_sgd_would_hide_state_that_stays_behind():
    assert run_ranks(2, weights_only_with_sgd) == ["equal"] * 2


def test_rows_in_flight_must_be_protected():
    assert run_ranks(2, unprotected) == ["differs"] * 2
    state = new_toy(Case(buffered=True, depth=2, protect_steps=2), Channels.of(World.single()))
    runner = Runner(state, Schedule.of("nested", state.micro_batching.micro_batches, depth=2))
    feed = BatchFeed(batches=toy_batches(0), rates=Case(buffered=True).rates, num_batches=1)
    with pytest.raises(
        ConfigError, match=r"table 'item' .* 2 batches ahead: set embedding.protect_steps to at least 3"
    ):
        runner.run(feed)
    assert state.num_steps == 0
