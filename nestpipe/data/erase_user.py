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
from nestpipe.data.vocabulary import OwnId


def forget_user(
    sequences: Sequences, user: int | None, *, announce: Callable[[str], None], own: OwnId | None = None
) -> int:
    """Replaces the folder by one without the user; returns the number of erased events.

    A user without events may still be in the users table, or with their own id in quarantined records alone; these are
    erased too. None is a user without a number. `announce` receives the digest of the new folder before it is published. No other process may
    write the folder.
    """
    users = sequences.users
    place = len(users) if user is None else int(np.searchsorted(users, user))
    is_known = place < len(users) and users[place] == user
    if not is_known and not _is_named(sequences, user, own):
        return 0
    first, last = (int(edge) for edge in sequences.offsets[place : place + 2]) if is_known else (0, 0)
    place_of_user = slice(place, place + 1) if is_known else slice(0, 0)
    with publish_folder(sequences.path, overwrite=True) as draft:
        for name in sequences.meta["files"]:
            _copy(sequences.path / name, draft / name, user=user, own=place_of_user, rows=slice(first, last))
        _drop_unused_texts(sequences, draft)
        announce(_write_meta(sequences, draft, num_users=int(is_known), num_events=last - first))
    return last - first


def _is_named(sequences: Sequences, user: int | None, own: OwnId | None) -> bool:
    """Whether something of a user without events is in the folder: a text, or a rejected record."""
    if user is not None and user in sequences.vocabulary("user").table["id"]:
        return True
    return own is not None and is_quarantined(sequences, own)


def is_quarantined(sequences: Sequences, own: OwnId) -> bool:
    """Whether an own id occurs in rejected records."""
    rejected = (sequences.path / QUARANTINE).read_text(encoding="utf-8")
    return str(own) in rejected or json.dumps(str(own))[1:-1] in rejected


def _drop_unused_texts(sequences: Sequences, draft: Path) -> None:
    """Values of id features that nobody else has are gone with the user."""
    for feature in sequences.schema.of_scope("event", "user"):
        path = draft / f"texts.{feature.name}.parquet"
        if path.exists():
            used = pl.Series(np.unique(_load(draft / f"{feature.scope}.{feature.name}.values.npy")))
            pl.read_parquet(path).filter(pl.col("id").is_in(used.implode())).write_parquet(path)


def _copy(source: Path, target: Path, *, user: int | None, own: slice, rows: slice) -> None:
    """Copies one file without the user's rows."""
    parts = source.name.split(".")
    is_features = parts[0] in {"event", "user"} and parts[-1] == "npy"
    if source.name == QUARANTINE:
        target.touch()
    elif source.name in {"items.npy", "times.npy"}:
        _save(target, np.delete(_load(source), rows))
    elif source.name == "users.npy":
        _save(target, np.delete(_load(source), own))
    elif source.name == "offsets.npy":
        _save(target, _without(_load(source), own))
    elif is_features and parts[-2] == "offsets":
        _save(target, _without(_load(source), rows if parts[0] == "event" else own))
    elif is_features:
        offsets = source.with_name(".".join([*parts[:-2], "offsets", "npy"]))
        erased = rows if parts[0] == "event" else own
        if offsets.exists():
            erased = slice(*_load(offsets)[[erased.start, erased.stop]].tolist())
        _save(target, np.delete(_load(source), erased, axis=0))
    elif parts[-1] == "parquet":
        frame = pl.read_parquet(source)
        column = "id" if source.name == "texts.user.parquet" else "user"
        if column in frame.columns and user is not None:
            frame.filter(pl.col(column) != user).write_parquet(target)
        else:
            shutil.copy(source, target)
    else:
        shutil.copy(source, target)


def _without(offsets: NDArray[np.int64], rows: slice) -> NDArray[np.int64]:
    """Offsets after the removal of some rows."""
    lengths = np.delete(np.diff(offsets), rows)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _write_meta(sequences: Sequences, draft: Path, *, num_users: int, num_events: int) -> str:
    """Returns the digest of the new folder."""
    meta: dict[str, Any] = json.loads(json.dumps(sequences.meta))
    for name in ("read", "kept", "events"):
        meta["counts"][name] -= num_events
    meta["counts"]["users"] -= num_users
    meta.pop("ancestors", None)  # it holds less than they did
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
