"""Ingests a log and optional side tables into a sequence folder.

    log -> typed chunks -> external sort by (user, time, order) -> arrays
    item and user tables -> joined to the catalogue and to the users -> arrays

Invariant, checked: read = kept + quarantined + filtered + duplicates. The folder is published atomically.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.array_files import (
    FORMAT,
    META,
    PART_FORMAT,
    ArrayFile,
    FeatureFiles,
    file_entry,
    keep_values,
    publish_folder,
    save_array,
)
from nestpipe.data.external_sort import Bools, Spool
from nestpipe.data.id_encoding import make_encoders
from nestpipe.data.item_texts import raw_texts, write_item_texts
from nestpipe.data.log_reader import LogSource, expand
from nestpipe.data.quarantine import KEY, ORDER, Quarantine, TypedReader
from nestpipe.data.remote_files import check_url, is_url, name_of, push_folder
from nestpipe.data.schema import Schema, Scope
from nestpipe.data.sequences import QUARANTINE, VERSION, Sequences, folder_digest
from nestpipe.data.tie_order import FILE, NO_TIMES, check_ties, describe_ties, order_numbers
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.errors import ConfigError, DataError

Source = LogSource | pl.DataFrame
RowFilter = Callable[[Callable[[], Iterator[pl.DataFrame]]], tuple[list[Bools], dict[str, int]]]
_EARLY_MS = 63_072_000_000  # 1972: milliseconds that end earlier are most likely seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SideTable:
    """Attributes of items or users, with the column that holds their ids; it must fit in memory."""

    source: Source
    key: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildOptions:
    """Options of ingest. Only `dedupe`, `ties`, `row_filter`, `extra` and `documents` change what is stored."""

    dedupe: bool = False
    """Keep only the first of records that are equal in every column read."""
    ties: str = FILE
    """Order of events of a user with equal times: file (as in the log), meta or shuffle:SEED; see tie_order.py."""
    max_quarantine_share: float = 0.01
    """Raise an error if more than this share of the records of the log, or of a table, is bad."""
    overwrite: bool = False
    budget_rows: int = 10_000_000
    """Events held in memory at a time."""
    progress: Callable[[str, int], None] = lambda phase, num_rows: None
    row_filter: RowFilter | None = None
    """Takes a function that iterates over runs of typed events; returns a mask per run, and counts of dropped events."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Stored as meta['extra'], for example the origin of the data."""
    documents: Mapping[str, Any] = field(default_factory=dict)
    """Stored as NAME.json."""


def write_sequences(
    out: str | Path,
    *,
    schema: Schema,
    log: Source,
    items: SideTable | None = None,
    users: SideTable | None = None,
    texts: SideTable | None = None,
    options: BuildOptions | None = None,
) -> Sequences:
    """Reads the log and the tables, writes the folder and opens it; on DataError or ConfigError nothing is written.

    `texts` are kept for semantic ids and instructions: the columns beside its key are texts of the item.
    """
    options = options or BuildOptions()
    check_job(schema, items=items, users=users, options=options)
    if is_url(out):
        check_url(str(out), overwrite=options.overwrite)
        with tempfile.TemporaryDirectory(prefix="nestpipe-") as local:
            write_sequences(
                f"{local}/out", schema=schema, log=log, items=items, users=users, texts=texts, options=options
            )
            push_folder(Path(local) / "out", str(out))
        return Sequences.open(out)
    with publish_folder(Path(out), overwrite=options.overwrite, inputs=input_files(log, items, users, texts)) as draft:
        FolderBuild(draft, schema, options).run(log, items, users, texts)
    return Sequences.open(out)


def input_files(
    log: Source, items: SideTable | None, users: SideTable | None, texts: SideTable | None = None
) -> list[Path]:
    """All files that are read."""
    sources = [log, *(table.source for table in (items, users, texts) if table is not None)]
    return [path for source in sources if isinstance(source, LogSource) for path in expand(source)]


