"""Every order in which partly ordered events can happen, and every state they can end in.

A set of events that is closed downwards (a downset) is what may have happened at some moment. Two orders that lead to
the same downset and the same state have the same future, so each pair is followed once: the work is the number of
downsets times the states met in them, not the number of orders.

    found = explore(events, edges, apply, start)
    found.finals                  the states at the end, with the number of orders that lead to each
    found.differing(expected)     one order that ends elsewhere, or None
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Event = TypeVar("Event", bound=Hashable)
State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Exploration(Generic[Event, State]):
    """All that can happen; a downset is a mask with bit i for event i."""

    events: Sequence[Event]
    finals: dict[State, int]  # state -> number of orders (linear extensions) that end in it
    num_downsets: int
    num_states: int  # pairs of a downset and a state
    # What happened last before a pair was first met: the event's number and the state before it.
    _origins: dict[int, dict[State, tuple[int, State]]]

    def order_to(self, state: State) -> list[Event]:
        """One order of all events that ends in a final state; raises KeyError if there is none."""
        mask, order = (1 << len(self.events)) - 1, []
        self.finals[state]
        while mask:
            number, state = self._origins[mask][state]
            order.append(self.events[number])
            mask ^= 1 << number
        return order[::-1]

    def differing(self, expected: State) -> list[Event] | None:
        """One order that ends in another state than the expected one, or None if all end there."""
        other = next((state for state in self.finals if state != expected), None)
        return None if other is None else self.order_to(other)


def explore(
    events: Sequence[Event],
    edges: Iterable[tuple[Event, Event]],
    apply: Callable[[State, Event], State],
    start: State,
) -> Exploration[Event, State]:
    """Follows all orders that keep the edges (before, after); `apply` is pure, its states immutable and hashable.

    Raises ValueError if events repeat, an edge names an unknown event, or edges form a cycle.
    """
    before = _masks(events, edges)
    level: dict[int, dict[State, int]] = {0: {start: 1}}  # downsets of one size -> states -> number of orders
    origins: dict[int, dict[State, tuple[int, State]]] = {}
    num_downsets = num_states = 1
    for _ in events:
        above: dict[int, dict[State, int]] = {}
        for mask, states in level.items():
            possible = [
                number for number, needed in enumerate(before) if not mask >> number & 1 and needed & ~mask == 0
            ]
            for number in possible:
                reached = mask | 1 << number
                counts, firsts = above.setdefault(reached, {}), origins.setdefault(reached, {})
                for state, count in states.items():
                    after = apply(state, events[number])
                    counts[after] = counts.get(after, 0) + count
                    firsts.setdefault(after, (number, state))
        if not above:
            done = next(iter(level))
            stuck = [event for number, event in enumerate(events) if not done >> number & 1]
            raise ValueError(f"the edges form a cycle: none of {stuck} can be first among them")
        level = above
        num_downsets += len(level)
        num_states += sum(map(len, level.values()))
    ((_, finals),) = level.items()
    return Exploration(events, finals, num_downsets, num_states, origins)


def _masks(events: Sequence[Event], edges: Iterable[tuple[Event, Event]]) -> list[int]:
    """For each event the mask of those that must have happened."""
    numbers = {event: number for number, event in enumerate(events)}
    if len(numbers) != len(events):
        raise ValueError(f"events repeat: {[event for event in numbers if list(events).count(event) > 1]}")
    before = [0] * len(events)
    for first, second in edges:
        for event in (first, second):
            if event not in numbers:
                raise ValueError(f"the edge {first} -> {second} names {event}, which is no event")
        before[numbers[second]] |= 1 << numbers[first]
    return before
