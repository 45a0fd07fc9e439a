"""Checkpoints written beside the training: the loop takes a copy, a thread of its own writes it.

    loop     step step │ copy │ step step step step step │ wait, copy │ step ...
    thread             └──────▶ write, publish, mirror, prune         └────────▶ ...

One checkpoint is under way at a time: the next save and the end of the run wait for it, a failure for a while. An error of the
thread reaches the loop at the next agreement of all ranks, and all of them: what can go wrong on one rank is told to the
others on a lane that belongs to this thread alone. A kill leaves the checkpoints that were published before, and a
temporary folder.

Not in the background, tables are never copied: bucket by bucket they go to their files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.remote_copy import Mirror
from nestpipe.checkpoint.writer import Files
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import Channel
from nestpipe.errors import TrainError
from nestpipe.jagged import Cursor


class CheckpointSaver:
    """Saves checkpoints of a run and prunes old ones, on every rank in step."""

    def __init__(
        self, parent: Path, channel: Channel, *, keep_last: int, background: bool, mirror: Mirror | None = None
    ):
        """The lane must not be used by anybody else from now on. Rank 0 copies every checkpoint to the mirror."""
        self._parent, self._channel, self._keep_last, self._mirror = parent, channel, keep_last, mirror
        self._background = background
        self._under_way: Future[None] | None = None
        self._thread = threading.Thread()

    @property
    def failed(self) -> bool:
        """Whether `wait` would raise, as far as is known now."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def save(
        self, step: int, cursor: Cursor, progress: Mapping[str, Any], files: Files, *, keep: int | None = None
    ) -> None:
        """Saves files of copied tensors, after the save before; `keep` is a step that is not pruned."""
        self.wait()
        if not self._background:
            self._write(step, cursor, progress, files, keep)
            return
        copies, done = list(files), Future[None]()

        def write() -> None:
            try:
                self._write(step, cursor, progress, copies, keep)
            except BaseException as error:  # it is raised where somebody waits
                done.set_exception(error)
            else:
                done.set_result(None)

        self._channel.hand_over()
        self._under_way = done
        # A daemon: a rank that must end does not stay for a peer that hangs.
        self._thread = threading.Thread(target=write, name="saver", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is under way; raises what ended the last save."""
        if self._under_way is not None:
            done, self._under_way = self._under_way, None
            try:
                done.result()
            finally:
                self._thread.join()  # it still frees its copies: a process that ends meanwhile is aborted

    def abort(self, patience_s: float) -> str:
        """For a run that has failed: waits no longer than this; says what became of the save under way if it is lost."""
        if self._under_way is None:
            return ""
        try:
            error = self._under_way.exception(patience_s)
        except TimeoutError:
            return f"it was not finished after {patience_s:g} s"
        return str(error) if error else ""

    def _write(self, step: int, cursor: Cursor, progress: Mapping[str, Any], files: Files, keep: int | None) -> None:
        folder = checkpoint_writer.save_checkpoint(
            self._parent, step, cursor, progress, _finite(files, step), self._channel
        )
        leads = self._channel.world.rank == 0
        all_ranks_or_none(self._channel, "mirrored, pruned", lambda: self._follow_up(folder, keep) if leads else None)

    def _follow_up(self, folder: Path, keep: int | None) -> None:
        if self._mirror:
            self._mirror.push(folder)
            self._mirror.prune(keep_last=self._keep_last, keep=keep)
        checkpoint_folders.prune_checkpoints(self._parent, keep_last=self._keep_last, keep=keep)


def _finite(files: Files, step: int) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """The same files; raises TrainError at a weight that overflowed in its last update: not worth a checkpoint."""
    for file, tensors in files:
        check_finite(file, tensors, step)
        yield file, tensors


def check_finite(file: str, tensors: Mapping[str, Tensor], step: int) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainError(
                f"{file}/{name} is not finite after step {step}; nothing was saved. "
                "Lower the learning rates and go on from the last checkpoint."
            )
