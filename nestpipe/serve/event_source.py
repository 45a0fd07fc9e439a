"""Where `data append` finds what a service has stored: beside the event log of a run, or in a database."""

from __future__ import annotations

from pathlib import Path

from nestpipe.config import Config
from nestpipe.data.append_events import EventSource
from nestpipe.serve.event_log import is_event_log
from nestpipe.state.service_state import FileState, open_state
from nestpipe.state.stored_events import StoredEvents

_DATABASE = ("postgresql://", "postgres://")


def reads_folder(address: str, folder: str | Path) -> bool:
    """Whether the run that an event log belongs to reads a sequence folder; only then may the log be compacted behind it.

    A database does not say which folders its services read.
    """
    config = Path(address).resolve().parent.parent / "config.json"
    return config.is_file() and Path(Config.load(config).data.path).resolve() == Path(folder).resolve()


def is_stored(address: str) -> bool:
    """Whether an address is that of what a service has stored, and not of another log."""
    path = Path(address)
    return address.startswith(_DATABASE) or (path.is_file() and is_event_log(path))


def event_source(address: str) -> EventSource:
    """The state of a service; raises ConfigError if the database cannot be used."""
    return StoredEvents(open_state(address, Path()) if address.startswith(_DATABASE) else FileState(Path(address)))
