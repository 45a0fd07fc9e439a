"""Saves a checkpoint on all ranks, published whole or not at all.

Files go to a temporary folder, are flushed to the disk, and appear by one rename. A kill at any moment leaves the previous
checkpoints, and at most a temporary folder that the next start of the run removes.
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
    """Writes a checkpoint of `step` and publishes it; an existing one of the same step is kept.

    Files are asked for one after the other, so that they need not be in memory together. All ranks call it, each with files
    of its own in a folder that all see; rank 0 adds the manifest and publishes.
    """
    channel = channel or World.single().channel("checkpoint")
    leads = channel.world.rank == 0
    final, temporary = parent / f"step-{step:06d}", parent / f".tmp-step-{step:06d}"
    # Rank 0 looks: on a network file system another machine may see what it saw a moment ago.
    if channel.all_gather_ints([(final / "manifest.json").exists()], name="checkpoint exists")[0][0]:
        return final
    all_ranks_or_none(channel, "checkpoint folder", lambda: _make_room(parent, temporary) if leads else None)
    own = all_ranks_or_none(channel, "checkpoint files", lambda: _write_all(temporary, content))
    said = channel.all_gather_bytes(json.dumps(own).encode(), name="checkpoint digests")
    files = {name: entry for data in said for name, entry in json.loads(data).items()}
    contents = partial(write_manifest, temporary, step=step, cursor=cursor, progress=progress, files=files)
    all_ranks_or_none(channel, "checkpoint published", lambda: _publish(temporary, final, contents) if leads else None)
    return final


def _make_room(parent: Path, temporary: Path) -> None:
    parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(parent)
    temporary.mkdir()


def _write_all(folder: Path, content: Files) -> dict[str, dict[str, Any]]:
    return {f"{name}.safetensors": _write(folder / f"{name}.safetensors", part) for name, part in content}


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:  # which is no OSError, also for a full disk
        raise CheckpointError(f"{path} was not written: {error}. The checkpoint before it is complete.") from error
    atomic_files.flush(path)
    return {"sha256": file_digest(path), "bytes": path.stat().st_size}


def _publish(temporary: Path, final: Path, write: Callable[[], None]) -> None:
    """The manifest comes last: a folder without one is no checkpoint."""
    write()
    atomic_files.flush(temporary / "manifest.json")
    publish_checkpoint(temporary, final)
