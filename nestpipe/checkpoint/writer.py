"""Saves a checkpoint on all ranks, atomically.

Files are written to a temporary folder, flushed to disk, and published by one rename. A kill leaves the previous checkpoints and
at most a temporary folder, which the next start of the run deletes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nestpipe import atomic_files
from nestpipe.checkpoint.folders import publish_checkpoint, remove_unfinished
from nestpipe.checkpoint.manifest import write_manifest
from nestpipe.checkpoint.reader import file_digest
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import Channel, World
from nestpipe.errors import CheckpointError
from nestpipe.jagged import Cursor

Files = Iterable[tuple[str, Mapping[str, Tensor]]]  # names without suffix, and tensors


def save_checkpoint(
    parent: Path, step: int, cursor: Cursor, progress: Mapping[str, Any], content: Files, channel: Channel | None = None
) -> Path:
    """Writes a checkpoint of `step` and publishes it; an existing one of the same step is kept. Collective.

    `content` is consumed file by file, so that only one needs to be in memory. Every rank writes its own files to the shared
    folder; rank 0 adds the manifest and publishes.
    """
    channel = channel or World.single().channel("checkpoint")
    leads = channel.world.rank == 0
    final, temporary = parent / f"step-{step:06d}", parent / f".tmp-step-{step:06d}"
    # Rank 0 decides: on a network file system other machines may see stale entries.
    if channel.all_gather_ints([(final / "manifest.json").exists()], name="checkpoint exists")[0][0]:
        return final
    all_ranks_or_none(channel, "checkpoint folder", lambda: _make_room(parent, temporary) if leads else None)
    own = all_ranks_or_none(channel, "checkpoint files", lambda: _write_all(temporary, content))
    everyone = channel.all_gather_bytes(json.dumps(own).encode(), name="checkpoint digests")
    files = {name: entry for data in everyone for name, entry in json.loads(data).items()}
    contents = partial(write_manifest, temporary, step=step, cursor=cursor, progress=progress, files=files)
    all_ranks_or_none(channel, "checkpoint published", lambda: _publish(temporary, final, contents) if leads else None)
    return final


def _make_room(parent: Path, temporary: Path) -> None:
    parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(parent)
    temporary.mkdir()


def _write_all(folder: Path, content: Files) -> dict[str, dict[str, Any]]:
    return {f"{name}.safetensors": _write(folder / f"{name}.safetensors", tensors) for name, tensors in content}


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:  # also raised for a full disk
        raise CheckpointError(f"{path} was not written: {error}. The previous checkpoint is complete.") from error
    atomic_files.flush(path)
    return {"sha256": file_digest(path), "bytes": path.stat().st_size}


def _publish(temporary: Path, final: Path, write: Callable[[], None]) -> None:
    """Writes the manifest last: a folder without one is not a checkpoint."""
    write()
    atomic_files.flush(temporary / "manifest.json")
    publish_checkpoint(temporary, final)
