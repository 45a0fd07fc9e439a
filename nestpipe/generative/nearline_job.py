"""Near-line job: writes instructions for users with new events, batch by batch, and resumes after a crash.

    1 enqueue    users with events after the cursor become pending and the cursor advances: one transaction of the ledger
    2 filter     skip unchanged requests; defer users whose instruction is younger than `min_interval_s`
    3 generate   the provider writes texts, the text encoder makes their vectors
    4 write      to the store, except for users that were erased meanwhile
    5 finish     the users are no longer pending

A crash between two steps repeats work and loses nothing: step 2 finds what was already written unchanged. If the template had
to write in place of the model, its text is stored and the user stays pending, so that the model is retried later.
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from nestpipe.data.array_files import folder_version
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.generative.config import ThinkConfig
from nestpipe.generative.fitted_size import FittedSize
from nestpipe.generative.instruction_store import (
    ANY,
    InstructionStore,
    StoredInstruction,
    connect,
    drop_old_pages,
    transaction,
)
from nestpipe.generative.prompt_builder import Encode, InstructionProvider, InstructionRequest, RequestBuilder
from nestpipe.generative.work_shard import WorkShard

_PENDING = """CREATE TABLE IF NOT EXISTS pending (
    user INTEGER PRIMARY KEY, due_s REAL NOT NULL, tries INTEGER NOT NULL, num_events INTEGER NOT NULL DEFAULT 0)"""
_NUM_EVENTS = "ALTER TABLE pending ADD COLUMN num_events INTEGER NOT NULL DEFAULT 0"
_WRITE_S = 20.0  # what a write takes, and what a crash repeats
_MARK = "CREATE TABLE IF NOT EXISTS mark (number INTEGER PRIMARY KEY, text TEXT NOT NULL)"


class History(NamedTuple):
    """The first `end` events of the user at a row."""

    sequences: Sequences
    row: int
    end: int


class HistoryFeed(Protocol):
    """Source of events."""

    def changed_users(self, cursor: str) -> tuple[Iterable[int], str]:
        """A superset of the users with events after a cursor ("" is the beginning), and the current cursor."""
        ...

    def history(self, user: int) -> History | None:
        """The current history of a user; None if there is none."""
        ...

    def num_events(self, user: int) -> int:
        """How active a user was; the most active ones come first."""
        ...


class FolderHistoryFeed:
    """A sequence folder. It is replaced as a whole, so its cursor is its digest."""

    def __init__(self, sequences: Sequences):
        self._sequences, self._place = sequences, folder_version(sequences.path)

    def changed_users(self, cursor: str) -> tuple[Iterable[int], str]:
        own = self.sequences
        return ([] if cursor == own.digest else own.users.tolist()), own.digest

    def history(self, user: int) -> History | None:
        own = self.sequences
        row = int(np.searchsorted(own.users, user))
        if row == len(own.users) or own.users[row] != user or own.offsets[row] == own.offsets[row + 1]:
            return None
        return History(own, row, int(own.offsets[row + 1] - own.offsets[row]))

    def num_events(self, user: int) -> int:
        found = self.history(user)
        return 0 if found is None else found.end

    @property
    def sequences(self) -> Sequences:
        """The current folder, reopened when it was replaced: erased users must not be read."""
        if (place := folder_version(self._sequences.path)) not in (None, self._place):
            self._sequences, self._place = Sequences.open(self._sequences.path), place
        return self._sequences


class Due(NamedTuple):
    """A pending user, and how often the model has failed for its current events."""

    user: int
    tries: int


def ledger_of(store: Path, shard: WorkShard = WorkShard()) -> Path:  # noqa: B008 (immutable)
    """The path of the ledger of a store and shard, in the same folder."""
    part = "" if shard.count == 1 else f"-{shard.number}-of-{shard.count}"
    return store.with_name(f"{store.stem}.think{part}.sqlite")


def ledgers_of(store: Path) -> list[Path]:
    """The ledgers of all shards of a store that exist."""
    return sorted(
        one
        for one in store.parent.glob(f"{glob.escape(store.stem)}.think*.sqlite")
        if re.fullmatch(r"(-\d+-of-\d+)?\.sqlite", one.name.removeprefix(f"{store.stem}.think"))
    )


class JobLedger:
    """State of the job: the cursor and the pending users. One SQLite file, one job at a time."""

    def __init__(self, path: Path):
        self.path = path
        self._connection = connect(path, _PENDING, _MARK)
        columns = {row[1] for row in self._connection.execute("PRAGMA table_info(pending)")}
        if "num_events" not in columns:  # of an older version
            self._connection.execute(_NUM_EVENTS)

    def close(self) -> None:
        self._connection.close()

    @property
    def cursor(self) -> str:
        row = self._connection.execute("SELECT text FROM mark WHERE number = 0").fetchone()
        return row[0] if row else ""

    def enqueue(self, users: Iterable[tuple[int, int]], cursor: str) -> None:
        """Adds pending users, each with its number of events, and sets the cursor, atomically."""
        with transaction(self._connection):
            # A user that is already pending keeps its due time.
            self._connection.executemany(
                "INSERT INTO pending (user, due_s, tries, num_events) VALUES (?, 0, 0, ?) "
                "ON CONFLICT (user) DO UPDATE SET tries = 0, num_events = excluded.num_events",
                users,
            )
            self._connection.execute("INSERT OR REPLACE INTO mark VALUES (0, ?)", (cursor,))

    def due(self, now_s: float, most: int) -> list[Due]:
        query = "SELECT user, tries FROM pending WHERE due_s <= ? ORDER BY num_events DESC, user LIMIT ?"
        return [Due(*row) for row in self._connection.execute(query, (now_s, most))]

    def settle(self, done: Sequence[int], later: Sequence[tuple[int, float, int]]) -> None:
        """Removes users that are done and reschedules others: (user, due time, tries)."""
        with transaction(self._connection):
            self._connection.executemany("DELETE FROM pending WHERE user = ?", ((user,) for user in done))
            rows = [(due_s, tries, user) for user, due_s, tries in later]
            self._connection.executemany("UPDATE pending SET due_s = ?, tries = ? WHERE user = ?", rows)

    def forget(self, user: int) -> None:
        with transaction(self._connection):
            self._connection.execute("DELETE FROM pending WHERE user = ?", (user,))
        drop_old_pages(self._connection)

    @property
    def num_pending(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM pending").fetchone()[0])

    @property
    def next_due_s(self) -> float | None:
        """The earliest due time of the pending users."""
        found = self._connection.execute("SELECT min(due_s) FROM pending").fetchone()[0]
        return None if found is None else float(found)

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """Raises ConfigError if another job works with this ledger."""
        with self.path.with_name(self.path.name + ".lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another 'nestpipe think' uses {self.path}; only one may run at a time.") from None
            yield


@dataclass(slots=True, kw_only=True)
class NearlineJob:
    """The job. `counts` has the number of users and texts by outcome, since the start."""

    feed: HistoryFeed
    builder: RequestBuilder
    provider: InstructionProvider
    store: InstructionStore
    ledger: JobLedger
    encode: Encode
    version: str
    config: ThinkConfig
    shard: WorkShard = field(default_factory=WorkShard)
    clock: Callable[[], float] = time.time
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, on_batch: Callable[[NearlineJob], object] = lambda job: None) -> None:
        """Processes all users that are due; calls `on_batch` after each batch."""
        # A new store, version, provider or list of scenarios regenerates the instructions of all users.
        origin = json.dumps([self.store.identity, self.version, self.provider.provenance, *self._scenarios])
        last_origin, _, cursor = self.ledger.cursor.partition("\n")
        users, cursor = self.feed.changed_users(cursor if last_origin == origin else "")
        own = ((user, self.feed.num_events(user)) for user in users if self.shard.has(user))
        self.ledger.enqueue(own, f"{origin}\n{cursor}")
        size = FittedSize(target_s=_WRITE_S, most=self.config.batch_size, first=8)
        while batch := self.ledger.due(self.clock(), size.value):
            began = time.monotonic()
            self._batch(batch)
            size.add(len(batch), time.monotonic() - began)
            on_batch(self)

    @property
    def _scenarios(self) -> tuple[str, ...]:
        return self.config.scenarios or (ANY,)

    def _batch(self, batch: Sequence[Due]) -> None:
        now, wanted = self.clock(), list[InstructionRequest]()
        later: dict[int, tuple[int, float, int]] = {}
        for user, tries in batch:
            changed = [request for request in self._requests(user) if self._is_changed(request)]
            wait_until = max(map(self._due_at, changed), default=now)
            if not changed:
                self.counts["unchanged"] += 1
            elif wait_until > now:
                self.counts["deferred"] += 1
                later[user] = user, wait_until, tries
            else:
                wanted += changed
        replaced = self._write(wanted, now) if wanted else set()
        for user, tries in batch:
            if user in replaced and tries < self.config.max_retries:
                later[user] = user, now + self.config.min_interval_s, tries + 1
        self.ledger.settle([one.user for one in batch if one.user not in later], list(later.values()))

    def _requests(self, user: int) -> list[InstructionRequest]:
        history = self.feed.history(user)
        if history is None:
            return []
        return [self.builder.build(*history, scenario=scenario) for scenario in self._scenarios]

    def _is_changed(self, request: InstructionRequest) -> bool:
        """Whether the stored instruction is missing, outdated, expired or not from the provider itself."""
        stored = self.store.get(request.user, request.scenario)
        if stored is None or (stored.request, stored.version) != (request.digest, self.version):
            return True
        return stored.provenance != self.provider.provenance or self.clock() >= stored.written_s + stored.ttl_s

    def _due_at(self, request: InstructionRequest) -> float:
        stored = self.store.get(request.user, request.scenario)
        return -math.inf if stored is None else stored.written_s + self.config.min_interval_s

    def _write(self, requests: Sequence[InstructionRequest], now: float) -> set[int]:
        """Generates and stores instructions; returns the users for whom the template had to write."""
        results = self.provider.generate(requests)
        vectors = self.encode([one.text for one in results]).numpy()
        made = [
            StoredInstruction(
                user=request.user,
                scenario=request.scenario,
                text=result.text,
                vector=vector,
                provenance=result.provenance,
                version=self.version,
                request=request.digest,
                written_s=now,
                ttl_s=self.config.ttl_s,
            )
            for request, result, vector in zip(requests, results, vectors, strict=True)
        ]
        self.counts["written"] += self.store.put(made, wanted=lambda user: self.feed.history(user) is not None)
        self.counts.update(one.provenance.partition("/")[0] for one in made)
        return {one.user for one in made if one.provenance != self.provider.provenance}
