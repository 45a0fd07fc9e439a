"""The checkpoint that a run is initialised from (`--init-from`), and which differences are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.config import Word
from nestpipe.checkpoint.folders import is_checkpoint
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.places import is_url, place_of
from nestpipe.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class InitFrom:
    """The source of a warm start: a run (its best checkpoint, or the latest if it did not validate) or a checkpoint.

    `allow` lists permitted differences. The source may be a URL.
    """

    source: str | Path
    allow: tuple[Word, ...] = ()

    def resolve(self) -> Origin:
        """Raises CheckpointError if there is no complete checkpoint, ConfigError for an unknown word."""
        if unknown := [word for word in self.allow if word not in get_args(Word)]:
            raise ConfigError(f"--allow {unknown[0]} is not known; there are: {', '.join(get_args(Word))}.")
        source = self.absolute()
        place = place_of(source)
        is_one = is_checkpoint(place)
        folder = place if is_one else checkpoint_folders.best_checkpoint(checkpoint_folders.checkpoints_of(source))
        manifest = Manifest.read(folder)
        return Origin(source, str(folder), manifest.step, manifest.digest, self.allow)

    def absolute(self) -> str:
        """The source as a URL or an absolute path."""
        return str(self.source).rstrip("/") if is_url(self.source) else str(Path(self.source).resolve())


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a run was initialised from; stored in its run.json."""

    source: str
    checkpoint: str
    step: int
    digest: str  # of the manifest
    allow: tuple[Word, ...]

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Origin:
        return Origin(**{**content, "allow": tuple(content["allow"])})

    def check(self, manifest: Manifest) -> Manifest:
        """Returns the manifest; raises CheckpointError if it has changed since the run was created."""
        if manifest.digest != self.digest:
            raise CheckpointError(
                f"{self.checkpoint} has changed since the run was created from it (step {self.step})."
            )
        return manifest
