"""Where checkpoints are: a local folder, or a folder of any fsspec file system (s3://, gs://, memory://, file:// and others).

A `Place` is a `pathlib.Path` or a `RemotePath`, which has the few methods of a path that checkpoints need. So readers and writers
are the same code for both; nothing is copied to a local folder first.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from nestpipe.errors import CheckpointError, ConfigError


def is_url(text: object) -> bool:
    return "://" in str(text)


class RemotePath:
    """A path of an fsspec file system. Methods raise CheckpointError with the URL and the reason."""

    def __init__(self, system: Any, path: str, url: str):
        self._system, self._path, self._url = system, path, url

    @staticmethod
    def of(url: str) -> RemotePath:
        """Raises ConfigError if no installed fsspec backend supports the URL."""
        url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigError(f"{url} needs fsspec: pip install 'nestpipe[remote]'") from None
        try:
            system, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be reached: {error}") from error
        return RemotePath(system, path, url)

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._system, f"{self._path}/{name}", f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._system, self._path.rpartition("/")[0], self._url.rpartition("/")[0])

    def exists(self) -> bool:
        with self._explained("read"):
            self._system.invalidate_cache()  # another process may have written
            return bool(self._system.exists(self._path))

    def is_dir(self) -> bool:
        with self._explained("listed"):
            self._system.invalidate_cache()
            return bool(self._system.isdir(self._path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Its entries; none if it does not exist, as object stores have no empty folders."""
        with self._explained("listed"):
            self._system.invalidate_cache()
            try:
                paths = self._system.ls(self._path, detail=False)
            except FileNotFoundError:
                return
        for path in paths:
            if name := path.rstrip("/").rpartition("/")[2]:
                yield self / name

    def read_bytes(self) -> bytes:
        with self._explained("read"):
            return bytes(self._system.cat_file(self._path))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def read_range(self, offset: int, num_bytes: int) -> bytes:
        """Bytes from `offset` on: fewer than `num_bytes` if the file ends before."""
        with self._explained("read"):
            return bytes(self._system.cat_file(self._path, start=offset, end=offset + num_bytes))

    def size(self) -> int:
        with self._explained("read"):
            self._system.invalidate_cache()
            return int(self._system.size(self._path))

    def mkdir(self) -> None:
        """Creates it where folders exist on their own."""
        with self._explained("written"):
            self._system.makedirs(self._path, exist_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """A new file, streamed to the store."""
        with self._explained("written"), self._system.open(self._path, "wb") as file:
            yield cast(BinaryIO, file)

    def write_last(self, data: bytes) -> None:
        """Writes a small file at once: a reader sees all of it or nothing."""
        hidden = self.parent / f".{self.name}"
        with self._explained("written"):
            # Some stores show files while they are being written.
            self._system.pipe_file(hidden._path, data)
            self._system.mv(hidden._path, self._path)

    def unlink(self) -> None:
        with self._explained("deleted"):
            self._system.rm_file(self._path)

    def remove_tree(self) -> None:
        with self._explained("deleted"):
            self._system.rm(self._path, recursive=True)

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, FileNotFoundError):
            raise
        except Exception as error:  # backends raise errors of their own
            raise CheckpointError(f"{self._url} cannot be {done}: {type(error).__name__}: {error}") from error


Place: TypeAlias = Path | RemotePath


def place_of(text: str | Path) -> Place:
    """A path, or what is behind a URL."""
    return RemotePath.of(str(text)) if is_url(text) else Path(text)


def run_checkpoints(folder: Place, url: str = "") -> Place:
    """The folder of a run's checkpoints: its own, or the one of the URL that it saves to."""
    return (RemotePath.of(url) if url else folder) / "checkpoints"


def saves_to(folder: Path) -> str:
    """The URL to which the run in a folder saves (`train.checkpoints`); empty if that is the folder itself."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / "config.json").read_text())["train"]["checkpoints"])
    return ""


def read_range(place: Place, offset: int, num_bytes: int) -> bytes:
    """Bytes of a file from `offset` on: fewer than `num_bytes` if it ends before. Raises FileNotFoundError."""
    if isinstance(place, RemotePath):
        return place.read_range(offset, num_bytes)
    with place.open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def size_of(place: Place) -> int:
    return place.size() if isinstance(place, RemotePath) else place.stat().st_size
