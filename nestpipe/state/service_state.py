"""The state of a service: one interface, two backends.

    FileState        two append-only logs in RUN/serve, for the instances of one machine
    PostgresState    a database, for instances on several machines (--state postgresql://...)

    events     posted events, in numbers: {"id", "user", "item", "time", features}
    changes    {"of": "item", "number": 17, "text": "p7"}                     a new own id; text null: forgotten
               {"item": 17, "available": true, "content": {...}, "text": ""}  an item as it is now
               {"user": 5, "features": {...}}                                 a user as they are now
               {"forgotten": 5, "ids": [...]}                                 a user whose past does not count, and the event ids

Both are sequences of entries in one order for all readers. A writer holds one lock for both, reads what it has not read yet, and
appends; what it appended is durable when `writing` ends without an error. Nothing is acknowledged before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from nestpipe.errors import NestPipeError
from nestpipe.serve.event_log import EventLog

Entry = Mapping[str, Any]
CHANGES = "state.log"


class StateAwayError(NestPipeError):
    """The state cannot be written now; nothing was stored, or it is not known whether it was. Send the same again."""


class EntryLog(Protocol):
    """One of the two sequences, with the position of a reader."""

    def has_news(self) -> bool:
        """Whether `news` may return something; cheap, because every request asks."""
        ...

    def news(self) -> AbstractContextManager[tuple[bool, list[Entry]]]:
        """Whether entries were removed, and the entries since the last call, or all of them after a removal.

        They count as read only if the body succeeds. Never waits for a database: inside `writing` it has everything.
        """
        ...

    def append(self, entries: list[Entry]) -> None:
        """Appends entries; call it inside `writing`, after `news`."""
        ...

    def rewrite(self, keep: Callable[[Entry], bool]) -> int:
        """Removes entries for good and returns how many; not inside `writing`."""
        ...


class ServiceState(Protocol):
    """Where the instances of a service keep what they learn. One object serves one process."""

    @property
    def events(self) -> EntryLog: ...

    @property
    def changes(self) -> EntryLog: ...

    @property
    def folder(self) -> Path | None:
        """Where it writes on this machine; None: elsewhere."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Holds the writer lock; what was appended inside is durable after it. Raises StateAwayError."""
        ...

    def take_numbers(self, name: str, *, at_least: int, count: int) -> int:
        """The first of `count` numbers for new ids, none of which was given out before; inside `writing`."""
        ...

    def problem(self) -> str:
        """Why nothing can be written now; empty if all is well."""
        ...

    def close(self) -> None: ...


class FileState:
    """The embedded state: the event log, and beside it a log of changes under the same lock."""

    def __init__(self, log: Path):
        self.events = EventLog(log)
        self.changes = EventLog(log.with_name(CHANGES), lock=self.events.lock)
        self.folder: Path | None = log.parent

    def writing(self) -> AbstractContextManager[None]:
        return self.events.writing()

    def take_numbers(self, name: str, *, at_least: int, count: int) -> int:
        """Under the lock the reader has every number, so the next one follows from what it read."""
        return at_least

    def problem(self) -> str:
        return ""

    def close(self) -> None:
        pass


def open_state(url: str, log: Path) -> ServiceState:
    """The state at an address, or beside an event log if there is none; raises ConfigError."""
    if not url:
        return FileState(log)
    from nestpipe.state.postgres import PostgresState

    return PostgresState(url)
