"""Reads checkpoints, full or delta: verified tensors, and table sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.checkpoint.chain import BucketRange, Chain, MergedSection
from nestpipe.checkpoint.current_rows import CurrentRows
from nestpipe.checkpoint.manifest import DENSE, RATES, ROWS, STATE, Manifest
from nestpipe.checkpoint.packed_file import blob_shapes, check_size, read_blob
from nestpipe.checkpoint.places import Place
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.row_snapshot import ids_column
from nestpipe.embedding.table import WEIGHTS, Table
from nestpipe.errors import CheckpointError


def load_checkpoint(
    folder: Place, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[Manifest, dict[str, dict[str, Tensor]]]:
    """The dense part and whole tables by ascending id, all verified; raises CheckpointError naming a damaged file."""
    manifest = Manifest.read(folder)
    content = {DENSE: read_dense(folder, manifest)} if wanted(DENSE) else {}
    return manifest, content | {name: read_table(folder, manifest, name) for name in manifest.tables if wanted(name)}


def read_dense(folder: Place, manifest: Manifest) -> dict[str, Tensor]:
    """Dense weights and optimizer state; raises CheckpointError if they are missing or damaged."""
    for blob in manifest.blobs:
        if blob.kind == DENSE:
            return read_blob(folder, blob)
    raise CheckpointError(f"{folder} holds no dense part, which this model needs.")


def current_rows(folder: Place, manifest: Manifest, table: str) -> CurrentRows | None:
    """Catches up rows of exact Adam to the step of a checkpoint; None if the table has another optimizer."""
    if f"{RATES}{table}" not in dense_shapes(folder, manifest):
        return None
    return CurrentRows.of(read_dense(folder, manifest), table, manifest.step)


def dense_shapes(folder: Place, manifest: Manifest) -> dict[str, list[int]]:
    """Names and shapes of the dense tensors, from a header alone."""
    return {
        key: shape for one in manifest.blobs if one.kind == DENSE for key, shape in blob_shapes(folder, one).items()
    }


def read_table(folder: Place, manifest: Manifest, name: str) -> dict[str, Tensor]:
    """A whole table by ascending id; `pending.*` and `kept.*` have ids of their own."""
    columns: dict[str, list[Tensor]] = {}
    for section in table_sections(folder, manifest, name):
        for column, values in {**section.index, **section.rows()}.items():
            columns.setdefault(column, []).append(values)
    return by_id(columns)


def by_id(parts: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Parts of columns as whole ones by ascending id; distinct ids."""
    whole = {column: torch.cat(list(values)) for column, values in parts.items()}
    orders = {key: whole[key].argsort() for key in {ids_column(column) for column in whole}}
    return {column: values.index_select(0, orders[ids_column(column)]) for column, values in whole.items()}


def table_sections(
    folder: Place, manifest: Manifest, name: str, within: BucketRange | None = None
) -> Iterator[MergedSection]:
    """A table, or the part of it within a range, section by section, so that it may be larger than memory."""
    if name not in manifest.tables:
        raise CheckpointError(f"{folder} holds no table '{name}', which this model needs.")
    return Chain(folder, manifest).sections(name, within)


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Sizes of one table."""

    name: str
    dim: int
    rows_per_bucket: list[int]
    num_bytes: int  # of this checkpoint, without earlier links
    state: dict[str, list[int]]  # the optimizer's values for one row: name -> shape

    @property
    def num_rows(self) -> int:
        return sum(self.rows_per_bucket)


def table_facts(folder: Place, manifest: Manifest) -> list[TableFacts]:
    """Sizes of the tables of a checkpoint, from headers and ids."""
    chain, tables = Chain(folder, manifest), []
    for name, num_buckets in manifest.tables.items():
        dim, state = row_shape(folder, manifest, name)
        owners, counts = Owners(num_buckets, 1), torch.zeros(num_buckets, dtype=torch.int64)
        for section in chain.sections(name):
            counts += torch.bincount(owners.bucket_of(section.index["ids"]), minlength=num_buckets)
        num_bytes = sum(blob.num_bytes for blob in manifest.blobs if blob.table == name)
        tables.append(TableFacts(name, dim, counts.tolist(), num_bytes, state))
    return tables


def row_shape(folder: Place, manifest: Manifest, name: str) -> tuple[int, dict[str, list[int]]]:
    """Dimension and optimizer state of one row of a table, from headers alone."""
    dim = blob_shapes(folder, next(manifest.blobs_of(name, ROWS)))[WEIGHTS][1]
    for blob in manifest.blobs_of(name, STATE):
        return dim, {key.removeprefix("state."): shape[1:] for key, shape in blob_shapes(folder, blob).items()}
    return dim, {}


def damages(folder: Place) -> tuple[list[str], int, int]:
    """What is wrong with a checkpoint and the links before it, file by file; and its numbers of files and bytes."""
    try:
        manifest = Manifest.read(folder)
        chain = Chain(folder, manifest)
    except CheckpointError as error:
        return [str(error)], 0, 0
    problems: dict[str, None] = {}
    for place, one in chain.links:
        for file, num_bytes in one.files.items():
            try:
                for blob in (blob for blob in one.blobs if blob.file == file):
                    read_blob(place, blob)
                check_size(place, file, num_bytes)
            except CheckpointError as error:
                problems[str(error)] = None
    unknown = {path.name for path in folder.iterdir()} - {"manifest.json", *manifest.files}
    for name in sorted(unknown):
        problems[f"{folder / name} is not in the manifest: nothing reads it, it can be deleted."] = None
    return list(problems), len(manifest.files), sum(manifest.files.values())


def load_weights(model: nn.Module, folder: Place, manifest: Manifest) -> None:
    """Loads frozen weights into a model; raises CheckpointError if one is missing or has another shape."""
    saved = read_dense(folder, manifest)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        weights = saved.get(f"weights.{name}")
        if weights is None or weights.shape != parameter.shape:
            shape = "nothing" if weights is None else list(weights.shape)
            raise CheckpointError(
                f"{folder} has {shape} for '{name}', but the configuration of the run needs {list(parameter.shape)}."
            )
        parameter.copy_(weights)
    for name, buffer in model.named_buffers():
        if (values := saved.get(f"weights.{name}")) is not None:  # persistent buffers
            buffer.copy_(values)


def load_table(spec: TableSpec, config: EmbeddingConfig, seed: int, folder: Place, manifest: Manifest) -> Table:
    """Loads the index, then the rows section by section, as of the checkpoint's step: a table may be larger than memory."""
    table = Table(spec, OPTIMIZERS[config.optimizer](config), seed=seed, config=config)
    if spec.name not in manifest.tables:
        return table
    current = current_rows(folder, manifest, spec.name)
    if current is not None:
        table.decays_like(current.optimizer, manifest.step)
    ids = [section.index["ids"] for section in table_sections(folder, manifest, spec.name)]
    table.load_index({"ids": torch.cat([torch.empty(0, dtype=torch.int64), *ids])})
    for section in table_sections(folder, manifest, spec.name):
        rows = section.rows((ROWS,)) if current is None else {WEIGHTS: current.weights(section.rows())}
        table.load_rows({"ids": section.index["ids"], **rows})
    return table
