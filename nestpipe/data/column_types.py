"""Parses raw columns into typed ones, and reports which rows failed and why.

Each parser takes a raw series of any type and returns a typed series and (mask, reason) pairs; values under a mask are
undefined. Ids that will be hashed or numbered stay text. A reason is a category, the same text for all its rows, so that
reasons can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from nestpipe.data.raw_chunk import JSON_MARK
from nestpipe.data.schema import Encoding, Feature, TimeUnit
from nestpipe.errors import DataError

END_OF_TIME_MS = 4_133_980_800_000  # 2101-01-01; a later time is a wrong unit or a placeholder such as 9999-12-31
# from these values on a float cannot represent every whole number
_INEXACT: dict[pl.DataType, float] = {pl.Float16(): 2.0**11, pl.Float32(): 2.0**24, pl.Float64(): 2.0**53}
_MS_FROM = 100_000_000_000  # auto: 1973 in milliseconds; in seconds no legal time comes near it, so units never overlap
_WANTED = {"int64": "an int64", "hash": "a text or whole number", "dictionary": "a text or whole number"}
_ISO_FORM = "an ISO 8601 date, like 2024-05-01 or 2024-05-01T10:00:00+02:00"
_TIME_FORMS = {"iso8601": _ISO_FORM, "s": "a number", "ms": "a number", "auto": f"a number or {_ISO_FORM}"}
_MISSING_NUMBERS = ("nan", "null", "none", "na", "n/a", "\\n")

Problem = tuple[pl.Series, str]


@dataclass(frozen=True, slots=True, eq=False)
class TypedColumns:
    """Typed columns by name, and their problems, the most specific first."""

    columns: dict[str, pl.Series]
    problems: list[Problem]


def parse_key(raw: pl.Series, name: str, encoding: Encoding) -> TypedColumns:
    """A user or item id, which is required."""
    values, missing, bad = _id_values(_scalars(raw), encoding)
    return TypedColumns({name: values}, [(missing, f"{name} is missing"), (bad, f"{name} is not {_WANTED[encoding]}")])


def parse_time(raw: pl.Series, unit: TimeUnit) -> TypedColumns:
    """Milliseconds since 1970 (UTC where the text names no offset)."""
    raw = _scalars(raw)
    missing = _is_missing(raw)
    times = _milliseconds(raw, unit)
    coarse = _is_coarse(raw) & ~missing
    bad = times.is_null() & ~missing
    low, high = times < 0, times >= END_OF_TIME_MS
    problems = [
        (missing, "time is missing"),
        (
            coarse,
            f"time is too large for {raw.dtype}, which has lost its last digits (write it as an integer or float64)",
        ),
        (bad, f"time is not {_TIME_FORMS[unit]}"),
    ]
    if unit == "s":
        in_ms = high & (times < END_OF_TIME_MS * 1000)
        problems.append(
            (in_ms, "time is after the year 2100 when read as seconds, but fits milliseconds (time unit ms?)")
        )
    problems += [(low, "time is before 1970"), (high, "time is after the year 2100")]
    return TypedColumns({"time": times}, [(mask.fill_null(False), reason) for mask, reason in problems])


def parse_feature(frame: pl.DataFrame, feature: Feature, encoding: Encoding) -> TypedColumns:
    """The typed column(s) of a feature: its name, and name.weights if it has weights."""
    raw = frame[feature.source]
    if feature.kind == "number":
        return _parse_number(raw, feature)
    if feature.kind == "vector":
        return _parse_vector(raw, feature)
    if feature.kind == "id":
        values, _, bad = _id_values(_scalars(raw), encoding)
        return TypedColumns({feature.name: values}, [(bad, f"{feature.name} is not {_WANTED[encoding]}")])
    return _parse_ids(frame, feature, encoding)


def _refuse(raw: pl.Series, part: pl.DataType) -> None:
    """Raises DataError if values of type `part` (of the column or of its lists) cannot be ids or numbers."""
    if part.is_nested() or part in (pl.Binary, pl.Duration, pl.Object):
        raise DataError(
            f"column '{raw.name}' has type {raw.dtype}, which cannot be read as ids, times or numbers. Map another column in the schema, or convert it."
        )


def _scalars(raw: pl.Series) -> pl.Series:
    """The column itself; raises DataError unless its type has one value per row."""
    _refuse(raw, raw.dtype)
    return raw


def _text(raw: pl.Series) -> pl.Series:
    """Text without surrounding blanks; null if nothing is left."""
    text = raw.cast(pl.String, strict=False).str.strip_chars()
    return text.set(text == "", None)


def _is_missing(raw: pl.Series) -> pl.Series:
    if raw.dtype.is_float():
        return raw.is_null() | raw.is_nan().fill_null(False)
    return raw.is_null() if raw.dtype.is_numeric() else _text(raw).is_null()


def _is_coarse(raw: pl.Series) -> pl.Series:
    """Which float16 and float32 values may have lost digits; float64 represents every legal time."""
    if raw.dtype in (pl.Float16, pl.Float32):
        return (raw.abs() >= _INEXACT[raw.dtype]).fill_null(False)
    return pl.repeat(False, len(raw), eager=True)


def _id_values(raw: pl.Series, encoding: Encoding) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Int64 ids, or the texts that are to be hashed or numbered; then which are missing and which are bad."""
    frame, missing = raw.to_frame("v"), _is_missing(raw)
    values = frame.select(_ids(pl.col("v"), raw.dtype, encoding, decimals=False))["v"]
    if (values.is_null() & ~missing).any():  # parsing 12.0 is slow, so it is tried only if something failed
        values = frame.select(_ids(pl.col("v"), raw.dtype, encoding, decimals=True))["v"]
    return values, missing, values.is_null() & ~missing


