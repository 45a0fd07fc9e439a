"""KV prefixes on disk: the tier below host memory. One file per model and user, in a folder that one process owns
(prefix_folder.py).

A longer prefix of the same history is appended as a segment; another history replaces the file. `used + reserved <= cap` holds
after every operation, in bytes of whole disk blocks; the least recently used files are removed for new ones. Nothing here is
needed for a right answer: what is missing, cut off or damaged is a miss, and full inference answers.

A write that began before a user was forgotten leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nestpipe.models.kv_prefix import InputDigest, KVPrefix, PrefixKey
from nestpipe.serve.prefix_file import Buffer, DamagedError, encode, load, scan, write_all
from nestpipe.serve.prefix_folder import files_of, model_folders, model_name, remove_model, take_folder, user_of

_log = logging.getLogger("nestpipe.serve")
_BLOCK = 4096  # of a disk
_MAX_FORGOTTEN = 10_000  # users of whom it is known when they were forgotten
_Name = tuple[str, int]  # model, user


@dataclass(slots=True, eq=False)
class StoredEntry:
    """A file: the key of its longest prefix, and where its complete segments end."""

    key: PrefixKey
    end: int
    is_stale: bool = False  # a request of the user had another history

    @property
    def num_bytes(self) -> int:
        return -(-self.end // _BLOCK) * _BLOCK


class StoredMatch(NamedTuple):
    """A stored prefix that a history begins with."""

    key: PrefixKey
    digest: InputDigest


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrefix:
    """What a read brought, and what it took."""

    prefix: KVPrefix | None
    ms: float


class PrefixStore:
    """Thread-safe: one writer at a time, readers concurrently. Raises ConfigError for a folder that it cannot take."""

    def __init__(self, folder: Path, *, cap: int):
        self.folder, self.cap = folder, cap
        self.used = self.reserved = 0
        self.counts: Counter[str] = Counter()  # reads, read_bytes, writes, written_bytes, corrupt, evicted, failed
        self.num_forgets = 0
        self._all_forgotten = 0  # `num_forgets` when the last removal began that concerned all users
        self._forgotten: OrderedDict[int, int] = OrderedDict()  # and that of one user, the latest last
        self._entries: OrderedDict[_Name, StoredEntry] = OrderedDict()  # by last use
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._owned = take_folder(folder)
        self._open()

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Lets another process own the folder; call it when nothing reads or writes any more."""
        if self._owned >= 0:
            os.close(self._owned)
        self._owned = -1

    # Use.

    def peek(self, made_by: Sequence[str], user: int) -> StoredEntry | None:
        """What is stored of a user for a model."""
        if not self._entries:
            return None
        return self._entries.get((model_name(made_by), user))

    def read(self, key: PrefixKey, digest: InputDigest) -> KVPrefix | None:
        """The prefix of a key; None if it is not there, or damaged. `digest` is that of the inputs, whose text the key has."""
        name = _name_of(key)
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.key != key:
                return None
            self._entries.move_to_end(name)
        try:
            file = os.open(self._path(name), os.O_RDONLY)
            try:
                segments = scan(file)
                places = [place for place, one in enumerate(segments, 1) if one.key == key]
                found = load(file, segments[: places[0]], digest) if places else None
                os.utime(file)  # the order of use outlives the process
            finally:
                os.close(file)
        except FileNotFoundError:  # removed by 'nestpipe forget'
            self._discard(name, entry)
            return None
        except (DamagedError, OSError) as error:
            self.counts["corrupt"] += 1
            _log.warning("a stored KV prefix cannot be used (%s); it is removed, and computed again", error)
            self._discard(name, entry)
            return None
        self.counts["reads"] += 1
        self.counts["read_bytes"] += 0 if found is None else found.num_bytes
        with self._lock:
            return found if name in self._entries else None  # the user was forgotten meanwhile

    def write(self, prefix: KVPrefix, *, follows: PrefixKey | None = None, since: int) -> bool:
        """Stores a prefix. `follows` is the key of a shorter prefix of the same history: if that is stored, the rest is appended.

        `since` is `num_forgets` before the events were read. False if there is no room, the disk fails, or the user was forgotten.
        """
        name = _name_of(prefix.key)
        with self._writing:
            entry = self._entries.get(name)
            if self._is_forgotten(name[1], since) or (entry is not None and entry.key == prefix.key):
                return False
            is_longer = entry is not None and entry.key == follows and entry.key.length < prefix.key.length
            before = entry if is_longer else None
            buffers, begin = encode(prefix, before.key.length if before else 0), before.end if before else 0
            new = StoredEntry(prefix.key, begin + sum(map(len, buffers)))
            extra = new.num_bytes - (before.num_bytes if before else 0)
            with self._lock:
                is_gone = before is not None and self._entries.get(name) is not before
                if is_gone or not self._make_room(extra, keep=name if before else None):
                    return False
                self.reserved += extra
            try:
                draft = None if before else self._create(name, buffers)
                if before:
                    self._append(name, begin, buffers)
                return self._publish(name, before, new, draft, since=since)
            except OSError as error:
                self._note_failure(name, error)
                return False
            finally:
                with self._lock:
                    self.reserved -= extra

    def _note_failure(self, name: _Name, error: OSError) -> None:
        """A file that is gone was removed while it was written; anything else is the disk's."""
        with contextlib.suppress(OSError):
            self._draft(name).unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError):
            return
        self.counts["failed"] += 1
        if self.counts["failed"] == 1:
            _log.warning(
                "KV prefixes cannot be stored in %s (%s); requests are answered all the same", self.folder, error
            )

    def mark_stale(self, key: PrefixKey) -> None:
        """The user's history is no longer the one that is stored: the next prefix is stored, however long it is."""
        with self._lock:
            if (entry := self._entries.get(_name_of(key))) is not None and entry.key == key:
                entry.is_stale = True

    def users(self) -> list[int]:
        """Who has a stored prefix of any model, the least recently used first."""
        with self._lock:
            return list(dict.fromkeys(user for _, user in self._entries))

    # Removal.

    def forget(self, user: int | None = None) -> int:
        """Removes the files of a user, or all, and what is being written of them; returns their number."""
        with self._lock:
            self._note_forgotten(user)
            doomed = [name for name in self._entries if user is None or name[1] == user]
            for name in doomed:
                self._remove(name)
            return len(doomed)

    def retain(self, is_kept: Callable[[int, int], bool]) -> None:
        """Removes the files of users whose history no longer has the events: `is_kept(user, length of the prefix)`.

        Drops all that is being written: `is_dropped_with_others` says whose may be written again.
        """
        with self._lock:
            self._note_forgotten(None)
            lengths = [(name, entry.key.length) for name, entry in self._entries.items()]
        doomed = [name for name, length in lengths if not is_kept(name[1], length)]
        with self._lock:
            for name in doomed:
                if name in self._entries:
                    self._remove(name)

    def is_dropped_with_others(self, user: int, *, since: int) -> bool:
        """Whether a write was dropped although its user was not forgotten."""
        with self._lock:
            return self._forgotten.get(user, 0) <= since < self._all_forgotten

    def _is_forgotten(self, user: int, since: int) -> bool:
        """Whether events that were read at `since` may have been removed."""
        return since < max(self._all_forgotten, self._forgotten.get(user, 0))

    def _note_forgotten(self, user: int | None) -> None:
        """Under the lock."""
        self.num_forgets += 1
        if user is None:
            self._all_forgotten = self.num_forgets
            return
        self._forgotten[user] = self.num_forgets
        self._forgotten.move_to_end(user)
        if len(self._forgotten) > _MAX_FORGOTTEN:
            self._all_forgotten = max(self._all_forgotten, self._forgotten.popitem(last=False)[1])

    def retain_models(self, models: Collection[Sequence[str]]) -> None:
        """Removes what other models have stored: their prefixes are of no use."""
        kept = {model_name(one) for one in models}
        with self._writing, self._lock:
            for name in [name for name in self._entries if name[0] not in kept]:
                self._remove(name)
            for one in [one for one in model_folders(self.folder) if one.name not in kept]:
                remove_model(one)

    def check(self) -> None:
        """Raises AssertionError unless the bytes are those of the entries and of the files, and within the cap."""
        with self._writing, self._lock:
            entries = sum(one.num_bytes for one in self._entries.values())
            files = [path for one in model_folders(self.folder) for path in files_of(one)]
            on_disk = sum(-(-path.stat().st_size // _BLOCK) * _BLOCK for path in files)
            if not self.used == entries == on_disk or self.used + self.reserved > self.cap:
                raise AssertionError(f"{self.used=:,} {self.reserved=:,} {self.cap=:,}, {entries=:,} {on_disk=:,}")

    # Files.

    def _append(self, name: _Name, begin: int, buffers: Sequence[Buffer]) -> None:
        file = os.open(self._path(name), os.O_WRONLY)
        try:
            os.ftruncate(file, begin)  # a segment that was cut off
            write_all(file, buffers, begin)
        except BaseException:
            os.ftruncate(file, begin)
            raise
        finally:
            os.close(file)

    def _create(self, name: _Name, buffers: Sequence[Buffer]) -> Path:
        draft = self._draft(name)
        draft.parent.mkdir(exist_ok=True)
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(file, buffers, 0)
        finally:
            os.close(file)
        return draft

    def _publish(
        self, name: _Name, before: StoredEntry | None, new: StoredEntry, draft: Path | None, *, since: int
    ) -> bool:
        with self._lock:
            if draft is None:
                if self._entries.get(name) is not before or before is None:
                    return False  # the user was forgotten, and the file with its new segment is gone
                self.used -= before.num_bytes
            else:
                if self._is_forgotten(name[1], since):
                    draft.unlink()
                    return False
                draft.replace(self._path(name))
                if (old := self._entries.pop(name, None)) is not None:
                    self.used -= old.num_bytes
            self._entries[name] = new
            self._entries.move_to_end(name)
            self.used += new.num_bytes
            self.counts["writes"] += 1
            self.counts["written_bytes"] += new.end - (before.end if before else 0)
            return True

    def _open(self) -> None:
        """Reads the headers of all files, by last use; removes drafts, damaged files and what exceeds the cap."""
        found = list[tuple[float, _Name, StoredEntry]]()
        for model in model_folders(self.folder):
            for path in files_of(model):
                user = user_of(path)
                entry = None if user is None else _entry_of(path, model.name, user)
                if entry is None:
                    self.counts["corrupt"] += user is not None
                    path.unlink()
                else:
                    found.append((path.stat().st_mtime, (model.name, entry.key.user), entry))
        for _, name, entry in sorted(found, key=lambda one: one[0]):
            self._entries[name] = entry
            self.used += entry.num_bytes
        self._make_room(0)

    def _path(self, name: _Name) -> Path:
        return self.folder / name[0] / f"{name[1]}.kv"

    def _draft(self, name: _Name) -> Path:
        return self.folder / name[0] / f".{name[1]}.tmp"

    # Bytes. Under the lock.

    def _make_room(self, extra: int, *, keep: _Name | None = None) -> bool:
        """Removes the least recently used files until so many bytes are free; none if that cannot be reached."""
        kept = self._entries[keep].num_bytes if keep else 0
        if extra > self.cap - self.reserved - kept:
            return False
        for name in [one for one in self._entries if one != keep]:
            if self.used + self.reserved + extra <= self.cap:
                break
            self._remove(name)
            self.counts["evicted"] += 1
        return True

    def _discard(self, name: _Name, entry: StoredEntry) -> None:
        with self._lock:
            if self._entries.get(name) is entry:
                self._remove(name)

    def _remove(self, name: _Name) -> None:
        self.used -= self._entries.pop(name).num_bytes
        with contextlib.suppress(FileNotFoundError):
            self._path(name).unlink()


def _name_of(key: PrefixKey) -> _Name:
    return model_name(key.made_by), key.user


def _entry_of(path: Path, model: str, user: int) -> StoredEntry | None:
    """The entry of a file; None if it has no complete segment, is damaged, or is not what its name says."""
    file = os.open(path, os.O_RDONLY)
    try:
        segments = scan(file)
    except DamagedError:
        return None
    finally:
        os.close(file)
    if not segments or _name_of(segments[-1].key) != (model, user):
        return None
    if path.stat().st_size > segments[-1].end:
        os.truncate(path, segments[-1].end)  # a segment that was cut off
    return StoredEntry(segments[-1].key, segments[-1].end)
