"""The folder of a prefix store: which names are its own, and which process owns it.

    FOLDER/lock                     held by the owner
    FOLDER/MODEL/USER.kv            segments (prefix_file.py); MODEL is a digest of model, weights, features and number type
    FOLDER/MODEL/.USER.tmp          a file that is being written; a rename publishes it

A store removes files. So it opens no folder that has anything else, and removes only files with these names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nestpipe.errors import ConfigError
from nestpipe.models.kv_prefix import digest_of

_LOCK = "lock"
_MODEL = re.compile(r"[0-9a-f]{32}")  # a digest
_FILE = re.compile(r"(-?\d+)\.kv|\.-?\d+\.tmp")
_LISTED = 3  # foreign names in a message


class StoreInUseError(ConfigError):
    """Another process owns the folder."""


def model_name(made_by: Sequence[str]) -> str:
    """The folder of a model."""
    return digest_of(tuple(made_by))


def take_folder(folder: Path) -> int:
    """The lock of a folder, which is created if need be.

    Raises ConfigError for a folder with files of others, StoreInUseError if another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            f"{folder} is no folder, or is inside of a file; name a folder with --prefix-store."
        ) from None
    _refuse_foreign(folder)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StoreInUseError(
            f"{folder} is the prefix store of another process; two would remove each other's files. End that process, or name "
            "another folder with --prefix-store."
        ) from None
    return lock


def _refuse_foreign(folder: Path) -> None:
    """A lock alone makes no store: runs have one too."""
    entries = {one.name: one for one in folder.iterdir()}
    foreign = {name for name, one in entries.items() if not (name == _LOCK and one.is_file()) and not _is_model(one)}
    if not foreign and (_LOCK in entries or not entries):
        return
    names = sorted(foreign or entries)
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    raise ConfigError(
        f"{folder} has {', '.join(names[:_LISTED])}{more}, so it is no prefix store. A store removes files of its folder; nothing "
        "was opened or removed. Name an empty or new folder with --prefix-store."
    )


def model_folders(folder: Path) -> Iterator[Path]:
    return (one for one in folder.iterdir() if _is_model(one))


def files_of(model: Path) -> list[Path]:
    """The files of a model's folder that a store has made, with unfinished ones."""
    return [one for one in model.iterdir() if _FILE.fullmatch(one.name) and one.is_file()]


def user_of(path: Path) -> int | None:
    """Whose file it is; None for one that is not finished."""
    matched = _FILE.fullmatch(path.name)
    return int(matched[1]) if matched and matched[1] else None


def remove_model(model: Path) -> None:
    """Removes the files of a model, and its folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for path in files_of(model):
            path.unlink(missing_ok=True)
        model.rmdir()


def remove_user(folder: Path, user: int) -> int:
    """Removes the files of a user from a store that another process may own; returns their number."""
    models = list(model_folders(folder)) if folder.is_dir() else []
    found = [path for one in models for name in (f"{user}.kv", f".{user}.tmp") if (path := one / name).is_file()]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _is_model(path: Path) -> bool:
    return _MODEL.fullmatch(path.name) is not None and path.is_dir()
