"""`nestpipe checkpoint`: what a checkpoint holds, and whether every byte is what was saved."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint.folders import checkpoints_at
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.reader import table_facts, tensor_shapes
from nestpipe.checkpoint.remote_copy import local_copy
from nestpipe.cli.arguments import InspectCheckpoint, VerifyCheckpoint
from nestpipe.errors import CheckpointError


def inspect(arguments: InspectCheckpoint) -> int:
    with local_copy(arguments.path, step=arguments.step, every=False) as path:
        folder = checkpoints_at(path, arguments.step)[-1]
        _show_checkpoint(folder, title=str(folder).replace(str(path), arguments.path))
    return 0


def verify(arguments: VerifyCheckpoint) -> int:
    """Returns 1 if a file is damaged."""
    lines, code = [], 0
    with local_copy(arguments.path, step=arguments.step, every=True) as path:
        for folder in checkpoints_at(path, arguments.step):
            problems, num_files, num_bytes = damages(folder)
            lines += problems or [f"{folder}: {num_files} files, {num_bytes:,} bytes, all as saved"]
            code = 1 if problems else code
        print("\n".join(lines).replace(str(path), arguments.path))
    return code


def _show_checkpoint(folder: Path, *, title: str) -> None:
    manifest, console = Manifest.read(folder), Console(highlight=False, markup=False)
    console.print(
        f"{title}: step {manifest.step:,}, next batch {manifest.cursor.number:,} of epoch {manifest.cursor.epoch:,}"
    )
    progress = {key: value for key, value in manifest.progress.items() if key != "settings"}
    console.print("progress: " + ", ".join(f"{key} {_show(value)}" for key, value in progress.items()))
    shown = Table("table", "dim", "rows", "buckets", "min", "median", "max", "bytes", "state")
    shown.caption = "min, median, max: rows per bucket"
    for facts in table_facts(folder, manifest):
        rows = facts.rows_per_bucket
        numbers = [
            facts.dim,
            sum(rows),
            len(rows),
            min(rows),
            round(statistics.median(rows)),
            max(rows),
            facts.num_bytes,
        ]
        shown.add_row(facts.name, *(f"{number:,}" for number in numbers), ", ".join(facts.state))
    console.print(shown)
    sizes = [
        shape for name, shape in tensor_shapes(folder / "dense.safetensors").items() if name.startswith("weights.")
    ]
    num_parameters = sum(math.prod(shape) for shape in sizes)
    num_bytes = manifest.files["dense.safetensors"]["bytes"]
    console.print(
        f"dense: {num_parameters:,} parameters in {len(sizes)} tensors, {num_bytes:,} bytes with optimizer state"
    )


def damages(folder: Path) -> tuple[list[str], int, int]:
    """What is wrong with a checkpoint, file by file; and how many files and bytes it should have."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return [str(error)], 0, 0
    problems = []
    for file, expected in manifest.files.items():
        try:
            checkpoint_reader.verify_file(folder / file, expected)
        except CheckpointError as error:
            problems.append(str(error))
    unknown = {path.name for path in folder.iterdir()} - {"manifest.json", *manifest.files}
    problems += [
        f"{folder / name} is not in the manifest: nothing reads it, it can be deleted." for name in sorted(unknown)
    ]
    return problems, len(manifest.files), sum(entry["bytes"] for entry in manifest.files.values())


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_show(inner)}" for key, inner in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
