"""The checkpoint folders of a run: listing complete ones, publishing by rename, pruning."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from nestpipe import atomic_files
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.errors import CheckpointError

_NAME = re.compile(r"step-(\d{6,})")


def complete_steps(parent: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    if not parent.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in parent.iterdir())
    return sorted(int(match[1]) for match, path in matches if match and (path / "manifest.json").exists())


def checkpoint_folder(parent: Path, step: int | None = None) -> Path:
    """The folder of a step, by default the latest; raises CheckpointError with the available steps."""
    steps = complete_steps(parent)
    if not steps:
        raise CheckpointError(f"{parent} has no complete checkpoint; train first, or give another run.")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise CheckpointError(f"{parent} has no complete checkpoint of step {step}; it has {steps}.")
    return parent / f"step-{step:06d}"


def best_checkpoint(parent: Path) -> Path:
    """The best checkpoint if the run validated, else the latest."""
    latest = Manifest.read(checkpoint_folder(parent))
    return checkpoint_folder(parent, (latest.progress.get("best") or {}).get("step", latest.step))


def checkpoints_at(path: Path, step: int | None = None) -> list[Path]:
    """The checkpoints at a path of a run or of one checkpoint, ascending; raises CheckpointError if there is none."""
    if is_checkpoint(path):
        return [path]
    parent = path if path.name == "checkpoints" else path / "checkpoints"
    if not parent.is_dir():
        raise CheckpointError(
            f"{path} is no run and no checkpoint: it has neither a folder 'checkpoints' nor a manifest.json."
        )
    if step is not None:
        return [checkpoint_folder(parent, step)]
    checkpoint_folder(parent)  # raises if there is none
    return [checkpoint_folder(parent, one) for one in complete_steps(parent)]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint, complete or not."""
    return path.name.startswith("step-") or (path / "manifest.json").exists()


def publish_checkpoint(temporary: Path, final: Path) -> None:
    """Publishes a complete checkpoint by one rename."""
    atomic_files.flush(temporary)
    if final.exists():  # its manifest was deleted; keep the rest
        final.rename(final.with_name(f"damaged-{final.name}-{os.getpid()}"))
    temporary.rename(final)
    atomic_files.flush(final.parent)


def prune_checkpoints(parent: Path, *, keep_last: int, keep: int | None) -> None:
    """Deletes checkpoints except the last `keep_last` and the step `keep`."""
    for step in complete_steps(parent)[:-keep_last]:
        if step != keep:
            # Renamed first, so that a kill leaves no partial checkpoint that looks complete.
            doomed = parent / f".tmp-old-{step:06d}-{os.getpid()}"
            (parent / f"step-{step:06d}").rename(doomed)
            shutil.rmtree(doomed)


def remove_unfinished(parent: Path) -> None:
    """Deletes the temporary folders of killed saves. Only one process writes to a run at a time."""
    for path in parent.glob(".tmp-*"):
        shutil.rmtree(path)
