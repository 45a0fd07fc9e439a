"""Background checkpoints: the loop copies the state, a thread writes the copy.

    loop     step step │ copy │ step step step step step │ wait, copy │ step ...
    thread             └──────▶ write, publish, mirror, prune         └────────▶ ...

At most one save is in flight: the next save and the end of the run wait for it, an aborting run for a limited time. An error on
one rank is shared with the others on a channel that only this thread uses, and raised in the loop of every rank. A kill leaves
the previously published checkpoints and a temporary folder.

A save in the foreground copies no tables: buckets are written one by one.
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
    """Saves checkpoints of a run and prunes old ones; all ranks call it in lockstep."""

    def __init__(
        self, parent: Path, channel: Channel, *, keep_last: int, background: bool, mirror: Mirror | None = None
    ):
        """Takes over `channel`, which nothing else may use. Rank 0 copies every checkpoint to the mirror."""
        self._parent, self._channel, self._keep_last, self._mirror = parent, channel, keep_last, mirror
        self._background = background
        self._in_flight: Future[None] | None = None
        self._thread = threading.Thread()

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, so that `wait` would raise."""
        return self._in_flight is not None and self._in_flight.done() and self._in_flight.exception() is not None

    def save(
        self, step: int, cursor: Cursor, progress: Mapping[str, Any], files: Files, *, keep: int | None = None
    ) -> None:
        """Waits for the previous save, then saves `files`, whose tensors are copies; step `keep` is not pruned."""
        self.wait()
        if not self._background:
            self._write(step, cursor, progress, files, keep)
            return
        copies, done = list(files), Future[None]()

        def write() -> None:
            try:
                self._write(step, cursor, progress, copies, keep)
            except BaseException as error:  # raised by wait()
                done.set_exception(error)
            else:
                done.set_result(None)

        self._channel.hand_over()
        self._in_flight = done
        # A daemon, so that a process can exit while a peer hangs.
        self._thread = threading.Thread(target=write, name="saver", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Blocks until no save is in flight; raises the error of the last one."""
        if self._in_flight is not None:
            done, self._in_flight = self._in_flight, None
            try:
                done.result()
            finally:
                self._thread.join()  # freeing tensors during interpreter shutdown aborts the process

    def abort(self, patience_s: float) -> str:
        """For a run that has failed: waits at most `patience_s`; returns why the save in flight was lost, or ''."""
        if self._in_flight is None:
            return ""
        try:
            error = self._in_flight.exception(patience_s)
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
    """Passes files through; raises TrainError for a non-finite weight."""
    for file, tensors in files:
        check_finite(file, tensors, step)
        yield file, tensors


def check_finite(file: str, tensors: Mapping[str, Tensor], step: int) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainError(
                f"{file}/{name} is not finite after step {step}; nothing was saved. "
                "Lower the learning rates and resume from the last checkpoint."
            )
