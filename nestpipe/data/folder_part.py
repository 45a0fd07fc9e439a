"""A part of a log on disk: sorted events, side tables as read, texts and counts; `folder_merge` joins parts.

It looks like a sequence folder, but catalogue.npy has the logged items only, and side tables are table.SCOPE.ipc, because the rows
of the joined folder are not known yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from nestpipe.data.array_files import META, PART_FORMAT, file_entry, load_array
from nestpipe.data.folder_merge import EventPart
from nestpipe.data.schema import Schema, Scope
from nestpipe.data.sequences import QUARANTINE, VERSION, open_features
from nestpipe.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class FolderPart:
    """An open part."""

    path: Path
    schema: Schema
    meta: dict[str, Any]
    events: EventPart

    @staticmethod
    def open(path: Path) -> FolderPart:
        """Maps a part into memory; raises DataError if it is none or damaged."""
        try:
            meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is no shard of a log ({error}), so there is nothing to merge. Make shards with 'nestpipe data ingest LOG --shard 1/4 --out SHARD'."
            ) from None
        if (meta.get("format"), meta.get("version")) != (PART_FORMAT, VERSION):
            raise DataError(
                f"{path} has format {meta.get('format')} version {meta.get('version')}, but a shard has {PART_FORMAT} version {VERSION}. Name folders that 'nestpipe data ingest --shard' wrote."
            )
        damaged = [
            name
            for name, entry in meta["files"].items()
            if not (path / name).is_file() or file_entry(path / name) != entry
        ]
        if damaged:
            raise DataError(
                f"{path}: {', '.join(damaged)} changed since the shard was written (SHA-256 differs), so the merged folder would be wrong. Ingest this shard again."
            )
        schema = Schema.from_json(meta["schema"])
        events = EventPart(
            users=load_array(path / "users.npy"),
            offsets=load_array(path / "offsets.npy"),
            items=load_array(path / "items.npy"),
            times=None if schema.time is None else load_array(path / "times.npy"),
            features=open_features(path, schema, "event"),
        )
        return FolderPart(path, schema, meta, events)

    def table(self, scope: Scope) -> pl.DataFrame | None:
        """The side table as read, with the part's own numbers."""
        path = self.path / f"table.{scope}.ipc"
        return pl.read_ipc(path) if path.exists() else None


def join_quarantines(target: Path, sources: Sequence[tuple[Path, int]]) -> None:
    """Writes the bad records of all logs, then those of all tables; each file has so many of its log first."""
    with target.open("w", encoding="utf-8") as joined:
        for of_log in (True, False):
            for path, num_logged in sources:
                with (path / QUARANTINE).open(encoding="utf-8") as lines:
                    joined.writelines(islice(lines, num_logged) if of_log else islice(lines, num_logged, None))
