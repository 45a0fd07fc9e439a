"""The explorer of orders, on posets whose counts are known and on races that are known."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from math import comb, factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.order_model import explore


def nothing(state, _):
    return state


def word(state, event):
    """A state that remembers the whole order."""
    return (*state, event)


def chains(*lengths):
    """Independent chains, as events and edges."""
    events = [(chain, place) for chain, length in enumerate(lengths) for place in range(length)]
    return events, [(one, other) for one, other in pairwise(events) if one[0] == other[0]]


def count(events, edges):
    (number,) = explore(events, edges, nothing, None).finals.values()
    return number


def test_linear_extensions_of_known_posets():
    assert count([], []) == 1
    assert count(*chains(9)) == 1
    assert count(range(7), []) == factorial(7)
    assert count(*chains(6, 6)) == comb(12, 6)
    assert count(*chains(5, 4, 3)) == factorial(12) // (factorial(5) * factorial(4) * factorial(3))
    fork = [(0, leaf) for leaf in range(1, 7)]
    assert count(range(7), fork) == factorial(6)
    tree = [((node - 1) // 2, node) for node in range(1, 7)]  # hook lengths 7, 3, 3, 1, 1, 1, 1
    assert count(range(7), tree) == factorial(7) // (7 * 3 * 3)
    grid = [(row, column) for row in range(4) for column in range(4)]
    steps = [((row, column), (row + 1, column)) for row in range(3) for column in range(4)]
    steps += [((row, column), (row, column + 1)) for row in range(4) for column in range(3)]
    assert count(grid, steps) == 24_024  # standard Young tableaux of a 4 x 4 square
    zigzag = [(0, 1), (2, 1), (2, 3), (4, 3), (4, 5)]
    assert count(range(6), zigzag) == 61  # Euler's zigzag number


def test_twenty_events_are_few_downsets():
    events, edges = chains(5, 5, 5, 5)
    found = explore(events, edges, nothing, None)
    assert found.num_downsets == found.num_states == 6**4
    assert found.finals == {None: factorial(20) // factorial(5) ** 4}


@given(st.integers(1, 6), st.data())
def test_the_orders_found_are_those_that_keep_the_edges(size, data):
    pairs = [(one, other) for other in range(size) for one in range(other)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    events = data.draw(st.permutations(range(size)))
    expected = [
        order
        for order in permutations(range(size))
        if all(order.index(one) < order.index(other) for one, other in edges)
    ]
    found = explore(events, edges, word, ())
    assert found.finals == Counter(expected)
    assert all(found.order_to(order) == list(order) for order in expected)

    def last_even(state, event):
        return event if event % 2 == 0 else state

    merged = explore(events, edges, last_even, None)
    ends = Counter(max((event for event in order if event % 2 == 0), key=order.index) for order in expected)
    assert merged.finals == ends
    for state in ends:
        order = tuple(merged.order_to(state))
        assert order in expected
        assert max((event for event in order if event % 2 == 0), key=order.index) == state


def test_two_writes_without_an_order_race():
    def write(_, event):
        return event

    race = explore(["a", "b"], [], write, None)
    assert race.finals == {"a": 1, "b": 1}
    assert race.differing("b") == ["b", "a"]
    assert race.differing("a") == ["a", "b"]
    ordered = explore(["a", "b"], [("a", "b")], write, None)
    assert ordered.differing("b") is None
    with pytest.raises(KeyError):
        ordered.order_to("a")


def row(state, event):
    """One row, read from the master, updated and written back by each batch; an update is x -> 2x + 1 + t."""
    master, copies = state
    kind, t = event
    if kind == "R":
        return master, (*copies[:t], master, *copies[t + 1 :])
    if kind == "U":
        return master, (*copies[:t], 2 * copies[t] + 1 + t, *copies[t + 1 :])
    return copies[t], copies


def test_a_dropped_edge_loses_an_update_and_the_order_shows_it():
    events = [(kind, t) for t in range(4) for kind in "RUW"]
    inside = [edge for t in range(4) for edge in pairwise((kind, t) for kind in "RUW")]
    between = [(("W", t), ("R", t + 1)) for t in range(3)]
    start = (1, (0, 0, 0, 0))
    expected = start
    for event in events:
        expected = row(expected, event)
    assert explore(events, inside + between, row, start).differing(expected) is None
    for dropped in between:
        kept = [edge for edge in inside + between if edge != dropped]
        order = explore(events, kept, row, start).differing(expected)
        assert order is not None
        assert sorted(order) == sorted(events)
        assert all(order.index(one) < order.index(other) for one, other in kept)
        assert order.index(dropped[0]) > order.index(dropped[1]), "only the forbidden order can differ"
        state = start
        for event in order:
            state = row(state, event)
        assert state != expected


@pytest.mark.parametrize(
    ("events", "edges", "message"),
    [
        ("aba", [], r"events repeat: \['a'\]"),
        ("ab", [("a", "c")], "the edge a -> c names c, which is no event"),
        ("abc", [("a", "b"), ("b", "a")], r"cycle: none of \['a', 'b'\]"),
        ("a", [("a", "a")], "cycle"),
    ],
)
def test_mistakes_in_a_poset(events, edges, message):
    with pytest.raises(ValueError, match=message):
        explore(events, edges, nothing, None)
