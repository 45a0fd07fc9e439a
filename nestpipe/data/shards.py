"""Ingest on many machines: each reads some of the files of a log into a shard, and one joins the shards.

    files 1 2 3 | 4 5 | 6 7     ->  shard 1/3, 2/3, 3/3  ->  merge  ->  the folder of one ingest, byte for byte

Shards take the files in order, so that equal times keep the order of the log. Texts are numbered in sorted order in every shard and
in the joined folder, so renumbering keeps the order of users and items. The first shard alone reads the side tables.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.array_files import FORMAT, publish_folder, save_array
from nestpipe.data.folder_merge import merge_events, union
from nestpipe.data.folder_part import FolderPart, join_quarantines
from nestpipe.data.ingest import (
    BuildOptions,
    FolderBuild,
    SideTable,
    check_job,
    input_files,
    notes_of,
    table_counts,
    with_table_items,
    write_meta,
    write_table,
)
from nestpipe.data.log_reader import LogSource, expand
from nestpipe.data.remote_files import name_of
from nestpipe.data.schema import Schema, Scope
from nestpipe.data.sequences import QUARANTINE, Sequences
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.errors import ConfigError, DataError

Ints = NDArray[np.int64]
_SCOPES: tuple[Scope, Scope] = ("item", "user")


def write_shard(
    out: str | Path,
    *,
    shard: tuple[int, int],
    schema: Schema,
    log: LogSource,
    items: SideTable | None = None,
    users: SideTable | None = None,
    options: BuildOptions | None = None,
) -> None:
    """Reads this shard's files of the log, number `shard[0]` (from 1) of `shard[1]`, into a folder for `merge_shards`."""
    options = options or BuildOptions()
    check_job(schema, items=items, users=users, options=options)
    number, total = shard
    files = expand(log)
    if not 1 <= number <= total <= len(files):
        raise ConfigError(
            f"shard {number}/{total} of a log of {len(files)} files: a shard has at least one whole file, so it must be 1/1 to {len(files)}/{len(files)}. Use fewer shards, or write the log into more files."
        )
    own = np.array_split(np.arange(len(files)), total)[number - 1]
    part = dataclasses.replace(log, paths=tuple(name_of(files[place]) for place in own))
    tables = (items, users) if number == 1 else (None, None)
    inputs = input_files(log, items, users)
    with publish_folder(Path(out), overwrite=options.overwrite, inputs=inputs) as draft:
        FolderBuild(draft, schema, options).run_part(part, *tables, shard=shard)


def merge_shards(out: str | Path, shards: Sequence[str | Path], *, options: BuildOptions | None = None) -> Sequences:
    """Joins all shards of a log into a sequence folder: the same files as one ingest."""
    options = options or BuildOptions()
    parts = _all_shards([FolderPart.open(Path(path)) for path in shards])
    with publish_folder(Path(out), overwrite=options.overwrite, inputs=[part.path for part in parts]) as draft:
        write_meta(draft, _Merge(parts, draft, options).run())
    return Sequences.open(out)


def _all_shards(parts: list[FolderPart]) -> list[FolderPart]:
    """The shards in order; raises DataError unless they are all shards of one log, each once."""
    if not parts:
        raise DataError("no shard was given, so there is nothing to merge. Name the folders of all shards.")
    first, total = parts[0], parts[0].meta["shard"][1]
    for part in parts[1:]:
        for name in ("schema", "dedupe"):
            if part.meta[name] != first.meta[name]:
                raise DataError(
                    f"{part.path} has another {name} than {first.path}, so they are not shards of one log. Ingest all shards with the same flags."
                )
    found = Counter(tuple(part.meta["shard"]) for part in parts)
    wanted = {(number, total) for number in range(1, total + 1)}
    lacking = sorted(f"{number}/{of}" for number, of in wanted - found.keys())
    surplus = sorted(f"{number}/{of}" for number, of in found if found[number, of] > 1 or (number, of) not in wanted)
    if lacking or surplus:
        what = [f"shards {', '.join(lacking)} are missing"] if lacking else []
        what += [f"shards {', '.join(surplus)} are there twice or belong to another division"] if surplus else []
        raise DataError(
            f"{' and '.join(what)}, so the merged folder would not be the whole log. Name each of the {total} shards once."
        )
    return sorted(parts, key=lambda part: int(part.meta["shard"][0]))


