"""Where `data append` finds the events of a service: in the event log of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestpipe.config import Config
from nestpipe.data.append_events import EventSource
from nestpipe.serve.event_log import Event, EventLog, is_event_log


class EventLogSource:
    """The event log of a run on this machine."""

    def __init__(self, path: Path):
        self._path = path

    def events(self) -> Sequence[Event]:
        with EventLog(self._path).news() as (_, events):
            return events

    def texts(self) -> Mapping[str, Mapping[int, str]]:
        return {}

    def items(self) -> Mapping[int, Mapping[str, Any]]:
        return {}

    def remove(self, is_held: Callable[[Event], bool]) -> int:
        return EventLog(self._path).rewrite(lambda event: not is_held(event))


def reads_folder(log: Path, folder: str | Path) -> bool:
    """Whether the run that an event log belongs to reads a sequence folder; only then may the log be compacted behind it."""
    config = log.resolve().parent.parent / "config.json"
    return config.is_file() and Path(Config.load(config).data.path).resolve() == Path(folder).resolve()


def event_source(address: str) -> EventSource | None:
    """The state of a service at an address; None if it is the file of another log."""
    path = Path(address)
    return EventLogSource(path) if path.is_file() and is_event_log(path) else None
