"""Slow thinking: the near-line job that turns new events into instructions, batch by batch, and loses nothing.

    1 take in    users with events behind the mark are noted as pending, and the mark moves: one transaction of the ledger
    2 look       a user whose instruction is younger than the window waits; a request that is the stored one is done
    3 generate   the provider writes texts, a text encoder makes vectors of them
    4 write      to the store, unless the user was forgotten meanwhile
    5 finish     only now are they no longer pending

A crash between any two of these repeats work and nothing else: what was written is found unchanged in step 2. Texts that the template
wrote in a model's place are kept, but their users stay pending for a few windows, so that the model gets its chance.
"""

from __future__ import annotations

import fcntl
import json
import math
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
from nestpipe.generative.instruction_store import (
    ANY,
    InstructionStore,
    StoredInstruction,
    connect,
    drop_old_pages,
    transaction,
)
from nestpipe.generative.prompt_builder import Encode, InstructionProvider, InstructionRequest, RequestBuilder

_PENDING = """CREATE TABLE IF NOT EXISTS pending (
    user INTEGER PRIMARY KEY, due_s REAL NOT NULL, tries INTEGER NOT NULL)"""
_MARK = "CREATE TABLE IF NOT EXISTS mark (number INTEGER PRIMARY KEY, text TEXT NOT NULL)"


class History(NamedTuple):
    """The events before place `end` of the user at a row."""

    sequences: Sequences
    row: int
    end: int


class HistoryFeed(Protocol):
    """Where events come from."""

    def news(self, mark: str) -> tuple[Iterable[int], str]:
        """Users with events behind a mark ("" is before everything), perhaps some more; and the mark of now."""
        ...

    def history(self, user: int) -> History | None:
        """What is known of a user now; None if there is nothing."""
        ...


class FolderHistoryFeed:
    """A sequence folder, which changes as a whole or not at all: its mark is its digest."""

    def __init__(self, sequences: Sequences):
        self._sequences, self._place = sequences, folder_version(sequences.path)

    def news(self, mark: str) -> tuple[Iterable[int], str]:
        own = self.sequences
        return ([] if mark == own.digest else own.users.tolist()), own.digest

    def history(self, user: int) -> History | None:
        own = self.sequences
        row = int(np.searchsorted(own.users, user))
        if row == len(own.users) or own.users[row] != user or own.offsets[row] == own.offsets[row + 1]:
            return None
        return History(own, row, int(own.offsets[row + 1] - own.offsets[row]))

    @property
    def sequences(self) -> Sequences:
        """The folder that is there now: users that it has not any more must not be read."""
        if (place := folder_version(self._sequences.path)) not in (None, self._place):
            self._sequences, self._place = Sequences.open(self._sequences.path), place
        return self._sequences


class Due(NamedTuple):
    """A user to look at, and how often a model has failed for the events so far."""

    user: int
    tries: int


def ledger_of(store: Path) -> Path:
    """The ledger of a store stands beside it."""
    return store.with_name(f"{store.stem}.think.sqlite")


