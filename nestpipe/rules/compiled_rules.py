"""Rules compiled for the items of one model: a mask, positions, a bias and groups, each cached by what the rules say.

    rules, attributes  --compile-->  allowed [I]  excluded  pins  bias [I]  caps  diversity  unseen

Retrieval, cascade and decoding all read this form. Order, fixed: withdrawn, `exclude`, `filter` and `unseen` remove; `boost` is
added; then greedily by score `max_per` and `diversity`; `pin` stands first and obeys withdrawn and `exclude` only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.vocabulary import OwnId
from nestpipe.rules.field_masks import ItemGroups, field_of, filter_mask
from nestpipe.rules.item_attributes import AttributeSource, Ints, ItemAttributes, Mask
from nestpipe.rules.rule_set import Filters, Rules, ScoreBoost

_NOTHING = np.empty(0, np.int64)
_FEW_WITHDRAWN = 1000  # items that are removed one by one where nothing else needs a mask
Floats = NDArray[np.float32]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class GroupCap:
    """At most so many items of each group; `rows` are the positions' rows of `groups`, None if they are the same."""

    groups: ItemGroups
    most: int
    rows: Ints | None = None

    def at(self, positions: Ints | None) -> ItemGroups:
        """The groups of some positions, or of all."""
        if positions is None:
            return self.groups if self.rows is None else self.groups.take(self.rows)
        return self.groups.take(positions if self.rows is None else self.rows[positions])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompiledRules:
    """Rules over the items of a model. Pins are those that may be shown; `unknown` ones are in no catalogue."""

    num_items: int
    allowed: Mask | None = None  # neither withdrawn nor filtered out; None: all
    num_allowed: int = 0
    excluded: Ints = field(default_factory=lambda: _NOTHING)
    pins: Ints = field(default_factory=lambda: _NOTHING)
    bias: Floats | None = None
    caps: tuple[GroupCap, ...] = ()
    diversity: float = 0.0
    unseen: bool | None = None
    unknown: list[OwnId] = field(default_factory=list)

    @property
    def removes_only(self) -> bool:
        """Whether the list is the best of the allowed items, in the order of their scores."""
        return self.bias is None and not self.caps and not len(self.pins) and not self.diversity

    @property
    def is_plain(self) -> bool:
        """Whether nothing but single items is removed."""
        return self.removes_only and self.allowed is None

    def removed(self, seen: Ints, *, keeps_seen: bool) -> Ints:
        """Positions to remove besides those that are not allowed; `keeps_seen` is the run's own choice."""
        is_unseen = not keeps_seen if self.unseen is None else self.unseen
        return np.unique(np.concatenate([self.excluded, seen if is_unseen else _NOTHING]))

    def removing(self) -> CompiledRules:
        """What removes items, without what orders them."""
        return replace(self, bias=None, caps=(), pins=_NOTHING, diversity=0.0)

    def within(self, mask: Mask) -> CompiledRules:
        """The same for items of a mask alone."""
        allowed = mask if self.allowed is None else self.allowed & mask
        return replace(self, allowed=allowed, num_allowed=int(allowed.sum()))

    def num_left(self, removed: Ints) -> int:
        """How many items withdrawals, `exclude`, `filter` and `unseen` leave."""
        return self.num_allowed - int(len(removed) if self.allowed is None else self.allowed[removed].sum())


def no_rules(num_items: int) -> CompiledRules:
    """Nothing is removed but what the run itself removes."""
    return CompiledRules(num_items=num_items, num_allowed=num_items)


