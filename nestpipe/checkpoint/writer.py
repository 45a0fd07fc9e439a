"""Saves a checkpoint on all ranks, atomically, to a local folder or straight to an object store.

Every rank writes one packed file, rank 0 then the manifest. In a local folder, which all ranks must share, files are written to a
temporary folder, flushed to disk, and published by one rename. In an object store the manifest, written last, publishes them. A kill
leaves the previous checkpoints and files that nothing reads, which the next start of the run deletes. The name of a file contains
the attempt, which rank 0 draws: a late upload of a killed rank overwrites nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestpipe import atomic_files
from nestpipe.checkpoint.folders import publish_checkpoint, remove_unfinished, step_name
from nestpipe.checkpoint.manifest import MANIFEST, Blob, Link, Manifest, manifest_bytes
from nestpipe.checkpoint.packed_file import PackWriter
from nestpipe.checkpoint.places import Place, RemotePath
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import Channel, World
from nestpipe.embedding.row_snapshot import TableSection
from nestpipe.errors import TrainError
from nestpipe.jagged import Cursor


@dataclass(frozen=True, slots=True, eq=False)
class SaveContent:
    """What this rank saves. Sections are consumed one by one, so that only one needs to be in memory."""

    dense: Mapping[str, Tensor] | None  # of rank 0
    tables: Mapping[str, Iterable[TableSection]] = field(default_factory=dict)
    num_buckets: Mapping[str, int] = field(default_factory=dict)  # per table
    chain: Sequence[Link] = ()  # of a delta: the checkpoints that it needs


def save_checkpoint(
    parent: Place,
    step: int,
    cursor: Cursor,
    progress: Mapping[str, Any],
    content: SaveContent,
    channel: Channel | None = None,
) -> Place:
    """Writes a checkpoint of `step` and publishes it; an existing one of the same step is kept. Collective."""
    channel = channel or World.single().channel("checkpoint")
    leads = channel.world.rank == 0
    final = parent / step_name(step)
    # Rank 0 decides: on a network file system other machines may see stale entries.
    exists = all_ranks_or_none(channel, "checkpoint looked up", lambda: leads and (final / MANIFEST).exists())
    if channel.all_gather_ints([exists], name="checkpoint exists")[0][0]:
        return final
    target = final if isinstance(final, RemotePath) else final.with_name(f".tmp-{final.name}")
    all_ranks_or_none(channel, "checkpoint folder", lambda: _make_room(parent, target) if leads else None)
    attempt = channel.broadcast_bytes(secrets.token_hex(4).encode(), 0, name="attempt").decode()
    file = f"part-{attempt}-{channel.world.rank}.pack"
    own = all_ranks_or_none(channel, "checkpoint files", lambda: write_pack(target, file, content, step))
    everyone = channel.all_gather_bytes(json.dumps(own).encode(), name="checkpoint digests")
    blobs = [Blob(*one) for data in everyone for one in json.loads(data)]
    manifest = manifest_bytes(
        step=step, cursor=cursor, progress=progress, tables=content.num_buckets, blobs=blobs, chain=content.chain
    )
    all_ranks_or_none(channel, "checkpoint published", lambda: _publish(target, final, manifest) if leads else None)
    return final


def _make_room(parent: Place, target: Place) -> None:
    if isinstance(parent, Path):
        parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(parent)
    target.mkdir()


def write_pack(folder: Place, file: str, content: SaveContent, step: int) -> list[Blob]:
    """Writes the packed file of this rank; a rank without content writes none."""
    if content.dense is None and not content.tables:
        return []
    path = folder / file
    if isinstance(path, RemotePath):
        with path.writing() as remote:
            return _pack(PackWriter(remote, file), content, step)
    with path.open("wb") as local:
        blobs = _pack(PackWriter(local, file), content, step)
    atomic_files.flush(path)
    return blobs


def _pack(pack: PackWriter, content: SaveContent, step: int) -> list[Blob]:
    if content.dense is not None:
        check_finite("dense", content.dense, step)
        pack.add_dense(content.dense)
    for name, sections in content.tables.items():
        for section in sections:
            check_finite(name, section.rows, step)
            pack.add_section(name, section)
    return pack.blobs


def _publish(target: Place, final: Place, manifest: bytes) -> None:
    """Writes the manifest last: a folder without one is not a checkpoint."""
    if isinstance(target, RemotePath):
        (target / MANIFEST).write_last(manifest)
        return
    (target / MANIFEST).write_bytes(manifest)
    atomic_files.flush(target / MANIFEST)
    assert isinstance(final, Path)
    publish_checkpoint(target, final)


def links_of(folder: Place, channel: Channel) -> tuple[Link, ...]:
    """The links that a delta after this checkpoint needs; read by rank 0. Collective."""
    leads = channel.world.rank == 0
    own = all_ranks_or_none(channel, "manifest read", lambda: Manifest.read(folder).links if leads else None)
    return tuple(Link(*one) for one in json.loads(channel.broadcast_bytes(json.dumps(own).encode(), 0, name="links")))


def check_finite(part: str, tensors: Mapping[str, Tensor], step: int) -> None:
    """Raises TrainError for a non-finite weight."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainError(
                f"{part}/{name} is not finite after step {step}; nothing was saved. "
                "Lower the learning rates and resume from the last checkpoint."
            )
