"""The living catalogue: items as they were last stored, over those of the sequence folder. See nestpipe.data.item_content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.batch_builder import missing_values
from nestpipe.data.folder_merge import is_among
from nestpipe.data.item_content import ItemOverlay
from nestpipe.data.schema import Feature
from nestpipe.rng import mix64
from nestpipe.serve.event_parser import parse_feature
from nestpipe.state.service_state import Entry

Ints = NDArray[np.int64]
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ItemRecord:
    """An item as it was last stored: `content` has the features of the schema in numbers, and their weights."""

    number: int
    content: Mapping[str, Any]
    text: str | None = None
    available: bool = True

    @staticmethod
    def of(entry: Entry) -> ItemRecord:
        return ItemRecord(int(entry["item"]), entry["content"], entry.get("text"), entry["available"])

    def entry(self) -> Entry:
        return {"item": self.number, "available": self.available, "content": dict(self.content), "text": self.text}


class Catalogue:
    """Records by number. One thread writes at a time; readers use what is complete."""

    def __init__(self) -> None:
        self.records: dict[int, ItemRecord] = {}
        self._digests: dict[int, dict[str, int]] = {}  # of each feature's value, and of "text"
        self._changed, self._withdrawn = _NONE, _NONE

    def take(self, entries: Sequence[Entry], *, anew: bool = False) -> None:
        """Takes entries {"item", "available", "content", "text"}; the last of an item counts. `anew`: these are all."""
        if not entries and not anew:
            return
        last = {record.number: record for record in map(ItemRecord.of, entries)}
        digests = {number: _digests(record) for number, record in last.items()}
        new = np.array(sorted(last), np.int64)
        gone = np.array(sorted(number for number, record in last.items() if not record.available), np.int64)
        if anew:
            self.records, self._digests, self._changed, self._withdrawn = last, digests, new, gone
            return
        self._digests |= digests
        self.records |= last
        self._changed = np.union1d(self._changed, new)
        self._withdrawn = np.union1d(np.setdiff1d(self._withdrawn, new, assume_unique=True), gone)

    def changed(self) -> Ints:
        return self._changed

    def withdrawn(self) -> Ints:
        return self._withdrawn

    def shows(self, number: int) -> bool:
        """Whether an item may be shown: it was not withdrawn."""
        record = self.records.get(number)
        return record is None or record.available

    def overlay(self, items: Ints, features: Sequence[Feature]) -> ItemOverlay:
        rows = np.full(len(items), -1, np.int64)
        if not len(self._changed):
            return ItemOverlay(rows, {one.name: missing_values(one, 0) for one in features})
        is_own = is_among(items, self._changed)
        own, rows[is_own] = np.unique(items[is_own], return_inverse=True)
        content = [self.records[one].content for one in own.tolist()]
        return ItemOverlay(rows, {one.name: parse_feature(one, content) for one in features})

    def revisions(self, items: Ints, names: Sequence[str]) -> Ints:
        found = np.zeros(len(items), np.int64)
        for place in np.flatnonzero(is_among(items, self._changed)).tolist():
            digests, mixed = self._digests[int(items[place])], 0
            for name in names:
                mixed = mix64(mixed ^ digests.get(name, 0))
            found[place] = np.uint64(mixed).astype(np.int64)
        return found

    def texts(self, items: Ints) -> list[str | None]:
        return [None if (one := self.records.get(number)) is None else one.text for number in items.tolist()]


def _digests(record: ItemRecord) -> dict[str, int]:
    values = {**record.content, "text": record.text}
    found = {name: _digest(value) for name, value in values.items() if not name.endswith(".weights")}
    for name, value in values.items():
        if name.endswith(".weights"):
            own = name.removesuffix(".weights")
            found[own] = mix64(found.get(own, 0) ^ _digest(value))
    return found


def _digest(value: Any) -> int:
    text = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
