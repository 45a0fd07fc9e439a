"""Real gloo ranks for tests: `run_ranks(3, function, *args)` calls function(world, *args) in three processes.

The processes are started when first needed and serve all tests of the run, whatever world size they ask for: a call
takes the first `world_size` of them. They are forked from a server that has torch imported, so one costs hundredths of a
second instead of two seconds and more. Every call has a store of its own, so nothing of one test reaches the next; after
a failure all ranks are ended and the next call starts fresh ones.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.distributed.process_group import World
from nestpipe.ops.native_library import load

DEADLINE_S = 60.0
_GRACE_S = 5.0  # for the other ranks, once one has failed
Function = Callable[..., Any]


class RanksError(AssertionError):
    """Some rank failed, died or did not finish; the message has what each of them said."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank: a value, or the reason there is none."""

    value: Any = None
    failure: str | None = None


@dataclass(slots=True)
class _Rank:
    process: ForkServerProcess
    pipe: Connection


class RankPool:
    """Rank processes that are reused; `close` ends them."""

    def __init__(self) -> None:
        self._context = _fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[_Rank] = []
        self._num_calls = 0

    def run(self, world_size: int, function: Function, *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """The result of each rank; raises RanksError with every rank's traceback if one has none."""
        outcomes = self.outcomes(world_size, function, *args, deadline_s=deadline_s)
        if any(outcome.failure for outcome in outcomes):
            said = (f"--- rank {rank}: {outcome.failure or 'finished'}" for rank, outcome in enumerate(outcomes))
            raise RanksError(f"{function.__name__} failed at world size {world_size}\n" + "\n".join(said))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, world_size: int, function: Function, *args: Any, deadline_s: float = DEADLINE_S
    ) -> list[Outcome]:
        """The same, but a failure is part of the answer."""
        while len(self._ranks) < world_size:
            self._ranks.append(self._start(len(self._ranks)))
        self._num_calls += 1
        store = f"{self._folder.name}/store-{self._num_calls}"
        ranks = self._ranks[:world_size]
        found: dict[int, Outcome] = {}
        for rank, each in enumerate(ranks):
            each.pipe.send((store, rank, world_size, deadline_s / 2, function, args))  # a named error comes first
        end = time.monotonic() + deadline_s
        while len(found) < world_size and (left := end - time.monotonic()) > 0:
            ready = wait([each.pipe for rank, each in enumerate(ranks) if rank not in found], left)
            for rank, each in enumerate(ranks):
                if each.pipe in ready and rank not in found:
                    found[rank] = _read(each)
                    if found[rank].failure:
                        end = min(end, time.monotonic() + _GRACE_S)
        late = [rank for rank in range(world_size) if rank not in found]
        if late:
            found |= self._stacks(late)
        if any(outcome.failure for outcome in found.values()):
            self._end()
        return [found[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends all ranks and removes what they wrote."""
        self._end()
        self._folder.cleanup()

    def _start(self, rank: int) -> _Rank:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._stack_file(rank)), daemon=True)
        process.start()
        theirs.close()
        return _Rank(process, ours)

    def _stack_file(self, rank: int) -> str:
        return f"{self._folder.name}/stacks-{rank}.txt"

    def _stacks(self, late: list[int]) -> dict[int, Outcome]:
        """Asks the ranks that have not finished for the stacks of all their threads."""
        for rank in late:
            if pid := self._ranks[rank].process.pid:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the handlers to write
        return {
            rank: Outcome(failure="did not finish; stacks:\n" + Path(self._stack_file(rank)).read_text())
            for rank in late
        }

    def _end(self) -> None:
        for each in self._ranks:
            each.process.kill()
            each.process.join()
            each.process.close()
            each.pipe.close()
        self._ranks.clear()


def _fork_server() -> ForkServerContext:
    """Processes of this context are forked from one that has imported what tests need."""
    context = multiprocessing.get_context("forkserver")
    # torch imports dynamo at the first custom operator: 2 s of CPU, once here instead of in every rank.
    modules = ["torch.distributed", "torch._dynamo", "pytest", "hypothesis", "nestpipe.training.loop", "s3fs"]
    context.set_forkserver_preload(modules)
    return context


def exit_code_of(code: str, *arguments: str, deadline_s: float = 100.0) -> int | None:
    """Runs Python code as `python -c CODE ARGUMENTS` does, without the seconds that torch takes to start."""
    process = _fork_server().Process(target=_execute, args=(code, arguments), daemon=True)
    process.start()
    process.join(deadline_s)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"not finished after {deadline_s:.0f} s: {arguments}")
    return process.exitcode


def _execute(code: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


POOL: RankPool | None = None


def run_ranks(world_size: int, function: Function, *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
    """function(world, *args) in each of `world_size` rank processes; it must be importable by name. Results by rank."""
    global POOL  # noqa: PLW0603  one pool for all tests of a worker
    load()  # compiled here, if need be: ranks have deadlines, and one that is ended leaves its compiler behind
    POOL = POOL or RankPool()
    return POOL.run(world_size, function, *args, deadline_s=deadline_s)


def close_ranks() -> None:
    """Ends the pool; called when the test run ends."""
    global POOL  # noqa: PLW0603
    if POOL:
        POOL.close()
    POOL = None


def _read(rank: _Rank) -> Outcome:
    try:
        return Outcome(*rank.pipe.recv())
    except (EOFError, ConnectionResetError):
        rank.process.join()
        return Outcome(failure=f"died with exit code {rank.process.exitcode}")


def _serve(pipe: Connection, stack_file: str) -> None:
    """The life of a rank process: calls, until the pipe closes."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork: a collection would copy its pages
    with Path(stack_file).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                store, rank, size, deadline_s, function, args = pipe.recv()
            except EOFError:
                return
            try:
                world = World.from_store(dist.FileStore(store, size), rank, size, deadline_s=deadline_s)
                pipe.send((function(world, *args), None))
                world.close()
            except Exception:  # it is told to the test, which fails
                pipe.send((None, traceback.format_exc()))
