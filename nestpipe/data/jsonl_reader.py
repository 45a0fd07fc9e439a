"""Reads JSONL: lines of the usual form by one regular expression, all others by Python's parser.

    lines -> the form of the first line: its keys in order, every value a text without escapes, a number, true, false or null
          -> lines of that form: values captured by Polars
          -> all others: parsed one by one; broken ones keep their text and the reason

Polars' own JSON reader guesses types and drops what does not fit them, so it is not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from nestpipe.data.raw_chunk import (
    JSON_MARK,
    RECORD,
    BrokenRecord,
    NumberKinds,
    RawChunk,
    plain_numbers,
    require_columns,
)
from nestpipe.data.remote_files import name_of

_VALUE = r'"[^"\\\x00-\x1f]*"|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|true|false|null'
_FIRST = "first"  # the group of a line's opening brace, which tells whether the line has the form


def read_jsonl(
    path: Path,
    blocks: Iterator[bytes],
    *,
    wanted: Sequence[str],
    keys: Sequence[str],
    numbers: NumberKinds,
    split_all: bool,
) -> Iterator[RawChunk]:
    """A record may lack any key; a wanted key that no record of the file has is an error."""
    number, seen = 1, dict[str, None]()
    for lines in _line_blocks(blocks):
        if not len(lines):
            continue
        form = None if split_all or not wanted else _form_of(lines[0])
        values = pl.DataFrame() if form is None else lines.str.extract_groups(_pattern(form, wanted)).struct.unnest()
        fits = values[_FIRST].is_not_null() if form is not None else pl.repeat(False, len(lines), eager=True)
        rows, places, broken = [], [], []
        others = (~fits).arg_true()
        for place, text in zip(others.to_list(), lines.gather(others).to_list(), strict=True):
            row = _json_row(text)
            if isinstance(row, dict):
                rows.append(row)
                places.append(place)
            else:
                broken.append(BrokenRecord(number + place, row, text))
        first = not seen
        seen |= dict.fromkeys(form or () if fits.any() else ())
        seen |= dict.fromkeys(name for row in rows for name in row)
        if first and (rows or fits.any()):
            require_columns(name_of(path), list(seen), keys)
        frame = _parsed_frame(rows, places, wanted or seen)
        if fits.any():
            frame = pl.concat([frame, _captured_frame(values, fits, wanted)]).sort(RECORD)
        frame = frame.with_columns(pl.col(RECORD) + number)
        as_numbers = {} if split_all else plain_numbers(frame, numbers)
        yield RawChunk(
            name_of(path),
            frame.with_columns(**as_numbers),
            tuple(broken),
            as_text=(lambda text=frame: text) if as_numbers else None,  # type: ignore[misc]
        )
        number += len(lines)
    if seen:
        require_columns(name_of(path), list(seen), wanted)


def _line_blocks(blocks: Iterator[bytes]) -> Iterator[pl.Series]:
    """The lines of each block without their ends; blank lines are not records."""
    rest = b""
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        yield _lines(data[:end])
    yield _lines(rest)


def _lines(data: bytes) -> pl.Series:
    lines = pl.Series([data.decode()]).str.split("\n").explode()
    if b"\r" in data:
        lines = lines.str.strip_suffix("\r")
    return lines.filter(lines != "")


def _form_of(line: str) -> list[str] | None:
    """The keys of a line, if it is a flat object with distinct keys; their order is part of the form."""
    try:
        pairs = json.loads(line, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        return None
    names = [name for name, _ in pairs]
    return names if names and len(set(names)) == len(names) else None


def _pattern(form: Sequence[str], wanted: Sequence[str]) -> str:
    """Matches a whole line of this form; captures its opening brace and the wanted values."""
    groups = {name: f"v{place}" for place, name in enumerate(wanted)}
    fields = [
        f'"{_escaped(name)}" *: *' + (f"(?P<{groups[name]}>{_VALUE})" if name in groups else f"(?:{_VALUE})")
        for name in form
    ]
    return rf"^(?P<first>\{{) *{' *, *'.join(fields)} *\}}$"


def _escaped(name: str) -> str:
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in name)


def _captured_frame(values: pl.DataFrame, fits: pl.Series, wanted: Sequence[str]) -> pl.DataFrame:
    """The captured values as `_json_text` would give them, with the places of their lines."""
    kept = values.with_row_index(RECORD).filter(fits)
    columns = [kept[RECORD].cast(pl.Int64)]
    for place, name in enumerate(wanted):
        group = f"v{place}"
        raw = kept[group] if group in kept.columns else pl.repeat(None, kept.height, dtype=pl.String, eager=True)
        columns.append(_unwrapped(raw).alias(name))
    return pl.DataFrame(columns)


def _unwrapped(raw: pl.Series) -> pl.Series:
    """JSON scalars as texts: numbers without .0, booleans with their prefix, null as null."""
    is_text = raw.str.starts_with('"')
    if is_text.all():
        return raw.str.strip_prefix('"').str.strip_suffix('"')
    literal = raw.replace_strict(
        ["null", "true", "false"], [None, JSON_MARK + "true", JSON_MARK + "false"], default=raw, return_dtype=pl.String
    )
    literal = literal.str.replace(r"\.0+$", "")
    if not is_text.any():
        return literal
    return raw.str.strip_prefix('"').str.strip_suffix('"').zip_with(is_text.fill_null(False), literal)


def _parsed_frame(rows: list[dict[str, Any]], places: list[int], names: Iterable[str]) -> pl.DataFrame:
    columns = [_json_column(name, [row.get(name) for row in rows]) for name in names]
    return pl.DataFrame([pl.Series(RECORD, places, dtype=pl.Int64), *columns])


def _json_row(text: str) -> dict[str, Any] | str:
    """The object of a line with its numbers as text, or the reason why there is none."""
    try:
        row = _DECODER.decode(text)
        if not isinstance(row, dict):
            return "not a JSON object"
        # JSON can escape a lone surrogate, which is no character.
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "not valid text"
    except (ValueError, RecursionError):
        return "not a JSON object"
    return row


def _number_text(text: str) -> str:
    """A whole JSON number without its .0, so that 12.0 and 12 are the same id."""
    whole, _, fraction = text.partition(".")
    return text if fraction.strip("0") else whole


def _constant_text(name: str) -> str | None:
    """NaN means missing; an infinity is neither an id nor a legal number."""
    return None if name == "NaN" else JSON_MARK + name


# Built once: json.loads would build one per record.
_DECODER = json.JSONDecoder(parse_float=_number_text, parse_int=str, parse_constant=_constant_text)


def _json_column(name: str, values: list[Any]) -> pl.Series:
    return pl.Series(name, [_json_text(value) for value in values], dtype=pl.String)


def _json_text(value: Any) -> str | None:
    """Texts and numbers unchanged; lists, objects and booleans, also inside lists, as JSON with a prefix."""
    if isinstance(value, list):
        return JSON_MARK + json.dumps([_json_scalar(one) for one in value], ensure_ascii=False)
    return _json_scalar(value)


def _json_scalar(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else JSON_MARK + json.dumps(value, ensure_ascii=False)
