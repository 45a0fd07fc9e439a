"""Checkpoints: safetensors files and a manifest with their digests, published whole or not at all.

    RUN/checkpoints/step-000500/
        manifest.json            format, step, cursor, progress of the loop, digest of every file
        dense.safetensors        weights and optimizer state of the dense part
        item.007.safetensors     bucket 7 of table 'item': ids in ascending order, rows, optimizer state

Every rank writes the buckets it owns; any number of ranks can read them back.
A save goes to a temporary folder beside its place, is flushed to the disk, and appears by one rename. A kill at any
moment leaves the previous checkpoints, and at most a temporary folder that the next start of the run removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nestpipe.comm import Lane, World
from nestpipe.disk import flush
from nestpipe.errors import CheckpointError, ConfigError, DataError, NestPipeError, TrainError
from nestpipe.jagged import Cursor

FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})")
_ERRORS: dict[str, type[NestPipeError]] = {kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError)}
Files = Iterable[tuple[str, Mapping[str, Tensor]]]  # names without suffix, and tensors
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    cursor: Cursor  # the next batch to train on
    progress: dict[str, Any]  # what the training loop wants to remember
    files: dict[str, dict[str, Any]]
    digest: str  # of all this

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises CheckpointError if there is none, or one of another format."""
        try:
            content = json.loads((folder / "manifest.json").read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no manifest.json: the save did not finish, or this is no checkpoint."
            ) from None
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{folder / 'manifest.json'} is not JSON ({error}); the checkpoint is damaged."
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            content = content if isinstance(content, dict) else {}
            raise CheckpointError(
                f"{folder} has checkpoint format {content.get('format')!r}; this version reads format {FORMAT}."
            )
        digest = content.pop("digest", None)
        if digest != _manifest_digest(content):
            raise CheckpointError(f"{folder / 'manifest.json'} is not what was saved. {_advice(folder)}")
        return Manifest(content["step"], Cursor(*content["cursor"]), content["progress"], content["files"], digest)


def save(
    parent: Path, step: int, cursor: Cursor, progress: Mapping[str, Any], content: Files, lane: Lane | None = None
) -> Path:
    """Writes a checkpoint of `step` and publishes it; an existing one of the same step is kept.

    Files are asked for one after the other, so that they need not be in memory together. All ranks call it, each with files
    of its own in a folder that all see; rank 0 adds the manifest and publishes.
    """
    lane = lane or World.single().lane("checkpoint")
    leads = lane.world.rank == 0
    final, temporary = parent / f"step-{step:06d}", parent / f".tmp-step-{step:06d}"
    # Rank 0 looks: on a network file system another machine may see what it saw a moment ago.
    if lane.all_gather_ints([(final / "manifest.json").exists()], name="checkpoint exists")[0][0]:
        return final
    together(lane, "checkpoint folder", lambda: _make_room(parent, temporary) if leads else None)
    own = together(lane, "checkpoint files", lambda: _write_all(temporary, content))
    said = lane.all_gather_bytes(json.dumps(own).encode(), name="checkpoint digests")
    files = {name: entry for data in said for name, entry in json.loads(data).items()}
    manifest = {"format": FORMAT, "step": step, "cursor": list(cursor), "progress": dict(progress), "files": files}
    together(lane, "checkpoint published", lambda: _publish(temporary, final, manifest) if leads else None)
    return final


def together(lane: Lane, name: str, act: Callable[[], Result]) -> Result:
    """What `act` returns, on every rank or on none: where one is refused, all raise, and the others say which rank it was.

    Without this the others would only see that a rank has gone. `act` must not talk to other ranks.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = act()
    except (NestPipeError, OSError) as error:
        failure = error
    own = json.dumps([type(failure).__name__, str(failure)] if failure else None)
    said = [json.loads(data) for data in lane.all_gather_bytes(own.encode(), name=name)]
    if failure:
        raise failure
    for rank, problem in enumerate(said):
        if problem:
            raise _ERRORS.get(problem[0], TrainError)(f"rank {rank} stopped: {problem[1]}")
    return cast(Result, result)


def _make_room(parent: Path, temporary: Path) -> None:
    parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(parent)
    temporary.mkdir()


def _write_all(folder: Path, content: Files) -> dict[str, dict[str, Any]]:
    return {f"{name}.safetensors": _write(folder / f"{name}.safetensors", part) for name, part in content}


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:  # which is no OSError, also for a full disk
        raise CheckpointError(f"{path} was not written: {error}. The checkpoint before it is complete.") from error
    flush(path)
    return {"sha256": _digest(path), "bytes": path.stat().st_size}


def _publish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    manifest["digest"] = _manifest_digest(manifest)
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    flush(temporary / "manifest.json")
    publish(temporary, final)


def publish(temporary: Path, final: Path) -> None:
    """A whole checkpoint appears in its place by one rename."""
    flush(temporary)
    if final.exists():  # somebody took its manifest away; what is left may still be worth something
        final.rename(final.with_name(f"damaged-{final.name}-{os.getpid()}"))
    temporary.rename(final)
    flush(final.parent)


def load(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[Manifest, dict[str, dict[str, Tensor]]]:
    """Reads the wanted files of a checkpoint after checking each; raises CheckpointError that names the damaged one."""
    manifest = Manifest.read(folder)
    names = (file.removesuffix(".safetensors") for file in manifest.files)
    return manifest, {name: read(folder, manifest, name) for name in names if wanted(name)}


def read(
    folder: Path,
    manifest: Manifest,
    name: str,
    wanted: Callable[[str], bool] = lambda key: True,
    *,
    verify: bool = True,
) -> dict[str, Tensor]:
    """The wanted tensors of one file; raises CheckpointError if it is missing, or damaged as far as `verify` can tell."""
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
    """Raises CheckpointError if a file is missing or differs from its digest."""
    if not path.exists():
        raise CheckpointError(f"{path.parent} lacks {path.name}, which its manifest lists. {_advice(path.parent)}")
    if path.stat().st_size != expected["bytes"] or _digest(path) != expected["sha256"]:
        raise CheckpointError(
            f"{path} is not what was saved: its digest differs from the manifest's. {_advice(path.parent)}"
        )


def complete_steps(parent: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    if not parent.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in parent.iterdir())
    return sorted(int(match[1]) for match, path in matches if match and (path / "manifest.json").exists())


def folder_of(parent: Path, step: int | None = None) -> Path:
    """The checkpoint of a step, by default of the latest; raises CheckpointError that names what there is."""
    steps = complete_steps(parent)
    if not steps:
        raise CheckpointError(f"{parent} has no complete checkpoint; train first, or name another run.")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise CheckpointError(f"{parent} has no complete checkpoint of step {step}; it has {steps}.")
    return parent / f"step-{step:06d}"


def best_folder(parent: Path) -> Path:
    """The best checkpoint if the run validated, else the latest."""
    latest = Manifest.read(folder_of(parent))
    return folder_of(parent, (latest.progress.get("best") or {}).get("step", latest.step))


def prune(parent: Path, *, keep_last: int, keep: int | None) -> None:
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


def _advice(folder: Path) -> str:
    return f"Move {folder} away to go on from an earlier checkpoint."


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
