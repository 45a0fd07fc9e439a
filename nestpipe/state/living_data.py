"""What a process knows of the changes since ingestion: numbers of new ids, the catalogue, users, who was forgotten."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from nestpipe.state.catalogue import Catalogue
from nestpipe.state.grown_ids import GrownIds
from nestpipe.state.service_state import Entry, EntryLog


class LivingData:
    """Follows the changes of a state. Thread-safe: after a removal every part is read anew, then replaced at once."""

    def __init__(self, changes: EntryLog):
        self._changes, self._lock = changes, threading.Lock()
        self.catalogue, self.ids = Catalogue(), GrownIds()
        self.users: dict[int, Mapping[str, Any]] = {}
        self.forgotten: set[int] = set()
        self.forgotten_ids: set[bytes] = set()  # digests of their events' ids, which still count as known
        self.num_removals = 0  # users that were forgotten, and entries that were removed
        self.num_changes = 0  # reads that brought something
        self.refresh()

    def refresh(self) -> None:
        """Reads new changes; what fails is tried again by the next call."""
        if not self._changes.has_news():
            return
        with self._lock, self._changes.news() as (is_other, entries):
            if not is_other and not entries:
                return
            ids, users, forgotten = (
                (GrownIds(), dict[int, Mapping[str, Any]](), set[int]())
                if is_other
                else (self.ids, self.users, self.forgotten)
            )
            for entry in entries:
                if "of" in entry:
                    ids.add(entry)
                elif "user" in entry:
                    users[int(entry["user"])] = entry["features"]
                elif "forgotten" in entry:
                    self._forget(entry, users, forgotten)
            self.catalogue.take([one for one in entries if "item" in one], anew=is_other)
            self.ids, self.users, self.forgotten = ids, users, forgotten
            self.num_removals += is_other
            self.num_changes += 1

    def _forget(self, entry: Entry, users: dict[int, Mapping[str, Any]], forgotten: set[int]) -> None:
        users.pop(int(entry["forgotten"]), None)
        forgotten.add(int(entry["forgotten"]))
        self.forgotten_ids |= {bytes.fromhex(one) for one in entry["ids"]}
        self.num_removals += 1
