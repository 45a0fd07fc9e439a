"""The sequence folder: every user's events in time order, memory-mapped, with digests.

    users.npy      u0      u1   u2        ascending ids
    offsets.npy    0       3    4    6    events of user i are rows offsets[i] .. offsets[i+1]
    items.npy      a b c   d    e f       in time order; equal times by meta's tie rule (tie_order.py)
    times.npy      ...                    milliseconds since 1970; absent for an order-only log
    catalogue.npy                         ascending ids of all items, of the log and of the item table
    event.NAME.values.npy, .offsets.npy, .weights.npy     likewise item.NAME and user.NAME
    event_ids.npy                         of a folder with events of services: which of them it holds (event_ids.py)
    meta.json      schema, counts, encodings, size and SHA-256 of every file

`nestpipe.data.ingest` writes such folders; their files never change.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.array_files import FORMAT, META, PART_FORMAT, file_entry, load_array
from nestpipe.data.item_content import ItemContent
from nestpipe.data.remote_files import fetch_folder, is_url
from nestpipe.data.schema import Schema, Scope
from nestpipe.data.tie_order import FILE, NO_TIMES
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.errors import DataError

VERSION = 2  # 1 kept no texts of hashed ids, and no next_id
QUARANTINE = "quarantine.jsonl"

IntOrArray = TypeVar("IntOrArray", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, eq=False)
class StoredFeature:
    """Values of one feature. With offsets [rows + 1] (id, ids): row i is values[offsets[i]:offsets[i+1]].

    Without: one entry per row, float32 [rows] for numbers and [rows, dim] for vectors, NaN if missing.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None

    def between(self, first: int, last: int) -> StoredFeature:
        """Rows first .. last - 1, without copying values."""
        if self.offsets is None:
            return StoredFeature(self.values[first:last])
        cuts = self.offsets[first : last + 1]
        inner = slice(int(cuts[0]), int(cuts[-1]))
        return StoredFeature(self.values[inner], cuts - cuts[0], None if self.weights is None else self.weights[inner])

    def copied(self) -> StoredFeature:
        """The same rows in their own memory."""
        weights = None if self.weights is None else self.weights.copy()
        return StoredFeature(self.values.copy(), self.offsets, weights)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """An open sequence folder: users [U], offsets [U + 1], items and times [E], catalogue [I], features by name."""

    path: Path
    schema: Schema
    meta: dict[str, Any]
    users: NDArray[np.int64]
    offsets: NDArray[np.int64]
    items: NDArray[np.int64]
    times: NDArray[np.int64] | None
    catalogue: NDArray[np.int64]
    event_features: dict[str, StoredFeature]
    item_features: dict[str, StoredFeature]
    user_features: dict[str, StoredFeature]
    digest: str
    live: ItemContent | None = None  # of a service: what is known of items since ingestion

    @staticmethod
    def open(path: str | Path) -> Sequences:
        """Maps the folder into memory, of a URL a local copy; raises DataError if it is missing, incomplete or outdated."""
        folder = fetch_folder(str(path)) if is_url(path) else Path(path)
        meta = _read_meta(folder)
        _check_sizes(folder, meta)
        schema = Schema.from_json(meta["schema"])
        return Sequences(
            path=folder,
            schema=schema,
            meta=meta,
            users=load_array(folder / "users.npy"),
            offsets=load_array(folder / "offsets.npy"),
            items=load_array(folder / "items.npy"),
            times=None if schema.time is None else load_array(folder / "times.npy"),
            catalogue=load_array(folder / "catalogue.npy"),
            event_features=open_features(folder, schema, "event"),
            item_features=open_features(folder, schema, "item"),
            user_features=open_features(folder, schema, "user"),
            digest=meta["digest"],
        )

    def grew_from(self, digest: str) -> bool:
        """Whether a folder with this digest became this one by appending."""
        return digest in self.meta.get("ancestors", [])

    @property
    def ties(self) -> str:
        """The rule for equal times; folders of earlier versions keep the order of the log."""
        return str(self.meta.get("ties", NO_TIMES if self.times is None else FILE))

    def verify(self) -> None:
        """Reads every file again; raises DataError that names the damaged ones."""
        files = self.meta["files"]
        damaged = [name for name, entry in files.items() if file_entry(self.path / name) != entry]
        if not damaged and folder_digest(self.meta) != self.digest:
            damaged = [META]
        if damaged:
            raise DataError(
                f"{self.path}: {', '.join(damaged)} changed since ingest (SHA-256 differs), so results would be wrong. Ingest the log again."
            )

    def vocabulary(self, name: str) -> Vocabulary:
        """The own ids of 'user', 'item' or an id feature; raises DataError for another name."""
        if name not in (encodings := self.meta["encodings"]):
            raise DataError(f"{self.path} has no ids named '{name}'; it has {sorted(encodings)}.")
        if encodings[name]["encoding"] == "item":
            name = "item"
        about, path = encodings[name], self.path / f"texts.{name}.parquet"
        table = None if about["encoding"] == "int64" else pl.read_parquet(path)
        return Vocabulary(name, about["encoding"], table, next_id=about["next_id"])


def truncate(length: IntOrArray, max_len: int, block: int) -> IntOrArray:
    """The index of the first event that a history keeps: a multiple of `block`, at most `max_len` events before the end."""
    blocks = (length - max_len + block - 1) // block
    return blocks * (blocks > 0) * block


def folder_digest(meta: dict[str, Any]) -> str:
    """SHA-256 of the content; without the quarantine, which contains the path of the log."""
    content = {name: meta[name] for name in ("format", "version", "schema", "encodings")}
    content["files"] = {name: entry for name, entry in meta["files"].items() if name != QUARANTINE}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_meta(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise DataError(
            f"there is no sequence folder {folder}. Make one with 'nestpipe data ingest LOG --out {folder}'; 'nestpipe data --help' lists the other readers."
        )
    path = folder / META
    if not path.is_file():
        raise DataError(
            f"{folder} has no {META}, so it is not a sequence folder of 'nestpipe data'. Check the path, or ingest the log into a new folder."
        )
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): the folder is damaged. Ingest the log again.") from None
    found = (meta.get("format"), meta.get("version"))
    if found == (PART_FORMAT, VERSION):
        number, total = meta["shard"]
        raise DataError(
            f"{folder} is shard {number}/{total} of a log, not a sequence folder: other shards hold more of its users' events. Join them with 'nestpipe data merge'."
        )
    if found != (FORMAT, VERSION):
        raise DataError(
            f"{path} says format {found[0]} version {found[1]}; this nestpipe reads {FORMAT} version {VERSION}. Ingest the log again."
        )
    return meta


def _check_sizes(folder: Path, meta: dict[str, Any]) -> None:
    for name, entry in meta["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            seen = "is missing" if size is None else f"has {size:,} bytes"
            raise DataError(
                f"{path} {seen}, but {META} records {entry['bytes']:,}: the folder is damaged or incompletely copied. Copy it again, or ingest the log again."
            )


def open_features(folder: Path, schema: Schema, scope: Scope) -> dict[str, StoredFeature]:
    """The features of a scope, memory-mapped."""

    def part(name: str, what: str) -> NDArray[Any]:
        return load_array(folder / f"{scope}.{name}.{what}.npy")

    return {
        feature.name: StoredFeature(
            part(feature.name, "values"),
            part(feature.name, "offsets") if feature.kind in {"id", "ids"} else None,
            part(feature.name, "weights") if feature.weights is not None else None,
        )
        for feature in schema.of_scope(scope)
    }
