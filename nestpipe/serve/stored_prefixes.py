"""The engine's side of the prefix store: what of a history is stored, reads ahead of requests, writes behind them.

    hint    -> find -> launch_read     a reader thread, while retrieval runs
    request -> find -> read            in the engine's thread, only if the measured cost fits before the deadline
    reply   -> offer                   a writer thread of low priority, if at least `behind` events are not stored yet

The digest of the inputs cannot be stored in a form that can be continued. So `find` computes it from the request's own events;
that is also the check that the stored prefix is a prefix of this history.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from nestpipe.models.kv_prefix import KVPrefix
from nestpipe.serve.prefill import HistoryInputs, ServedModel
from nestpipe.serve.prefix_folder import StoreInUseError
from nestpipe.serve.prefix_store import PrefixStore, ReadPrefix, StoredEntry, StoredMatch
from nestpipe.serve.service_folder import PREFIXES, note_store
from nestpipe.serve.user_history import NOBODY

_log = logging.getLogger("nestpipe.serve")
BEHIND = 64  # events that `extend` computes at a request instead of a write
_MAX_PENDING_BYTES = 64 << 20  # of prefixes that wait to be written
_NICE = 10  # of the writer thread


class StoredPrefixes:
    """Used by the engine's thread; the threads of reads and writes are its own."""

    def __init__(self, store: PrefixStore, *, behind: int = BEHIND):
        self.store, self._behind = store, behind
        store.forget(NOBODY)  # earlier versions stored it
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="prefix-read")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="prefix-write", initializer=_lower_priority)
        self._lock, self._pending_bytes = threading.Lock(), 0

    def find(self, inputs: HistoryInputs) -> StoredMatch | None:
        """The stored prefix of this history, or of its beginning."""
        entry = self.store.peek(inputs.served.ranker.made_by, inputs.user)
        if entry is None or entry.key.length > max(inputs.num_events - 1, 0):
            return None
        if entry.key.length == inputs.num_events - 1:  # its digest is known already
            digest = inputs.suffix.digests[0] if inputs.key == entry.key else None
        else:
            digest = inputs.served.ranker.beginning(entry.key, inputs.prefix)
        if digest is None:
            self.store.mark_stale(entry.key)
            return None
        return StoredMatch(entry.key, digest)

    def read(self, match: StoredMatch) -> ReadPrefix:
        began = time.perf_counter()
        prefix = self.store.read(match.key, match.digest)
        return ReadPrefix(prefix, 1000 * (time.perf_counter() - began))

    def launch_read(self, match: StoredMatch) -> Future[ReadPrefix]:
        return self._reads.submit(self.read, match)

    def is_behind(self, served: ServedModel, user: int, num_events: int) -> bool:
        """Whether the stored prefix of a user is too short for a history, or of another one, and a longer one pays."""
        if user == NOBODY:
            return False
        length = max(num_events - 1, 0)
        entry = self.store.peek(served.ranker.made_by, user)
        return self._lacks(entry, length) and served.costs.stores(num_events, length * served.event_bytes)

    def _lacks(self, entry: StoredEntry | None, length: int) -> bool:
        if length < self._behind:  # also if a long one is stored: a request may send a short history
            return False
        if entry is None or entry.is_stale:
            return True
        # Shorter than what is stored: the window has moved.
        return length - entry.key.length >= self._behind or length < entry.key.length

    def offer(
        self, inputs: HistoryInputs, prefix: KVPrefix, *, since: int, dropped: Callable[[int], None] | None = None
    ) -> bool:
        """Writes the prefix of a history if enough of it is not stored; False if not, or if too many wait.

        `dropped` is called with the user, in the writer's thread, if the write was dropped because others were removed.
        """
        if not self.is_behind(inputs.served, prefix.key.user, inputs.num_events):
            return False
        if self.is_busy:
            return False
        prefix = prefix.moved(torch.device("cpu"))
        with self._lock:
            self._pending_bytes += prefix.num_bytes
        try:
            self._writes.submit(self._write, inputs, prefix, since, dropped)
        except RuntimeError:  # closed
            self._note_done(prefix)
            raise
        return True

    def _write(
        self, inputs: HistoryInputs, prefix: KVPrefix, since: int, dropped: Callable[[int], None] | None
    ) -> None:
        user = prefix.key.user
        try:
            match = self.find(inputs)
            is_written = self.store.write(prefix, follows=match.key if match else None, since=since)
            if not is_written and dropped is not None and self.store.is_dropped_with_others(user, since=since):
                dropped(user)
        except Exception:
            _log.exception("a KV prefix could not be stored")
        finally:
            self._note_done(prefix)

    def _note_done(self, prefix: KVPrefix) -> None:
        with self._lock:
            self._pending_bytes -= prefix.num_bytes

    @property
    def is_busy(self) -> bool:
        """Whether as many prefixes wait to be written as may."""
        return self._pending_bytes > _MAX_PENDING_BYTES

    def flush(self) -> None:
        """Waits for the writes that were offered."""
        self._writes.submit(int).result()

    def close(self) -> None:
        """Ends the threads after what was offered is written, and gives the folder up."""
        self._reads.shutdown()
        self._writes.shutdown()
        self.store.close()


def open_stored(serve: Path, *, folder: Path | None, cap: int) -> StoredPrefixes | None:
    """The store in a folder, or in the first one under RUN/serve that no process owns; None without bytes. Raises ConfigError."""
    if not cap:
        return None
    if folder is not None:
        stored = StoredPrefixes(PrefixStore(folder, cap=cap))
        note_store(serve, folder)
        return stored
    for number in itertools.count(1):
        with contextlib.suppress(StoreInUseError):
            return StoredPrefixes(PrefixStore(serve / PREFIXES / str(number), cap=cap))
    raise AssertionError("one of endlessly many folders is free")


def _lower_priority() -> None:
    """On Linux a thread has a priority of its own."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
