"""The checkpoint folders of a run: listing complete ones, publishing, pruning."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from nestpipe import atomic_files
from nestpipe.checkpoint.manifest import MANIFEST, Manifest
from nestpipe.checkpoint.places import Place, RemotePath, place_of, run_checkpoints, saves_to
from nestpipe.errors import CheckpointError

_NAME = re.compile(r"step-(\d{6,})")


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:06d}"


def complete_steps(parent: Place) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    if not parent.is_dir():
        return []
    return sorted(int(match[1]) for match, folder in _folders(parent) if (folder / MANIFEST).exists())


def _folders(parent: Place) -> list[tuple[re.Match[str], Place]]:
    matches = [(_NAME.fullmatch(path.name), path) for path in parent.iterdir()]
    return [(match, path) for match, path in matches if match]


def checkpoint_folder(parent: Place, step: int | None = None) -> Place:
    """The folder of a step, by default the latest; raises CheckpointError with the available steps."""
    steps = complete_steps(parent)
    if not steps:
        raise CheckpointError(f"{parent} has no complete checkpoint; train first, or give another run.")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise CheckpointError(f"{parent} has no complete checkpoint of step {step}; it has {steps}.")
    return parent / step_name(step)


def best_checkpoint(parent: Place) -> Place:
    """The best checkpoint if the run validated, else the latest."""
    latest = Manifest.read(checkpoint_folder(parent))
    return checkpoint_folder(parent, (latest.progress.get("best") or {}).get("step", latest.step))


def checkpoints_of(source: str | Path) -> Place:
    """The folder of checkpoints of a run, given by its folder, its URL or that folder itself."""
    place = place_of(source)
    if place.name == "checkpoints":
        return place
    return run_checkpoints(place, saves_to(place) if isinstance(place, Path) else "")


def checkpoints_at(source: str | Path, step: int | None = None) -> list[Place]:
    """The checkpoints of a run, or one checkpoint, ascending; raises CheckpointError if there is none."""
    place = place_of(source)
    if is_checkpoint(place):
        return [place]
    parent = checkpoints_of(source)
    if isinstance(parent, Path) and not parent.is_dir():
        raise CheckpointError(
            f"{source} is no run and no checkpoint: it has neither a folder 'checkpoints' nor a manifest.json."
        )
    if step is not None:
        return [checkpoint_folder(parent, step)]
    checkpoint_folder(parent)  # raises if there is none
    return [parent / step_name(one) for one in complete_steps(parent)]


def is_checkpoint(place: Place) -> bool:
    """Whether a place is one checkpoint, complete or not."""
    return place.name.startswith("step-") or (place / MANIFEST).exists()


def publish_checkpoint(temporary: Path, final: Path) -> None:
    """Publishes a complete local checkpoint by one rename."""
    atomic_files.flush(temporary)
    if final.exists():  # its manifest was deleted; keep the rest
        final.rename(final.with_name(f"damaged-{final.name}-{os.getpid()}"))
    temporary.rename(final)
    atomic_files.flush(final.parent)


def prune_checkpoints(parent: Place, *, keep_last: int, keep: int | None) -> None:
    """Deletes checkpoints except the last `keep_last`, the step `keep`, and the links that their deltas need."""
    steps = complete_steps(parent)
    kept = {*steps[-keep_last:], *(step for step in steps if step == keep)}
    needed = {link.step for step in kept for link in Manifest.read(parent / step_name(step)).chain}
    for step in steps:
        if step not in kept | needed:
            remove_checkpoint(parent / step_name(step))


def remove_checkpoint(folder: Place) -> None:
    """Deletes a checkpoint; a kill leaves no partial one that looks complete."""
    if isinstance(folder, RemotePath):
        (folder / MANIFEST).unlink()
        folder.remove_tree()
        return
    doomed = folder.with_name(f".tmp-old-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_unfinished(parent: Place) -> None:
    """Deletes what killed saves have left. Only one process writes to a run at a time."""
    if isinstance(parent, RemotePath):
        for _, folder in _folders(parent):
            if isinstance(folder, RemotePath) and not (folder / MANIFEST).exists():
                folder.remove_tree()
        return
    for path in parent.glob(".tmp-*"):
        shutil.rmtree(path)
