"""All orders that a schedule allows, for every pattern of which batch holds which key: each ends like sequential.

And with any one edge dropped some order does not, so that the edges are the right ones: enough, and none too many.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nestpipe.pipeline.schedule import Schedule
from tests.pipeline.order_model import explore
from tests.pipeline.orders import breaks, edges_of, is_implied
from tests.pipeline.row_model import RowModel, events_of, kinds_of, patterns, projected

NUM_BATCHES, NUM_KEYS = 4, 3
# Both ends lie between two stages of the model that other needs order too; real ranks show what they are for.
BETWEEN = {
    ("read", "read"),
    ("read", "keys"),
    ("dense step", "read"),
    ("dense step", "keys"),
    ("keys", "retrieve"),
    ("grads", "collect"),
    ("grads", "flag"),
    ("compute", "dense sum"),
    ("dense sum", "dense step"),
    ("flag", "dense step"),
    ("collect", "update"),
    ("flag", "update"),
}


# Likewise in chunks.
BETWEEN_CHUNKS = BETWEEN | {
    ("compute", "chunk grads"),
    ("chunk grads", "chunk collect"),
    ("chunk collect", "chunk update"),
    ("flag", "chunk update"),
}
# Which rows are shared is a fact of the model, not a message.
BETWEEN_SHARED = BETWEEN_CHUNKS | {
    ("keys", "keys"),
    ("keys", "post"),
    ("rows", "arrive"),
    ("chunk rows", "arrive"),
    ("arrive", "compute"),
}


def nested(depth, chunks=1):
    return Schedule.of("nested", 1, depth=depth, chunks=chunks)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_order_of_every_pattern_ends_like_sequential(depth, scale):
    events, order = events_of(NUM_BATCHES), projected(nested(depth), NUM_BATCHES)
    every = [(buffered, num_slots) for buffered in (True, False) for num_slots in (1, 2, 3)]
    total: Counter[str] = Counter()
    for number, pattern in enumerate(patterns(NUM_BATCHES, NUM_KEYS)):
        for buffered, num_slots in scale([every[number % 6]], every):
            model = RowModel(pattern, NUM_KEYS, num_slots, depth + 1, buffered)
            found = explore(events, order, model.apply, model.start)
            differing = found.differing(model.sequential())
            assert differing is None, (
                f"{pattern}, buffered {buffered}, {num_slots} slots: {' '.join(map(str, differing))}"
            )
            total += Counter(trainings=1, orders=sum(found.finals.values()), states=found.num_states)
    assert total["trainings"] == scale(816, 6 * 816)
    print(f"depth {depth}: {', '.join(f'{value:,} {name}' for name, value in total.items())}, none differs")


@pytest.mark.parametrize("chunks", ["shared", 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_order_of_a_schedule_in_chunks_ends_like_sequential(depth, scale, chunks):
    schedule, num_keys = nested(depth, chunks), scale(2, 3)
    events, order = events_of(NUM_BATCHES, kinds_of(schedule)), projected(schedule, NUM_BATCHES)
    every = [(buffered, num_slots) for buffered in (True, False) for num_slots in range(1, num_keys + 1)]
    total: Counter[str] = Counter()
    for number, pattern in enumerate(patterns(NUM_BATCHES, num_keys)):
        buffered, num_slots = every[number % len(every)]
        model = RowModel(pattern, num_keys, num_slots, depth + 1, buffered, chunks)
        plain = RowModel(pattern, num_keys, num_slots, depth + 1, buffered, _names=model._names)
        found = explore(events, order, model.apply, model.start)
        differing = found.differing(plain.sequential())
        assert differing is None, f"{pattern}, buffered {buffered}, {num_slots} slots: {' '.join(map(str, differing))}"
        total += Counter(trainings=1, orders=sum(found.finals.values()), states=found.num_states)
    print(
        f"depth {depth}, chunks {chunks}: {', '.join(f'{value:,} {name}' for name, value in total.items())}, none differs"
    )


def candidates(depth):
    """Patterns that may show a missing edge, with the number of slots: first those of four batches, then longer ones."""
    source = random.Random(depth)
    short = list(patterns(NUM_BATCHES, NUM_KEYS))
    yield from ((source.choice(short), 1 + number % 3) for number in range(60))
    # A key that gets the only slot, which is no longer protected, at its second try.
    again = {0: (0,), depth + 1: (1,), depth + 2: (1,)}
    # A row that loses its slot to another and comes back, while a batch that held it may still be in flight.
    away = {0: (0,), depth + 2: (1,), depth + 3: (0,)}
    for rare in (again, away):
        yield tuple(rare.get(t, ()) for t in range(depth + 4)), 1


def counterexample(schedule, edge, buffered):
    """A training and an order of it that keeps all edges but this kind and ends elsewhere; None if there is none."""
    depth = schedule.depth
    for pattern, num_slots in candidates(depth):
        events, order = events_of(len(pattern), kinds_of(schedule)), projected(schedule, len(pattern), edge)
        model = RowModel(pattern, NUM_KEYS, num_slots, depth + 1, buffered, schedule.chunks)
        found = explore(events, order, model.apply, model.start)
        if differing := found.differing(model.sequential()):
            return model, order, differing
    return None


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "in place"])
@pytest.mark.parametrize(("depth", "chunks"), [(1, 1), (2, 1), (3, 1), (2, "shared"), (1, 2), (2, 2)])
def test_without_an_edge_some_order_differs(depth, buffered, chunks):
    schedule, length = nested(depth, chunks), depth + 4
    between, free = set(), set()
    for edge in edges_of(schedule):
        if is_implied(schedule, edge):
            continue
        if set(projected(schedule, length, edge)) == set(projected(schedule, length)):
            between.add((edge.before, edge.after))
            continue
        if (found := counterexample(schedule, edge, buffered)) is None:
            free.add((edge.before, edge.after))
            continue
        model, order, differing = found
        place = {event: number for number, event in enumerate(differing)}
        assert all(place[first] < place[second] for first, second in order), "the order breaks more than the edge"
        if {edge.before, edge.after} <= set(kinds_of(schedule)):
            assert breaks(differing, edge), f"{edge} is kept by {differing}"
        state = model.start
        for event in differing:
            state = model.apply(state, event)
        assert state != model.sequential()
        print(
            f"depth {depth}, {'buffered' if buffered else 'in place'}, without {edge}: {' '.join(map(str, differing))}"
        )
    assert between == {"shared": BETWEEN_SHARED, 2: BETWEEN_CHUNKS}.get(chunks, BETWEEN)
    # Rows that stay in place and that the next batch holds too are kept from eviction by what that batch waits for.
    # Of chunks one alone may be forgotten: what the next batch waits for keeps its rows back.
    updates = {"shared": [("update", "write")], 2: [("update", "write"), ("chunk update", "write")]}
    unneeded = {("write", "write"), *updates.get(chunks, [])}
    assert free == (set() if buffered else unneeded), "these edges could go"
