"""Copies of a run's checkpoints on any fsspec file system: s3://, gs://, memory://, file:// and others.

    URL/config.json, run.json                    written at every start of the run
    URL/checkpoints/step-000500/manifest.json    written last: a step without it is incomplete and ignored

Training publishes a checkpoint in its local folder; rank 0 then copies it here. To read one, it is copied to a local folder,
where every digest is verified.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.errors import CheckpointError, ConfigError

_MANIFEST = "manifest.json"
_RUN_FILES = ("run.json", "config.json")  # config.json last: it makes a folder a run


def is_url(text: str | Path) -> bool:
    return "://" in str(text)


class Mirror:
    """The remote copy of one run. Methods raise CheckpointError with the URL and the reason."""

    def __init__(self, url: str):
        """Raises ConfigError if no installed fsspec backend supports the URL."""
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigError(f"{url} needs fsspec: pip install 'nestpipe[remote]'") from None
        try:
            self._system, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be reached: {error}") from error

    def holds_run(self) -> bool:
        with self._explained("read"):
            self._system.invalidate_cache()
            return bool(self._system.exists(f"{self._root}/{_RUN_FILES[-1]}"))

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        with self._explained("listed"):
            self._system.invalidate_cache()  # another process may have written
            paths = self._system.glob(f"{self._root}/checkpoints/step-*/{_MANIFEST}")
        return sorted(int(match[1]) for path in paths if (match := re.search(r"/step-(\d{6,})/[^/]*$", path)))

    def push_run(self, folder: Path) -> None:
        """Copies config.json and run.json."""
        with self._explained("written"):
            self._system.makedirs(self._root, exist_ok=True)
            for name in _RUN_FILES:
                self._system.put_file(str(folder / name), f"{self._root}/{name}")

    def push(self, folder: Path) -> None:
        """Copies a published checkpoint, manifest last; replaces a different one of the same step."""
        manifest, target = Manifest.read(folder), f"{self._root}/checkpoints/{folder.name}"
        with self._explained("written"):
            if self._system.exists(f"{target}/{_MANIFEST}"):
                if self._system.cat_file(f"{target}/{_MANIFEST}") == (folder / _MANIFEST).read_bytes():
                    return
                self._system.rm_file(f"{target}/{_MANIFEST}")
            self._system.makedirs(target, exist_ok=True)
            for name in manifest.files:
                self._system.put_file(str(folder / name), f"{target}/{name}")
            # Some stores show files while they are being written.
            self._system.put_file(str(folder / _MANIFEST), f"{target}/.{_MANIFEST}")
            self._system.mv(f"{target}/.{_MANIFEST}", f"{target}/{_MANIFEST}")

    def prune(self, *, keep_last: int, keep: int | None) -> None:
        """Deletes checkpoints except the last `keep_last` and the step `keep`."""
        for step in self.steps()[:-keep_last]:
            if step != keep:
                with self._explained("pruned"):
                    folder = f"{self._root}/checkpoints/step-{step:06d}"
                    self._system.rm_file(f"{folder}/{_MANIFEST}")  # first: from here on it is incomplete
                    self._system.rm(folder, recursive=True)

    def fetch(self, step: int, parent: Path, *, whole: bool = True) -> Path:
        """Copies a checkpoint, or its manifest alone, to a local folder of checkpoints; published by rename."""
        name = f"step-{step:06d}"
        final, temporary = parent / name, parent / f".tmp-{name}"
        if not (final / _MANIFEST).exists():
            parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            with self._explained("read"):
                self._get(f"checkpoints/{name}/{_MANIFEST}", temporary / _MANIFEST)
                for file in Manifest.read(temporary).files if whole else ():
                    self._get(f"checkpoints/{name}/{file}", temporary / file)
            checkpoint_folders.publish_checkpoint(temporary, final)
        return final

    def restore(self, folder: Path) -> None:
        """Restores a local run with its latest and its best checkpoint, if there is a remote run."""
        if not self.holds_run():
            return
        if steps := self.steps():
            latest = Manifest.read(self.fetch(steps[-1], folder / "checkpoints"))
            best = (latest.progress.get("best") or {}).get("step", latest.step)
            if best in steps:
                self.fetch(best, folder / "checkpoints")
        folder.mkdir(parents=True, exist_ok=True)
        for name in _RUN_FILES:
            with self._explained("read"):
                self._get(name, folder / f".{name}.tmp")
            (folder / f".{name}.tmp").replace(folder / name)

    def _get(self, name: str, into: Path) -> None:
        self._system.get_file(f"{self._root}/{name}", str(into))

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # backends raise errors of their own
            raise CheckpointError(f"{self.url} cannot be {done}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def local_copy(
    source: str | Path, *, step: int | None = None, every: bool = False, whole: bool = True
) -> Iterator[Path]:
    """A temporary local copy of a remote run or checkpoint; a local path is returned as it is.

    Of a run it holds `step`, by default the best and the latest checkpoint, with `every` all of them; without `whole`, manifests
    alone. Raises CheckpointError if there is none; errors name the URL instead of the copy.
    """
    if not is_url(source):
        yield Path(source)
        return
    url = str(source).rstrip("/")
    run, _, name = url.rpartition("/")
    is_step = re.fullmatch(r"step-\d{6,}", name) is not None
    mirror = Mirror(run.removesuffix("/checkpoints") if is_step else url.removesuffix("/checkpoints"))
    with tempfile.TemporaryDirectory(prefix="nestpipe-mirror-") as temporary:
        parent = Path(temporary) / "checkpoints"
        try:
            wanted = [int(name.removeprefix("step-"))] if is_step else [step] if step is not None else None
            _fetch_some(mirror, parent, wanted, every=every, whole=whole)
            yield parent / name if is_step else Path(temporary)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(temporary, mirror.url)) from error


def _fetch_some(mirror: Mirror, parent: Path, wanted: list[int] | None, *, every: bool, whole: bool) -> None:
    steps = mirror.steps()
    if not steps:
        raise CheckpointError(f"{mirror.url} has no complete checkpoint; give another run.")
    if missing := [step for step in wanted or () if step not in steps]:
        raise CheckpointError(f"{mirror.url} has no complete checkpoint of step {missing[0]}; it has {steps}.")
    for step in wanted or (steps if every else steps[-1:]):
        latest = Manifest.read(mirror.fetch(step, parent, whole=whole))
    best: dict[str, Any] = latest.progress.get("best") or {}
    if wanted is None and best.get("step") in steps:
        mirror.fetch(best["step"], parent, whole=whole)
