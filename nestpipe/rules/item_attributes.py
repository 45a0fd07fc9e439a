"""Attributes of items, which rules read: one column for each item feature of the log.

An `ItemAttributes` is a snapshot and never changes. What changes is which one a source returns: a service asks its source for
each request, so a catalogue may grow, items may be withdrawn and attributes may be updated while it serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.data.vocabulary import Vocabulary

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class ItemAttributes(Protocol):
    """The attributes of all known items at one time."""

    @property
    def version(self) -> str:
        """Of the content: another one if an item, an attribute or a withdrawal is another."""

    @property
    def items(self) -> Ints:
        """Numbers of the items [I], ascending."""

    @property
    def withdrawn(self) -> Mask | None:
        """Which of them are withdrawn [I]; None: none is."""

    @property
    def fields(self) -> Mapping[str, Feature]:
        """The features of items by name."""

    def column(self, field: str) -> StoredFeature:
        """The values of a field, one row for each item."""

    def vocabulary(self, name: str) -> Vocabulary:
        """The own ids of 'item' or of an id field."""


AttributeSource = Callable[[], ItemAttributes]


class FolderAttributes:
    """The item features of a sequence folder but vectors, in memory: a mapped file that stays open could not be forgotten.

    No item is withdrawn.
    """

    withdrawn: Mask | None = None

    def __init__(self, sequences: Sequences):
        self.version, self.items = sequences.digest, np.array(sequences.catalogue)
        self.fields: Mapping[str, Feature] = {one.name: one for one in sequences.schema.of_scope("item")}
        self._columns = {
            name: _copied(sequences.item_features[name]) for name, one in self.fields.items() if one.kind != "vector"
        }
        self._folder, self._vocabularies = without_arrays(sequences), dict[str, Vocabulary]()

    def column(self, field: str) -> StoredFeature:
        return self._columns[field]

    def vocabulary(self, name: str) -> Vocabulary:
        if name not in self._vocabularies:
            self._vocabularies[name] = self._folder.vocabulary(name)
        return self._vocabularies[name]


def without_arrays(sequences: Sequences) -> Sequences:
    """The schema and encodings of a folder."""
    nothing = np.empty(0, np.int64)
    return replace(
        sequences,
        users=nothing,
        offsets=np.zeros(1, np.int64),
        items=nothing,
        times=None if sequences.times is None else nothing,
        catalogue=nothing,
        event_features={},
        item_features={},
        user_features={},
    )


def _copied(column: StoredFeature) -> StoredFeature:
    """Without weights, which no rule reads."""
    return StoredFeature(np.array(column.values), None if column.offsets is None else np.array(column.offsets))


class BareItems:
    """Items without attributes, whose own ids are their numbers."""

    version, withdrawn = "", None
    fields: Mapping[str, Feature] = MappingProxyType({})

    def __init__(self, items: Ints):
        self.items = items

    def column(self, field: str) -> StoredFeature:
        raise KeyError(field)

    def vocabulary(self, name: str) -> Vocabulary:
        return Vocabulary(name, "int64")


class FolderSource:
    """The attributes of a folder as it is now: `sequences` returns it, and it may be written again."""

    def __init__(self, sequences: Callable[[], Sequences]):
        self._sequences, self._lock = sequences, threading.Lock()
        self._current: FolderAttributes | None = None

    def __call__(self) -> FolderAttributes:
        sequences = self._sequences()
        with self._lock:
            if self._current is None or self._current.version != sequences.digest:
                self._current = FolderAttributes(sequences)
            return self._current
