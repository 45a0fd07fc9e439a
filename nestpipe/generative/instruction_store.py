"""Store of instructions by user and scenario: written near-line by one process, read by many on the request path.

    key      user, scenario or "*" for any
    value    text, vector, provenance, version, digest of the request, time, time to live

A store does not judge its content. `Instructions` decides what a request may use: an instruction that has expired, or has
another version or width, is a counted miss, and the model uses its default. `SqliteStore` is one file in WAL mode, so readers
never wait for the writer. For another service (Redis: one hash per key) implement `InstructionStore`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import DataError

ANY = "*"
INSTRUCTIONS = "instructions.sqlite"  # in RUN/serve
_FORMAT = 1
_TABLE = """CREATE TABLE IF NOT EXISTS instructions (
    user INTEGER NOT NULL, scenario TEXT NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL, provenance TEXT NOT NULL,
    version TEXT NOT NULL, request TEXT NOT NULL, written_s REAL NOT NULL, ttl_s REAL NOT NULL,
    PRIMARY KEY (user, scenario)) WITHOUT ROWID"""
_NAME = "CREATE TABLE IF NOT EXISTS name (number INTEGER PRIMARY KEY, text TEXT NOT NULL)"
_NAMED = "INSERT OR IGNORE INTO name VALUES (0, lower(hex(randomblob(8))))"
# Idempotent, and an older write never replaces a newer one.
_PUT = """INSERT INTO instructions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (user, scenario) DO UPDATE SET
    text = excluded.text, vector = excluded.vector, provenance = excluded.provenance, version = excluded.version,
    request = excluded.request, written_s = excluded.written_s, ttl_s = excluded.ttl_s
    WHERE excluded.written_s >= instructions.written_s"""

Reason = Literal["found", "absent", "expired", "version", "width", "unreadable"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredInstruction:
    """One instruction. `version` names the semantic ids and the text encoder that its vector belongs to."""

    user: int
    scenario: str  # or ANY
    text: str
    vector: NDArray[np.float32]
    provenance: str  # provider of the text
    version: str
    request: str  # digest of the request it was generated from
    written_s: float
    ttl_s: float


class InstructionStore(Protocol):
    """Interface of a store. Its errors are DataError."""

    @property
    def identity(self) -> str:
        """Changes when the store is recreated, so that a job knows that its content is gone."""
        ...

    def put(
        self, instructions: Sequence[StoredInstruction], *, wanted: Callable[[int], bool] = lambda user: True
    ) -> int:
        """Stores, atomically, the instructions of users that are `wanted` inside the transaction; returns their number."""
        ...

    def get(self, user: int, scenario: str) -> StoredInstruction | None:
        """The instruction of exactly this key."""
        ...

    def forget(self, user: int) -> int:
        """Deletes the instructions of a user; returns their number."""
        ...


def version_of(ids_version: str, encoder: str) -> str:
    """The version of instructions, from the versions of semantic ids and text encoder."""
    return f"{ids_version}/{encoder}"


class SqliteStore:
    """One SQLite file. Many processes may read while one writes; threads may share an instance."""

    def __init__(self, path: Path, *, read_only: bool = False, timeout_s: float = 10.0):
        """A read-only store may be opened before the file exists; it is empty then."""
        self.path, self._read_only, self._timeout_s = path, read_only, timeout_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    @property
    def identity(self) -> str:
        with self._open() as connection:
            return str(connection.execute("SELECT text FROM name WHERE number = 0").fetchone()[0])

    def put(
        self, instructions: Sequence[StoredInstruction], *, wanted: Callable[[int], bool] = lambda user: True
    ) -> int:
        with self._open() as connection, transaction(connection):
            # Checked inside the transaction: a user is erased either before this check or after these writes.
            kept = [one for one in instructions if wanted(one.user)]
            connection.executemany(_PUT, [_row(one) for one in kept])
        return len(kept)

    def get(self, user: int, scenario: str) -> StoredInstruction | None:
        if self._read_only and not self.path.exists():
            return None
        with self._open() as connection:
            query = "SELECT * FROM instructions WHERE user = ? AND scenario = ?"
            row = connection.execute(query, (user, scenario)).fetchone()
        return None if row is None else _read(row)

    def forget(self, user: int) -> int:
        with self._open() as connection:
            with transaction(connection):
                gone = connection.execute("DELETE FROM instructions WHERE user = ?", (user,)).rowcount
            drop_old_pages(connection)
        return gone

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The connection to the current file, reopened if it was replaced; raises DataError with its path."""
        with self._lock:
            try:
                if self._connection is not None and self.path.stat().st_ino != self._inode:
                    self._connection.close()
                    self._connection = None
                if self._connection is None:
                    self._connection = connect(
                        self.path, _TABLE, _NAME, _NAMED, read_only=self._read_only, timeout_s=self._timeout_s
                    )
                    self._inode = self.path.stat().st_ino
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                raise DataError(
                    f"cannot use the instruction store {self.path} ({error}). If the file is damaged, move it away; "
                    "'nestpipe think' creates it again."
                ) from error