def _ids(value: pl.Expr, kind: pl.DataType, encoding: Encoding, *, decimals: bool) -> pl.Expr:
    """Values of a type as int64 or text, null if missing or bad; with `decimals` the text 12.0 means 12."""
    target = pl.Int64() if encoding == "int64" else pl.String()
    if kind == pl.Boolean:
        return pl.when(False).then(value.cast(target))
    if kind.is_integer():
        return value.cast(target, strict=False)
    if kind.is_float():
        exact = (value.round() == value) & (value.abs() < _INEXACT[kind])
        return pl.when(exact).then(value).cast(pl.Int64, strict=False).cast(target)
    text = value.cast(pl.String, strict=False).str.strip_chars()
    text = pl.when((text != "") & ~text.str.starts_with(JSON_MARK)).then(text)
    if kind.is_decimal() or (decimals and encoding == "int64"):
        text = text.str.replace(r"^([+-]?\d+)\.0+$", "${1}")
        return text.cast(pl.Int64, strict=False).cast(target)
    return text.cast(target, strict=False)


def _milliseconds(raw: pl.Series, unit: TimeUnit) -> pl.Series:
    if raw.dtype in (pl.Date, pl.Datetime):
        return raw.dt.timestamp("ms")
    if unit == "iso8601":
        return _iso_milliseconds(_text(raw))
    if unit == "auto":
        return _guessed_milliseconds(raw)
    scale = 1000 if unit == "s" else 1
    whole = pl.repeat(None, len(raw), dtype=pl.Int64, eager=True)
    if not raw.dtype.is_float():
        whole, _, _ = _id_values(raw, "int64")
    # Whole numbers stay integers, because a float would round large ones. The clip prevents overflow.
    whole = whole.clip(-(2**53), 2**53) * scale
    if not whole.null_count():
        return whole
    fraction = raw if raw.dtype.is_numeric() else _text(raw).cast(pl.Float64, strict=False)
    rounded = (fraction.cast(pl.Float64) * scale).clip(-(2.0**62), 2.0**62).round()
    return whole.zip_with(whole.is_not_null(), rounded.set(rounded.is_nan(), None).cast(pl.Int64, strict=False))


def _guessed_milliseconds(raw: pl.Series) -> pl.Series:
    """Each value by itself: a number is in seconds or, from 1973 in milliseconds on, in milliseconds; else ISO 8601."""
    in_ms = _milliseconds(raw, "ms")
    times = _milliseconds(raw, "s").zip_with((in_ms < _MS_FROM).fill_null(True), in_ms)
    if raw.dtype.is_float():
        return times
    if raw.dtype.is_integer() and not is_date_number(raw).any():
        return times
    text = _text(raw)
    # 20240501 is a whole number of seconds in 1970 and a date; nobody writes the former.
    is_text = times.is_null() | text.str.contains(r"^(19|20)\d{6}$").fill_null(False)
    return times.zip_with(~is_text, _iso_milliseconds(text)) if is_text.any() else times


def is_date_number(numbers: pl.Series) -> pl.Series:
    """Which whole numbers are dates such as 20240501."""
    return numbers.is_between(19_000_000, 20_999_999)


def _iso_milliseconds(text: pl.Series) -> pl.Series:
    times = _iso_times(text)
    if (times.is_null() & text.is_not_null()).any():
        times = times.zip_with(times.is_not_null(), _iso_times(_extended(text)))
    return times


def _iso_times(text: pl.Series) -> pl.Series:
    """Milliseconds of the extended format; a date is its midnight, and UTC where there is no offset."""
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


def _extended(text: pl.Series) -> pl.Series:
    """Rarer legal forms converted to the usual one: 20240501T100000,5+02 becomes 2024-05-01T10:00:00.5+02:00."""
    for pattern, replacement in (
        (r"^(\d{4})(\d\d)(\d\d)(\D|$)", "${1}-${2}-${3}${4}"),
        (r"^(\d{4}-\d\d-\d\d)[T ]+(\d)", "${1}T${2}"),
        (r"T(\d\d)(\d\d)(\d\d)", "T${1}:${2}:${3}"),
        (r"T(\d\d)(\d\d)(\D|$)", "T${1}:${2}${3}"),
        (r"(\d),(\d)", "${1}.${2}"),
        (r" *(Z|UTC|GMT)$", "+00:00"),
        (r"T(.*\d) *([+-]\d\d)$", "T${1}${2}:00"),
        (r"T(.*\d) +([+-])", "T${1}${2}"),
    ):
        text = text.str.to_uppercase().str.replace(pattern, replacement)
    return text