class _Merge:
    """Writes the files of the joined folder into a draft."""

    def __init__(self, parts: list[FolderPart], draft: Path, options: BuildOptions) -> None:
        self._parts, self._draft, self._options = parts, draft, options
        self._schema = parts[0].schema
        self._meta = parts[0].meta
        self._numbers: list[dict[str, Ints]] = [{} for _ in parts]  # of each part, by column: final number by its own

    def run(self) -> dict[str, Any]:
        """Writes all files but meta.json, whose content it returns."""
        encodings = self._join_texts()
        events = []
        for part, numbers in zip(self._parts, self._numbers, strict=True):
            own = dataclasses.replace(part.events, numbers=numbers)
            events.append(dataclasses.replace(own, users=self._final(part.events.users, "user", numbers)))
        merged = merge_events(
            self._draft, self._schema, events, dedupe=self._meta["dedupe"], progress=self._options.progress
        )
        logged = np.empty(0, np.int64)
        for part, numbers in zip(self._parts, self._numbers, strict=True):
            logged = union(logged, self._final(np.load(part.path / "catalogue.npy"), "item", numbers))
        tables = {scope: self._table(scope) for scope in _SCOPES}
        catalogue = with_table_items(logged, tables["item"])
        save_array(self._draft / "catalogue.npy", catalogue)
        counted = dict(self._meta["tables"])
        rows = {"item": (catalogue, logged), "user": (merged.users, merged.users)}
        for scope, table in tables.items():
            ids, in_log = rows[scope]
            write_table(self._draft, self._schema, table, scope, ids)
            if table is not None:
                counted[scope] = counted[scope] | table_counts(table[scope].to_numpy(), ids, in_log)
        num_bad = [part.meta["counts"]["quarantined"] for part in self._parts]
        bad = zip([part.path for part in self._parts], num_bad, strict=True)
        join_quarantines(self._draft / QUARANTINE, list(bad))
        counts = {name: sum(part.meta["counts"][name] for part in self._parts) for name in self._meta["counts"]}
        counts |= {"kept": merged.num_events, "events": merged.num_events, "users": len(merged.users)}
        counts |= {"items": len(catalogue), "logged_items": len(logged)}
        counts["duplicates"] += merged.num_duplicates
        return self._about(counts, encodings, counted)

    def _about(self, counts: dict[str, int], encodings: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
        spans = [moment for part in self._parts for moment in part.meta["time_span_ms"] or ()]
        time_span_ms = [min(spans), max(spans)] if spans else None
        reasons = sum((Counter(part.meta["quarantine"]) for part in self._parts), Counter[str]())
        about = {name: value for name, value in self._meta.items() if name not in {"files", "digest", "shard"}}
        return about | {
            "format": FORMAT,
            "counts": counts,
            "time_span_ms": time_span_ms,
            "encodings": encodings,
            "quarantine": dict(reasons.most_common()),
            "tables": tables,
            "notes": notes_of(self._schema, time_span_ms),
            "sources": [entry for part in self._parts for entry in part.meta["sources"]],
        }

    def _join_texts(self) -> dict[str, Any]:
        """Writes the texts of all parts, numbered as one ingest would; returns meta's entries."""
        found = {}
        for name, about in self._meta["encodings"].items():
            found[name] = dict(about)
            if about["encoding"] == "int64":
                continue
            tables = [pl.read_parquet(part.path / f"texts.{name}.parquet") for part in self._parts]
            if about["encoding"] == "hash":
                table = _joined_hashes(name, tables)
            else:
                texts = pl.concat([table["text"] for table in tables]).unique().sort()
                table = pl.DataFrame({"id": np.arange(len(texts)), "text": texts})
                joined = Vocabulary(name, "dictionary", table)
                found[name]["next_id"] = joined.next_id
                for numbers, own in zip(self._numbers, tables, strict=True):
                    numbers[name] = joined.numbers_of(own["text"].to_list())[0]
            table.write_parquet(self._draft / f"texts.{name}.parquet")
        return found

    @staticmethod
    def _final(ids: Ints, column: str, numbers: Mapping[str, Ints]) -> Ints:
        return numbers[column][ids] if column in numbers else ids

    def _table(self, scope: Scope) -> pl.DataFrame | None:
        """The side table, which the first shard has read, with final numbers."""
        table = self._parts[0].table(scope)
        if table is None:
            return None
        for name, numbers in self._numbers[0].items():
            if name in table.columns:
                final = pl.Series(numbers)
                own = pl.int_range(len(final), eager=True)
                if isinstance(table.schema[name], pl.List):
                    mapped = pl.col(name).list.eval(pl.element().replace_strict(own, final, return_dtype=pl.Int64))
                else:
                    mapped = pl.col(name).replace_strict(own, final, return_dtype=pl.Int64)
                table = table.with_columns(mapped)
        return table


def _joined_hashes(name: str, tables: list[pl.DataFrame]) -> pl.DataFrame:
    table = pl.concat(tables).unique(maintain_order=True).sort("id")
    again = table.filter(pl.col("id").is_duplicated())
    if again.height:
        one, other = again["text"][:2]
        raise DataError(
            f"'{name}' values {one!r} and {other!r} have the same 64-bit hash {again['id'][0]}, so they would become one id. Rename one of them."
        )
    return table.rechunk()