def check_job(
    schema: Schema,
    *,
    items: SideTable | None,
    users: SideTable | None,
    options: BuildOptions,
    need_tables: bool = True,
) -> None:
    """Raises ConfigError unless the schema, the tables and the options fit each other."""
    schema.check()
    check_ties(options.ties)
    if options.ties != FILE and schema.time is None:
        raise ConfigError(f"ties is {options.ties!r}, but the log has no times, so no two are equal. Leave it out.")
    scopes: tuple[tuple[Scope, SideTable | None], ...] = (("item", items), ("user", users))
    for scope, table in scopes:
        if need_tables and table is None and (features := schema.of_scope(scope)):
            raise ConfigError(
                f"feature '{features[0].name}' has scope '{scope}', but there is no {scope} table to read it from. Give the {scope} table, or change the scope to 'event'."
            )
    if options.dedupe and schema.time is None:
        raise ConfigError(
            "dedupe needs times: in an order-only log two equal records are two events, which it would drop. Give a time column, or turn dedupe off."
        )
    if not 0 <= options.max_quarantine_share <= 1:
        raise ConfigError(f"max_quarantine_share is {options.max_quarantine_share}; it must be between 0 and 1.")
    if options.budget_rows < 1:
        raise ConfigError(f"budget_rows is {options.budget_rows}; it must be at least 1 event.")


@dataclass(slots=True)
class EventTotals:
    """Totals of the written events."""

    users: NDArray[np.int64]
    logged_items: NDArray[np.int64]
    num_events: int
    num_duplicates: int
    time_span_ms: list[int] | None


