"""How a model asks what is known of items now: their content in the living catalogue, and its revision.

    sequences.live        None offline: the files of the folder are all there is. A service sets its catalogue here.
    live.overlay(items, features)    rows of content that replace or add to the folder's `item_features`
    live.revisions(items, names)     a number per item that changes with the named features, and with nothing else

A revision is a digest of values, made once when the content is stored. So it is the same on every instance and after a restart,
and a prefix digest holds it in place of the values: 8 bytes per event, also for a text vector of 384 numbers. It is 0 while the
content is that of the sequence folder, or while nothing is known of the item. What needs an item's vector again when its content
changes (an index, a cache) remembers the revision that it was made of and compares.

`BatchBuilder` reads both: item features come from the overlay where it has a row, a new item without a record has missing values,
and the event feature `REVISION` holds the revisions of the item features that the model reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Feature

if TYPE_CHECKING:
    from nestpipe.data.sequences import StoredFeature

REVISION = "item.revision"
"""The event feature of a batch with the content revision of each item; int64."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemOverlay:
    """Content of some of n asked items: `rows` [n] are places in `features`, -1 where the folder's content counts."""

    rows: NDArray[np.int64]
    features: Mapping[str, StoredFeature]


class ItemContent(Protocol):
    """The living catalogue as models see it. Numbers are those of the sequence folder; thread-safe."""

    def overlay(self, items: NDArray[np.int64], features: Sequence[Feature]) -> ItemOverlay:
        """Stored content of the named item features; an item that is new and has no record gets missing values."""
        ...

    def revisions(self, items: NDArray[np.int64], names: Sequence[str]) -> NDArray[np.int64]:
        """Revisions [n] of the named features; 0 while they are those of the folder, or unknown."""
        ...

    def texts(self, items: NDArray[np.int64]) -> list[str | None]:
        """The texts that were stored with items; None for an item without."""
        ...

    def changed(self) -> NDArray[np.int64]:
        """Ascending numbers of all items that have a record: new ones, and known ones whose content was replaced."""
        ...

    def withdrawn(self) -> NDArray[np.int64]:
        """Ascending numbers of the items that must not be shown."""
        ...
