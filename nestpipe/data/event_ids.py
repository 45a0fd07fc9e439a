"""The events of services that a sequence folder holds, by the ids that their senders gave them: its watermark.

event_ids.npy    8 bytes of a digest of each id, ascending

An event is in the folder or still in the log of a service, never counted in both: whoever reads both skips the events of the log
whose ids are here. Ids stay when the log is compacted, so a late copy of an event is still known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.array_files import load_array, save_array

EVENT_IDS = "event_ids.npy"


def event_digest(name: str) -> bytes:
    """Digest of an event's id."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).digest()


class HeldEvents:
    """The ids of a folder's events that came from services."""

    def __init__(self, codes: NDArray[np.int64]):
        self._codes = codes

    @staticmethod
    def of(folder: Path) -> HeldEvents:
        """Those of a sequence folder; none if no service's events were appended to it."""
        path = folder / EVENT_IDS
        return HeldEvents(load_array(path) if path.is_file() else np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self._codes)

    def __contains__(self, digest: object) -> bool:
        if not len(self._codes) or not isinstance(digest, bytes):
            return False
        code = _code(digest)
        place = int(np.searchsorted(self._codes, code))
        return place < len(self._codes) and int(self._codes[place]) == code

    def save_with(self, folder: Path, digests: Iterable[bytes]) -> None:
        """Writes these and further ones into a folder."""
        new = np.array([_code(one) for one in digests], np.int64)
        save_array(folder / EVENT_IDS, np.union1d(self._codes, new))


def _code(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)
