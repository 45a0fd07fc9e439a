"""Logs and side tables through a schema into clean typed chunks; bad records go to the quarantine.

    files -> raw chunks -> typed chunks (user, item, time in ms, features, `_order`)      read = kept + quarantined
                        -> quarantine.jsonl: file, record, reason, the raw values

`_order` numbers the records of the whole log; it decides among equal times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import polars as pl

from nestpipe.data.encode import Encoder
from nestpipe.data.parse import Typed, parse_feature, parse_key, parse_time
from nestpipe.data.schema import Schema, Scope
from nestpipe.data.source import RECORD, LogSource, RawChunk, read_raw
from nestpipe.errors import DataError

ORDER = "_order"
_EARLY = 1_000_000  # records after which a log with too many bad ones is given up before its end


@dataclass(slots=True)
class Quarantine:
    """The bad records of one log or table, written to a shared file, with counts per reason."""

    file: IO[str]
    max_share: float
    num_read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        return self.reasons.total()

    def add(self, *, file: str, record: int, reason: str, values: Mapping[str, object] | str) -> None:
        """One bad record."""
        entry = {"file": file, "record": record, "reason": reason, "values": values}
        self.file.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
        self.reasons[reason] += 1
        if reason not in self.first:
            shown = json.dumps(values, ensure_ascii=False, default=str)
            self.first[reason] = f"record {record:,} of {file}: {shown[:200]}"

    def check_share(self, *, final: bool) -> None:
        """Raises DataError if too many records are bad, with the most common reasons."""
        if (final or self.num_read >= _EARLY) and self.num_bad > self.max_share * self.num_read:
            lines = [
                f"  - {count:,} x {reason}; first {self.first[reason]}" for reason, count in self.reasons.most_common(5)
            ]
            raise DataError(
                f"{self.num_bad:,} of {self.num_read:,} records are bad ({self.num_bad / self.num_read:.1%}), more than the "
                f"{self.max_share:.1%} that max_quarantine_share allows; nothing was written. Most common reasons:\n"
                + "\n".join(lines)
                + "\n"
                "Mend the log or the column mapping, or raise max_quarantine_share."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Types the chunks of a log or of a side table."""

    schema: Schema
    encoders: Mapping[str, Encoder]
    quarantine: Quarantine
    progress: Callable[[str, int], None] = lambda phase, num_rows: None

    def log(self, source: LogSource | pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Typed chunks of a log, in order; raises DataError if nothing is left or too much is bad."""

        def typed(frame: pl.DataFrame) -> list[Typed]:
            found = [parse_key(frame[self.schema.user], "user", self.schema.user_encoding)]
            found.append(parse_key(frame[self.schema.item], "item", self.schema.item_encoding))
            if self.schema.time is not None:
                found.append(parse_time(frame[self.schema.time], self.schema.time_unit))
            return found + self._features(frame, "event")

        for chunk in self._chunks(source, list(self.schema.log_columns()), typed, "reading the log"):
            yield self._encoded(chunk.drop(RECORD))

    def table(self, source: LogSource | pl.DataFrame, *, scope: Scope, key: str) -> pl.DataFrame:
        """A whole side table, its key as column 'key'; later records of a key are quarantined."""
        columns = [key]
        for feature in self.schema.of_scope(scope):
            columns += [feature.source, *([feature.weights] if feature.weights else [])]

        def typed(frame: pl.DataFrame) -> list[Typed]:
            ids = parse_key(frame[key], scope, self.encoders[scope].encoding)
            return [Typed({"key": ids.columns[scope]}, ids.problems), *self._features(frame, scope)]

        chunks = list(self._chunks(source, list(dict.fromkeys(columns)), typed, f"reading the {scope} table"))
        table = self._first_of_each(pl.concat(chunks), scope).drop(RECORD, ORDER)
        return self._encoded(table.rename({"key": scope})).rename({scope: "key"})

    def _first_of_each(self, table: pl.DataFrame, scope: str) -> pl.DataFrame:
        again = ~table["key"].is_first_distinct()
        reason = f"{scope} appears again in the table"
        for key, record in table.filter(again).select("key", RECORD).iter_rows():
            self.quarantine.add(file=f"{scope} table", record=record, reason=reason, values={"key": key})
        self.quarantine.check_share(final=True)
        return table.filter(~again)

    def _encoded(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Texts replaced by provisional ids; only now, so that a quarantined record adds no text to a dictionary."""
        for name, kind in frame.schema.items():
            if kind == pl.String:
                frame = frame.with_columns(self.encoders[name].provisional(frame[name]).alias(name))
            elif kind == pl.List(pl.String):
                frame = frame.with_columns(self.encoders[name].provisional_lists(frame[name]).alias(name))
        return frame

    def _features(self, frame: pl.DataFrame, scope: Scope) -> list[Typed]:
        return [parse_feature(frame, feature) for feature in self.schema.of_scope(scope)]

    def _chunks(
        self,
        source: LogSource | pl.DataFrame,
        columns: list[str],
        typed: Callable[[pl.DataFrame], list[Typed]],
        phase: str,
    ) -> Iterator[pl.DataFrame]:
        num_kept, sheet = 0, self.quarantine
        for raw in read_raw(source, columns):
            chunk = self._clean(raw, typed(raw.frame))
            sheet.num_read += raw.frame.height + len(raw.broken)
            num_kept += chunk.height
            if sheet.num_read != num_kept + sheet.num_bad:
                raise AssertionError(f"{raw.file}: read {sheet.num_read}, kept {num_kept}, quarantined {sheet.num_bad}")
            sheet.check_share(final=False)
            self.progress(phase, sheet.num_read)
            yield chunk
        sheet.check_share(final=True)
        if not num_kept:
            where = "the frame" if isinstance(source, pl.DataFrame) else ", ".join(source.paths)
            raise DataError(
                f"{where} has no usable record ({sheet.num_read:,} read, {sheet.num_bad:,} quarantined), so there is nothing to build."
            )

    def _clean(self, raw: RawChunk, parts: list[Typed]) -> pl.DataFrame:
        """The rows without a problem; the others and the broken records go to the quarantine, in the order of the file."""
        problems = [problem for part in parts for problem in part.problems]
        which = np.full(raw.frame.height, -1)
        for index in reversed(range(len(problems))):  # the first problem of a row is the one that is told
            which[problems[index][0].to_numpy()] = index
        bad: list[tuple[int, str, Mapping[str, object] | str]] = list(raw.broken)
        for place in np.flatnonzero(which >= 0).tolist():
            values = raw.frame.row(place, named=True)
            bad.append((values.pop(RECORD), problems[which[place]][1], values))
        for record, reason, shown in sorted(bad, key=lambda entry: entry[0]):
            self.quarantine.add(file=raw.file, record=record, reason=reason, values=shown)
        order = pl.int_range(self.quarantine.num_read, self.quarantine.num_read + raw.frame.height, eager=True).alias(
            ORDER
        )
        columns = [series.alias(name) for part in parts for name, series in part.columns.items()]
        return pl.DataFrame([order, raw.frame[RECORD], *columns]).filter(pl.Series(which < 0))


def read_events(
    source: LogSource | pl.DataFrame, schema: Schema, *, encoders: Mapping[str, Encoder], quarantine: Quarantine
) -> Iterator[pl.DataFrame]:
    """Typed chunks of a log: columns user, item, time, the features and `_order`; see `Reader` for tables."""
    yield from Reader(schema, encoders, quarantine).log(source)
