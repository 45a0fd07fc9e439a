"""Attributes of items as rules read them while a service runs: the sequence folder, and over it the living catalogue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import polars as pl

from nestpipe.data.live_features import laid_over
from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.data.vocabulary import TABLE_SCHEMA, Vocabulary
from nestpipe.rules.item_attributes import FolderAttributes, Ints, ItemAttributes, Mask
from nestpipe.state.catalogue import Catalogue
from nestpipe.state.living_data import LivingData


class LiveSource:
    """The attributes as they are now; the snapshot is another one after a change of the folder, the catalogue or the ids."""

    def __init__(self, sequences: Callable[[], Sequences], living: LivingData):
        self._sequences, self._living, self._lock = sequences, living, threading.Lock()
        self._current: ItemAttributes | None = None

    def __call__(self) -> ItemAttributes:
        sequences, living = self._sequences(), self._living
        version = f"{sequences.digest}/{living.num_changes}"
        with self._lock:
            current = self._current
            if current is None or current.version != version:
                folder = FolderAttributes(sequences)
                current = self._current = LiveAttributes(folder, living.catalogue, version, _grown(living))
            return current


def _grown(living: LivingData) -> dict[str, dict[int, str]]:
    return {name: dict(texts) for name, texts in living.ids.tables().items()}


@dataclass(eq=False)
class LiveAttributes:
    """One state of folder and catalogue: items that came later are there, withdrawn ones are marked."""

    folder: FolderAttributes
    catalogue: Catalogue
    version: str
    texts: Mapping[str, Mapping[int, str]]  # own ids that the folder does not have, by number
    _vocabularies: dict[str, Vocabulary] = field(default_factory=dict)

    @cached_property
    def items(self) -> Ints:
        return np.union1d(self.folder.items, self.catalogue.changed())

    @cached_property
    def withdrawn(self) -> Mask | None:
        gone = self.catalogue.withdrawn()
        return np.isin(self.items, gone) if len(gone) else None

    @property
    def fields(self) -> Mapping[str, Feature]:
        return self.folder.fields

    def column(self, field: str) -> StoredFeature:
        overlay = self.catalogue.overlay(self.items, [self.fields[field]])
        own = self.folder.items
        places = np.minimum(np.searchsorted(own, self.items), len(own) - 1)
        places = np.where(own[places] == self.items, places, -1)
        return laid_over(self.folder.column(field), places, overlay.features[field], overlay.rows)

    def vocabulary(self, name: str) -> Vocabulary:
        if name not in self._vocabularies:
            known, later = self.folder.vocabulary(name), self.texts.get(name, {})
            if later and known.encoding != "int64":
                table = pl.DataFrame({"id": list(later), "text": list(later.values())}, schema=TABLE_SCHEMA)
                known = Vocabulary(name, known.encoding, pl.concat([known.table, table]))
            self._vocabularies[name] = known
        return self._vocabularies[name]
