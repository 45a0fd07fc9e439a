"""Erases a user from the state of a service that this process does not serve; `UserHistories.forget` is for one that it does."""

from __future__ import annotations

from nestpipe.data.vocabulary import OwnId
from nestpipe.state.living_data import LivingData
from nestpipe.state.service_state import Entry, ServiceState


def number_in(state: ServiceState, own: OwnId) -> int | None:
    """The number that a service has given to a user since ingestion."""
    return LivingData(state.changes).ids.number_of("user", str(own))


def erase_entries(state: ServiceState, user: int) -> int:
    """Erases events, features and text of a user; returns the number of events. Their number is never given out again."""
    named = ("user", user)

    def keep(entry: Entry) -> bool:
        is_text = (entry.get("of"), entry.get("number")) == named and entry["text"] is not None
        return entry.get("user") != user and entry.get("forgotten") != user and not is_text

    with state.changes.news() as (_, entries):
        has_number = any((one.get("of"), one.get("number")) == named for one in entries)
        is_known = not all(map(keep, entries))
    if is_known and has_number:
        with state.writing():
            with state.changes.news():
                pass
            state.changes.append([{"of": "user", "number": user, "text": None}])
    if is_known:
        state.changes.rewrite(keep)
    return state.events.rewrite(keep)
