"""`nestpipe checkpoint`: what a checkpoint holds, and whether every byte is what was saved."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from nestpipe import checkpoint
from nestpipe.checkpoint import Manifest
from nestpipe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    path: tyro.conf.Positional[Path]
    """Folder of a run or of one of its checkpoints."""
    step: int | None = None
    """Checkpoint of the run [default: inspect shows the latest, verify checks all]."""


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What the bucket files of one table hold together."""

    name: str
    dim: int
    rows_per_bucket: list[int]
    num_bytes: int
    state: list[str]  # names of the optimizer's values


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
    arguments = tyro.cli(_Arguments, prog=f"nestpipe checkpoint {name}", description=_TASKS[name], args=rest)
    folders = _folders(arguments.path, arguments.step)
    return _inspect(folders[-1]) if name == "inspect" else _verify(folders)


def _usage() -> str:
    return (
        "usage: nestpipe checkpoint inspect|verify RUN_OR_CHECKPOINT [--step STEP]\n\n"
        "  inspect   step, data position, progress, tables and dense parameters\n"
        "  verify    every file against its digest; names the damaged ones, exit code 1 if there are any\n\n"
        "example: nestpipe checkpoint verify runs/tiny"
    )


def _folders(path: Path, step: int | None) -> list[Path]:
    """The checkpoints that a path means, ascending; raises CheckpointError if there is none."""
    if path.name.startswith("step-") or (path / "manifest.json").exists():
        return [path]
    parent = path if path.name == "checkpoints" else path / "checkpoints"
    if not parent.is_dir():
        raise CheckpointError(f"{path} is no run and no checkpoint: it has no folder 'checkpoints', no manifest.json.")
    if step is not None:
        return [checkpoint.folder_of(parent, step)]
    checkpoint.folder_of(parent)  # raises if there is none
    return [checkpoint.folder_of(parent, one) for one in checkpoint.complete_steps(parent)]


def _inspect(folder: Path) -> int:
    manifest, console = Manifest.read(folder), Console(highlight=False, markup=False)
    console.print(
        f"{folder}: step {manifest.step:,}, next batch {manifest.cursor.number:,} of epoch {manifest.cursor.epoch:,}"
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
    with safe_open(_existing(folder / "dense.safetensors"), "pt") as file:
        sizes = {key: file.get_slice(key).get_shape() for key in file.keys() if key.startswith("weights.")}  # noqa: SIM118
    num_parameters = sum(_product(shape) for shape in sizes.values())
    num_bytes = manifest.files["dense.safetensors"]["bytes"]
    console.print(
        f"dense: {num_parameters:,} parameters in {len(sizes)} tensors, {num_bytes:,} bytes with optimizer state"
    )
    return 0


def table_facts(folder: Path, manifest: Manifest) -> list[TableFacts]:
    """What the tables of a checkpoint hold; reads headers only."""
    buckets: dict[str, list[str]] = defaultdict(list)
    for file in sorted(manifest.files):
        table, _, number = file.removesuffix(".safetensors").rpartition(".")
        if number.isdigit():
            buckets[table].append(file)
    found = []
    for name, files in buckets.items():
        rows, state, dim = [], [], 0
        for file in files:
            with safe_open(_existing(folder / file), "pt") as opened:
                shape = opened.get_slice("rows").get_shape()
                state = [key.removeprefix("state.") for key in opened.keys() if key.startswith("state.")]  # noqa: SIM118
            rows.append(shape[0])
            dim = shape[1]
        found.append(TableFacts(name, dim, rows, sum(manifest.files[file]["bytes"] for file in files), sorted(state)))
    return found


def _verify(folders: list[Path]) -> int:
    num_damaged = 0
    for folder in folders:
        problems, num_files, num_bytes = damages(folder)
        num_damaged += len(problems)
        for problem in problems:
            print(problem)
        if not problems:
            print(f"{folder}: {num_files} files, {num_bytes:,} bytes, all as saved")
    return 1 if num_damaged else 0


def damages(folder: Path) -> tuple[list[str], int, int]:
    """What is wrong with a checkpoint, file by file; and how many files and bytes it should have."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return [str(error)], 0, 0
    problems = []
    for file, expected in manifest.files.items():
        try:
            checkpoint.verify_file(folder / file, expected)
        except CheckpointError as error:
            problems.append(str(error))
    unknown = {path.name for path in folder.iterdir()} - {"manifest.json", *manifest.files}
    problems += [f"{folder / name} does not stand in the manifest: nobody reads it." for name in sorted(unknown)]
    return problems, len(manifest.files), sum(entry["bytes"] for entry in manifest.files.values())


def _existing(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path} is missing; 'nestpipe checkpoint verify {path.parent}' lists all damage.")
    return path


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_show(inner)}" for key, inner in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
