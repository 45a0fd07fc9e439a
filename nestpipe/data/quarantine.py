"""Types the records of logs and side tables; bad records go to the quarantine.

    files -> raw chunks -> typed chunks (user, item, time in ms, features, `#order`)      read = kept + quarantined
                        -> quarantine.jsonl: file, record, reason, raw values

`#order` numbers the records of the whole log and breaks ties of equal times. Names with # cannot collide with features,
whose names are identifiers.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.column_types import TypedColumns, is_date_number, parse_feature, parse_key, parse_time
from nestpipe.data.id_encoding import Encoder
from nestpipe.data.log_reader import LogSource, read_raw
from nestpipe.data.raw_chunk import JSON_MARK, RECORD, NumberKinds, RawChunk, shown
from nestpipe.data.schema import Schema, Scope
from nestpipe.errors import DataError

ORDER = "#order"
KEY = "#key"
_FILE = "#file"
# Reading stops early only if more than half of the first records are bad. Otherwise the share in the whole log decides, so
# that the outcome does not depend on chunk boundaries.
_EARLY = 100_000
_HOPELESS = 0.5
_NOT_INT64 = "{} is not an int64"
_TEXT_IDS = {_NOT_INT64.format(one) for one in ("user", "item")}
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)  # built once: json.dumps would build one per record


@dataclass(slots=True)
class Quarantine:
    """The bad records of one log or table, written to a shared file, with counts per reason."""

    file: IO[str]
    max_share: float
    num_read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    num_texts: Counter[str] = field(
        default_factory=Counter
    )  # ids that are no int64, also where that is the second problem

    @property
    def num_bad(self) -> int:
        return self.reasons.total()

    def count(self, num_read: int, reasons: Mapping[str, int]) -> None:
        """Adds to the number of records read, and of bad records per reason."""
        self.num_read += num_read
        self.reasons.update(reasons)

    def is_hopeless(self) -> bool:
        """Whether so many records are bad that reading can stop."""
        return self.max_share < _HOPELESS and self.num_read >= _EARLY and self.num_bad > _HOPELESS * self.num_read

    def write(self, file: str, entries: Iterable[tuple[int, str, object]]) -> None:
        """Writes (record number, reason, raw values) of bad records; they were counted before."""
        for record, reason, values in entries:
            entry = {"file": file, "record": record, "reason": reason, "values": values}
            self.file.write(_JSON.encode(entry) + "\n")
            if reason not in self.first:
                self.first[reason] = f"record {record:,} of {file}: {_JSON.encode(values)[:200]}"

    def check_share(self) -> None:
        """Raises DataError if too many of all records are bad."""
        if self.num_bad > self.max_share * self.num_read:
            raise self.too_many("")

    def too_many(self, when: str) -> DataError:
        """The error for too many bad records, with the share and the most common reasons."""
        share, allowed = self.num_bad / self.num_read, self.max_share
        places = 1  # as many decimals as it takes to tell the two shares apart
        while f"{share:.{places}%}" == f"{allowed:.{places}%}" and places < 9:
            places += 1
        lines = [
            f"  - {count:,} x {reason}; first {self.first[reason]}" for reason, count in self.reasons.most_common(5)
        ]
        return DataError(
            f"{self.num_bad:,} of {self.num_read:,} records{when} are bad ({share:.{places}%}), more than the "
            f"{allowed:.{places}%} that max_quarantine_share allows; nothing was written. Most common reasons:\n"
            + "\n".join(lines)
            + "\nCorrect the log or the column mapping, or raise max_quarantine_share."
            + "".join(f" Texts as {one} ids need --{one}-encoding dictionary." for one in self._text_ids())
        )

    def _text_ids(self) -> list[str]:
        """The columns of which many ids are no int64, most likely because they are texts."""
        return [one for one in ("user", "item") if self.num_texts[_NOT_INT64.format(one)] * 2 > self.num_bad]


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """The columns to read, those that nearly every record has, and those that may be read as numbers at once."""

    columns: list[str]
    keys: list[str]
    numbers: NumberKinds
    time: str | None = None

    def needs_text(self, frame: pl.DataFrame, parts: list[TypedColumns]) -> bool:
        """Whether a chunk read as numbers must be typed from its text: for the quarantine, or because of dates."""
        if any(mask.any() for part in parts for mask, _ in part.problems):
            return True
        # 20240501 is a date, 020240501 are seconds.
        if self.time is None or frame.schema[self.time] != pl.Int64:
            return False
        return bool(is_date_number(frame[self.time]).any())


@dataclass(frozen=True, slots=True, eq=False)
class TypedReader:
    """Types the chunks of a log or of a side table."""

    schema: Schema
    encoders: Mapping[str, Encoder]
    quarantine: Quarantine
    progress: Callable[[str, int], None] = lambda phase, num_rows: None

    def log(self, source: LogSource | pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Typed chunks of a log, in order; raises DataError if no record is good or too many are bad."""

        def typed(frame: pl.DataFrame) -> list[TypedColumns]:
            found = [parse_key(frame[self.schema.user], "user", self.schema.user_encoding)]
            found.append(parse_key(frame[self.schema.item], "item", self.schema.item_encoding))
            if self.schema.time is not None:
                found.append(parse_time(frame[self.schema.time], self.schema.time_unit))
            return found + self._features(frame, "event")

        keys = [self.schema.user, self.schema.item, *([self.schema.time] if self.schema.time else [])]
        kinds: list[tuple[str, type[pl.Int64 | pl.Float64] | None]] = [
            (self.schema.user, pl.Int64 if self.schema.user_encoding == "int64" else None),
            (self.schema.item, pl.Int64 if self.schema.item_encoding == "int64" else None),
        ]
        if self.schema.time is not None:
            kinds.append((self.schema.time, pl.Int64 if self.schema.time_unit != "iso8601" else None))
        wanted = _Wanted(list(self.schema.log_columns()), keys, self._kinds_of("event", kinds), self.schema.time)
        for chunk in self._chunks(source, wanted, typed, "reading the log"):
            yield self._encoded(chunk.drop(RECORD, _FILE))

    def table(self, source: LogSource | pl.DataFrame, *, scope: Scope, key: str) -> pl.DataFrame:
        """A whole side table with its key as column `#key`; repeated keys are quarantined."""
        columns = [key]
        for feature in self.schema.of_scope(scope):
            columns += [feature.source, *([feature.weights] if feature.weights else [])]

        def typed(frame: pl.DataFrame) -> list[TypedColumns]:
            ids = parse_key(frame[key], scope, self.encoders[scope].encoding)
            return [TypedColumns({KEY: ids.columns[scope]}, ids.problems), *self._features(frame, scope)]

        kind = pl.Int64 if self.encoders[scope].encoding == "int64" else None
        wanted = _Wanted(list(dict.fromkeys(columns)), [key], self._kinds_of(scope, [(key, kind)]))
        chunks = list(self._chunks(source, wanted, typed, f"reading the {scope} table"))
        table = self._first_of_each(pl.concat(chunks), scope).drop(RECORD, ORDER, _FILE)
        return self._encoded(table.rename({KEY: scope})).rename({scope: KEY})

    def _first_of_each(self, table: pl.DataFrame, scope: str) -> pl.DataFrame:
        again = ~table[KEY].is_first_distinct()
        reason = f"{scope} appears again in the table"
        self.quarantine.count(0, {reason: int(again.sum())} if again.any() else {})
        repeats = table.filter(again).drop(ORDER).rename({KEY: scope})
        for (file,), part in repeats.group_by(_FILE, maintain_order=True):
            rows = part.drop(_FILE, RECORD).iter_rows(named=True)
            entries = zip(part[RECORD].to_list(), [reason] * part.height, rows, strict=True)
            self.quarantine.write(str(file), entries)
        self.quarantine.check_share()
        return table.filter(~again)

    def _encoded(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Replaces texts by provisional ids; after the quarantine, so that bad records add no text to a dictionary."""
        for name, kind in frame.schema.items():
            if kind == pl.String:
                frame = frame.with_columns(self.encoders[name].provisional(frame[name]).alias(name))
            elif kind == pl.List(pl.String):
                frame = frame.with_columns(self.encoders[name].provisional_lists(frame[name]).alias(name))
        return frame

    def _features(self, frame: pl.DataFrame, scope: Scope) -> list[TypedColumns]:
        features = self.schema.of_scope(scope)
        return [parse_feature(frame, one, self.schema.encoding_of(one)) for one in features]

    def _kinds_of(self, scope: Scope, kinds: list[tuple[str, type[pl.Int64 | pl.Float64] | None]]) -> NumberKinds:
        """The columns that may be read as numbers at once: those whose typed values are the same then."""
        for feature in self.schema.of_scope(scope):
            kinds.append((feature.source, pl.Float64 if feature.kind == "number" else None))
            if feature.weights is not None:
                kinds.append((feature.weights, None))
        found: dict[str, set[type[pl.Int64 | pl.Float64] | None]] = {}
        for column, kind in kinds:
            found.setdefault(column, set()).add(kind)
        return {column: kind for column, several in found.items() if len(several) == 1 and (kind := several.pop())}

    def _chunks(
        self,
        source: LogSource | pl.DataFrame,
        wanted: _Wanted,
        typed: Callable[[pl.DataFrame], list[TypedColumns]],
        phase: str,
    ) -> Iterator[pl.DataFrame]:
        num_kept, quarantine = 0, self.quarantine
        for raw in read_raw(source, wanted.columns, keys=wanted.keys, numbers=wanted.numbers):
            parts = typed(raw.frame)
            if raw.as_text is not None and wanted.needs_text(raw.frame, parts):
                raw = RawChunk(raw.file, raw.as_text(), raw.broken)  # noqa: PLW2901
                parts = typed(raw.frame)
            chunk = self._clean(raw, parts)
            num_kept += chunk.height
            num_read, num_bad = quarantine.num_read, quarantine.num_bad
            if num_read != num_kept + num_bad:
                raise AssertionError(f"{raw.file}: read {num_read}, kept {num_kept}, quarantined {num_bad}")
            self.progress(phase, num_read)
            yield chunk
        quarantine.check_share()
        if not num_kept:
            where = "the frame" if isinstance(source, pl.DataFrame) else ", ".join(source.paths)
            raise DataError(
                f"{where} has no good record ({quarantine.num_read:,} read, {quarantine.num_bad:,} quarantined), so there is nothing to train on; nothing was written. Check the file and the column mapping."
            )

    def _clean(self, raw: RawChunk, parts: list[TypedColumns]) -> pl.DataFrame:
        """The rows without a problem; all others go to the quarantine, in the order of the file."""
        problems = [problem for part in parts for problem in part.problems]
        which = np.full(raw.frame.height, -1)
        for index in reversed(range(len(problems))):  # a row's first problem is the one reported
            which[problems[index][0].to_numpy()] = index
        first_order = self.quarantine.num_read
        reasons = Counter(broken.reason for broken in raw.broken)
        for mask, reason in problems:
            self.quarantine.num_texts[reason] += int(mask.sum()) if reason in _TEXT_IDS else 0
        for index, count in zip(*np.unique(which[which >= 0], return_counts=True), strict=True):
            reasons[problems[index][1]] += int(count)
        self.quarantine.count(raw.frame.height + len(raw.broken), reasons)
        hopeless = self.quarantine.is_hopeless()
        if reasons:
            listed = _first_of_reasons(which) if hopeless else which
            self.quarantine.write(raw.file, _entries(raw, listed, [reason for _, reason in problems]))
        if hopeless:
            raise self.quarantine.too_many(" so far")
        own = [
            pl.int_range(first_order, first_order + raw.frame.height, eager=True).alias(ORDER),
            pl.repeat(raw.file, raw.frame.height, dtype=pl.Categorical, eager=True).alias(_FILE),
            raw.frame[RECORD],
        ]
        columns = [series.alias(name) for part in parts for name, series in part.columns.items()]
        return pl.DataFrame([*own, *columns]).filter(pl.Series(which < 0))


def _first_of_reasons(which: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keeps only the first row of each reason, enough for an error message."""
    numbers, places = np.unique(which, return_index=True)
    first = np.full_like(which, -1)
    first[places] = numbers
    return first


def _entries(raw: RawChunk, which: NDArray[np.int64], reasons: list[str]) -> Iterator[tuple[int, str, object]]:
    """The bad records of a chunk in the order of the file; `which` is the index of a row's reason, or -1."""
    bad = np.flatnonzero(which >= 0)
    frame = raw.frame[bad]
    row_reasons = (reasons[index] for index in which[bad].tolist())
    rows: Iterator[dict[str, Any]] = frame.drop(RECORD).iter_rows(named=True)
    if any(frame[name].str.starts_with(JSON_MARK).any() for name, kind in frame.schema.items() if kind == pl.String):
        rows = ({name: shown(value) for name, value in row.items()} for row in rows)
    return heapq.merge(
        zip(frame[RECORD].to_list(), row_reasons, rows, strict=True), raw.broken, key=lambda entry: entry[0]
    )
