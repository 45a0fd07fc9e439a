"""The state of a service as `data append` reads it: events in numbers, the own ids behind new numbers, the content of items.

Own ids come first: an append that did not know the numbers that a service has given out would give them to other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nestpipe.state.living_data import LivingData
from nestpipe.state.service_state import Entry, ServiceState


class StoredEvents:
    """What a state holds. Opened for one append; `state` is of this process alone."""

    def __init__(self, state: ServiceState):
        self._state, self.living, self._events = state, LivingData(state.changes), list[Entry]()

    def events(self) -> Sequence[Entry]:
        """All stored events, in their order."""
        with self._state.events.news() as (is_other, events):
            self._events = [*events] if is_other else [*self._events, *events]
        return self._events

    def texts(self) -> Mapping[str, Mapping[int, str]]:
        """Own ids that the service has numbered since ingestion, by column."""
        return self.living.ids.tables()

    def next_numbers(self) -> Mapping[str, int]:
        """The first number of each column that was not given out, also not to a user who was forgotten."""
        return self.living.ids.next_numbers()

    def items(self) -> Mapping[int, Mapping[str, Any]]:
        """The content of items that were stored since ingestion."""
        return {number: record.content for number, record in self.living.catalogue.records.items()}

    def remove(self, is_held: Callable[[Entry], bool]) -> int:
        """Removes events for good; returns how many."""
        return self._state.events.rewrite(lambda event: not is_held(event))
