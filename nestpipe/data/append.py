"""Appends a log to a sequence folder: new events, users and items join it, and no old log is read again.

    folder + log  ->  part (the new log alone, ids numbered behind the known ones)  ->  merged folder, published by rename

Numbers never change. With int64 and hash ids the result is that of one ingest of both logs; with dictionaries it is so up to the
numbers, because new texts are numbered behind the old ones.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.array_files import FeatureFiles, folder_version, publish_folder, remove_stale, save_array
from nestpipe.data.folder_merge import EventPart, MergedEvents, gather_feature, is_among, merge_events, union
from nestpipe.data.folder_part import FolderPart, join_quarantines
from nestpipe.data.ingest import (
    BuildOptions,
    FolderBuild,
    SideTable,
    Source,
    check_job,
    input_files,
    notes_of,
    source_entries,
    write_meta,
)
from nestpipe.data.remote_files import is_url
from nestpipe.data.schema import Feature, Scope
from nestpipe.data.sequences import QUARANTINE, Sequences, StoredFeature, open_features
from nestpipe.data.tie_order import FILE, NO_TIMES
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.errors import ConfigError, DataError

Ints = NDArray[np.int64]


def append_log(
    folder: str | Path,
    *,
    log: Source,
    items: SideTable | None = None,
    users: SideTable | None = None,
    options: BuildOptions | None = None,
    force: bool = False,
    known: Mapping[str, Vocabulary] | None = None,
    write: Callable[[Path], None] | None = None,
) -> Sequences:
    """Replaces the folder by one that has the events of the log too; on an error the folder stays as it was.

    Side tables give the attributes of new items and users, and of known ones that have none. A file that is in the folder
    already is refused by name, unless `force` is set. Only one process may append at a time. `known` are the vocabularies with
    own ids that a service has numbered since; `write` adds files to the new folder before it is published.
    """
    if is_url(folder):
        raise ConfigError(
            f"{folder} is in an object store, where a folder cannot be replaced by one rename; nothing was changed. Append to a local folder, and copy it."
        )
    path = Path(folder)
    remove_stale(path.resolve())
    sequences = Sequences.open(path)
    version = folder_version(path)
    options = dataclasses.replace(options or BuildOptions(), dedupe=sequences.meta.get("dedupe", False))
    check_job(sequences.schema, items=items, users=users, options=options, need_tables=False)
    _refuse_filtered(sequences)
    if not force:
        _refuse_repeats(sequences, log)
    with publish_folder(path, overwrite=True, inputs=input_files(log, items, users)) as draft:
        known = known or {name: sequences.vocabulary(name) for name in sequences.meta["encodings"]}
        if write is not None:
            write(draft)
        own = draft / "part"
        own.mkdir()
        FolderBuild(own, sequences.schema, options, known=known).run_part(log, items, users)
        about = _Append(sequences, FolderPart.open(own), draft, options).run()
        shutil.rmtree(own)
        write_meta(draft, about)
        if folder_version(path) != version:
            raise DataError(
                f"{path} was replaced by another process meanwhile, so its events would be lost; it was not changed. Append again."
            )
    return Sequences.open(path)


def _refuse_filtered(sequences: Sequences) -> None:
    if sequences.ties not in {FILE, NO_TIMES}:
        raise DataError(
            f"{sequences.path} was made with ties '{sequences.ties}', which orders the whole log, so appended events would be ordered by another rule. Ingest both logs together."
        )
    if sequences.meta["filtered"]:
        raise DataError(
            f"{sequences.path} was filtered ({', '.join(sequences.meta['filtered'])}), which depends on the whole log: appended events "
            "could bring back dropped ones, which are not stored. Ingest both logs together."
        )


def _refuse_repeats(sequences: Sequences, log: Source) -> None:
    """Raises DataError for a file that is in the folder already, also under another name, or is given twice."""
    seen = {entry["sha256"]: entry["file"] for entry in sequences.meta.get("sources", []) if "sha256" in entry}
    for entry in source_entries(log):
        if "sha256" not in entry:
            continue
        if (before := seen.get(entry["sha256"])) is not None:
            name = entry["file"] if before == entry["file"] else f"{entry['file']} (the same bytes as {before})"
            raise DataError(
                f"{name} is in {sequences.path} already, so each of its events would be there twice; nothing was changed. Name only new files, or pass --force (force=True) if they really happened again."
            )
        seen[entry["sha256"]] = entry["file"]


class _Append:
    """Merges a folder and a part with the same numbering into a draft."""

    def __init__(self, old: Sequences, new: FolderPart, draft: Path, options: BuildOptions) -> None:
        self._old, self._new, self._draft, self._options = old, new, draft, options
        self._schema = old.schema

    def run(self) -> dict[str, Any]:
        """Writes all files but meta.json, whose content it returns."""
        old, options = self._old, self._options
        before = EventPart(old.users, old.offsets, old.items, old.times, old.event_features)
        parts = [before, self._new.events]
        merged = merge_events(self._draft, self._schema, parts, dedupe=options.dedupe, progress=options.progress)
        logged = np.asarray(np.load(self._new.path / "catalogue.npy"))
        tables = {scope: self._new.table(scope) for scope in ("item", "user")}
        of_table = tables["item"]["item"].to_numpy() if tables["item"] is not None else logged[:0]
        catalogue = union(union(old.catalogue, logged), np.unique(of_table))
        save_array(self._draft / "catalogue.npy", catalogue)
        about = self._about(merged, len(catalogue), self._num_logged(logged))
        rows: tuple[tuple[Scope, Ints, Ints], ...] = (
            ("item", old.catalogue, catalogue),
            ("user", old.users, merged.users),
        )
        for scope, known, ids in rows:
            filled = self._write_features(scope, known, ids, tables[scope])
            self._count_table(about, scope, tables[scope], known=known, ids=ids, filled=filled)
        num_bad = [old.meta["counts"]["quarantined"], self._new.meta["counts"]["quarantined"]]
        join_quarantines(self._draft / QUARANTINE, list(zip((old.path, self._new.path), num_bad, strict=True)))
        self._copy_others()
        return about

    def _num_logged(self, logged: Ints) -> int:
        """The number of items that have events; only an item table has others."""
        counts = self._old.meta["counts"]
        known = is_among(logged, self._old.catalogue)
        first = int((~known).sum())
        if counts["items"] > counts["logged_items"] and known.any():
            old_items = pl.Series(self._old.items).unique()
            first += int((~pl.Series(logged[known]).is_in(old_items.implode())).sum())
        return int(counts["logged_items"]) + first

    def _write_features(self, scope: Scope, known: Ints, ids: Ints, table: pl.DataFrame | None) -> int:
        """Writes the rows of all ids; returns how many known ids got attributes that they did not have."""
        features = self._schema.of_scope(scope)
        if not features:
            return 0
        old = self._old.item_features if scope == "item" else self._old.user_features
        is_new = ~is_among(ids, known)
        places = np.searchsorted(known, ids)
        filled = np.zeros(len(ids), np.bool_)
        if table is not None:
            is_bare = np.logical_and.reduce([_is_missing(old[feature.name]) for feature in features])
            filled[~is_new] = is_bare[places[~is_new]]
            filled &= np.isin(ids, table[scope].to_numpy())
        taken = ids[is_new | filled]
        scratch = self._new.path / f"rows.{scope}"
        scratch.mkdir()
        frame = pl.DataFrame({scope: taken}).join(
            _empty_table(scope, features) if table is None else table, on=scope, how="left", maintain_order="left"
        )
        for feature in features:
            file = FeatureFiles(scratch, feature)
            file.append(frame)
            file.close()
        new = open_features(scratch, self._schema, scope)
        rows = np.where(is_new | filled, len(known) + np.cumsum(is_new | filled) - 1, places)
        for feature in features:
            file = FeatureFiles(self._draft, feature)
            file.append_rows(*gather_feature([old[feature.name], new[feature.name]], rows))
            file.close()
        return int(filled.sum())

    def _about(self, merged: MergedEvents, num_items: int, num_logged: int) -> dict[str, Any]:
        old, new = self._old.meta, self._new.meta
        counts = {name: old["counts"][name] + new["counts"][name] for name in ("read", "quarantined", "filtered")}
        duplicates = old["counts"]["duplicates"] + new["counts"]["duplicates"] + merged.num_duplicates
        counts |= {
            "kept": merged.num_events,
            "duplicates": duplicates,
            "users": len(merged.users),
            "items": num_items,
            "logged_items": num_logged,
            "events": merged.num_events,
        }
        spans = [*(old["time_span_ms"] or ()), *(new["time_span_ms"] or ())]
        time_span_ms = [min(spans), max(spans)] if spans else None
        return {
            **{name: value for name, value in old.items() if name not in {"files", "digest"}},
            "counts": {name: counts[name] for name in old["counts"]},
            "time_span_ms": time_span_ms,
            "encodings": new["encodings"],
            "quarantine": dict((Counter(old["quarantine"]) + Counter(new["quarantine"])).most_common()),
            "tables": dict(old["tables"]),
            "notes": notes_of(self._schema, time_span_ms),
            "sources": [*old.get("sources", []), *new["sources"]],
            "ancestors": [*old.get("ancestors", []), old["digest"]],
        }

    def _count_table(
        self, about: dict[str, Any], scope: Scope, table: pl.DataFrame | None, *, known: Ints, ids: Ints, filled: int
    ) -> None:
        """Adds the counts of a side table; ids of a table that had no event before are not known, so they do not fall."""
        before = about["tables"].get(scope)
        if before is None and table is None:
            return
        added = ids[~is_among(ids, known)]
        keys = added[:0] if table is None else table[scope].to_numpy()
        before = before or {"read": 0, "kept": 0, "quarantined": 0, "reasons": {}, "not_in_log": 0}
        lacking = before.get("without_attributes", len(known)) - filled + int((~np.isin(added, keys)).sum())
        new = self._new.meta["tables"].get(scope, {"read": 0, "kept": 0, "quarantined": 0, "reasons": {}})
        counts = {name: before[name] + new[name] for name in ("read", "kept", "quarantined")}
        users_only = int((~is_among(keys, ids)).sum())
        unlogged = about["counts"]["items"] - about["counts"]["logged_items"]
        about["tables"][scope] = {
            **counts,
            "reasons": dict(Counter(before["reasons"]) + Counter(new["reasons"])),
            "without_attributes": max(lacking, 0),
            "not_in_log": unlogged if scope == "item" else before["not_in_log"] + users_only,
        }

    def _copy_others(self) -> None:
        """Texts come from the part, which knows all of them; attachments and documents stay."""
        for name, about in self._new.meta["encodings"].items():
            if about["encoding"] != "int64":
                shutil.move(self._new.path / f"texts.{name}.parquet", self._draft)
        for name in self._old.meta["files"]:
            if not (self._draft / name).exists():
                shutil.copy(self._old.path / name, self._draft / name)


def _is_missing(stored: StoredFeature) -> NDArray[np.bool_]:
    """Which rows have no value."""
    if stored.offsets is not None:
        return np.asarray(np.diff(stored.offsets) == 0)
    return np.asarray(np.isnan(stored.values if stored.values.ndim == 1 else stored.values[:, 0]))


def _empty_table(scope: Scope, features: tuple[Feature, ...]) -> pl.DataFrame:
    kinds: dict[str, pl.DataType] = {scope: pl.Int64()}
    for feature in features:
        if feature.kind == "number":
            kinds[feature.name] = pl.Float32()
        elif feature.kind == "vector":
            kinds[feature.name] = pl.Array(pl.Float32, feature.dim)
        else:
            kinds[feature.name] = pl.Int64() if feature.kind == "id" else pl.List(pl.Int64)
        if feature.weights is not None:
            kinds[f"{feature.name}.weights"] = pl.List(pl.Float32)
    return pl.DataFrame(schema=kinds)
