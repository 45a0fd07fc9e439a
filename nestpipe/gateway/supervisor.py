"""Instances as processes of this machine: started, watched, started again when they end, stopped with the gateway.

An instance keeps its name and port over restarts, so its users stay; its epoch is new, so tickets of before are refused.
A process whose gateway is gone must not go on serving, so the kernel is asked to end it with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger("nestpipe")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_STEADY_S = 30.0  # a process that lived so long is no longer thought to fail at once
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process to keep: its name, and the command that runs it."""

    name: str
    command: tuple[str, ...]


class Fleet:
    """Processes that are kept running."""

    def __init__(self, workers: Sequence[Worker], *, grace_s: float = 10.0):
        self.workers = tuple(workers)
        self.pids: dict[str, int] = {}
        self.num_starts: dict[str, int] = dict.fromkeys((one.name for one in workers), 0)
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all; returns at once."""
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self.workers]

    async def stop(self) -> None:
        """Asks every process to end, and ends those that do not."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _keep(self, worker: Worker) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._stopping.is_set():
            began = time.monotonic()
            # Not in the terminal's group: Ctrl-C is for the gateway, which ends its instances when the last answer is out.
            process = await asyncio.create_subprocess_exec(
                *worker.command, preexec_fn=_end_with_parent(), start_new_session=True
            )
            self.pids[worker.name] = process.pid
            self.num_starts[worker.name] += 1
            code = await self._until_end(process)
            del self.pids[worker.name]
            if self._stopping.is_set():
                return
            wait_s = _FIRST_WAIT_S if time.monotonic() - began > _STEADY_S else min(2 * wait_s, _LONGEST_WAIT_S)
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            log.warning("instance %s ended %s; it is started again in %.1f s", worker.name, how, wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    async def _until_end(self, process: asyncio.subprocess.Process) -> int:
        """Waits for a process, which is ended when the fleet stops."""
        ended, stopping = asyncio.create_task(process.wait()), asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            process.terminate()
            await asyncio.wait({ended}, timeout=self._grace_s)
        if not ended.done():
            process.kill()
        return await ended


def _end_with_parent() -> Callable[[], None] | None:
    """What the new process does first: it asks Linux for a signal when its parent is gone."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)  # loaded here: after the fork is no time for that
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