def _parse_number(raw: pl.Series, feature: Feature) -> TypedColumns:
    raw = _scalars(raw)
    missing = _is_missing(raw)
    if raw.dtype.is_numeric() or raw.dtype == pl.Boolean:
        values = raw.cast(pl.Float32, strict=False)
    else:
        text = _text(raw)
        missing |= text.str.to_lowercase().is_in(_MISSING_NUMBERS).fill_null(False)
        if text.str.starts_with(JSON_MARK).any():
            text = text.replace([JSON_MARK + "true", JSON_MARK + "false"], ["1", "0"])
        # Through Float64, so that a number outside of float32 becomes infinite instead of null.
        values = text.cast(pl.Float64, strict=False).cast(pl.Float32, strict=False)
    bad = ~values.is_finite().fill_null(False) & ~missing
    problems = [(bad, f"{feature.name} is not a finite float32")]
    if feature.missing == "refuse":
        problems.append((missing, f"{feature.name} is missing"))
    return TypedColumns({feature.name: values.set(missing, float("nan")).fill_null(float("nan"))}, problems)


def _inner(lists: pl.Series) -> pl.DataType:
    """The type of the elements of lists."""
    inner: pl.DataType = lists.dtype.inner  # type: ignore[attr-defined]
    return inner


def _lists(raw: pl.Series, separator: str) -> pl.Series:
    """A list per row; empty if the value is missing."""
    if isinstance(raw.dtype, pl.Array):
        raw = raw.arr.to_list()
    if isinstance(raw.dtype, pl.List):
        _refuse(raw, _inner(raw))
    elif raw.dtype.is_numeric() or raw.dtype == pl.Boolean:
        present = pl.lit(~_is_missing(raw))
        raw = raw.to_frame("v").select(pl.when(present).then(pl.concat_list("v")))["v"]
    else:
        raw = _split(_text(_scalars(raw)), separator)
    elements = raw.to_frame("v").select(pl.col("v").fill_null([]))
    if raw.dtype == pl.List(pl.String):
        elements = elements.select(pl.col("v").list.eval(pl.element().str.strip_chars()))
    return elements["v"]


def _split(text: pl.Series, separator: str) -> pl.Series:
    """Texts split at the separator; elements of JSON lists are not split."""
    lists = text.str.split(separator)
    marked = text.str.starts_with(JSON_MARK + "[").fill_null(False)
    if not marked.any():
        return lists
    decoded = text.set(~marked, None).str.slice(len(JSON_MARK)).str.json_decode(pl.List(pl.String))
    return decoded.zip_with(marked, lists)


def _any_null(lists: pl.Series) -> pl.Series:
    return lists.to_frame("v").select(pl.col("v").list.eval(pl.element().is_null()).list.any())["v"].fill_null(False)


def _float_lists(raw: pl.Series, separator: str) -> tuple[pl.Series, pl.Series]:
    lists = _lists(raw, separator).cast(pl.List(pl.Float64), strict=False).cast(pl.List(pl.Float32))
    finite = lists.to_frame("v").select(pl.col("v").list.eval(pl.element().is_finite().fill_null(False)).list.all())[
        "v"
    ]
    return lists, ~finite


def _parse_vector(raw: pl.Series, feature: Feature) -> TypedColumns:
    lists, bad = _float_lists(raw, feature.separator)
    lengths = lists.list.len()
    wrong = (lengths != feature.dim) & (lengths > 0)
    fits = lists.to_frame("v").select(pl.when(pl.lit(lengths == feature.dim)).then(pl.col("v")))["v"]
    problems = [
        (wrong, f"{feature.name} does not have {feature.dim} values"),
        (bad, f"{feature.name} has a value that is not a finite float32"),
    ]
    return TypedColumns({feature.name: fits.cast(pl.Array(pl.Float32, feature.dim))}, problems)


def _parse_ids(frame: pl.DataFrame, feature: Feature, encoding: Encoding) -> TypedColumns:
    lists = _lists(frame[feature.source], feature.separator)
    element = _ids(pl.element(), _inner(lists), encoding, decimals=True)
    values = lists.to_frame("v").select(pl.col("v").list.eval(element))["v"]
    problems = [(_any_null(values), f"{feature.name} has a value that is not {_WANTED[encoding]}")]
    if feature.weights is None:
        return TypedColumns({feature.name: values}, problems)
    weights, bad = _float_lists(frame[feature.weights], feature.separator)
    problems.append((weights.list.len() != values.list.len(), f"{feature.name} and its weights differ in number"))
    problems.append((bad, f"{feature.name} has a weight that is not a finite float32"))
    return TypedColumns({feature.name: values, f"{feature.name}.weights": weights}, problems)
