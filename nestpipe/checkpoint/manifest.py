"""The layout of a checkpoint, and its manifest, which is written last.

    RUN/checkpoints/step-000500/
        manifest.json            format, step, cursor, loop state, digest of every file
        dense.safetensors        dense weights and optimizer state
        item.007.safetensors     bucket 7 of table 'item': ids in ascending order, rows, optimizer state

Every rank writes the buckets it owns (writer.py); any number of ranks can read them (reader.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.errors import CheckpointError
from nestpipe.jagged import Cursor

FORMAT = 3  # 3: settings and progress have new names


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint."""

    step: int
    cursor: Cursor  # the next batch to train on
    progress: dict[str, Any]  # state of the training loop
    files: dict[str, dict[str, Any]]
    digest: str  # of all other fields

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises CheckpointError if it is missing, damaged or of another format."""
        try:
            content = json.loads((folder / "manifest.json").read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no manifest.json: the save did not finish, or this is not a checkpoint."
            ) from None
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{folder / 'manifest.json'} is not JSON ({error}); the checkpoint is damaged."
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            content = content if isinstance(content, dict) else {}
            raise CheckpointError(
                f"{folder} has checkpoint format {content.get('format')!r}; this version reads format {FORMAT}, in which settings "
                "have other names. Train again, or use the version that wrote it."
            )
        digest = content.pop("digest", None)
        if digest != _digest_of(content):
            raise CheckpointError(f"{folder / 'manifest.json'} does not match its digest. {move_away_advice(folder)}")
        return Manifest(content["step"], Cursor(*content["cursor"]), content["progress"], content["files"], digest)


def write_manifest(
    folder: Path, *, step: int, cursor: Cursor, progress: Mapping[str, Any], files: Mapping[str, Any]
) -> None:
    """Writes manifest.json with its own digest."""
    content = {"format": FORMAT, "step": step, "cursor": list(cursor), "progress": dict(progress), "files": dict(files)}
    content["digest"] = _digest_of(content)
    (folder / "manifest.json").write_text(json.dumps(content, indent=2) + "\n")


def move_away_advice(folder: Path) -> str:
    return f"Move {folder} away to resume from an earlier checkpoint."


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
