"""Proves that a block of CSV is regular, so that Polars may parse it at once.

Polars fills in missing fields, drops surplus ones and guesses at stray quotes, so its word is not enough. A block is regular if

    quotes       pair up: one opens at the start of a field, one closes at its end, "" inside stands for a quote
    delimiters   outside of quotes: after every (columns - 1) of them comes one line end

A few passes over the bytes decide that. `record_splitter` cuts every other block record by record; on regular blocks both give
the same records.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.record_splitter import MAX_OPEN, CleanRecords

_QUOTE, _NEWLINE = ord('"'), ord("\n")


def cut_clean(data: bytes, *, separator: bytes, num_columns: int, quoted: bool) -> tuple[CleanRecords, int] | None:
    r"""The whole records of a regular block with \n as line end, and the bytes they take; None if irregular."""
    if num_columns < 2:
        return None  # a blank line is no record, but would be a field of its own
    if quoted and b'"' in data:
        return _cut_quoted(data, separator=separator, num_columns=num_columns)
    used = data.rfind(b"\n") + 1
    body = data[:used]
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n")
    text = np.frombuffer(body, np.uint8)
    places = np.flatnonzero((text == separator[0]) | (text == _NEWLINE))
    num_records = _num_records(text[places] == _NEWLINE, num_columns)
    return (CleanRecords(body, num_records), used) if num_records else None


def _num_records(is_end: NDArray[np.bool_], num_columns: int) -> int:
    """Of delimiters and line ends in order: the number of records if each has all its fields, else 0."""
    num_records, surplus = divmod(len(is_end), num_columns)
    ends = is_end[num_columns - 1 :: num_columns]
    return num_records if not surplus and ends.all() and int(is_end.sum()) == num_records else 0


def _cut_quoted(data: bytes, *, separator: bytes, num_columns: int) -> tuple[CleanRecords, int] | None:
    has_returns = b"\r" in data
    unified = data.replace(b"\r\n", b"\n") if has_returns else data
    text = np.frombuffer(unified, np.uint8)
    # A border is a delimiter or a line end; the text begins behind one.
    is_border = np.ones(len(text) + 1, np.bool_)
    np.logical_or(text == separator[0], text == _NEWLINE, out=is_border[1:])
    places = np.flatnonzero(is_border[1:] | (text == _QUOTE))
    kinds = text.take(places)
    is_quote = kinds == _QUOTE
    quotes = np.flatnonzero(is_quote)
    is_outer = ~is_quote
    if len(quotes) % 2 or (quotes[1::2] - quotes[0::2] != 1).any():
        # Borders with an odd number of quotes before them are part of a field.
        is_outer &= ~np.logical_xor.accumulate(is_quote)
    outer = np.flatnonzero(is_outer)
    is_line_end = kinds.take(outer) == _NEWLINE
    line_ends = places.take(outer[is_line_end])
    if not len(line_ends):
        return None
    used = int(line_ends[-1]) + 1
    body, rest = unified[:used], unified[used:]
    # With returns, a line break inside of quotes may have been altered: the record splitter keeps it.
    is_altered = has_returns and (body.count(b"\n") != len(line_ends) or b"\n" in rest)
    if is_altered or len(rest) >= MAX_OPEN or int(np.diff(line_ends, prepend=-1).max()) >= MAX_OPEN:
        return None
    in_body = places.take(quotes)
    if not _are_paired(in_body[: np.searchsorted(in_body, used)], is_border[: used + 1]):
        return None
    num_records = _num_records(is_line_end[: len(outer) - int(is_line_end[::-1].argmax())], num_columns)
    return (CleanRecords(body, num_records), len(data) - len(rest)) if num_records else None


def _are_paired(quotes: NDArray[np.intp], is_border: NDArray[np.bool_]) -> bool:
    """Whether quotes open at the start of fields and close at their ends; is_border[i] tells of the byte before byte i."""
    opening, closing = quotes[0::2], quotes[1::2]
    if len(opening) != len(closing):
        return False
    starts, ends = is_border.take(opening), is_border[2:].take(closing)
    if starts.all() and ends.all():
        return True
    # "" inside of a field stands for a quote: a closing one and an opening one behind it.
    doubled = opening[1:] - closing[:-1] == 1
    return bool(starts[:1].all() and ends[-1:].all() and (starts[1:] | doubled).all() and (ends[:-1] | doubled).all())
