"""Atomically published folders, and the growing .npy files in them.

    .OUT.tmp-PID   written here, flushed         -> rename -> OUT
    .OUT.old-PID   the folder that was replaced  -> removed

A process that dies leaves a hidden folder with its process id in the name. The next writer of OUT removes it, or renames
it back if the replacement never came.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.atomic_files import flush
from nestpipe.data.schema import Feature
from nestpipe.errors import DataError


class FeatureFiles:
    """The array files of one feature, appended to in chunks."""

    def __init__(self, folder: Path, feature: Feature) -> None:
        stem = f"{feature.scope}.{feature.name}"
        shape = (feature.dim,) if feature.kind == "vector" else ()
        self._feature = feature
        self._values = ArrayFile(
            folder / f"{stem}.values.npy", dtype=np.int64 if feature.kind in {"id", "ids"} else np.float32, shape=shape
        )
        self._offsets = self._weights = None
        if feature.kind in {"id", "ids"}:
            self._offsets = ArrayFile(folder / f"{stem}.offsets.npy", dtype=np.int64)
            self._offsets.append(np.zeros(1, np.int64))
        if feature.weights is not None:
            self._weights = ArrayFile(folder / f"{stem}.weights.npy", dtype=np.float32)

    def append(self, frame: pl.DataFrame) -> None:
        """Adds one row per row of the frame; null means missing."""
        column = frame[self._feature.name]
        if self._offsets is None:
            self.append_rows(_floats(column, self._feature))
            return
        if self._feature.kind == "id":
            lengths, values = column.is_not_null(), column.drop_nulls()
        else:
            lengths, values = column.list.len().fill_null(0), _flat(column)
        weights = None if self._weights is None else _flat(frame[f"{self._feature.name}.weights"]).to_numpy()
        self.append_rows(values.to_numpy(), lengths.to_numpy(), weights)

    def append_rows(
        self, values: NDArray[Any], lengths: NDArray[Any] | None = None, weights: NDArray[Any] | None = None
    ) -> None:
        """Adds rows as they are stored; with lengths [rows] for features of several values per row."""
        if self._offsets is not None and lengths is not None:
            self._offsets.append(self._values.num_rows + np.cumsum(lengths, dtype=np.int64))
        self._values.append(values)
        if self._weights is not None and weights is not None:
            self._weights.append(weights)

    def close(self) -> None:
        for file in (self._values, self._offsets, self._weights):
            if file is not None:
                file.close()


def keep_values(folder: Path, feature: Feature, is_kept: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> int:
    """Removes values of an id feature from its closed files; returns how many."""
    stem = f"{feature.scope}.{feature.name}"
    values = np.load(folder / f"{stem}.values.npy", allow_pickle=False)
    kept = is_kept(values)
    if kept.all():
        return 0
    offsets = np.load(folder / f"{stem}.offsets.npy", allow_pickle=False)
    save_array(folder / f"{stem}.values.npy", values[kept])
    save_array(folder / f"{stem}.offsets.npy", np.concatenate([[0], np.cumsum(kept)])[offsets])
    if feature.weights is not None:
        weights = np.load(folder / f"{stem}.weights.npy", allow_pickle=False)
        np.save(folder / f"{stem}.weights.npy", weights[kept], allow_pickle=False)
    return int((~kept).sum())


def _flat(lists: pl.Series) -> pl.Series:
    return lists.filter(lists.list.len().fill_null(0) > 0).explode()


def _floats(column: pl.Series, feature: Feature) -> NDArray[np.float32]:
    if feature.kind == "number":
        return column.fill_null(float("nan")).to_numpy()
    rows = np.full((len(column), feature.dim), np.nan, np.float32)
    present = column.is_not_null().to_numpy()
    if present.any():
        rows[present] = column.drop_nulls().to_numpy()
    return rows


FORMAT = "nestpipe-sequences"
PART_FORMAT = "nestpipe-sequences-part"  # of a part of a log, which `nestpipe data merge` joins to others
META = "meta.json"


@contextmanager
def publish_folder(out: Path, *, overwrite: bool, inputs: Sequence[Path] = ()) -> Iterator[Path]:
    """A temporary folder that becomes `out` if the body succeeds and is removed if it fails; see `check_place`."""
    target = out.resolve()
    remove_stale(target)
    check_place(out, overwrite=overwrite, inputs=inputs)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = _sibling(target, "tmp")
    if draft.exists():  # left by an interrupt during the cleanup below
        shutil.rmtree(draft)
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.iterdir(), draft]:
            flush(path)
        check_place(out, overwrite=overwrite)  # another process may have written it since
        _swap(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


FolderVersion = tuple[int, int] | None


def folder_version(folder: Path) -> FolderVersion:
    """Changes when the folder is replaced; None during the replacement."""
    try:
        info = os.stat(f"{folder}/{META}")  # noqa: PTH116  (for each request: a new Path costs more than the call)
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns


def remove_stale(out: Path) -> None:
    """Removes leftovers of dead processes; an old folder whose replacement never came is renamed back."""
    for path in sorted(out.parent.glob(f".{out.name}.*-*")):
        kind, _, process = path.name.removeprefix(f".{out.name}.").partition("-")
        if kind not in {"tmp", "old"} or not process.isdigit() or _is_alive(int(process)):
            continue
        if kind == "old" and not out.exists():
            path.rename(out)
        else:
            shutil.rmtree(path)


def check_place(out: Path, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Raises DataError unless `out` may be written: only a sequence folder is ever replaced."""
    target = out.resolve()
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir():
        raise DataError(
            f"{out} cannot be created, because {parent} is a file; nothing was written. Choose another folder."
        )
    if Path.cwd().is_relative_to(target):
        raise DataError(
            f"{out} is or contains the working folder {Path.cwd()}, which replacing it would delete; nothing was written. Choose another folder."
        )
    for path in inputs:
        if path.resolve().is_relative_to(target):
            raise DataError(
                f"{out} contains the input {path}, which replacing it would delete; nothing was written. Choose another folder."
            )
    if not target.exists():
        return
    if not target.is_dir():
        raise DataError(
            f"{out} is a file, but sequences are written to a folder; nothing was written. Choose another path."
        )
    if not overwrite:
        raise DataError(
            f"{out} exists already; nothing was written. Choose another folder, or pass --overwrite (overwrite=True) to replace it."
        )
    if any(target.iterdir()) and not _is_sequence_folder(target):
        raise DataError(
            f"{out} holds files but no {META} of a sequence folder; overwriting could delete other data, so nothing was written. Choose another folder, or remove it yourself."
        )


