"""A training state as checkpoint files and back. Rows are stored by bucket, so any number of ranks can load them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.embedding.stale_rows import PreviousRows, StaleRows, split_previous
from nestpipe.pipeline.stages import TrainState


def checkpoint_files(state: TrainState) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The files of this rank, as copies: its share of the buckets among replicas, and on rank 0 the dense part."""
    embedding = state.embedding
    if state.control.world.rank == 0:
        yield "dense", state.dense.export()
    for name, table in embedding.tables.items():
        buckets = embedding.owners.buckets_of(embedding.rank)[embedding.group :: embedding.num_groups]
        access = embedding.row_access[name]
        stale = access.previous.export() if isinstance(access, StaleRows) and access.previous else {}
        previous = dict(split_previous(stale, embedding.owners, buckets))
        for number, content in table.export_buckets(embedding.owners, buckets):
            yield bucket_name(name, number), {**content, **previous.get(number, {})}


def restore_state(state: TrainState, folder: Path, manifest: Manifest) -> None:
    """Loads the dense part and the rows that this rank owns into a new state; raises CheckpointError."""
    embedding = state.embedding
    state.dense.load(checkpoint_reader.read_tensors(folder, manifest, "dense"))
    for name, table in embedding.tables.items():
        files = [bucket_name(name, number) for number in embedding.owners.buckets_of(embedding.rank)]
        # The index, then the rows bucket by bucket: a table may be larger than memory.
        indices = [
            checkpoint_reader.read_tensors(folder, manifest, file, lambda key: not _is_of_rows(key)) for file in files
        ]
        content = {key: torch.cat([one[key] for one in indices]) for key in indices[0]}
        table.load_index(content)
        for file in files:
            table.load_rows(checkpoint_reader.read_tensors(folder, manifest, file, _is_row_or_id, verify=False))
        if isinstance(access := embedding.row_access[name], StaleRows):
            access.previous = PreviousRows.read(content)
    state.num_steps = manifest.step


def _is_of_rows(key: str) -> bool:
    """Whether a tensor of a bucket file holds weights or optimizer state."""
    return key == "rows" or key.startswith("state.")


def _is_row_or_id(key: str) -> bool:
    return key == "ids" or _is_of_rows(key)


def bucket_name(table: str, bucket: int) -> str:
    return f"{table}.{bucket:03d}"
