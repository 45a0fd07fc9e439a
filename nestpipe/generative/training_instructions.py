"""Instructions for training: one for every target of a log, written before training from what was known then.

    STORE (SQLite)   about     data digest, version (semantic ids and encoder), author, users that are done (by shard)
                     texts     digest of the request, text, author, vector
                     targets   event of the log, digest of its request

**Leak rule**: the instruction of a target is built from the user's events before it and from other users' events before its
time. Equal requests share a text. The job resumes at the first user that has none; a row is written once. In training and
evaluation the vectors are an event feature `reasoning`, as if the log had been ingested with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nestpipe.config import Config
from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.fitted_size import FittedSize
from nestpipe.generative.instruction_store import ANY, connect, transaction
from nestpipe.generative.prompt_builder import (
    Encode,
    InstructionProvider,
    InstructionRequest,
    InstructionResult,
    RequestBuilder,
)
from nestpipe.generative.work_shard import WorkShard
from nestpipe.models.config import EncDecConfig
from nestpipe.rng import mix64

REASONING = "reasoning"
_ABOUT = "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL)"
_TEXTS = """CREATE TABLE IF NOT EXISTS texts (
    digest TEXT PRIMARY KEY, text TEXT NOT NULL, author TEXT NOT NULL, vector BLOB NOT NULL) WITHOUT ROWID"""
_TARGETS = "CREATE TABLE IF NOT EXISTS targets (event INTEGER PRIMARY KEY, digest TEXT NOT NULL)"
_BATCH = 64  # most users in a transaction
_WRITE_S = 20.0  # what a transaction's texts take, and what a crash repeats


class IndexedVectors:
    """Vectors [E, D] by event, of which only distinct ones are stored; NaN for an event without one."""

    def __init__(self, vectors: NDArray[np.float32], index: NDArray[np.int64]):
        missing = np.full((1, vectors.shape[1]), np.nan, np.float32)
        self._vectors, self._index = np.concatenate([vectors, missing]), index  # index -1 is the last row

    def __getitem__(self, events: Any) -> NDArray[np.float32]:
        return np.asarray(self._vectors[self._index[events]])

    def __len__(self) -> int:
        return len(self._index)


class TrainingInstructions:
    """The file of a store."""

    def __init__(self, path: Path, *, read_only: bool = True):
        if read_only and not path.is_file():
            raise ConfigError(
                f"{path} does not exist. Write it with 'nestpipe think DATA --for-training --store {path}'."
            )
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = connect(path, *(() if read_only else (_ABOUT, _TEXTS, _TARGETS)), read_only=read_only)

    def close(self) -> None:
        self._connection.close()

    @property
    def about(self) -> dict[str, str]:
        return dict(self._connection.execute("SELECT name, value FROM about"))

    def begin(self, about: Mapping[str, str], shard: WorkShard) -> int:
        """The number of users up to which a shard is done; raises ConfigError if the store was begun for something else."""
        known = self.about
        differs = [name for name, value in about.items() if known.get(name, value) != value]
        if differs:
            raise ConfigError(
                f"{self.path} was written for another {differs[0]} ({known[differs[0]]}; now {about[differs[0]]}); rows of both "
                "would mix. Name another --store."
            )
        with transaction(self._connection):
            rows = [*about.items(), (_users_key(shard), "0")]
            self._connection.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", rows)
        return int(self.about[_users_key(shard)])

    def add(
        self,
        targets: Sequence[tuple[int, str]],
        texts: Sequence[tuple[str, str, str, bytes]],
        *,
        num_users: int,
        shard: WorkShard,
    ) -> None:
        """Rows of some users, and up to which user the shard is done then; one transaction."""
        with transaction(self._connection):
            self._connection.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?, ?, ?)", texts)
            self._connection.executemany("INSERT OR REPLACE INTO targets VALUES (?, ?)", targets)
            done = (str(num_users), _users_key(shard))
            self._connection.execute("UPDATE about SET value = ? WHERE name = ?", done)

    def known(self, digests: Sequence[str]) -> set[str]:
        """Those requests that have a text."""
        query = "SELECT digest FROM texts WHERE digest = ?"
        return {one for one in digests if self._connection.execute(query, (one,)).fetchone()}

    def authors(self, events: Sequence[int]) -> dict[int, str]:
        """Who wrote the instructions of some events; without those that have none."""
        query = "SELECT author FROM targets JOIN texts USING (digest) WHERE event = ?"
        rows = ((event, self._connection.execute(query, (event,)).fetchone()) for event in events)
        return {event: str(row[0]) for event, row in rows if row}

    @property
    def dim(self) -> int:
        """Width of the vectors; 0 if there are none."""
        row = self._connection.execute("SELECT vector FROM texts LIMIT 1").fetchone()
        return len(row[0]) // 4 if row else 0

    def counts(self) -> tuple[int, int]:
        """Targets and texts."""
        one = [self._connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("targets", "texts")]
        return int(one[0]), int(one[1])

    def digest(self) -> str:
        """Of all rows and their texts; part of the settings of a run."""
        content = hashlib.blake2b(digest_size=8)
        joined = "SELECT event, text FROM targets JOIN texts USING (digest) ORDER BY event"
        for row in self._connection.execute(joined):
            content.update(json.dumps(row).encode())
        return content.hexdigest()

    def attach(self, sequences: Sequences) -> Sequences:
        """The log with the instructions of its targets; raises ConfigError if they are of another log or incomplete."""
        about = self.about
        if about.get("data") != sequences.digest:
            raise ConfigError(
                f"{self.path} was written for other data than {sequences.path} (digest {about.get('data', '')[:12]}, not "
                f"{sequences.digest[:12]}). Write it with 'nestpipe think {sequences.path} --for-training'."
            )
        count = int(about.get("shards", "1"))
        for shard in (WorkShard(number, count) for number in range(1, count + 1)):
            if (done := int(about.get(_users_key(shard), "0"))) < len(sequences.users):
                part = "" if count == 1 else f"shard {shard} of "
                raise ConfigError(
                    f"{part}{self.path} has instructions for {done:,} of {len(sequences.users):,} users; the job was "
                    "interrupted. The same 'nestpipe think --for-training' continues."
                )
        texts = list(self._connection.execute("SELECT digest, vector FROM texts ORDER BY digest"))
        if not texts:
            raise ConfigError(f"{self.path} has no instructions: no user of {sequences.path} has two events.")
        number = {digest: place for place, (digest, _) in enumerate(texts)}
        vectors = np.stack([np.frombuffer(vector, np.float32) for _, vector in texts])
        index = np.full(len(sequences.items), -1, np.int64)
        for event, digest in self._connection.execute("SELECT event, digest FROM targets"):
            index[event] = number[digest]
        feature = Feature(name=REASONING, kind="vector", dim=vectors.shape[1])
        others = tuple(one for one in sequences.schema.features if one.name != REASONING)
        stored = StoredFeature(cast(Any, IndexedVectors(vectors, index)))
        return dataclasses.replace(
            sequences,
            schema=dataclasses.replace(sequences.schema, features=(*others, feature)),
            event_features={**sequences.event_features, REASONING: stored},
        )


@dataclass(slots=True, kw_only=True)
class TrainingJob:
    """Writes the store of a log. `share` of the requests go to the provider, the others to `template`."""

    sequences: Sequences
    builder: RequestBuilder
    provider: InstructionProvider
    template: InstructionProvider
    store: TrainingInstructions
    encode: Encode
    version: str
    share: float = 1.0
    shard: WorkShard = field(default_factory=WorkShard)
    column: str = ""
    """Id feature of events whose text, where an event has one, is the instruction: a search query."""
    _names: dict[tuple[str, int], str] = field(default_factory=dict)

    def run(self, on_batch: Callable[[int], object] = lambda num_users: None) -> None:
        """Writes the users that are missing; calls `on_batch` with the number of users that are done."""
        about = {
            "data": self.sequences.digest,
            "version": self.version,
            "author": self.provider.provenance,
            "share": repr(self.share),
            "column": self.column,
            "template": self.template.provenance,
            "shards": str(self.shard.count),
        }
        last, num_users = self.store.begin(about, self.shard), len(self.sequences.users)
        size = FittedSize(target_s=_WRITE_S, most=_BATCH, first=8)
        while last < num_users:
            began, first = time.monotonic(), last
            last = min(first + size.value * self.shard.count, num_users)
            own = [row for row in range(first, last) if row % self.shard.count == self.shard.number - 1]
            self._write([one for row in own for one in self._requests(row)], num_users=last)
            size.add(len(own), time.monotonic() - began)
            on_batch(last)

    def _requests(self, row: int) -> list[tuple[int, InstructionRequest, str]]:
        """Event, request and own text of every target of a user: each event but the first."""
        sequences, first = self.sequences, int(self.sequences.offsets[row])
        found = []
        for place in range(1, int(sequences.offsets[row + 1]) - first):
            event = first + place
            scenario, trigger = self._id("scenario", event), self._id("trigger", event)
            request = self.builder.before_target(
                sequences,
                row,
                place,
                scenario=ANY if scenario is None else self._own("scenario", scenario),
                trigger=trigger,
            )
            number = self._id(self.column, event) if self.column else None
            found.append((event, request, "" if number is None else self._own(self.column, number)))
        return found

    def _write(self, rows: Sequence[tuple[int, InstructionRequest, str]], *, num_users: int) -> None:
        digests = [
            hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if text else one.digest for _, one, text in rows
        ]
        known = self.store.known(digests)
        new = {digest: row for digest, row in zip(digests, rows, strict=True) if digest not in known}
        asked = {key: one for key, (_, one, text) in new.items() if not text}
        results = self._generated(asked)
        results |= {
            key: InstructionResult(text=text, provenance=self.column) for key, (*_, text) in new.items() if text
        }
        vectors = self.encode([one.text for one in results.values()]).numpy() if results else np.empty((0, 0))
        texts = [
            (key, one.text, one.provenance, vector.astype(np.float32).tobytes())
            for (key, one), vector in zip(results.items(), vectors, strict=True)
        ]
        targets = [(event, digest) for (event, *_), digest in zip(rows, digests, strict=True)]
        self.store.add(targets, texts, num_users=num_users, shard=self.shard)

    def _generated(self, requests: Mapping[str, InstructionRequest]) -> dict[str, InstructionResult]:
        own = {key: one for key, one in requests.items() if _chance(key) < self.share}
        found = dict(zip(own, self.provider.generate(list(own.values())), strict=True)) if own else {}
        others = [key for key in requests if key not in own]
        found |= zip(others, self.template.generate([requests[key] for key in others]), strict=True)
        return {key: found[key] for key in requests}

    def _id(self, name: str, event: int) -> int | None:
        stored = self.sequences.event_features.get(name)
        if stored is None or stored.offsets is None or stored.offsets[event] == stored.offsets[event + 1]:
            return None
        return int(stored.values[stored.offsets[event]])

    def _own(self, name: str, number: int) -> str:
        if (name, number) not in self._names:
            self._names[name, number] = str(self.sequences.vocabulary(name).own_ids([number])[0])
        return self._names[name, number]


def _users_key(shard: WorkShard) -> str:
    return "users" if shard.count == 1 else f"users {shard}"


def _chance(digest: str) -> float:
    """A number in [0, 1) that depends on the request alone."""
    return mix64(int(digest[:15], 16)) / 2**64


def check_column(sequences: Sequences, column: str) -> None:
    """Raises ConfigError unless a column is an id feature of events with texts."""
    texts = [
        one.name for one in sequences.schema.of_scope("event") if one.kind == "id" and one.encoding == "dictionary"
    ]
    if column and column not in texts:
        raise ConfigError(
            f"--column {column} is no text of events in {sequences.path}; there are: {', '.join(texts) or 'none'}. Ingest the log "
            f"with --feature {column}:id:event:encoding=dictionary."
        )


def open_store(path: str | Path) -> TrainingInstructions:
    """A store to read; raises ConfigError and DataError."""
    try:
        return TrainingInstructions(Path(path))
    except sqlite3.Error as error:
        raise DataError(f"{path} is no store of instructions ({error}).") from None


def untrained_message(folder: Path, config: Config) -> str:
    """Why a run is not steered, with the commands that train one that is."""
    assert isinstance(config.model, EncDecConfig)
    data, ids = shlex.quote(config.data.path), shlex.quote(config.model.ids)
    return (
        f"{folder} never saw an instruction in training, so instructions would steer nothing. Write some for its log and "
        f"train with them:\n  nestpipe think {data} --for-training --ids {ids} --store instructions.sqlite\n"
        f"  nestpipe train scenarios --data.path {data} --model.ids {ids} --instructions instructions.sqlite"
    )


def follows_instructions(model: EncDecConfig, sequences: Sequences) -> bool:
    """Whether a model has a reasoning input, and the log or a store gave it instructions to learn from."""
    has_some = bool(model.instructions) or REASONING in {one.name for one in sequences.schema.of_scope("event")}
    return has_some and model.reasoning_dim > 0 and model.placement != "none"
