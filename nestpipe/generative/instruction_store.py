"""Instructions by user and scenario: written near-line by one process, read on the request path by many.

    key      user, scenario or "*" for any
    value    text, vector, who wrote it, version, digest of the request, time, time to live

A store keeps what it is given; `Instructions` decides what a reader may use: one that has expired, is of another version, or
of another width is a counted miss, and the model's default takes its place. `SqliteStore` is one file in WAL mode, so readers never wait
for the writer. A store on another service (Redis: one hash per key) needs what `InstructionStore` lists.
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
# The same write again changes nothing, and one that comes late does not replace a newer one.
_PUT = """INSERT INTO instructions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (user, scenario) DO UPDATE SET
    text = excluded.text, vector = excluded.vector, provenance = excluded.provenance, version = excluded.version,
    request = excluded.request, written_s = excluded.written_s, ttl_s = excluded.ttl_s
    WHERE excluded.written_s >= instructions.written_s"""

Reason = Literal["found", "absent", "expired", "version", "width", "unreadable"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredInstruction:
    """One instruction. `version` names the semantic ids and the text encoder: to others the vector means nothing."""

    user: int
    scenario: str  # or ANY
    text: str
    vector: NDArray[np.float32]
    provenance: str  # who wrote the text
    version: str
    request: str  # digest of what it was made from
    written_s: float
    ttl_s: float


class InstructionStore(Protocol):
    """Where instructions are kept. Errors of the store are DataError."""

    @property
    def identity(self) -> str:
        """Another one if the store is made anew: whoever remembers what is in it must begin again."""
        ...

    def put(
        self, instructions: Sequence[StoredInstruction], *, wanted: Callable[[int], bool] = lambda user: True
    ) -> int:
        """Keeps all or none, of users that are still `wanted` when nobody else can write; says how many."""
        ...

    def get(self, user: int, scenario: str) -> StoredInstruction | None:
        """What was put under this very key."""
        ...

    def forget(self, user: int) -> int:
        """Removes everything of a user; says how many instructions that were."""
        ...


def version_of(ids_version: str, encoder: str) -> str:
    """The version of instructions for some semantic ids, whose vectors a text encoder makes."""
    return f"{ids_version}/{encoder}"


class SqliteStore:
    """One file. Any number of processes may read while one writes; threads may share it."""

    def __init__(self, path: Path, *, read_only: bool = False, timeout_s: float = 10.0):
        """A reader may come before the first writer: there is nothing yet."""
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
            # Inside: whoever forgets a user does that before this look, which sees it, or after these writes.
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
        """The connection, to the file that is there now; raises DataError that names it."""
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
                    f"the instructions in {self.path} cannot be used ({error}); if the file is damaged, move it away: "
                    "'nestpipe think' makes it again."
                ) from error


def connect(path: Path, *statements: str, read_only: bool = False, timeout_s: float = 10.0) -> sqlite3.Connection:
    """A file of ours, made by these statements if it is to be written; raises DataError for another format."""
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
            connection.execute("PRAGMA synchronous = FULL")  # what is committed outlives a power cut
            connection.execute("PRAGMA secure_delete = ON")  # what is forgotten leaves no trace in the file
            with transaction(connection):
                for statement in statements:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_FORMAT}")
    except BaseException:
        connection.close()
        raise
    return connection


def drop_old_pages(connection: sqlite3.Connection) -> None:
    """What was deleted leaves the log of the file too; raises DataError if somebody still reads it there."""
    if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        raise DataError("what was deleted is still in the log of the store, because somebody reads it; forget again.")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the body or nothing of it; no other process writes meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


class InstructionLookup(NamedTuple):
    """What a reader may use, and why not."""

    instruction: StoredInstruction | None
    reason: Reason


class Instructions:
    """A store as the request path sees it: of one version and width, not expired. `counts` says how often what was found."""

    def __init__(self, store: InstructionStore, *, version: str, dim: int, clock: Callable[[], float]):
        self.version, self.counts = version, Counter[Reason]()
        self._store, self._dim, self._clock = store, dim, clock

    def of(self, user: int, scenario: str) -> InstructionLookup:
        """The instruction of a scenario, else the one for any; else none, and the reason of the nearest miss. Never raises."""
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
        raise DataError(f"an instruction has a vector {list(vector.shape)} that is not one row of finite numbers.")
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
    # SQLite keeps whatever it is given in a column.
    numbers = np.frombuffer(vector, "<f4") if isinstance(vector, bytes) and len(vector) % 4 == 0 else None
    is_timed = isinstance(written_s, float) and isinstance(ttl_s, float)
    if numbers is None or not np.isfinite(numbers).all() or not isinstance(text, str) or not is_timed:
        raise DataError("an instruction in the store is not one of ours; move the file away.")
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
