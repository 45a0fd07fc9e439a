"""The state in PostgreSQL, for instances on several machines.

    nestpipe_entries    seq | stream (events, changes) | key | body      one order for all readers
    nestpipe_numbers    name | next                                      numbers of new ids
    nestpipe_state      version | epoch                                  of the tables; epoch counts removals

A writer takes an advisory lock for its transaction, so `seq` ascends in the order of commits and a reader that has read up to a
`seq` has missed nothing before it. `key` is unique within a stream: the id of an event, the own id of a number. A thread follows
the table (LISTEN, and a poll for the case that a notification is lost), so readers never wait for the network: while the database
is away they keep what they know, and writers raise StateAwayError.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nestpipe.errors import ConfigError
from nestpipe.state.service_state import Entry, StateAwayError

try:
    import psycopg
except ModuleNotFoundError:
    raise ConfigError(
        "--state postgresql://... needs the package 'psycopg'; install it with: pip install 'nestpipe[postgres]'"
    ) from None

_log = logging.getLogger("nestpipe.serve")
_CHANNEL, _LOCK = "nestpipe_state", 0x6E657374  # "nest", of the advisory lock
_POLL_S, _RETRY_S = 0.25, 0.2
_CONNECT: dict[str, Any] = {"connect_timeout": 3, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 2}
_SETTINGS = "-c statement_timeout=8000 -c idle_in_transaction_session_timeout=15000 -c synchronous_commit=on"
MIGRATIONS = (
    """
    CREATE TABLE nestpipe_entries (seq bigint PRIMARY KEY, stream text NOT NULL, key text, body json NOT NULL);
    CREATE UNIQUE INDEX nestpipe_entries_once ON nestpipe_entries (stream, key);
    CREATE TABLE nestpipe_numbers (name text PRIMARY KEY, next bigint NOT NULL);
    """,
)
"""The n-th brings the tables from version n to n + 1. What is released is never edited: a change is a further one."""
_READ = """
    SELECT state.epoch, entry.seq, entry.stream, entry.body::text FROM nestpipe_state AS state
    LEFT JOIN nestpipe_entries AS entry ON entry.seq > %s ORDER BY entry.seq
"""
_TAKE = """
    INSERT INTO nestpipe_numbers VALUES (%(name)s, %(least)s::bigint + %(count)s::bigint)
    ON CONFLICT (name) DO UPDATE SET next = greatest(nestpipe_numbers.next, %(least)s) + %(count)s RETURNING next
"""
_APPEND = """
    INSERT INTO nestpipe_entries
    SELECT (SELECT coalesce(max(seq), 0) FROM nestpipe_entries) + place, %(stream)s, key, body::json
    FROM unnest(%(keys)s::text[], %(bodies)s::text[]) WITH ORDINALITY AS new (key, body, place)