def _is_sequence_folder(folder: Path) -> bool:
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(meta, dict) and meta.get("format") in (FORMAT, PART_FORMAT)


def _sibling(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.{kind}-{os.getpid()}"


def _swap(draft: Path, out: Path) -> None:
    old = _sibling(out, "old")
    if out.exists():
        out.rename(old)
    draft.rename(out)
    flush(out.parent)
    if old.exists():
        shutil.rmtree(old)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def file_entry(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


class ArrayFile:
    """A .npy file that grows along its first axis; numpy pads the header, so the final length fits."""

    def __init__(self, path: Path, *, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._shape = shape
        self.num_rows = 0
        self._write_header()
        self._start = self._file.tell()

    def append(self, rows: NDArray[Any]) -> None:
        """Adds rows [n, ...]."""
        if rows.dtype != self._dtype or rows.shape[1:] != self._shape:
            raise AssertionError(
                f"{self._file.name}: {rows.dtype} {rows.shape} appended to {self._dtype} {self._shape}"
            )
        self._file.write(np.ascontiguousarray(rows).data)
        self.num_rows += len(rows)

    def close(self) -> None:
        """Writes the final header."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._start:
            raise AssertionError(f"{self._file.name}: the header outgrew its space")
        self._file.close()

    def _write_header(self) -> None:
        description = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._file, {**description, "shape": (self.num_rows, *self._shape)})


def save_array(path: Path, values: NDArray[Any]) -> None:
    """Writes a whole array of int64 without pickle."""
    if values.dtype != np.int64:
        raise AssertionError(f"{path.name}: {values.dtype} instead of int64")
    np.save(path, values, allow_pickle=False)


def load_array(path: Path) -> NDArray[Any]:
    """Memory-maps an array read-only (an empty one is loaded); raises DataError if it is damaged.

    It is no `np.memmap`, whose every slice costs calls in Python.
    """
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, _ = np.lib.format.read_array_header_1_0(file)
        mapped: NDArray[Any] = np.load(path, mmap_mode="r" if 0 not in shape else None, allow_pickle=False)
    except ValueError as error:
        raise DataError(
            f"{path} is no readable .npy file ({error}): the folder is damaged. Ingest the log again."
        ) from None
    return mapped.view(np.ndarray)
