"""Reads checkpoints: verified tensors, and table sizes from file headers alone."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nestpipe.checkpoint.manifest import Manifest, move_away_advice
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import Table
from nestpipe.errors import CheckpointError


def load_checkpoint(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[Manifest, dict[str, dict[str, Tensor]]]:
    """Reads and verifies the wanted files of a checkpoint; raises CheckpointError naming a damaged one."""
    manifest = Manifest.read(folder)
    names = (file.removesuffix(".safetensors") for file in manifest.files)
    return manifest, {name: read_tensors(folder, manifest, name) for name in names if wanted(name)}


def read_tensors(
    folder: Path,
    manifest: Manifest,
    name: str,
    wanted: Callable[[str], bool] = lambda key: True,
    *,
    verify: bool = True,
) -> dict[str, Tensor]:
    """The wanted tensors of one file; raises CheckpointError if it is missing or, with `verify`, damaged."""
    file = f"{name}.safetensors"
    if file not in manifest.files:
        raise CheckpointError(f"{folder} holds no {name}, which this model needs.")
    if verify:
        verify_file(folder / file, manifest.files[file])
    try:
        with safe_open(folder / file, "pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys() if wanted(key)}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{folder / file} cannot be read ({error}).") from error


def verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a file is missing or does not match its digest."""
    if not path.exists():
        raise CheckpointError(
            f"{path.parent} lacks {path.name}, which its manifest lists. {move_away_advice(path.parent)}"
        )
    if path.stat().st_size != expected["bytes"] or file_digest(path) != expected["sha256"]:
        raise CheckpointError(
            f"{path} is not what was saved: its digest differs from the manifest's. {move_away_advice(path.parent)}"
        )


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Sizes of one table, over all its bucket files."""

    name: str
    dim: int
    rows_per_bucket: list[int]
    num_bytes: int
    state: dict[str, list[int]]  # the optimizer's values for one row: name -> shape


def bucket_files(manifest: Manifest) -> dict[str, list[str]]:
    """The files of each table, by bucket."""
    files: dict[str, list[str]] = defaultdict(list)
    for file in sorted(manifest.files):
        table, _, number = file.removesuffix(".safetensors").rpartition(".")
        if number.isdigit():
            files[table].append(file)
    return files


def table_facts(folder: Path, manifest: Manifest) -> list[TableFacts]:
    """Sizes of the tables of a checkpoint, from headers alone."""
    tables = []
    for name, files in bucket_files(manifest).items():
        headers = [tensor_shapes(folder / file) for file in files]
        state = {key.removeprefix("state."): shape[1:] for key, shape in headers[0].items() if key.startswith("state.")}
        num_bytes = sum(manifest.files[file]["bytes"] for file in files)
        rows = [header["rows"] for header in headers]
        tables.append(TableFacts(name, rows[0][1], [shape[0] for shape in rows], num_bytes, state))
    return tables


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a file."""
    advice = f"'nestpipe checkpoint verify {path.parent}' lists all damage"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; {advice}.")
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {advice}.") from error


def load_weights(model: nn.Module, folder: Path, manifest: Manifest) -> None:
    """Loads frozen weights into a model; raises CheckpointError if one is missing or has another shape."""
    saved = read_tensors(folder, manifest, "dense", lambda key: key.startswith("weights."))
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


def load_table(spec: TableSpec, config: EmbeddingConfig, seed: int, folder: Path, manifest: Manifest) -> Table:
    """Loads the index, then the rows bucket by bucket: a table may be larger than memory."""
    table = Table(spec, OPTIMIZERS[config.optimizer](config), seed=seed, config=config)
    files = [file.removesuffix(".safetensors") for file in bucket_files(manifest).get(spec.name, [])]
    ids = [read_tensors(folder, manifest, file, lambda key: key == "ids")["ids"] for file in files]
    table.load_index({"ids": torch.cat([torch.empty(0, dtype=torch.int64), *ids])})
    for file in files:
        table.load_rows(read_tensors(folder, manifest, file, lambda key: key in {"ids", "rows"}, verify=False))
    return table
