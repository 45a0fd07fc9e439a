"""`nestpipe checkpoint`: what a checkpoint holds, and whether every byte is what was saved."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint.folders import checkpoints_at
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.reader import table_facts, tensor_shapes
from nestpipe.checkpoint.remote_copy import local_copy
from nestpipe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class CheckpointArguments:
    path: tyro.conf.Positional[str]
    """Folder of a run or of one of its checkpoints, or the URL of either."""
    step: int | None = None
    """Checkpoint of the run [default: inspect shows the latest, verify checks all]."""


_TASKS = {
    "inspect": "Says what a checkpoint holds.\n\nExample: nestpipe checkpoint inspect runs/tiny",
    "verify": "Reads every file and compares it with its digest.\n\nExample: nestpipe checkpoint verify runs/tiny",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        print(_usage())
        return 0
    name, *rest = argv
    if name not in _TASKS:
        raise CheckpointError(f"unknown task '{name}'; there are: {', '.join(_TASKS)}\n\n{_usage()}")
    arguments = tyro.cli(CheckpointArguments, prog=f"nestpipe checkpoint {name}", description=_TASKS[name], args=rest)
    with local_copy(arguments.path, step=arguments.step, every=name == "verify") as path:
        folders = checkpoints_at(path, arguments.step)
        if name == "inspect":
            return _inspect(folders[-1], title=str(folders[-1]).replace(str(path), arguments.path))
        lines, code = _verify(folders)
        print("\n".join(lines).replace(str(path), arguments.path))
        return code


def _usage() -> str:
    return (
        "usage: nestpipe checkpoint inspect|verify RUN_OR_CHECKPOINT [--step STEP]\n\n"
        "  inspect   step, data position, progress, tables and dense parameters\n"
        "  verify    every file against its digest; names the damaged ones, exit code 1 if there are any\n\n"
        "Example: nestpipe checkpoint verify runs/tiny"
    )


def _inspect(folder: Path, *, title: str) -> int:
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
    return 0


def _verify(folders: list[Path]) -> tuple[list[str], int]:
    """What to say about each checkpoint, and the exit code."""
    lines, code = [], 0
    for folder in folders:
        problems, num_files, num_bytes = damages(folder)
        lines += problems or [f"{folder}: {num_files} files, {num_bytes:,} bytes, all as saved"]
        code = 1 if problems else code
    return lines, code


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
    problems += [f"{folder / name} does not stand in the manifest: nobody reads it." for name in sorted(unknown)]
    return problems, len(manifest.files), sum(entry["bytes"] for entry in manifest.files.values())


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_show(inner)}" for key, inner in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
