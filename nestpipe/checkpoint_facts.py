"""What checkpoints hold, read from names and headers alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nestpipe import checkpoint
from nestpipe.checkpoint import Manifest
from nestpipe.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What the bucket files of one table hold together."""

    name: str
    dim: int
    rows_per_bucket: list[int]
    num_bytes: int
    state: dict[str, list[int]]  # the optimizer's values for one row: name -> shape


def checkpoints_at(path: Path, step: int | None = None) -> list[Path]:
    """The checkpoints that a path means, ascending; raises CheckpointError if there is none."""
    if is_checkpoint(path):
        return [path]
    parent = path if path.name == "checkpoints" else path / "checkpoints"
    if not parent.is_dir():
        raise CheckpointError(f"{path} is no run and no checkpoint: it has no folder 'checkpoints', no manifest.json.")
    if step is not None:
        return [checkpoint.folder_of(parent, step)]
    checkpoint.folder_of(parent)  # raises if there is none
    return [checkpoint.folder_of(parent, one) for one in checkpoint.complete_steps(parent)]


def is_checkpoint(path: Path) -> bool:
    """Whether a path means one checkpoint, complete or not."""
    return path.name.startswith("step-") or (path / "manifest.json").exists()


def bucket_files(manifest: Manifest) -> dict[str, list[str]]:
    """The files of each table, by bucket."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(manifest.files):
        table, _, number = file.removesuffix(".safetensors").rpartition(".")
        if number.isdigit():
            found[table].append(file)
    return found


def table_facts(folder: Path, manifest: Manifest) -> list[TableFacts]:
    """What the tables of a checkpoint hold."""
    found = []
    for name, files in bucket_files(manifest).items():
        headers = [tensor_shapes(folder / file) for file in files]
        state = {key.removeprefix("state."): shape[1:] for key, shape in headers[0].items() if key.startswith("state.")}
        num_bytes = sum(manifest.files[file]["bytes"] for file in files)
        rows = [header["rows"] for header in headers]
        found.append(TableFacts(name, rows[0][1], [shape[0] for shape in rows], num_bytes, state))
    return found


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """The tensors of a file."""
    advice = f"'nestpipe checkpoint verify {path.parent}' lists all damage"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; {advice}.")
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {advice}.") from error
