"""`nestpipe checkpoint`: what a checkpoint holds, whether every byte is what was saved, what differs, and rewriting it."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nestpipe.atomic_files import replace_file
from nestpipe.checkpoint.difference import dense_differences, table_differences
from nestpipe.checkpoint.folders import checkpoints_at, checkpoints_of
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.places import Place, RemotePath
from nestpipe.checkpoint.reader import damages, dense_shapes, table_facts
from nestpipe.checkpoint.rewrite import compact as compact_checkpoint
from nestpipe.checkpoint.rewrite import rebucket as rebucket_checkpoints
from nestpipe.cli.checkpoint_arguments import (
    CompactCheckpoint,
    DiffCheckpoints,
    ImportHSTU,
    InspectCheckpoint,
    RebucketCheckpoints,
    VerifyCheckpoint,
)
from nestpipe.config import Config
from nestpipe.errors import ConfigError
from nestpipe.training.import_hstu import import_hstu as import_file
from nestpipe.training.process import lock_run


def inspect(arguments: InspectCheckpoint) -> int:
    _show_checkpoint(checkpoints_at(arguments.path, arguments.step)[-1])
    return 0


def verify(arguments: VerifyCheckpoint) -> int:
    """Returns 1 if a file is damaged."""
    code = 0
    for folder in checkpoints_at(arguments.path, arguments.step):
        problems, num_files, num_bytes = damages(folder)
        print("\n".join(problems) or f"{folder}: {num_files} files, {num_bytes:,} bytes, all as saved")
        code = 1 if problems else code
    return code


def diff(arguments: DiffCheckpoints) -> int:
    """Returns 1 if the checkpoints differ."""
    a, b = (checkpoints_at(path, arguments.step)[-1] for path in (arguments.path, arguments.other))
    dense, is_equal = dense_differences(a, b), True
    print(f"a: {a}\nb: {b}")
    print(f"dense: {'equal' if not dense else 'these tensors differ: ' + ', '.join(dense)}")
    for table in table_differences(a, b):
        only = [f"{num:,} ids only in {name}" for name, num in zip("ab", table.num_only, strict=True) if num]
        changed = [f"{name} differs in {num:,}" for name, num in table.changed.items() if num]
        print(f"table '{table.name}': {table.num_common:,} common ids, {', '.join([*only, *changed]) or 'equal'}")
        is_equal &= table.is_equal
    return 0 if is_equal and not dense else 1


def compact(arguments: CompactCheckpoint) -> int:
    folder = checkpoints_at(arguments.path, arguments.step)[-1]
    with _taken(arguments.path):
        num_links = compact_checkpoint(folder)
    said = (
        f"is now full; it needed {num_links} earlier checkpoints" if num_links else "is full already; nothing was done"
    )
    print(f"{folder} {said}")
    return 0


def rebucket(arguments: RebucketCheckpoints) -> int:
    path = arguments.run / "config.json"
    config = Config.load(path)
    if config.embedding.max_rows:
        raise ConfigError(
            f"{arguments.run} limits its rows (embedding.max_rows {config.embedding.max_rows:,}), bucket by bucket: "
            "other buckets would evict other rows. Train again."
        )
    with _taken(str(arguments.run)):
        steps = rebucket_checkpoints(
            checkpoints_of(arguments.run), arguments.buckets, {"embedding.num_buckets": repr(arguments.buckets)}
        )
        content = json.loads(path.read_text())
        content["embedding"]["num_buckets"] = arguments.buckets
        Config.from_json(json.dumps(content)).validate()
        data = (json.dumps(content, indent=2) + "\n").encode()
        replace_file(path, data)
        if config.train.checkpoints:
            (RemotePath.of(config.train.checkpoints) / "config.json").write_last(data)
    shown = ", ".join(str(step) for step in steps) or "none"
    print(f"{arguments.run}: {arguments.buckets:,} buckets, at most as many ranks; rewritten checkpoints: {shown}")
    return 0


def import_hstu(arguments: ImportHSTU) -> int:
    found = import_file(
        arguments.file, arguments.data, arguments.run, num_heads=arguments.num_heads, max_len=arguments.max_len
    )
    model = found.run.config.model
    print(f"{arguments.run}: HSTU with {model.num_blocks} blocks, width {model.dim}, rows of {found.num_rows:,} items")
    if found.num_missing:
        print(f"{found.num_missing:,} items of {arguments.data} have no row in the file; theirs are initialised")
    print(f"Next: nestpipe eval {shlex.quote(str(arguments.run))}")
    return 0


def _taken(source: str) -> ExitStack:
    """Keeps a local run from training meanwhile."""
    stack, path = ExitStack(), Path(source)
    run = next((one for one in (path, *path.parents[:2]) if (one / "config.json").exists()), None)
    if run is not None:
        stack.enter_context(lock_run(run))
    return stack


def _show_checkpoint(folder: Place) -> None:
    manifest, console = Manifest.read(folder), Console(highlight=False, markup=False)
    console.print(
        f"{folder}: step {manifest.step:,}, next batch {manifest.cursor.number:,} of epoch {manifest.cursor.epoch:,}"
    )
    if manifest.chain:
        links = ", ".join(f"{link.step:,}" for link in manifest.chain)
        console.print(
            f"a delta: what changed since step {manifest.chain[-1].step:,}; it needs the checkpoints of {links}"
        )
    progress = {key: value for key, value in manifest.progress.items() if key != "settings"}
    console.print("progress: " + ", ".join(f"{key} {_show(value)}" for key, value in progress.items()))
    shown = Table("table", "dim", "rows", "buckets", "min", "median", "max", "bytes", "state")
    shown.caption = "min, median, max: rows per bucket; bytes: of this checkpoint alone"
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
    sizes = [shape for name, shape in dense_shapes(folder, manifest).items() if name.startswith("weights.")]
    num_parameters = sum(math.prod(shape) for shape in sizes)
    num_bytes = sum(blob.num_bytes for blob in manifest.blobs if not blob.table)
    console.print(
        f"dense: {num_parameters:,} parameters in {len(sizes)} tensors, {num_bytes:,} bytes with optimizer state"
    )


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_show(inner)}" for key, inner in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