class RuleCompiler:
    """Compiles rules with the attributes of a source. Thread-safe; masks, biases and groups are kept while they are used."""

    def __init__(self, source: AttributeSource, *, cache_bytes: int = 128 << 20):
        self._source, self._cache = source, _RecentArrays(cache_bytes)

    def compile(self, rules: Rules, items: Ints) -> CompiledRules:
        """Rules for the items [I] of a model, ascending numbers; raises RuleError."""
        attributes = self._source()
        rows = self._rows(attributes, items)
        excluded, _ = self._positions(attributes, rules.exclude, items)
        withdrawn = self._withdrawn(attributes, rows)
        if not rules.filter and len(withdrawn) <= _FEW_WITHDRAWN:
            allowed, num_allowed, excluded = None, len(items), np.concatenate([excluded, withdrawn])
        else:
            allowed, num_allowed = self._allowed(attributes, rules.filter, items, rows)
        pins, unknown = self._positions(attributes, rules.pin, items)
        if attributes.withdrawn is not None and len(pins):
            pins = pins[~_mapped(attributes.withdrawn, pins if rows is None else rows[pins])]
        pins = pins[np.sort(np.unique(pins, return_index=True)[1])]
        return CompiledRules(
            num_items=len(items),
            allowed=allowed,
            num_allowed=num_allowed,
            excluded=excluded,
            pins=pins[~np.isin(pins, excluded)],
            bias=self._bias(attributes, rules.boost, rows) if rules.boost else None,
            caps=tuple(self._cap(attributes, name, most, rows) for name, most in rules.max_per.items()),
            diversity=rules.diversity or 0.0,
            unseen=rules.unseen,
            unknown=unknown,
        )

    def check(self, rules: Rules) -> None:
        """Raises RuleError for rules that name what does not exist."""
        self.compile(rules, self._source().items)

    def _rows(self, attributes: ItemAttributes, items: Ints) -> Ints | None:
        """The row of each item, -1 for one without attributes; None if they are the same items."""

        def find() -> tuple[Ints | None, Ints]:
            own = attributes.items
            if np.array_equal(own, items):
                return None, items
            places = np.minimum(np.searchsorted(own, items), max(len(own) - 1, 0))
            return np.where(own[places] == items, places, -1) if len(own) else np.full(len(items), -1), items

        # The items are kept with their rows, so that their id stays theirs.
        return self._cache.get(("rows", attributes.version, id(items)), find, lambda one: 8 * len(one[1]))[0]

    def _withdrawn(self, attributes: ItemAttributes, rows: Ints | None) -> Ints:
        """The positions of withdrawn items."""
        if (mask := attributes.withdrawn) is None:
            return _NOTHING

        def find() -> tuple[Ints, Ints | None]:
            return np.flatnonzero(_mapped(mask, rows)), rows

        return self._cache.get(("withdrawn", attributes.version, id(rows)), find, lambda one: one[0].nbytes)[0]

    def _allowed(
        self, attributes: ItemAttributes, filters: Filters, items: Ints, rows: Ints | None
    ) -> tuple[Mask, int]:
        def find() -> tuple[Mask, int, Ints]:
            mask = filter_mask(attributes, filters, "filter")
            if attributes.withdrawn is not None:
                mask &= ~attributes.withdrawn
            found = _mapped(mask, rows)
            found.flags.writeable = False
            return found, int(found.sum()), items

        key = ("allowed", attributes.version, id(items), _key(filters))
        mask, count, _ = self._cache.get(key, find, lambda one: len(one[0]))
        return mask, count

    def _bias(self, attributes: ItemAttributes, boosts: Sequence[ScoreBoost], rows: Ints | None) -> Floats:
        def find() -> Floats:
            bias = np.zeros(len(attributes.items), np.float32)
            for place, boost in enumerate(boosts):
                bias[filter_mask(attributes, boost.filter, f"boost[{place}].filter")] += np.float32(boost.add)
            return bias

        key = ("bias", attributes.version, tuple((_key(one.filter), one.add) for one in boosts))
        bias = self._cache.get(key, find, lambda one: one.nbytes)
        if rows is None or not len(bias):
            return bias if rows is None else np.zeros(len(rows), np.float32)
        return np.where(rows < 0, np.float32(0), bias[rows])

    def _cap(self, attributes: ItemAttributes, name: str, most: int, rows: Ints | None) -> GroupCap:
        field_of(attributes, name, "max_per")

        def find() -> ItemGroups:
            return ItemGroups.of(attributes.column(name))

        key = ("groups", attributes.version, name)
        groups = self._cache.get(key, find, lambda one: one.values.nbytes + one.offsets.nbytes)
        return GroupCap(groups, most, rows)

    def _positions(self, attributes: ItemAttributes, own: Sequence[OwnId], items: Ints) -> tuple[Ints, list[OwnId]]:
        """The positions of items in their order, and those that the catalogue does not have."""
        if not own:
            return _NOTHING, []
        numbers, known = attributes.vocabulary("item").numbers_of(own)
        places = np.minimum(np.searchsorted(items, numbers), len(items) - 1)
        known = known & (items[places] == numbers)
        return places[known], [one for one, is_known in zip(own, known.tolist(), strict=True) if not is_known]


def _mapped(mask: Mask, rows: Ints | None) -> Mask:
    """A mask over attributes at some of their rows, or at all; an item without attributes (-1) has False."""
    if rows is None:
        return mask
    return mask[rows] & (rows >= 0) if len(mask) else np.zeros(len(rows), np.bool_)


def _key(filters: Filters) -> Hashable:
    return tuple(sorted((name, repr(one)) for name, one in filters.items()))


class _RecentArrays:
    """Values by key, the least recently used dropped beyond so many bytes."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value], size: Callable[[Value], int]) -> Value:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]  # type: ignore[return-value]
        value = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = (value, num_bytes := size(value))
                self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1][1]
        return value
