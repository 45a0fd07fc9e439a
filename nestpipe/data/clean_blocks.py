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

Bytes = NDArray[np.uint8]
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
    places = np.flatnonzero((text == separator[0]) | (text == _NEWLINE) | (text == _QUOTE))
    kinds = text[places]
    is_quote = kinds == _QUOTE
    is_inside = np.logical_xor.accumulate(is_quote)
    is_line_end = kinds == _NEWLINE
    outer_ends = np.flatnonzero(is_line_end & ~is_inside)
    if not len(outer_ends):
        return None
    last = int(outer_ends[-1]) + 1
    used = int(places[last - 1]) + 1
    body, rest = unified[:used], unified[used:]
    # With returns, a line break inside of quotes may have been altered: the record splitter keeps it.
    is_altered = has_returns and (int(is_line_end[:last].sum()) != len(outer_ends) or b"\n" in rest)
    if is_altered or len(rest) >= MAX_OPEN or not _are_paired(text[:used], places[:last][is_quote[:last]], separator):
        return None
    line_ends = places[outer_ends]
    if int(np.diff(line_ends, prepend=-1).max()) >= MAX_OPEN:
        return None
    is_outer = ~is_quote[:last] & ~is_inside[:last]
    num_records = _num_records(is_line_end[:last][is_outer], num_columns)
    return (CleanRecords(body, num_records), len(data) - len(rest)) if num_records else None


def _are_paired(text: Bytes, quotes: NDArray[np.intp], separator: bytes) -> bool:
    """Whether quotes open at the start of fields and close at their ends; "" inside is a closing and an opening one."""
    opening, closing = quotes[0::2], quotes[1::2]
    if len(opening) != len(closing):
        return False
    before = text[np.maximum(opening - 1, 0)]
    after = text[closing + 1]  # the text ends with a line end, so there is a byte behind every quote
    doubled = np.zeros(len(opening), np.bool_)
    doubled[1:] = opening[1:] == closing[:-1] + 1
    starts = (before == separator[0]) | (before == _NEWLINE) | (opening == 0) | doubled
    continued = np.append(doubled[1:], False)
    ends = (after == separator[0]) | (after == _NEWLINE) | continued
    return bool(starts.all() and ends.all())
