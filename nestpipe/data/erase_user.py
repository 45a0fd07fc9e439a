"""Erases one user from a sequence folder: events, features and texts.

The catalogue is kept, because it describes items. quarantine.jsonl is emptied, because rejected records may contain
anything of the log.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.array_files import META, file_entry, publish_folder
from nestpipe.data.sequences import QUARANTINE, Sequences, folder_digest


def forget_user(sequences: Sequences, user: int, *, announce: Callable[[str], None]) -> int:
    """Replaces the folder by one without the user; returns the number of erased events, 0 for an unknown user.

    `announce` receives the digest of the new folder before it is published. No other process may write the folder.
    """
    place = int(np.searchsorted(sequences.users, user))
    if place == len(sequences.users) or sequences.users[place] != user:
        return 0
    first, last = (int(edge) for edge in sequences.offsets[place : place + 2])
    rows = slice(first, last)
    with publish_folder(sequences.path, overwrite=True) as draft:
        for name in sequences.meta["files"]:
            _copy(sequences.path / name, draft / name, user=user, place=place, rows=rows)
        announce(_write_meta(sequences, draft, num_events=last - first))
    return last - first


def _copy(source: Path, target: Path, *, user: int, place: int, rows: slice) -> None:
    """Copies one file without the user's rows."""
    parts = source.name.split(".")
    is_features = parts[0] in {"event", "user"} and parts[-1] == "npy"
    if source.name == QUARANTINE:
        target.touch()
    elif source.name in {"items.npy", "times.npy"}:
        _save(target, np.delete(_load(source), rows))
    elif source.name == "users.npy":
        _save(target, np.delete(_load(source), place))
    elif source.name == "offsets.npy":
        _save(target, _without(_load(source), slice(place, place + 1)))
    elif is_features and parts[-2] == "offsets":
        _save(target, _without(_load(source), rows if parts[0] == "event" else slice(place, place + 1)))
    elif is_features:
        offsets = source.with_name(".".join([*parts[:-2], "offsets", "npy"]))
        own = rows if parts[0] == "event" else slice(place, place + 1)
        if offsets.exists():
            own = slice(*_load(offsets)[[own.start, own.stop]].tolist())
        _save(target, np.delete(_load(source), own, axis=0))
    elif parts[-1] == "parquet":
        frame = pl.read_parquet(source)
        column = "id" if source.name == "texts.user.parquet" else "user"
        frame.filter(pl.col(column) != user).write_parquet(target) if column in frame.columns else shutil.copy(
            source, target
        )
    else:
        shutil.copy(source, target)


def _without(offsets: NDArray[np.int64], rows: slice) -> NDArray[np.int64]:
    """Offsets after the removal of some rows."""
    lengths = np.delete(np.diff(offsets), rows)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _write_meta(sequences: Sequences, draft: Path, *, num_events: int) -> str:
    """Returns the digest of the new folder."""
    meta: dict[str, Any] = json.loads(json.dumps(sequences.meta))
    for name in ("read", "kept", "events"):
        meta["counts"][name] -= num_events
    meta["counts"]["users"] -= 1
    meta["files"] = {name: file_entry(draft / name) for name in meta["files"]}
    meta["digest"] = folder_digest(meta)
    (draft / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    digest: str = meta["digest"]
    return digest


def _load(path: Path) -> NDArray[Any]:
    found: NDArray[Any] = np.load(path, allow_pickle=False)
    return found


def _save(path: Path, values: NDArray[Any]) -> None:
    np.save(path, values, allow_pickle=False)