def connect(path: Path, *statements: str, read_only: bool = False, timeout_s: float = 10.0) -> sqlite3.Connection:
    """Opens an SQLite file, creating its tables unless read-only; raises DataError for another format."""
    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True)
    name = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    connection = sqlite3.connect(name, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in {0, _FORMAT}:
            raise DataError(f"{path} has format {found}; this nestpipe reads format {_FORMAT}. Move it away.")
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute("PRAGMA synchronous = FULL")  # commits survive a power failure
            connection.execute("PRAGMA secure_delete = ON")  # overwrite deleted content in the file
            with transaction(connection):
                for statement in statements:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_FORMAT}")
    except BaseException:
        connection.close()
        raise
    return connection


def drop_old_pages(connection: sqlite3.Connection) -> None:
    """Truncates the write-ahead log, so that deleted content leaves it too; raises DataError if a reader blocks it."""
    if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        raise DataError(
            "deleted instructions are still in the write-ahead log, because a reader is active. Run the command again."
        )


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Runs the body in a write transaction: committed, or rolled back on an exception."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


class InstructionLookup(NamedTuple):
    """The instruction that a request may use, or the reason why there is none."""

    instruction: StoredInstruction | None
    reason: Reason


class Instructions:
    """Read side of a store: only unexpired instructions of one version and width. `counts` has the lookups by reason."""

    def __init__(self, store: InstructionStore, *, version: str, dim: int, clock: Callable[[], float]):
        self.version, self.counts = version, Counter[Reason]()
        self._store, self._dim, self._clock = store, dim, clock

    def of(self, user: int, scenario: str) -> InstructionLookup:
        """The instruction of a scenario, else that for any scenario, else none with the reason. Never raises."""
        found = InstructionLookup(None, "absent")
        for key in dict.fromkeys((scenario, ANY)):
            try:
                one = self._store.get(user, key)
            except DataError:
                found = InstructionLookup(None, "unreadable")
                break
            reason = self._judge(one)
            if reason == "found":
                found = InstructionLookup(one, reason)
                break
            if found.reason == "absent":
                found = InstructionLookup(None, reason)
        self.counts[found.reason] += 1
        return found

    def _judge(self, one: StoredInstruction | None) -> Reason:
        if one is None:
            return "absent"
        if one.version != self.version:
            return "version"
        if self._clock() >= one.written_s + one.ttl_s:
            return "expired"
        return "found" if len(one.vector) == self._dim else "width"


def _row(one: StoredInstruction) -> tuple[object, ...]:
    vector = np.ascontiguousarray(one.vector, "<f4")
    if vector.ndim != 1 or not np.isfinite(vector).all():
        raise DataError(
            f"an instruction has a vector of shape {list(vector.shape)}; it must be one row of finite numbers."
        )
    return (
        one.user,
        one.scenario,
        one.text,
        vector.tobytes(),
        one.provenance,
        one.version,
        one.request,
        one.written_s,
        one.ttl_s,
    )


def _read(row: Sequence[object]) -> StoredInstruction:
    user, scenario, text, vector, provenance, version, request, written_s, ttl_s = row
    # SQLite columns are untyped.
    numbers = np.frombuffer(vector, "<f4") if isinstance(vector, bytes) and len(vector) % 4 == 0 else None
    is_timed = isinstance(written_s, float) and isinstance(ttl_s, float)
    if numbers is None or not np.isfinite(numbers).all() or not isinstance(text, str) or not is_timed:
        raise DataError("an instruction in the store is malformed; move the file away and run 'nestpipe think' again.")
    return StoredInstruction(
        user=int(str(user)),
        scenario=str(scenario),
        text=text,
        vector=numbers.astype(np.float32),
        provenance=str(provenance),
        version=str(version),
        request=str(request),
        written_s=float(str(written_s)),
        ttl_s=float(str(ttl_s)),
    )