class FolderBuild:
    """Builds one folder: of a whole log, or of a part of it that `folder_merge` joins to others."""

    def __init__(
        self, draft: Path, schema: Schema, options: BuildOptions, *, known: Mapping[str, Vocabulary] | None = None
    ) -> None:
        self._draft = draft
        self._schema = schema
        self._options = options
        self._encoders = make_encoders(schema, known)
        self._tables: dict[str, dict[str, Any]] = {}
        self._notes: list[str] = []

    def run(self, log: Source, items: SideTable | None, users: SideTable | None, texts: SideTable | None) -> None:
        """Writes a whole sequence folder."""
        quarantine, totals, filtered, tables = self._read(log, items, users)
        catalogue = with_table_items(totals.logged_items, tables["item"])
        save_array(self._draft / "catalogue.npy", catalogue)
        write_table(self._draft, self._schema, tables["item"], "item", catalogue)
        write_table(self._draft, self._schema, tables["user"], "user", totals.users)
        for scope, ids, logged in (("item", catalogue, totals.logged_items), ("user", totals.users, totals.users)):
            if (table := tables[scope]) is not None:
                self._tables[scope] |= table_counts(table[scope].to_numpy(), ids, logged)
        self._drop_unknown_items(catalogue)
        self._write_texts()
        if texts is not None:
            read, vocabulary = raw_texts(texts.source, texts.key), self._encoders["item"].vocabulary()
            self._tables["text"] = write_item_texts(self._draft, read, texts.key, vocabulary, catalogue)
        about = self._about(log, quarantine, totals, filtered, num_items=len(catalogue))
        write_meta(self._draft, about)

    def run_part(
        self, log: Source, items: SideTable | None, users: SideTable | None, *, shard: tuple[int, int] = (1, 1)
    ) -> None:
        """Writes a part: its tables stay tables, because the rows of the joined folder are not known yet."""
        if naming := [feature.name for feature in self._schema.features if feature.encoding == "item"]:
            raise ConfigError(
                f"feature '{naming[0]}' names items (encoding=item), and which items there are is known only for the whole log, so it cannot be appended or read in shards. Ingest the whole log at once."
            )
        if self._options.ties != FILE:
            raise ConfigError(
                f"ties is {self._options.ties!r}, which orders the whole log, so it cannot be appended or read in shards. Ingest the whole log at once."
            )
        quarantine, totals, filtered, tables = self._read(log, items, users)
        save_array(self._draft / "catalogue.npy", totals.logged_items)
        for scope, table in tables.items():
            if table is not None:
                table.write_ipc(self._draft / f"table.{scope}.ipc")
        self._write_texts()
        about = self._about(log, quarantine, totals, filtered, num_items=len(totals.logged_items))
        write_meta(self._draft, {**about, "format": PART_FORMAT, "shard": list(shard)})

    def _read(
        self, log: Source, items: SideTable | None, users: SideTable | None
    ) -> tuple[Quarantine, EventTotals, dict[str, int], dict[str, pl.DataFrame | None]]:
        spool = Spool(self._draft / "spool", budget_rows=self._options.budget_rows)
        with (self._draft / QUARANTINE).open("w", encoding="utf-8") as bad:
            quarantine = Quarantine(bad, self._options.max_quarantine_share)
            for chunk in self._reader(quarantine).log(log):
                spool.add(chunk)
            tables = {"item": self._read_table(items, "item", bad), "user": self._read_table(users, "user", bad)}
        if self._options.ties != FILE:
            spool.renumber(partial(order_numbers, self._options.ties))
        masks, filtered = self._options.row_filter(spool.runs) if self._options.row_filter else (None, {})
        totals = self._write_events(spool, masks)
        if (self._draft / "spool").exists():
            shutil.rmtree(self._draft / "spool")
        final = {
            scope: None if table is None else self._final(table.rename({KEY: scope})) for scope, table in tables.items()
        }
        return quarantine, totals, filtered, final

    def _reader(self, quarantine: Quarantine) -> TypedReader:
        return TypedReader(self._schema, self._encoders, quarantine, self._options.progress)

    def _read_table(self, table: SideTable | None, scope: Scope, bad: Any) -> pl.DataFrame | None:
        if table is None:
            return None
        quarantine = Quarantine(bad, self._options.max_quarantine_share)
        frame = self._reader(quarantine).table(table.source, scope=scope, key=table.key)
        self._tables[scope] = {
            "read": quarantine.num_read,
            "kept": frame.height,
            "quarantined": quarantine.num_bad,
            "reasons": dict(quarantine.reasons),
        }
        return frame

    def _final(self, frame: pl.DataFrame) -> pl.DataFrame:
        for name, encoder in self._encoders.items():
            frame = encoder.final(frame, name)
        return frame

    def _write_events(self, spool: Spool, masks: list[Bools] | None) -> EventTotals:
        features = [FeatureFiles(self._draft, feature) for feature in self._schema.of_scope("event")]
        files = {"item": ArrayFile(self._draft / "items.npy", dtype=np.int64)}
        if self._schema.time is not None:
            files["time"] = ArrayFile(self._draft / "times.npy", dtype=np.int64)
        users, lengths = [], []
        span: list[int] = []
        logged, num_duplicates = np.empty(0, np.int64), 0
        for frame in spool.ranges(self._final, masks):
            events = frame
            if self._options.dedupe:
                events = frame.unique(
                    [name for name in frame.columns if name != ORDER], keep="first", maintain_order=True
                )
                num_duplicates += frame.height - events.height
            distinct, counts = np.unique(events["user"].to_numpy(), return_counts=True)
            users.append(distinct)
            lengths.append(counts)
            logged = np.union1d(logged, events["item"].to_numpy())
            for name, file in files.items():
                file.append(events[name].to_numpy())
            for feature in features:
                feature.append(events)
            if "time" in events.columns and events.height:
                times = events["time"].to_numpy()
                span += [int(times.min()), int(times.max())]
            self._options.progress("writing events", files["item"].num_rows)
        for file in files.values():
            file.close()
        for feature in features:
            feature.close()
        if not files["item"].num_rows:
            raise DataError(
                f"the filter dropped all {sum(map(len, masks or [])):,} events, so there is nothing to train on; nothing was written. Use a less strict filter."
            )
        save_array(self._draft / "users.npy", np.concatenate(users))
        save_array(
            self._draft / "offsets.npy", np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
        )
        time_span = [min(span), max(span)] if span else None
        return EventTotals(np.concatenate(users), logged, files["item"].num_rows, num_duplicates, time_span)

    def _drop_unknown_items(self, catalogue: NDArray[np.int64]) -> None:
        """A value of a feature that names an item which the catalogue does not have becomes a missing one."""
        for feature in self._schema.features:
            if feature.encoding == "item" and feature.scope != "request":
                num_dropped = keep_values(self._draft, feature, lambda values: np.isin(values, catalogue))
                if num_dropped:
                    self._notes.append(
                        f"feature '{feature.name}': {num_dropped:,} values name items that are in no event; they are missing"
                    )

    def _write_texts(self) -> None:
        for name, encoder in self._encoders.items():
            if encoder.encoding != "int64" and encoder.name == name:
                encoder.vocabulary().table.write_parquet(self._draft / f"texts.{name}.parquet")
        for name, document in self._options.documents.items():
            (self._draft / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def _about(
        self, log: Source, quarantine: Quarantine, totals: EventTotals, filtered: dict[str, int], *, num_items: int
    ) -> dict[str, Any]:
        """The content of meta.json, without the files."""
        counts = {
            "read": quarantine.num_read,
            "kept": totals.num_events,
            "quarantined": quarantine.num_bad,
            "filtered": sum(filtered.values()),
            "duplicates": totals.num_duplicates,
            "users": len(totals.users),
            "items": num_items,
            "logged_items": len(totals.logged_items),
            "events": totals.num_events,
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "schema": self._schema.to_json(),
            "counts": counts,
            "time_span_ms": totals.time_span_ms,
            "ties": (ties := self._options.ties if self._schema.time is not None else NO_TIMES),
            "tie_rule": describe_ties(ties),
            "encodings": {
                name: encoder.to_json() if encoder.name == name else {"encoding": encoder.name}
                for name, encoder in self._encoders.items()
            },
            "quarantine": dict(quarantine.reasons.most_common()),
            "filtered": filtered,
            "dedupe": self._options.dedupe,
            "tables": self._tables,
            "notes": [*self._notes, *notes_of(self._schema, totals.time_span_ms)],
            "extra": dict(self._options.extra),
            "sources": source_entries(log),
        }


def with_table_items(logged: NDArray[np.int64], item_table: pl.DataFrame | None) -> NDArray[np.int64]:
    """The catalogue: ids of all items, of the log and of the item table, ascending."""
    return logged if item_table is None else np.union1d(logged, item_table["item"].to_numpy())


def write_table(draft: Path, schema: Schema, table: pl.DataFrame | None, scope: Scope, ids: NDArray[np.int64]) -> None:
    """Writes the features of a side table, one row per id."""
    if table is None:
        return
    joined = pl.DataFrame({scope: ids}).join(table, on=scope, how="left", maintain_order="left")
    for feature in schema.of_scope(scope):
        file = FeatureFiles(draft, feature)
        file.append(joined)
        file.close()


def table_counts(known: NDArray[np.int64], ids: NDArray[np.int64], logged: NDArray[np.int64]) -> dict[str, int]:
    """How many ids have no row in a side table, and how many of its rows have no event."""
    return {
        "without_attributes": int((~np.isin(ids, known)).sum()),
        "not_in_log": int((~np.isin(known, logged)).sum()),
    }


def source_entries(log: Source) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of the files of a log, by which `nestpipe data append` knows a file again."""
    if isinstance(log, pl.DataFrame):
        return [{"file": "frame", "rows": log.height}]
    return [{"file": name_of(path), **file_entry(path)} for path in expand(log)]


def write_meta(draft: Path, about: Mapping[str, Any]) -> None:
    """Writes meta.json with the digests of all files; checks that no record is lost."""
    counts = about["counts"]
    if counts["read"] != sum(counts[name] for name in ("kept", "quarantined", "filtered", "duplicates")):
        raise AssertionError(f"the counts do not add up: {counts}")
    meta = {**about, "files": {path.name: file_entry(path) for path in sorted(draft.iterdir())}}
    meta["digest"] = folder_digest(meta)
    (draft / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def notes_of(schema: Schema, time_span_ms: list[int] | None) -> list[str]:
    """What a user should know about the times."""
    if schema.time is None:
        return ["order-only log: there are no times, so time features and time biases are off"]
    if schema.time_unit == "ms" and time_span_ms and time_span_ms[1] < _EARLY_MS:
        return [
            "all times are before 1972 when read as milliseconds; if the log is in seconds, ingest it with time unit s"
        ]
    return []