class JobLedger:
    """What the job must remember: how far it has read, and who is pending. One SQLite file, one job at a time."""

    def __init__(self, path: Path):
        self.path = path
        self._connection = connect(path, _PENDING, _MARK)

    def close(self) -> None:
        self._connection.close()

    @property
    def mark(self) -> str:
        row = self._connection.execute("SELECT text FROM mark WHERE number = 0").fetchone()
        return row[0] if row else ""

    def take_in(self, users: Iterable[int], mark: str) -> None:
        """Notes users as pending and moves the mark, both or neither."""
        with transaction(self._connection):
            # One that waits already goes on waiting as long as it had to.
            self._connection.executemany(
                "INSERT INTO pending VALUES (?, 0, 0) ON CONFLICT (user) DO UPDATE SET tries = 0",
                ((user,) for user in users),
            )
            self._connection.execute("INSERT OR REPLACE INTO mark VALUES (0, ?)", (mark,))

    def due(self, now_s: float, most: int) -> list[Due]:
        query = "SELECT user, tries FROM pending WHERE due_s <= ? ORDER BY user LIMIT ?"
        return [Due(*row) for row in self._connection.execute(query, (now_s, most))]

    def settle(self, done: Sequence[int], later: Sequence[tuple[int, float, int]]) -> None:
        """Users that are done, and those to look at again: (user, when, tries)."""
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
        """When the next of the pending users is due."""
        found = self._connection.execute("SELECT min(due_s) FROM pending").fetchone()[0]
        return None if found is None else float(found)

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """Raises ConfigError if another job works with this ledger."""
        with self.path.with_name(self.path.name + ".lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another 'nestpipe think' works with {self.path}; one at a time writes.") from None
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkConfig:
    """How often instructions are made, and how long they last."""

    window_s: float = 300.0
    """At most one regeneration of a user's instructions in this time."""
    ttl_s: float = 7 * 86400.0
    """How long an instruction is used."""
    batch: int = 64
    """Users between two writes: what a crash may have to do again."""
    max_tries: int = 3
    """Windows in which a model is asked again for texts that the template had to write."""
    scenarios: tuple[str, ...] = (ANY,)
    """Scenarios that get instructions of their own; * is one for any."""

    def problems(self) -> Iterator[str]:
        for name in ("window_s", "max_tries"):
            if not 0 <= getattr(self, name) < math.inf:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more, and finite"
        if not 0 < self.ttl_s < math.inf or self.batch < 1:
            yield f"ttl_s is {self.ttl_s} and batch {self.batch}; both must be above 0, and finite"
        if not self.scenarios or len(set(self.scenarios)) != len(self.scenarios):
            yield f"scenarios is {self.scenarios}; it names each scenario once, and at least one or *"


@dataclass(slots=True, kw_only=True)
class NearlineJob:
    """The job. `counts` says what became of users and texts since it was made."""

    feed: HistoryFeed
    builder: RequestBuilder
    provider: InstructionProvider
    store: InstructionStore
    ledger: JobLedger
    encode: Encode
    version: str
    config: ThinkConfig
    clock: Callable[[], float] = time.time
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, said: Callable[[NearlineJob], object] = lambda job: None) -> None:
        """Everything that is due now; `said` is called after each batch."""
        # Whoever changes what instructions are made of, or throws them away, wants them for everybody.
        made_by = json.dumps([self.store.identity, self.version, self.provider.provenance, *self.config.scenarios])
        before, _, mark = self.ledger.mark.partition("\n")
        users, mark = self.feed.news(mark if before == made_by else "")
        self.ledger.take_in(users, f"{made_by}\n{mark}")
        while batch := self.ledger.due(self.clock(), self.config.batch):
            self._batch(batch)
            said(self)

    def _batch(self, batch: Sequence[Due]) -> None:
        now, asked = self.clock(), list[InstructionRequest]()
        later: dict[int, tuple[int, float, int]] = {}
        for user, tries in batch:
            changed = [request for request in self._requests(user) if self._is_changed(request)]
            wait_until = max(map(self._free_at, changed), default=now)
            if not changed:
                self.counts["unchanged"] += 1
            elif wait_until > now:
                self.counts["deferred"] += 1
                later[user] = user, wait_until, tries
            else:
                asked += changed
        replaced = self._write(asked, now) if asked else set()
        for user, tries in batch:
            if user in replaced and tries < self.config.max_tries:
                later[user] = user, now + self.config.window_s, tries + 1
        self.ledger.settle([one.user for one in batch if one.user not in later], list(later.values()))

    def _requests(self, user: int) -> list[InstructionRequest]:
        history = self.feed.history(user)
        if history is None:
            return []
        return [self.builder.build(*history, scenario=scenario) for scenario in self.config.scenarios]

    def _is_changed(self, request: InstructionRequest) -> bool:
        """Unless the same was asked before, and the answer is still good and the provider's own."""
        kept = self.store.get(request.user, request.scenario)
        if kept is None or (kept.request, kept.version) != (request.digest, self.version):
            return True
        return kept.provenance != self.provider.provenance or self.clock() >= kept.written_s + kept.ttl_s

    def _free_at(self, request: InstructionRequest) -> float:
        kept = self.store.get(request.user, request.scenario)
        return -math.inf if kept is None else kept.written_s + self.config.window_s

    def _write(self, requests: Sequence[InstructionRequest], now: float) -> set[int]:
        """Generates and keeps; says for whom the template had to write."""
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
