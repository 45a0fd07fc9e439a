"""Logs and sequence folders in object stores: s3://, gs:// and every other file system of fsspec.

    log      s3://bucket/logs/*.csv.gz   each file is copied once into the cache, and again if it has changed
    folder   s3://bucket/data/shop       copied once per host into the cache, under the digest of its content
    output   s3://bucket/data/shop       written on this machine, then copied; meta.json last, so that it appears complete

The cache is ~/.cache/nestpipe/objects, or $XDG_CACHE_HOME/nestpipe/objects. Copies are published by rename, and digests are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestpipe.data.array_files import META, file_entry
from nestpipe.errors import ConfigError, DataError

_names: dict[Path, str] = {}  # of copied logs: their URL


def is_url(text: str | Path) -> bool:
    return "://" in str(text)


def absolute_path(text: str) -> str:
    """A URL as it is, a path from the root."""
    return text if is_url(text) else str(Path(text).resolve())


def name_of(path: Path) -> str:
    """How a file of a log is named in messages and in meta.json: by its URL if it is a copy."""
    return _names.get(path, str(path))


def cache_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "nestpipe" / "objects"


def fetch_files(pattern: str) -> list[Path]:
    """Local copies of the files that a URL or a URL with a glob names, in the order of their names."""
    system, root = _system_of(pattern)
    with _explained(pattern, "read"):
        system.invalidate_cache()
        found = [root] if system.isfile(root) else sorted(system.glob(root))
        return [_fetch_file(system, name) for name in found if system.isfile(name)]


def _fetch_file(system: Any, name: str) -> Path:
    """A copy of one file, named after its content's version in the store."""
    url = system.unstrip_protocol(name)
    version = hashlib.sha256(f"{url} {system.ukey(name)}".encode()).hexdigest()[:32]
    target = cache_folder() / "files" / version / Path(name).name
    with _one_at_a_time(target.parent):
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            draft = target.with_name(f".{target.name}.tmp")
            system.get_file(name, str(draft))
            if draft.stat().st_size != system.size(name):
                raise DataError(
                    f"{url} was cut off while it was read: {draft.stat().st_size:,} bytes arrived. Try again."
                )
            draft.rename(target)
    _names[target] = url
    return target


def fetch_folder(url: str) -> Path:
    """The local copy of a sequence folder, made by the first process of this host that asks; raises DataError."""
    system, root = _system_of(url)
    with _explained(url, "read"):
        system.invalidate_cache()
        if not system.exists(f"{root}/{META}"):
            raise DataError(
                f"{url} has no {META}, so it is no sequence folder, or its upload has not finished. Make one with 'nestpipe data ingest LOG --out {url}'."
            )
        about = system.cat_file(f"{root}/{META}")
    meta = json.loads(about)
    target = cache_folder() / "folders" / hashlib.sha256(about).hexdigest()[:32]
    with _one_at_a_time(target):
        if not target.exists():
            draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                for name, entry in meta["files"].items():
                    with _explained(url, "read"):
                        system.get_file(f"{root}/{name}", str(draft / name))
                    if file_entry(draft / name) != entry:
                        raise DataError(
                            f"{url}/{name} is not the file that {META} describes (SHA-256 differs): it is damaged, or the folder is being replaced. Try again, or ingest the log again."
                        )
                (draft / META).write_bytes(about)
                draft.rename(target)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    return target


def check_url(url: str, *, overwrite: bool) -> None:
    """Raises DataError if there is a folder already, unless it may be replaced."""
    system, root = _system_of(url)
    with _explained(url, "read"):
        system.invalidate_cache()
        if system.exists(f"{root}/{META}") and not overwrite:
            raise DataError(
                f"{url} exists already; nothing was written. Choose another folder, or pass --overwrite (overwrite=True) to replace it."
            )


def push_folder(folder: Path, url: str) -> None:
    """Copies a sequence folder to a store; until its meta.json is there, last, it is no sequence folder."""
    system, root = _system_of(url)
    with _explained(url, "written"):
        old = json.loads(system.cat_file(f"{root}/{META}"))["files"] if system.exists(f"{root}/{META}") else {}
        if old:
            system.rm_file(f"{root}/{META}")
        system.makedirs(root, exist_ok=True)
        names = [path.name for path in sorted(folder.iterdir()) if path.name != META]
        for name in [*names, META]:
            system.put_file(str(folder / name), f"{root}/{name}")
        for name in old.keys() - set(names):
            system.rm_file(f"{root}/{name}")


def _system_of(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(f"{url} needs fsspec: pip install 'nestpipe[remote]'") from None
    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url} cannot be reached: {error}") from None
    return system, root.rstrip("/")


@contextlib.contextmanager
def _explained(url: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{url} could not be {what} ({type(error).__name__}: {error}). Check the address, the credentials and the network, and try again."
        ) from error


@contextlib.contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    """Processes of this host that want the same copy wait for the one that makes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
