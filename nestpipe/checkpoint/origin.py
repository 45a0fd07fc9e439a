"""Which checkpoint a run is initialised from (`--init-from`), and what may differ between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.config import Word
from nestpipe.checkpoint.folders import is_checkpoint
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.remote_copy import is_url, local_copy
from nestpipe.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class InitFrom:
    """A run, whose best checkpoint is meant, or its latest if it did not validate; or a checkpoint. And what may differ.

    It may lie behind a URL: every rank then copies the checkpoint to a temporary folder first.
    """

    source: str | Path
    allow: tuple[Word, ...] = ()

    def resolve(self) -> Origin:
        """Raises CheckpointError if there is no complete checkpoint, ConfigError for an unknown word."""
        if unknown := [word for word in self.allow if word not in get_args(Word)]:
            raise ConfigError(f"--allow {unknown[0]} is not known; there are: {', '.join(get_args(Word))}.")
        place = self.absolute()
        with local_copy(place, whole=False) as path:
            folder = path if is_checkpoint(path) else checkpoint_folders.best_checkpoint(path / "checkpoints")
            manifest = Manifest.read(folder)
            found = str(folder).replace(str(path), place)
        return Origin(place, found, manifest.step, manifest.digest, self.allow)

    def absolute(self) -> str:
        """The source, wherever it is looked at from."""
        return str(self.source).rstrip("/") if is_url(self.source) else str(Path(self.source).resolve())


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a run was initialised from; stands in its run.json."""

    source: str
    checkpoint: str
    step: int
    digest: str  # of the manifest
    allow: tuple[Word, ...]

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Origin:
        return Origin(**{**content, "allow": tuple(content["allow"])})

    def check(self, manifest: Manifest) -> Manifest:
        """The manifest that was found there; raises CheckpointError if it is another by now."""
        if manifest.digest != self.digest:
            raise CheckpointError(
                f"{self.checkpoint} is no longer the checkpoint that the run was to start from (step {self.step})."
            )
        return manifest
