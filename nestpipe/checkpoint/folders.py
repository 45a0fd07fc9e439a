"""The checkpoint folders of a run: which are complete, the best one, publishing by rename, pruning."""

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
    """The checkpoint of a step, by default of the latest; raises CheckpointError that names what there is."""
    steps = complete_steps(parent)
    if not steps:
        raise CheckpointError(f"{parent} has no complete checkpoint; train first, or name another run.")
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
    """The checkpoints that a path means, ascending; raises CheckpointError if there is none."""
    if is_checkpoint(path):
        return [path]
    parent = path if path.name == "checkpoints" else path / "checkpoints"
    if not parent.is_dir():
        raise CheckpointError(f"{path} is no run and no checkpoint: it has no folder 'checkpoints', no manifest.json.")
    if step is not None:
        return [checkpoint_folder(parent, step)]
    checkpoint_folder(parent)  # raises if there is none
    return [checkpoint_folder(parent, one) for one in complete_steps(parent)]


def is_checkpoint(path: Path) -> bool:
    """Whether a path means one checkpoint, complete or not."""
    return path.name.startswith("step-") or (path / "manifest.json").exists()


def publish_checkpoint(temporary: Path, final: Path) -> None:
    """A whole checkpoint appears in its place by one rename."""
    atomic_files.flush(temporary)
    if final.exists():  # somebody took its manifest away; what is left may still be worth something
        final.rename(final.with_name(f"damaged-{final.name}-{os.getpid()}"))
    temporary.rename(final)
    atomic_files.flush(final.parent)


def prune_checkpoints(parent: Path, *, keep_last: int, keep: int | None) -> None:
    """Removes old checkpoints but the last ones and the step in `keep`."""
    for step in complete_steps(parent)[:-keep_last]:
        if step != keep:
            # Renamed first, so that a kill in between leaves no checkpoint that looks complete but is not.
            doomed = parent / f".tmp-old-{step:06d}-{os.getpid()}"
            (parent / f"step-{step:06d}").rename(doomed)
            shutil.rmtree(doomed)


def remove_unfinished(parent: Path) -> None:
    """Removes what killed saves left behind. One process writes to a run at a time."""
    for path in parent.glob(".tmp-*"):
        shutil.rmtree(path)
