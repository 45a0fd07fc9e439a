"""Supervisor of instances on this machine: starts processes, restarts those that end, stops them with the gateway.

An instance keeps its name and port over restarts, so its users stay; its epoch is new, so old tickets are refused. An instance
must not outlive its gateway: on Linux the kernel ends it with its parent.
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
_STEADY_S = 30.0  # after this uptime the restart delay is reset
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process to keep running: its name and command."""

    name: str
    command: tuple[str, ...]


class Fleet:
    """Keeps processes running."""

    def __init__(self, workers: Sequence[Worker], *, grace_s: float = 10.0):
        self.workers = tuple(workers)
        self.pids: dict[str, int] = {}
        self.num_starts: dict[str, int] = dict.fromkeys((one.name for one in workers), 0)
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all processes without waiting for them."""
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self.workers]

    async def stop(self) -> None:
        """Terminates every process; kills those that outlive the grace period."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _keep(self, worker: Worker) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._stopping.is_set():
            began = time.monotonic()
            # Not in the terminal's group: the gateway handles Ctrl-C and ends its instances after the last answer.
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
        """Waits for a process; terminates it when the fleet stops."""
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
    """Runs in the new process first: Linux sends it SIGTERM when its parent dies."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)  # before the fork: loading libraries after it is unsafe
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
