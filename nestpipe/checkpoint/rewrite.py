"""Rewrites a checkpoint in its place: a delta as a full checkpoint, or with another number of buckets.

A new packed file is written into the same folder, the manifest is replaced in one operation, then the old files are deleted. A kill
leaves the old or the new checkpoint, and at most files that nothing reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from nestpipe import atomic_files
from nestpipe.checkpoint.chain import BucketRange, Chain
from nestpipe.checkpoint.folders import complete_steps, step_name
from nestpipe.checkpoint.manifest import INDEX, MANIFEST, Manifest, manifest_bytes
from nestpipe.checkpoint.places import Place, RemotePath
from nestpipe.checkpoint.reader import by_id, read_dense, table_sections
from nestpipe.checkpoint.writer import SaveContent, write_pack
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.row_snapshot import TableSection, by_section
from nestpipe.errors import CheckpointError


def compact(folder: Place) -> int:
    """Makes a delta a full checkpoint, which needs no other; returns the number of links that it needed.

    Raises CheckpointError if a later delta needs the checkpoint as it is.
    """
    manifest = Manifest.read(folder)
    if not manifest.chain:
        return 0
    for step in complete_steps(folder.parent):
        if any(link.step == manifest.step for link in Manifest.read(folder.parent / step_name(step)).chain):
            raise CheckpointError(
                f"{folder} is needed as it is by the delta of step {step}; compact that one with --step {step}."
            )
    _rewrite(folder, manifest, manifest.tables, manifest.progress)
    return len(manifest.chain)


def rebucket(parent: Place, num_buckets: int, settings: Mapping[str, str]) -> list[int]:
    """Rewrites all checkpoints of a run with so many buckets and these changed settings, as full ones; returns their steps.

    A call that was interrupted can be repeated.
    """
    done = []
    for step in reversed(complete_steps(parent)):  # a delta before the links that it needs
        folder = parent / step_name(step)
        manifest = Manifest.read(folder)
        tables = dict.fromkeys(manifest.tables, num_buckets)
        if manifest.tables != tables or manifest.chain:
            progress = {**manifest.progress, "settings": {**manifest.progress.get("settings", {}), **settings}}
            _rewrite(folder, manifest, tables, progress)
            done.append(step)
    return done[::-1]


def _rewrite(folder: Place, manifest: Manifest, tables: Mapping[str, int], progress: Mapping[str, Any]) -> None:
    content = SaveContent(
        read_dense(folder, manifest),
        {name: _sections(folder, manifest, name, num_buckets) for name, num_buckets in tables.items()},
        tables,
    )
    blobs = write_pack(folder, f"part-{secrets.token_hex(4)}-0.pack", content, manifest.step)
    data = manifest_bytes(
        step=manifest.step, cursor=manifest.cursor, progress=progress, tables=tables, blobs=blobs, chain=()
    )
    path = folder / MANIFEST
    if isinstance(path, RemotePath):
        path.write_last(data)
    else:
        atomic_files.replace_file(path, data)
        atomic_files.flush(path.parent)
    for file in manifest.files:
        (folder / file).unlink()


def _sections(folder: Place, manifest: Manifest, table: str, num_buckets: int) -> Iterator[TableSection]:
    """A table, section by section, as a full checkpoint with so many buckets holds it."""
    before = manifest.tables[table]
    owners = Owners(num_buckets, 1)
    # As many buckets at a time as the sections of the first link have; every new bucket is read whole.
    edges = [
        -(-blob.first * num_buckets // before) for blob in Chain(folder, manifest).links[0][1].blobs_of(table, INDEX)
    ]
    for first, last in zip(edges, [*edges[1:], num_buckets], strict=True):
        own = range(first, last)
        if not own:
            continue
        parts: dict[str, list[Any]] = {}
        for section in table_sections(folder, manifest, table, BucketRange(owners, own)):
            rows = section.rows()
            for name, values in {**section.index, **rows}.items():
                parts.setdefault(name, []).append(values)
        for buckets, content in by_section(by_id(parts), owners, own, rows_per_section=len(own) << 40):
            yield TableSection(
                buckets,
                {name: values for name, values in content.items() if name not in rows},
                {name: content[name] for name in rows},
            )
