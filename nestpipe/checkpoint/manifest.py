"""The layout of a checkpoint, and its manifest, which is written last.

    RUN/checkpoints/step-000500/
        manifest.json            format, step, cursor, loop state, the blobs of every file with their digests
        part-0a1b2c3d-0.pack     what rank 0 wrote: the dense part and the sections of its buckets
        part-0a1b2c3d-1.pack     ... rank 1; the name contains the attempt, so that no late upload overwrites another

A packed file is a sequence of blobs; each is a safetensors file of its own. A table is stored in *sections*, which are ranges of
buckets. A section has up to three blobs:

    index     ids in ascending order per bucket, their usage, counts of ids without a row, kept rows (stale_rows.py)
    rows      weights, in the order of the ids
    state     optimizer state, in the order of the ids

Rows of exact Adam are stored as of their last update, so that a delta holds only rows that were looked up. The dense part has the
learning rates of all batches; `current_rows.py` makes the steps that rows have missed.

Every rank writes the buckets that it owns (writer.py); any number of ranks can read them (reader.py).
A delta holds only what has changed since the previous link of its *chain*: the full checkpoint that it begins with, and the deltas
between (chain.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nestpipe.checkpoint.places import Place
from nestpipe.errors import CheckpointError
from nestpipe.jagged import Cursor

FORMAT = 4  # 4: packed files, deltas
MANIFEST = "manifest.json"
DENSE, INDEX, ROWS, STATE = "dense", "index", "rows", "state"  # kinds of blobs
RATES, ADAM = "rates.", "adam."  # in the dense part, per table with exact Adam: rate of every batch, and constants


class Blob(NamedTuple):
    """One safetensors file inside a packed file; the dense part belongs to no table and no bucket."""

    file: str
    offset: int
    num_bytes: int
    sha256: str
    kind: str
    table: str = ""
    first: int = 0  # bucket of the section
    last: int = 0  # bucket after the section
    num_rows: int = 0

    @property
    def title(self) -> str:
        """What it holds, for messages."""
        return (
            self.kind
            if not self.table
            else f"{self.kind} of table '{self.table}', buckets {self.first} to {self.last - 1}"
        )


class Link(NamedTuple):
    """An earlier checkpoint that a delta needs."""

    step: int
    digest: str  # of its manifest
    num_bytes: int  # of its tables


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint."""

    step: int
    cursor: Cursor  # the next batch to train on
    progress: dict[str, Any]  # state of the training loop
    tables: dict[str, int]  # number of buckets per table
    files: dict[str, int]  # bytes
    blobs: tuple[Blob, ...]
    chain: tuple[Link, ...]  # empty for a full checkpoint
    digest: str  # of all other fields

    @staticmethod
    def read(folder: Place) -> Manifest:
        """Raises CheckpointError if it is missing, damaged or of another format."""
        try:
            content = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no manifest.json: the save did not finish, or this is not a checkpoint."
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{folder / MANIFEST} is not JSON ({error}); the checkpoint is damaged.") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            content = content if isinstance(content, dict) else {}
            raise CheckpointError(
                f"{folder} has checkpoint format {content.get('format')!r}; this version reads format {FORMAT}, with packed "
                "files. Train again, or use the version that wrote it."
            )
        digest = content.pop("digest", None)
        if digest != _digest_of(content):
            raise CheckpointError(f"{folder / MANIFEST} does not match its digest. {move_away_advice(folder)}")
        return Manifest(
            content["step"],
            Cursor(*content["cursor"]),
            content["progress"],
            content["tables"],
            content["files"],
            tuple(Blob(*one) for one in content["blobs"]),
            tuple(Link(*one) for one in content["chain"]),
            digest,
        )

    @property
    def links(self) -> tuple[Link, ...]:
        """What a delta after this checkpoint needs: its chain and itself."""
        own = Link(self.step, self.digest, sum(blob.num_bytes for blob in self.blobs if blob.table))
        return *self.chain, own

    def blobs_of(self, table: str, kind: str) -> Iterator[Blob]:
        """The blobs of a table, by ascending bucket."""
        return iter(
            sorted((blob for blob in self.blobs if (blob.table, blob.kind) == (table, kind)), key=lambda one: one.first)
        )

    def contents(self) -> dict[tuple[str, str, int, int], str]:
        """Digest of each blob by kind, table and buckets: equal for equal content, whoever wrote it in which attempt."""
        return {(blob.kind, blob.table, blob.first, blob.last): blob.sha256 for blob in self.blobs}


def manifest_bytes(
    *,
    step: int,
    cursor: Cursor,
    progress: Mapping[str, Any],
    tables: Mapping[str, int],
    blobs: Sequence[Blob],
    chain: Sequence[Link] = (),
) -> bytes:
    """manifest.json with its own digest."""
    files = dict.fromkeys((blob.file for blob in blobs), 0)
    for blob in blobs:
        files[blob.file] += blob.num_bytes
    content = {
        "format": FORMAT,
        "step": step,
        "cursor": list(cursor),
        "progress": dict(progress),
        "tables": dict(tables),
    }
    content |= {"files": files, "blobs": [list(blob) for blob in blobs], "chain": [list(link) for link in chain]}
    content["digest"] = _digest_of(content)
    return (json.dumps(content) + "\n").encode()


def move_away_advice(folder: Place) -> str:
    return f"Move {folder} away to resume from an earlier checkpoint."


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
