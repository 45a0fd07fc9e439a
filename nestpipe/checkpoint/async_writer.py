"""Background checkpoints: a thread reads a snapshot of the state while the loop trains on.

    loop     step step │ snapshot │ step step step step step │ wait, snapshot │ step ...
    thread             └─────────▶ write, publish, prune                      └────────▶ ...

The snapshot is no copy of the rows (embedding/row_snapshot.py). If its log fills up, all ranks wait for the save. At most one save
is in flight: the next save and the end of the run wait for it, an aborting run for a limited time. An error on one rank is shared
with the others on a channel that only this thread uses, and raised in the loop of every rank. A kill leaves the previously published
checkpoints and files that nothing reads.

A save is a *delta* (chain.py) as long as the chain has at most `max_deltas` of them and they are together smaller than
`_DELTA_SHARE` of the full checkpoint; else it is full and begins a new chain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.manifest import Link
from nestpipe.checkpoint.places import Place
from nestpipe.checkpoint.writer import SaveContent
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import Channel
from nestpipe.jagged import Cursor

_DELTA_SHARE = 0.5  # of the full checkpoint's table bytes, which reading a chain may cost in addition


class Snapshot(Protocol):
    """What is saved, as it was at one moment; read once."""

    @property
    def is_tight(self) -> bool: ...

    def content(self, chain: tuple[Link, ...]) -> SaveContent: ...

    def close(self) -> None: ...


class SnapshotSource(Protocol):
    """A state of which snapshots can be taken."""

    def changed_bytes(self) -> int:
        """Upper bound of the rows of this rank that have changed since the last snapshot, in bytes."""
        ...

    def snapshot(self, *, concurrent: bool, delta: bool) -> Snapshot: ...


class CheckpointSaver:
    """Saves checkpoints of a run and prunes old ones; all ranks call it in lockstep."""

    def __init__(
        self,
        parent: Place,
        channel: Channel,
        *,
        keep_last: int,
        background: bool,
        max_deltas: int = 0,
        chain: tuple[Link, ...] = (),
    ):
        """Takes over `channel`, which nothing else may use. `chain` are the links of the checkpoint that was resumed."""
        self._parent, self._channel, self._keep_last = parent, channel, keep_last
        self._background, self._max_deltas, self._chain = background, max_deltas, chain
        self._in_flight: Future[None] | None = None
        self._snapshot: Snapshot | None = None
        self._thread = threading.Thread()

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight and has not ended."""
        return self._in_flight is not None and not self._in_flight.done()

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, so that `wait` would raise."""
        return self._in_flight is not None and self._in_flight.done() and self._in_flight.exception() is not None

    @property
    def is_tight(self) -> bool:
        """Whether the steps of this rank are so far ahead of the save in flight that all ranks should `wait`."""
        return self.is_saving and self._snapshot is not None and self._snapshot.is_tight

    def save(
        self,
        step: int,
        cursor: Cursor,
        progress: Mapping[str, Any],
        source: SnapshotSource,
        *,
        keep: int | None = None,
    ) -> None:
        """Waits for the previous save, then saves a snapshot of `source`; step `keep` is not pruned."""
        self.wait()
        chain = self._links_of_delta(source)
        snapshot = source.snapshot(concurrent=self._background, delta=bool(chain))

        def write() -> None:
            try:
                self._write(step, cursor, progress, snapshot.content(chain), keep)
            finally:
                snapshot.close()

        if self._background:
            self._start(write, snapshot)
        else:
            write()

    def wait(self) -> None:
        """Blocks until no save is in flight; raises the error of the last one."""
        if self._in_flight is not None:
            done, self._in_flight, self._snapshot = self._in_flight, None, None
            try:
                done.result()
            finally:
                self._thread.join()  # freeing tensors during interpreter shutdown aborts the process
                self._channel.hand_over()

    def abort(self, patience_s: float) -> str:
        """For a run that has failed: waits at most `patience_s`; returns why the save in flight was lost, or ''."""
        if self._in_flight is None:
            return ""
        try:
            error = self._in_flight.exception(patience_s)
        except TimeoutError:
            return f"it was not finished after {patience_s:g} s"
        return str(error) if error else ""

    def _links_of_delta(self, source: SnapshotSource) -> tuple[Link, ...]:
        """The chain that the next save continues; empty if it is full. Collective: every rank must decide alike."""
        if not self._chain or len(self._chain) > self._max_deltas:
            return ()
        everyone = self._channel.all_gather_ints([source.changed_bytes()], name="changed rows")
        num_bytes = sum(own for (own,) in everyone) + sum(link.num_bytes for link in self._chain[1:])
        return self._chain if num_bytes <= _DELTA_SHARE * self._chain[0].num_bytes else ()

    def _start(self, write: Callable[[], None], snapshot: Snapshot) -> None:
        done = Future[None]()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised by wait()
                done.set_exception(error)
            else:
                done.set_result(None)

        self._channel.hand_over()
        self._in_flight, self._snapshot = done, snapshot
        # A daemon, so that a process can exit while a peer hangs.
        self._thread = threading.Thread(target=run, name="saver", daemon=True)
        self._thread.start()

    def _write(
        self, step: int, cursor: Cursor, progress: Mapping[str, Any], content: SaveContent, keep: int | None
    ) -> None:
        folder = checkpoint_writer.save_checkpoint(self._parent, step, cursor, progress, content, self._channel)
        if self._max_deltas:
            self._chain = checkpoint_writer.links_of(folder, self._channel)
        leads = self._channel.world.rank == 0
        all_ranks_or_none(
            self._channel,
            "pruned",
            lambda: (
                checkpoint_folders.prune_checkpoints(self._parent, keep_last=self._keep_last, keep=keep)
                if leads
                else None
            ),
        )
