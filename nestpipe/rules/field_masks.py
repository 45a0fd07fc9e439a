"""Filters as masks over items, and fields as groups for `max_per`: numpy over whole columns, never a loop over items."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import StoredFeature
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.rules.item_attributes import Ints, ItemAttributes, Mask
from nestpipe.rules.rule_set import FieldFilter, Filters, RuleError, Scalar, ValueRange

_COMPARED = 4  # values that are compared one by one; more are looked up together
_LISTED = 10  # values that a message names


def field_of(attributes: ItemAttributes, field: str, where: str) -> Feature:
    """The feature behind a field of a rule; raises RuleError that names those that there are."""
    known = attributes.fields
    usable = [name for name, feature in known.items() if feature.kind != "vector"]
    if field not in known or field not in usable:
        what = "is no field of items" if field not in known else "is a vector, which no rule reads"
        there_are = ", ".join(usable) or "none; ingest the log with a table of items"
        raise RuleError(f"{where}.{field}", f"{what}; there are: {there_are}.")
    return known[field]


def filter_mask(attributes: ItemAttributes, filters: Filters, where: str) -> Mask:
    """The items [I] that pass every field of a filter; a missing value passes none. Raises RuleError."""
    mask = np.ones(len(attributes.items), np.bool_)
    for field, wanted in filters.items():
        feature = field_of(attributes, field, where)
        mask &= _field_mask(attributes, feature, wanted, f"{where}.{field}")
    return mask


def _field_mask(attributes: ItemAttributes, feature: Feature, wanted: FieldFilter, where: str) -> Mask:
    column = attributes.column(feature.name)
    if feature.kind == "number":
        return _in_range(column, wanted) if isinstance(wanted, ValueRange) else _is_number(column, wanted, where)
    if isinstance(wanted, ValueRange):
        raise RuleError(where, "is a range, but the field holds ids; name one or several of its values.")
    vocabulary = attributes.vocabulary("item" if feature.encoding == "item" else feature.name)
    numbers = [_number_of(vocabulary, one, where) for one in wanted]
    return rows_with(column, _equals_any(column.values, numbers))


def _in_range(column: StoredFeature, wanted: ValueRange) -> Mask:
    mask: Mask = ~np.isnan(column.values)
    if wanted.gte is not None:
        mask &= column.values >= wanted.gte
    if wanted.lte is not None:
        mask &= column.values <= wanted.lte
    return mask


def _is_number(column: StoredFeature, wanted: Sequence[Scalar], where: str) -> Mask:
    for one in wanted:
        if isinstance(one, str):
            raise RuleError(where, f"is {one[:60]!r}, but the field holds numbers.")
    return _equals_any(column.values, np.array(wanted, column.values.dtype).tolist())


def _number_of(vocabulary: Vocabulary, own: Scalar, where: str) -> int:
    """The number of a value as the log has it; raises RuleError for one that no item of the log can have."""
    if isinstance(own, float) and not own.is_integer():
        raise RuleError(where, f"is {own:g}, but the field holds ids: whole numbers or texts, as in the log.")
    numbers, known = vocabulary.numbers_of([int(own) if isinstance(own, float) else own])
    if known[0]:
        return int(numbers[0])
    if vocabulary.encoding == "int64":
        raise RuleError(where, f"is {str(own)[:60]!r}, but the field holds whole numbers.")
    texts = vocabulary.table["text"]
    listed = f": {', '.join(texts.to_list())}" if len(texts) <= _LISTED else ""
    raise RuleError(where, f"is {str(own)[:60]!r}, which is not among the {len(texts):,} values of the log{listed}.")


def _equals_any(values: NDArray[np.generic], wanted: Sequence[float]) -> Mask:
    if len(wanted) > _COMPARED:
        return np.isin(values, np.array(wanted, values.dtype))
    mask = np.zeros(len(values), np.bool_)
    for one in wanted:
        mask |= values == one
    return mask


def rows_with(column: StoredFeature, hits: Mask) -> Mask:
    """The rows that hold a hit, of one hit or not for each value."""
    if column.offsets is None or _is_one_each(column.offsets, len(hits)):
        return hits
    before = np.concatenate([[0], np.cumsum(hits)])
    return np.asarray(before[column.offsets[1:]] > before[column.offsets[:-1]])


def _is_one_each(offsets: Ints, num_values: int) -> bool:
    return len(offsets) == num_values + 1 and bool((np.diff(offsets) == 1).all())


@dataclass(frozen=True, slots=True, eq=False)
class ItemGroups:
    """The groups of rows: row i is in values[offsets[i]:offsets[i+1]], each at most once, numbers below `size`."""

    values: Ints
    offsets: Ints
    size: int

    @staticmethod
    def of(column: StoredFeature) -> ItemGroups:
        """The rows of a field by value; a missing value is in no group."""
        values, offsets = column.values, column.offsets
        if offsets is None:
            present = ~np.isnan(values)
            values, offsets = values[present], np.concatenate([[0], np.cumsum(present)])
        names, groups = np.unique(np.asarray(values), return_inverse=True)
        return ItemGroups(*_without_repetition(groups.astype(np.int64), np.asarray(offsets)), len(names))

    def take(self, rows: Ints) -> ItemGroups:
        """Some rows, of which -1 is in no group."""
        kept = np.maximum(rows, 0)
        lengths = np.where(rows < 0, 0, self.offsets[kept + 1] - self.offsets[kept])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self.offsets[kept] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return ItemGroups(self.values[places], offsets, self.size)

    def rows_in(self, groups: Mask) -> Mask:
        """The rows that are in one of some groups."""
        return rows_with(StoredFeature(self.values, self.offsets), groups[self.values])

    def lists(self) -> list[list[int]]:
        """The groups of each row."""
        values, offsets = self.values.tolist(), self.offsets.tolist()
        return [values[first:end] for first, end in itertools.pairwise(offsets)]


def _without_repetition(values: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    lengths = np.diff(offsets)
    if (lengths <= 1).all():
        return values, offsets
    rows = np.repeat(np.arange(len(lengths)), lengths)
    pairs = np.unique(np.stack([rows, values]), axis=1)
    return pairs[1], np.concatenate([[0], np.cumsum(np.bincount(pairs[0], minlength=len(lengths)))])
