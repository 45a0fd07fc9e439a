"""Appends the events that a service has stored to a sequence folder, each once, and compacts the service's log behind them.

    log of a service  --events the folder does not hold-->  frame in own ids  --append_log-->  folder with their ids
                      <--events that the folder holds now are removed--

The folder is published with the ids of its events in one rename. A crash before it changes nothing; after it, the next run finds
all events held, and only compacts. Events that arrive meanwhile stay in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from nestpipe.data.append import append_log
from nestpipe.data.event_ids import HeldEvents, event_digest
from nestpipe.data.ingest import BuildOptions, SideTable
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import Vocabulary

Event = Mapping[str, Any]


class EventSource(Protocol):
    """Where a service stores what it learns, in numbers."""

    def events(self) -> Sequence[Event]:
        """All stored events, in their order: id, user, item, time in seconds, features."""
        ...

    def texts(self) -> Mapping[str, Mapping[int, str]]:
        """Own ids that the service has numbered since ingestion, by column."""
        ...

    def next_numbers(self) -> Mapping[str, int]:
        """The first number of each column that was not given out, also not to a user who was forgotten."""
        ...

    def items(self) -> Mapping[int, Mapping[str, Any]]:
        """The content of items that were stored since ingestion."""
        ...

    def remove(self, is_held: Callable[[Event], bool]) -> int:
        """Removes events for good; returns how many."""
        ...


@dataclass(frozen=True, slots=True)
class AppendedEvents:
    """What an append did: events that joined, that the folder held already, and that were left because nothing names them."""

    sequences: Sequences
    num_new: int
    num_held: int
    num_nameless: int
    num_removed: int  # from the log


def append_events(
    folder: str | Path,
    source: EventSource,
    *,
    items: SideTable | None = None,
    users: SideTable | None = None,
    options: BuildOptions | None = None,
    compact: bool = True,
) -> AppendedEvents:
    """Appends what the folder does not hold, then compacts the source. Raises DataError, and then nothing has changed.

    Tables of items and users are read as by `append_log`; without one of items, their content is that of the service. Without
    `compact` the source keeps everything: for a folder that its service does not read.
    """
    sequences = Sequences.open(folder)
    held, texts, content = HeldEvents.of(sequences.path), source.texts(), source.items()
    stored = source.events()
    new = {event_digest(event["id"]): event for event in stored if event_digest(event["id"]) not in held}
    known = grown_vocabularies(sequences, texts, source.next_numbers())
    names = _Names(sequences.schema, known)
    named = {digest: event for digest, event in new.items() if names.has(event)}
    if named:
        own = names.item_table({number: one for number, one in content.items() if names.has_item(number)})
        if items is None and own is not None:
            items = SideTable(source=own, key=sequences.schema.item)
        sequences = append_log(
            folder,
            log=names.frame(list(named.values())),
            items=items,
            users=users,
            options=options,
            known=known,
            write=lambda draft: held.save_with(draft, named),
        )
        held = HeldEvents.of(sequences.path)
    removed = source.remove(lambda event: event_digest(event["id"]) in held) if compact and len(held) else 0
    return AppendedEvents(sequences, len(named), len(stored) - len(new), len(new) - len(named), removed)


def grown_vocabularies(
    sequences: Sequences, texts: Mapping[str, Mapping[int, str]], next_numbers: Mapping[str, int]
) -> dict[str, Vocabulary]:
    """The vocabularies of a folder with the own ids that a service has numbered since."""
    found = {name: sequences.vocabulary(name) for name in sequences.meta["encodings"]}
    for name in [one for one in {**texts, **next_numbers} if one in found and found[one].encoding != "int64"]:
        before, own = found[name], texts.get(name, {})
        later = pl.DataFrame({"id": list(own), "text": list(own.values())}, schema=before.table.schema)
        table = pl.concat([before.table, later]).unique("id", keep="last", maintain_order=True)
        is_counted = before.encoding == "dictionary"
        next_id = max(before.next_id, next_numbers.get(name, 0)) if is_counted else before.next_id
        found[name] = Vocabulary(before.name, before.encoding, table, next_id=next_id)
    return found


class _Names:
    """Events in numbers as records of a log, in own ids."""

    def __init__(self, schema: Schema, known: Mapping[str, Vocabulary]):
        self._schema, self._known = schema, known

    def has(self, event: Event) -> bool:
        """Whether user and item have own ids; a forgotten user has none."""
        return self._own("user", event["user"]) is not None and self.has_item(event["item"])

    def has_item(self, number: int) -> bool:
        return self._own("item", number) is not None

    def frame(self, events: Sequence[Event]) -> pl.DataFrame:
        """One record per event, with the columns of the log."""
        schema = self._schema
        columns: dict[str, list[Any]] = {
            schema.user: [self._own("user", event["user"]) for event in events],
            schema.item: [self._own("item", event["item"]) for event in events],
        }
        if schema.time is not None:
            columns[schema.time] = [_time(event["time"], schema) for event in events]
        for feature in schema.of_scope("event"):
            columns |= self._columns(feature, events)
        return pl.DataFrame(columns, strict=False)

    def item_table(self, content: Mapping[int, Mapping[str, Any]]) -> pl.DataFrame | None:
        """The features of items with content, as a side table; None if there is nothing to say."""
        features = self._schema.of_scope("item")
        if not content or not features:
            return None
        columns: dict[str, list[Any]] = {self._schema.item: [self._own("item", number) for number in content]}
        for feature in features:
            columns |= self._columns(feature, list(content.values()))
        return pl.DataFrame(columns, strict=False)

    def _columns(self, feature: Feature, records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        values = [record.get(feature.name) for record in records]
        own: list[Any] = values
        if feature.kind in {"id", "ids"}:
            lists = [[] if one is None else one if isinstance(one, list) else [one] for one in values]
            texts = [[str(self._own(feature.name, number)) for number in one] for one in lists]
            own = [feature.separator.join(one) or None for one in texts]
        elif feature.kind == "vector":
            own = [None if one is None else feature.separator.join(map(str, one)) for one in values]
        columns = {feature.source: own}
        if feature.weights is not None:
            given = [record.get(f"{feature.name}.weights") for record in records]
            columns[feature.weights] = [None if one is None else feature.separator.join(map(str, one)) for one in given]
        return columns

    def _own(self, name: str, number: int) -> int | str | None:
        vocabulary = self._known[name]
        return int(number) if vocabulary.encoding == "int64" else vocabulary.texts_of([int(number)])[0]


def _time(seconds: int, schema: Schema) -> int | str:
    """A time as the log writes it."""
    match schema.time_unit:
        case "ms":
            return seconds * 1000
        case "iso8601":
            return datetime.fromtimestamp(seconds, UTC).isoformat()
        case _:
            return seconds
