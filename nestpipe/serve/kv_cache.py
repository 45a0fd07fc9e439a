"""KV prefixes in two byte-accounted tiers: a small one on the device for requests to come, one on the host for reuse.

    reserve -> RESERVED -> start -> COMPUTING -> finish -> READY <-> PINNED
                                                             |  demote: DEMOTING, a copy
               PROMOTING, a copy  <- promote <-  HOST   <----+

Bytes are reserved before work starts and freed when it fails. After every operation `used + reserved <= cap` and
`used = sum of entries` hold in both tiers; `check` verifies it. Pinned and moving entries are never evicted. Of the others the
expired are evicted first, then the consumed, then the unconsumed, each by least recent use. A promoted entry keeps its host copy
(values never change), so demoting it again copies nothing.

A key is computed once: other requests join the work with a future of their own, and cancelling it cancels nothing else. A lease
(the entry itself) identifies the worker: if the user was invalidated meanwhile, its result is dropped.

Keys and values are opaque, copy and clock are parameters: this file knows neither torch nor time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class EntryState(StrEnum):
    RESERVED = "reserved"
    COMPUTING = "computing"
    READY = "ready"
    PINNED = "pinned"
    DEMOTING = "demoting"
    HOST = "host"
    PROMOTING = "promoting"


_AT_REST = frozenset({EntryState.READY, EntryState.HOST})
# Their bytes on the device are reserved.
_IN_WORK = frozenset({EntryState.RESERVED, EntryState.COMPUTING, EntryState.PROMOTING})


class LostError(Exception):
    """The joined work failed, or its user was invalidated: rank in full."""


@dataclass(slots=True, eq=False)
class CacheEntry(Generic[Value]):
    """One prefix: its tiers, pins and joined futures."""

    key: Hashable
    user: int
    num_bytes: int
    state: EntryState = EntryState.RESERVED
    device: Value | None = None
    host: Value | None = None
    pins: dict[Hashable, float] = field(default_factory=dict)  # holder -> until when
    joiners: list[Future[Value]] = field(default_factory=list)
    consumed: bool = False
    expires: float = math.inf
    used_at: float = 0.0

    def settle(self, now: float) -> EntryState:
        """Its state, after expired pins were removed."""
        if self.pins and min(self.pins.values()) <= now:
            self.pins = {holder: until for holder, until in self.pins.items() if until > now}
        if self.state in {EntryState.READY, EntryState.PINNED}:
            self.state = EntryState.PINNED if self.pins else EntryState.READY
        return self.state


@dataclass(slots=True)
class CacheTier:
    """The bytes of one tier. Bytes of an entry are reserved while it is computed or copied here, then used."""

    cap: int
    used: int = 0
    reserved: int = 0
    copies: int = 0  # into this tier
    copied_bytes: int = 0

    @property
    def free(self) -> int:
        return self.cap - self.used - self.reserved

    def take_copy(self, num_bytes: int) -> None:
        """A copy is complete: its reserved bytes are used."""
        self.copies += 1
        self.copied_bytes += num_bytes
        self.reserved -= num_bytes
        self.used += num_bytes


class KVCache(Generic[Value]):
    """Both tiers. Thread-safe; copies are made outside of the lock."""

    def __init__(
        self,
        *,
        device_bytes: int,
        host_bytes: int,
        copy: Callable[[Value], Value],
        promoted: Callable[[Value], Value] | None = None,
        clock: Callable[[], float],
        device_ttl_s: float = 10.0,
        host_ttl_s: float = 600.0,
    ):
        self.device, self.host = CacheTier(device_bytes), CacheTier(host_bytes)
        self.num_evicted = self.num_invalidations = 0
        self._copy, self._promoted, self._clock = copy, promoted or copy, clock
        self._device_ttl_s, self._host_ttl_s = device_ttl_s, host_ttl_s
        self._entries: dict[Hashable, CacheEntry[Value]] = {}
        self._of_user: dict[int, dict[Hashable, CacheEntry[Value]]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    # Work: one prefill per key.

    def reserve(self, key: Hashable, *, user: int, num_bytes: int) -> CacheEntry[Value] | None:
        """The lease of a new entry, or None if there is no room; raises ValueError if the key is live: join it."""
        with self._lock:
            if key in self._entries:
                raise ValueError(f"the key is {self._entries[key].state} already; join it")  # no user: this is logged
            if not self._make_room(self.device, num_bytes):
                return None
            entry = self._enter(CacheEntry[Value](key, user, num_bytes))
            self.device.reserved += num_bytes
            return entry

    def has_room(self, num_bytes: int) -> bool:
        """Whether `reserve` would find room, evicting if need be."""
        with self._lock:
            free = self.device.free
            return num_bytes <= free or num_bytes <= free + sum(one.num_bytes for one in self._evictable(self.device))

    def start(self, lease: CacheEntry[Value]) -> bool:
        """Work begins; False if the entry is gone."""
        with self._lock:
            if wanted := self._holds(lease):
                lease.state = EntryState.COMPUTING
            return wanted

    def finish(self, lease: CacheEntry[Value], value: Value) -> bool:
        """The value of a lease, for those who joined too; False if the entry is gone, and the value is dropped.

        It replaces unpinned prefixes of the user: a user has one history.
        """
        with self._lock:
            if not self._holds(lease):
                return False
            self.device.reserved -= lease.num_bytes
            self.device.used += lease.num_bytes
            self._enter_device(lease, value)
            self._remove_others(lease)
            return True

    def keep(self, key: Hashable, *, user: int, num_bytes: int, make: Callable[[], Value], since: int) -> bool:
        """Stores a value that was computed without a lease on the host; False if its key is live or there is no room.

        `since` is `num_invalidations` before the value was computed: if anything was invalidated meanwhile, it is dropped.
        """
        with self._lock:
            if since != self.num_invalidations or key in self._entries or not self._make_room(self.host, num_bytes):
                return False
            entry = self._enter(CacheEntry[Value](key, user, num_bytes, EntryState.DEMOTING, consumed=True))
            self.host.reserved += num_bytes
        value = self._made(entry, make)
        with self._lock:
            if not self._holds(entry):
                return False
            self.host.take_copy(num_bytes)
            entry.host, entry.state, entry.used_at = value, EntryState.HOST, self._clock()
            entry.expires = entry.used_at + self._host_ttl_s
            self._remove_others(entry)
            return True

    def fail(self, lease: CacheEntry[Value]) -> None:
        """The work failed: frees its bytes; joined futures get LostError."""
        with self._lock:
            if self._holds(lease):
                self._remove(lease)

    def join(self, key: Hashable) -> Future[Value] | None:
        """A future of the value that is being computed; None if no work is in flight. Cancel it to stop waiting."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.state not in _IN_WORK:
                return None
            entry.joiners = [one for one in entry.joiners if not one.cancelled()]
            entry.joiners.append(Future())
            return entry.joiners[-1]

    # Use.

    def peek_state(self, key: Hashable) -> EntryState | None:
        with self._lock:
            entry = self._entries.get(key)
            return entry.settle(self._clock()) if entry else None

    def knows_user(self, user: int) -> bool:
        """Whether the user has an entry, also one in work."""
        with self._lock:
            return bool(self._of_user.get(user))

    def peek_user(self, user: int) -> list[Value]:
        """The values of a user in either tier."""
        with self._lock:
            mine = self._of_user.get(user, {}).values()
            values = (one.host if one.device is None else one.device for one in mine)
            return [value for value in values if value is not None]

    def pin(self, key: Hashable, holder: Hashable, *, until: float = math.inf) -> Value | None:
        """Pins an entry, also one in work, and returns its value if it is on the device. Promote an entry on the host first."""
        with self._lock:
            entry, now = self._entries.get(key), self._clock()
            if entry is None or entry.state in {EntryState.HOST, EntryState.DEMOTING}:
                return None
            entry.pins[holder] = until
            entry.used_at = now
            entry.settle(now)
            return entry.device

    def unpin(self, key: Hashable, holder: Hashable, *, consumed: bool = False) -> None:
        """Removes a pin, if the entry still exists. Consumed entries are evicted before others."""
        with self._lock:
            if entry := self._entries.get(key):
                entry.pins.pop(holder, None)
                entry.consumed |= consumed
                entry.settle(self._clock())

    # Moves between tiers: started and finished under the lock, copied outside of it.

    def demote(self, key: Hashable) -> bool:
        """Device to host; False if it is pinned, in work, not on the device, or the host has no room."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.settle(self._clock()) != EntryState.READY or entry.device is None:
                return False
            value, copied = entry.device, entry.host
            if copied is None and not self._make_room(self.host, entry.num_bytes):
                return False
            entry.state = EntryState.DEMOTING
            self.host.reserved += entry.num_bytes if copied is None else 0
        new = self._made(entry, lambda: self._copy(value)) if copied is None else copied
        with self._lock:
            if not self._holds(entry):
                return False
            if copied is None:
                self.host.take_copy(entry.num_bytes)
            entry.host, entry.device, entry.state = new, None, EntryState.HOST
            self.device.used -= entry.num_bytes
            entry.expires = self._clock() + self._host_ttl_s
            return True

    def promote(self, key: Hashable) -> bool:
        """Copies from the host to the device; False if it is not on the host alone, or the device has no room."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.state != EntryState.HOST or entry.host is None:
                return False
            if not self._make_room(self.device, entry.num_bytes):
                return False
            entry.state, value = EntryState.PROMOTING, entry.host
            self.device.reserved += entry.num_bytes
        new = self._made(entry, lambda: self._promoted(value))
        with self._lock:
            if not self._holds(entry):
                return False
            self.device.take_copy(entry.num_bytes)
            self._enter_device(entry, new)
            return True

    def _made(self, entry: CacheEntry[Value], make: Callable[[], Value]) -> Value:
        """The value for an entry; on failure the entry is removed, or it would be moving for ever."""
        try:
            return make()
        except BaseException:
            self.fail(entry)
            raise

    # Removal.

    def invalidate(self, user: int | None = None) -> int:
        """Drops the entries of a user, or all, from both tiers and from work in flight; returns their number."""
        with self._lock:
            self.num_invalidations += 1
            doomed = list((self._entries if user is None else self._of_user.get(user, {})).values())
            for entry in doomed:
                self._remove(entry)
            return len(doomed)

    def sweep(self, is_wanted: Callable[[Any], bool] | None = None) -> None:
        """Evicts expired entries, and those that are not wanted any more."""
        with self._lock:
            now = self._clock()
            for entry in list(self._entries.values()):
                if entry.settle(now) in _AT_REST and (entry.expires <= now or (is_wanted and not is_wanted(entry.key))):
                    self._remove(entry)
                    self.num_evicted += 1

    def check(self) -> None:
        """Raises AssertionError unless both tiers' bytes equal the sums over their entries."""
        with self._lock:
            entries = list(self._entries.values())
            device_used = sum(one.num_bytes for one in entries if one.device is not None)
            device_reserved = sum(one.num_bytes for one in entries if one.state in _IN_WORK)
            host_used = sum(one.num_bytes for one in entries if one.host is not None)
            moving = sum(one.num_bytes for one in entries if one.state == EntryState.DEMOTING and one.host is None)
            for tier, used, reserved in ((self.device, device_used, device_reserved), (self.host, host_used, moving)):
                if (tier.used, tier.reserved) != (used, reserved) or tier.free < 0:
                    raise AssertionError(f"{tier}, but its entries use {used:,} and reserve {reserved:,} bytes")

    def _enter(self, entry: CacheEntry[Value]) -> CacheEntry[Value]:
        self._entries[entry.key] = entry
        self._of_user.setdefault(entry.user, {})[entry.key] = entry
        return entry

    def _remove_others(self, entry: CacheEntry[Value]) -> None:
        """Unpinned prefixes of the user's earlier history."""
        for other in list(self._of_user[entry.user].values()):
            if other is not entry and other.settle(self._clock()) in _AT_REST:
                self._remove(other)

    def _holds(self, entry: CacheEntry[Value]) -> bool:
        return self._entries.get(entry.key) is entry

    def _enter_device(self, entry: CacheEntry[Value], value: Value) -> None:
        now = self._clock()
        entry.device, entry.state = value, EntryState.READY
        entry.used_at, entry.expires = now, now + self._device_ttl_s
        entry.settle(now)
        joiners, entry.joiners = entry.joiners, []
        for joiner in joiners:
            settle(joiner, value)

    def _evictable(self, tier: CacheTier) -> list[CacheEntry[Value]]:
        """Entries that may be evicted from a tier, in eviction order."""
        now, on_device = self._clock(), tier is self.device
        here = (one for one in self._entries.values() if (one.device if on_device else one.host) is not None)
        at_rest = [one for one in here if one.settle(now) in _AT_REST]
        return sorted(at_rest, key=lambda one: (one.expires > now, not one.consumed, one.used_at))

    def _make_room(self, tier: CacheTier, num_bytes: int) -> bool:
        """Evicts until so many bytes are free; evicts nothing if that cannot be reached."""
        if tier.free >= num_bytes:
            return True
        evictable = self._evictable(tier)
        if num_bytes > tier.free + sum(one.num_bytes for one in evictable):
            return False
        for entry in evictable:
            if tier.free >= num_bytes:
                break
            self._evict(entry, tier)
        return True

    def _evict(self, entry: CacheEntry[Value], tier: CacheTier) -> None:
        """Removes an entry from one tier; its copy in the other one stays."""
        self.num_evicted += 1
        if entry.device is None or entry.host is None:
            self._remove(entry)
            return
        tier.used -= entry.num_bytes
        if tier is self.host:
            entry.host = None
        else:
            entry.device, entry.state = None, EntryState.HOST
            entry.expires = self._clock() + self._host_ttl_s

    def _remove(self, entry: CacheEntry[Value]) -> None:
        del self._entries[entry.key]
        mine = self._of_user[entry.user]
        del mine[entry.key]
        if not mine:
            del self._of_user[entry.user]
        self.device.reserved -= entry.num_bytes if entry.state in _IN_WORK else 0
        self.host.reserved -= entry.num_bytes if entry.state == EntryState.DEMOTING and entry.host is None else 0
        self.device.used -= entry.num_bytes if entry.device is not None else 0
        self.host.used -= entry.num_bytes if entry.host is not None else 0
        entry.device = entry.host = None
        joiners, entry.joiners = entry.joiners, []
        for joiner in joiners:
            settle(joiner, LostError("the prefix is gone"))


def settle(reply: Future[Any], result: object) -> bool:
    """Sets the result or exception of a future; False if it was cancelled."""
    if not reply.set_running_or_notify_cancel():
        return False
    if isinstance(result, BaseException):
        reply.set_exception(result)
    else:
        reply.set_result(result)
    return True
