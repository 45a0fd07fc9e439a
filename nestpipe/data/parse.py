"""Raw columns to typed ones, and which rows failed and why.

Each parser takes a raw series of any type and gives a typed series plus (mask, reason) pairs; the values under a mask
mean nothing. Ids that are to be hashed or numbered stay text. A reason is a category, the same text for all rows it holds for, so that reasons can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from nestpipe.data.schema import Encoding, Feature, TimeUnit
from nestpipe.errors import DataError

END_OF_TIME_MS = 4_133_980_800_000  # 2101-01-01; a later time is a wrong unit or a placeholder such as 9999-12-31
_LARGEST_EXACT = 2.0**53  # a float above this may have lost the last digits of an id
_MISSING_NUMBERS = ("nan", "null", "none", "na", "n/a", "\\n")

Problem = tuple[pl.Series, str]


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """Typed columns by name, and the problems found on the way, the telling one first."""

    columns: dict[str, pl.Series]
    problems: list[Problem]


def parse_key(raw: pl.Series, name: str, encoding: Encoding) -> Typed:
    """A user or item id, which must be there."""
    raw = _scalars(raw)
    values, bad = _id_values(raw, encoding)
    missing = _is_missing(raw)
    return Typed({name: values}, [(missing, f"{name} is missing"), (bad, f"{name} is not an int64")])


def parse_time(raw: pl.Series, unit: TimeUnit) -> Typed:
    """Milliseconds since 1970 (UTC where the text names no offset)."""
    raw = _scalars(raw)
    missing = _is_missing(raw)
    times = _milliseconds(raw, unit)
    bad = times.is_null() & ~missing
    low, high = times < 0, times >= END_OF_TIME_MS
    problems = [
        (missing, "time is missing"),
        (bad, f"time is not {'an ISO 8601 date' if unit == 'iso8601' else 'a number'}"),
    ]
    if unit == "s":
        in_ms = high & (times < END_OF_TIME_MS * 1000)
        problems.append(
            (in_ms, "time is after the year 2100 when read as seconds, but fits milliseconds (time unit ms?)")
        )
    problems += [(low, "time is before 1970"), (high, "time is after the year 2100")]
    return Typed({"time": times}, [(mask.fill_null(False), reason) for mask, reason in problems])


def parse_feature(frame: pl.DataFrame, feature: Feature) -> Typed:
    """The typed column(s) of a feature: its name, and name.weights if it has weights."""
    raw = frame[feature.source]
    if feature.kind == "number":
        return _parse_number(raw, feature)
    if feature.kind == "vector":
        return _parse_vector(raw, feature)
    if feature.kind == "id":
        values, bad = _id_values(_scalars(raw), feature.encoding)
        return Typed({feature.name: values}, [(bad, f"{feature.name} is not an int64")])
    return _parse_ids(frame, feature)


def _scalars(raw: pl.Series) -> pl.Series:
    """Lists of one become their element and other lists a text that is no number: one bad JSON value makes a list column."""
    if isinstance(raw.dtype, pl.List):
        texts = raw.cast(pl.List(pl.String))
        joined = "[" + texts.list.join(",", ignore_nulls=True) + "]"
        return texts.list.get(0, null_on_oob=True).zip_with(texts.list.len() == 1, joined)
    if raw.dtype.is_nested() or raw.dtype == pl.Binary:
        raise DataError(
            f"column '{raw.name}' is of type {raw.dtype}, which holds no single id, time or number. Map another column."
        )
    return raw


def _text(raw: pl.Series) -> pl.Series:
    """Text without surrounding blanks; null where nothing is left."""
    text = raw.cast(pl.String, strict=False).str.strip_chars()
    return text.set(text == "", None)


def _is_missing(raw: pl.Series) -> pl.Series:
    if raw.dtype.is_float():
        return raw.is_null() | raw.is_nan().fill_null(False)
    return _text(raw).is_null() if raw.dtype == pl.String else raw.is_null()


def _id_values(raw: pl.Series, encoding: Encoding) -> tuple[pl.Series, pl.Series]:
    if encoding != "int64":
        return _text(raw), pl.repeat(False, len(raw), eager=True)
    values = _integers(raw)
    return values, values.is_null() & ~_is_missing(raw)


def _integers(raw: pl.Series) -> pl.Series:
    if raw.dtype.is_float():
        exact = (raw.round() == raw) & (raw.abs() <= _LARGEST_EXACT)
        return raw.set(~exact.fill_null(False), None).cast(pl.Int64, strict=False)
    if raw.dtype.is_integer() or raw.dtype == pl.Boolean:
        return raw.cast(pl.Int64, strict=False)
    return _text(raw).cast(pl.Int64, strict=False)


def _milliseconds(raw: pl.Series, unit: TimeUnit) -> pl.Series:
    if raw.dtype in (pl.Date, pl.Datetime):
        return raw.dt.timestamp("ms")
    if unit == "iso8601":
        return _iso_milliseconds(_text(raw))
    scale = 1000 if unit == "s" else 1
    whole = _integers(raw) if not raw.dtype.is_float() else pl.repeat(None, len(raw), dtype=pl.Int64, eager=True)
    # whole numbers stay integers: a float would round large ones; the clip keeps the product inside int64
    whole = whole.clip(-(2**53), 2**53) * scale
    fraction = raw if raw.dtype.is_numeric() else _text(raw).cast(pl.Float64, strict=False)
    rounded = (fraction.cast(pl.Float64) * scale).clip(-(2.0**62), 2.0**62).round()
    return whole.zip_with(whole.is_not_null(), rounded.set(rounded.is_nan(), None).cast(pl.Int64, strict=False))


def _iso_milliseconds(text: pl.Series) -> pl.Series:
    frame = text.to_frame("text").with_columns(
        pl.col("text").str.replace(" ", "T", literal=True).str.replace("[zZ]$", "+00:00")
    )
    dated = (
        pl.when(pl.col("text").str.contains("T", literal=True))
        .then(pl.col("text"))
        .otherwise(pl.col("text") + "T00:00:00")
    )
    zoned = pl.when(dated.str.contains(r"T.*[+-]\d\d:?\d\d$")).then(dated).otherwise(dated + "+00:00")
    formats = ("%Y-%m-%dT%H:%M:%S%.f%:z", "%Y-%m-%dT%H:%M%:z")
    parsed = [zoned.str.to_datetime(form, time_unit="ms", strict=False) for form in formats]
    return frame.select(pl.coalesce(parsed).dt.timestamp("ms"))["text"]


def _parse_number(raw: pl.Series, feature: Feature) -> Typed:
    raw = _scalars(raw)
    missing = _is_missing(raw)
    if raw.dtype.is_numeric() or raw.dtype == pl.Boolean:
        values = raw.cast(pl.Float32, strict=False)
    else:
        text = _text(raw)
        missing |= text.str.to_lowercase().is_in(_MISSING_NUMBERS).fill_null(False)
        # by way of Float64, so that a number outside float32 becomes infinite instead of null
        values = text.cast(pl.Float64, strict=False).cast(pl.Float32, strict=False)
    bad = ~values.is_finite().fill_null(False) & ~missing
    problems = [(bad, f"{feature.name} is not a finite float32")]
    if feature.missing == "refuse":
        problems.append((missing, f"{feature.name} is missing"))
    return Typed({feature.name: values.set(missing, float("nan")).fill_null(float("nan"))}, problems)


def _lists(raw: pl.Series, separator: str) -> pl.Series:
    """A list per row; an empty one where the value is missing."""
    if isinstance(raw.dtype, pl.Array):
        raw = raw.arr.to_list()
    if not isinstance(raw.dtype, pl.List):
        text = _text(raw)
        raw = text.str.split(separator)
    elements = raw.to_frame("v").select(pl.col("v").fill_null([]))
    if raw.dtype == pl.List(pl.String):
        elements = elements.select(pl.col("v").list.eval(pl.element().str.strip_chars()))
    return elements["v"]


def _any_null(lists: pl.Series) -> pl.Series:
    return lists.to_frame("v").select(pl.col("v").list.eval(pl.element().is_null()).list.any())["v"].fill_null(False)


def _float_lists(raw: pl.Series, separator: str) -> tuple[pl.Series, pl.Series]:
    lists = _lists(raw, separator).cast(pl.List(pl.Float64), strict=False).cast(pl.List(pl.Float32))
    finite = lists.to_frame("v").select(pl.col("v").list.eval(pl.element().is_finite().fill_null(False)).list.all())[
        "v"
    ]
    return lists, ~finite


def _parse_vector(raw: pl.Series, feature: Feature) -> Typed:
    lists, bad = _float_lists(raw, feature.separator)
    lengths = lists.list.len()
    wrong = (lengths != feature.dim) & (lengths > 0)
    fits = lists.to_frame("v").select(pl.when(pl.lit(lengths == feature.dim)).then(pl.col("v")))["v"]
    problems = [
        (wrong, f"{feature.name} does not have {feature.dim} values"),
        (bad, f"{feature.name} has a value that is not a finite float32"),
    ]
    return Typed({feature.name: fits.cast(pl.Array(pl.Float32, feature.dim))}, problems)


def _parse_ids(frame: pl.DataFrame, feature: Feature) -> Typed:
    lists = _lists(frame[feature.source], feature.separator)
    if feature.encoding == "int64":
        values, what = lists.cast(pl.List(pl.Int64), strict=False), "an int64"
    else:
        texts = lists.cast(pl.List(pl.String)).to_frame("v")
        values, what = texts.select(pl.col("v").list.eval(pl.element().replace("", None)))["v"], "a text"
    problems = [(_any_null(values), f"{feature.name} has a value that is not {what}")]
    if feature.weights is None:
        return Typed({feature.name: values}, problems)
    weights, bad = _float_lists(frame[feature.weights], feature.separator)
    problems.append((weights.list.len() != values.list.len(), f"{feature.name} and its weights differ in number"))
    problems.append((bad, f"{feature.name} has a weight that is not a finite float32"))
    return Typed({feature.name: values, f"{feature.name}.weights": weights}, problems)