"""


class PostgresLog:
    """One stream of the table. The entries that have arrived wait here until `news` hands them over."""

    def __init__(self, state: PostgresState, stream: str):
        self._state, self._stream = state, stream
        self.lock = threading.Lock()
        self.arrived: list[Entry] = []
        self.is_other = False

    def has_news(self) -> bool:
        return self._state.is_writing() or self.is_other or bool(self.arrived)

    @contextmanager
    def news(self) -> Iterator[tuple[bool, list[Entry]]]:
        self._state.catch_up()
        with self.lock:
            is_other, entries = self.is_other, list(self.arrived)
        yield is_other, entries
        with self.lock:  # those that arrived meanwhile stay, unless a removal has replaced them all
            if self.arrived[: len(entries)] == entries:
                del self.arrived[: len(entries)]
                self.is_other = False

    def append(self, entries: list[Entry]) -> None:
        self._state.insert(self._stream, entries)

    def rewrite(self, keep: Callable[[Entry], bool]) -> int:
        return self._state.remove(self._stream, keep)


class PostgresState:
    """A connection that writes and a thread that follows. Raises ConfigError if the database cannot be used at the start."""

    folder: Path | None = None

    def __init__(self, url: str):
        self._url = url
        self.events, self.changes = PostgresLog(self, "events"), PostgresLog(self, "changes")
        self._writer: psycopg.Connection[Any] | None = None
        self._is_writing = threading.local()
        self._writers, self._reading = threading.Lock(), threading.Lock()
        self._last, self._epoch, self._problem = 0, -1, ""
        self._stopping = threading.Event()
        try:
            with self._connect() as connection:
                _migrate(connection)
                self._read(connection)
        except psycopg.Error as error:
            raise ConfigError(
                f"the database of --state cannot be used ({_brief(error)}). Check the address, and that it is running."
            ) from None
        self._follower = threading.Thread(target=self._follow, name="state", daemon=True)
        self._follower.start()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._writers:
            try:
                if self._writer is None or self._writer.closed:
                    self._writer = self._connect()
                with self._writer.transaction():
                    self._writer.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
                    self._is_writing.now = True
                    yield
            except psycopg.Error as error:
                self._drop_writer()
                if isinstance(error, psycopg.IntegrityError | psycopg.ProgrammingError | psycopg.DataError):
                    raise
                if not self._problem:  # else the follower has said it
                    _log.warning("nothing was stored: %s", _brief(error))
                raise StateAwayError(
                    "the database of this service is away, so nothing can be stored; send the same again later."
                ) from error
            finally:
                self._is_writing.now = False
            try:
                self._read(self._writer)  # a writer sees what it wrote
            except psycopg.Error:  # it is stored all the same, and the follower will read it
                self._drop_writer()

    def take_numbers(self, name: str, *, at_least: int, count: int) -> int:
        found = self._held().execute(_TAKE, {"name": name, "least": at_least, "count": count}).fetchone()
        return int(found[0]) - count if found else at_least

    def insert(self, stream: str, entries: Sequence[Entry]) -> None:
        keys, bodies = [_key(one) for one in entries], [json.dumps(one, allow_nan=False) for one in entries]
        self._held().execute(_APPEND, {"stream": stream, "keys": keys, "bodies": bodies})
        self._held().execute(f"NOTIFY {_CHANNEL}")
        self._is_writing.now = False  # until the commit nothing is read: this transaction sees what may not become true

    def remove(self, stream: str, keep: Callable[[Entry], bool]) -> int:
        """Deletes entries and counts up the epoch, so that every reader begins again."""
        with self.writing():
            held = self._held()
            rows = held.execute("SELECT seq, body::text FROM nestpipe_entries WHERE stream = %s", [stream]).fetchall()
            gone = [seq for seq, body in rows if not keep(json.loads(body))]
            held.execute("DELETE FROM nestpipe_entries WHERE seq = ANY(%s)", [gone])
            held.execute("UPDATE nestpipe_state SET epoch = epoch + 1")
            held.execute(f"NOTIFY {_CHANNEL}")
        return len(gone)

    def catch_up(self) -> None:
        """Reads everything that is committed, if this thread holds the writer lock; the follower does it otherwise."""
        if self.is_writing():
            self._read(self._held())

    def is_writing(self) -> bool:
        """Whether this thread holds the writer lock."""
        return bool(getattr(self._is_writing, "now", False))

    def problem(self) -> str:
        return "the database of the state is away" if self._problem else ""

    def close(self) -> None:
        self._stopping.set()
        self._follower.join()
        self._drop_writer()

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _held(self) -> psycopg.Connection[Any]:
        assert self._writer is not None, "only inside `writing`"
        return self._writer

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._url, autocommit=True, options=_SETTINGS, application_name="nestpipe", **_CONNECT)

    def _follow(self) -> None:
        """Reads what is committed until the state is closed; connects again whenever the database was away."""
        while not self._stopping.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(f"LISTEN {_CHANNEL}")
                    while not self._stopping.is_set():
                        self._read(connection)
                        if self._problem:
                            _log.warning("the database of the state is back")
                        self._problem = ""
                        for _ in connection.notifies(timeout=_POLL_S, stop_after=1):
                            pass
            except psycopg.Error as error:
                if not self._problem:
                    _log.warning("the database of the state is away: %s", _brief(error))
                self._problem = _brief(error)
                self._stopping.wait(_RETRY_S)

    def _read(self, connection: psycopg.Connection[Any]) -> None:
        """Hands new entries to their streams; all of them after a removal."""
        with self._reading:
            rows = connection.execute(_READ, [self._last]).fetchall()
            is_other = bool(rows) and rows[0][0] != self._epoch
            if is_other:
                rows = connection.execute(_READ, [0]).fetchall()
            entries = [(stream, json.loads(body)) for _, seq, stream, body in rows if seq is not None]
            for log, name in ((self.events, "events"), (self.changes, "changes")):
                own = [entry for stream, entry in entries if stream == name]
                with log.lock:
                    if is_other and self._epoch >= 0:
                        log.arrived, log.is_other = own, True
                    else:
                        log.arrived = log.arrived + own
            if rows:
                self._epoch = int(rows[0][0])
            self._last = max([seq for _, seq, _, _ in rows if seq is not None], default=0 if is_other else self._last)


def _migrate(connection: psycopg.Connection[Any]) -> None:
    """Brings the tables to the newest version; raises ConfigError for tables of a later release."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        connection.execute("CREATE TABLE IF NOT EXISTS nestpipe_state (version int NOT NULL, epoch bigint NOT NULL)")
        found = connection.execute("SELECT version FROM nestpipe_state").fetchone()
        if found is None:
            connection.execute("INSERT INTO nestpipe_state VALUES (0, 0)")
        version = 0 if found is None else int(found[0])
        if version > len(MIGRATIONS):
            raise ConfigError(
                f"the database of --state has tables of version {version}, and this nestpipe knows {len(MIGRATIONS)}: it was "
                "used by a later release. Install that one."
            )
        for step in MIGRATIONS[version:]:
            connection.execute(step)
        connection.execute("UPDATE nestpipe_state SET version = %s", [len(MIGRATIONS)])


def _key(entry: Entry) -> str | None:
    """What may stand in a stream once: an event id (in hex, because a text may have what PostgreSQL refuses), a number."""
    if "id" in entry:
        return str(entry["id"]).encode("utf-8", "surrogatepass").hex()
    return f"{entry['of']}/{entry['number']}" if entry.get("text") is not None and "of" in entry else None


def _brief(error: psycopg.Error) -> str:
    """The first line of a message, which names no password."""
    text = str(error).strip().splitlines()
    with suppress(IndexError):
        return text[0][:200]
    return type(error).__name__
