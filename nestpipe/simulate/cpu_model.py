"""Scheduling of more runnable threads than cores.

CoreSharing   processor sharing: all jobs run at the same rate.
CoreTurns     time slices, as in an operating system: a core runs one thread until it blocks or its slice ends, then the thread
              with the least CPU time. Equal threads drift apart: the first may have ended before the last has begun.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

_NOTHING_S = 1e-12  # rounding error of the remaining work


def slice_s(cores: int) -> float:
    """The time slice of Linux (sched_base_slice): 0.7 ms, scaled by the number of cores.

    The kernel checks it when a thread wakes or at a clock tick; where ranks share cores, threads wake all the time.
    """
    return 0.7e-3 * (1 + math.floor(math.log2(min(cores, 8))))


@dataclass(slots=True, eq=False)
class CpuJob:
    """Core work of a thread."""

    left_s: float
    had_s: float = 0.0  # CPU time of its thread, as the scheduler counts it

    @property
    def is_done(self) -> bool:
        return self.left_s <= _NOTHING_S


class Cores(Protocol):
    """Runs jobs on cores; the simulator advances by at most `until_s` with `go_on`."""

    def add(self, job: CpuJob) -> None:
        """A thread becomes runnable."""
        ...

    def until_s(self) -> float:
        """Seconds until a job ends or is preempted; infinite if there is none."""
        ...

    def go_on(self, seconds: float) -> list[CpuJob]:
        """Advances by at most `until_s()`; returns the jobs that have ended."""
        ...


class CoreSharing:
    """All runnable jobs at the same rate; `cores` may be fractional."""

    def __init__(self, cores: float = float("inf")):
        self._cores = cores
        self._jobs: list[CpuJob] = []

    @property
    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._jobs))

    def add(self, job: CpuJob) -> None:
        self._jobs.append(job)

    def until_s(self) -> float:
        return min(job.left_s for job in self._jobs) / self._rate if self._jobs else float("inf")

    def go_on(self, seconds: float) -> list[CpuJob]:
        passed = seconds * self._rate if self._jobs else 0.0
        for job in self._jobs:
            job.left_s -= passed
        done = [job for job in self._jobs if job.is_done]
        self._jobs = [job for job in self._jobs if not job.is_done]
        return done


class CoreTurns:
    """Whole cores, each running one job for at most a time slice, then the one with the least CPU time (FIFO among equals).

    A thread that wakes is credited with at least the least CPU time of all: sleeping earns no priority. `speed` is the share of a
    core that polling threads leave.
    """

    def __init__(self, cores: int, *, speed: float = 1.0):
        if cores < 1 or not 0 < speed <= 1:
            raise ValueError(f"{cores} cores at a speed of {speed:.2f}: no job would ever end")
        self._cores, self._speed, self._slice_s = cores, speed, slice_s(cores)
        self._running: list[tuple[CpuJob, float]] = []  # with the rest of its slice
        self._ready: list[tuple[float, int, CpuJob]] = []
        self._num_added, self._least_s = 0, 0.0

    def add(self, job: CpuJob) -> None:
        job.had_s = max(job.had_s, self._least_s)
        self._queue(job)
        self._fill()

    def until_s(self) -> float:
        return min((min(job.left_s, left) for job, left in self._running), default=float("inf")) / self._speed

    def go_on(self, seconds: float) -> list[CpuJob]:
        passed, done, running = seconds * self._speed, list[CpuJob](), list[tuple[CpuJob, float]]()
        for job, left in self._running:
            job.left_s -= passed
            job.had_s += passed
            if job.is_done:
                done.append(job)
            elif left - passed > _NOTHING_S:
                running.append((job, left - passed))
            else:
                self._queue(job)
        self._running = running
        self._fill()
        return done

    def _queue(self, job: CpuJob) -> None:
        self._num_added += 1
        heapq.heappush(self._ready, (job.had_s, self._num_added, job))

    def _fill(self) -> None:
        while self._ready and len(self._running) < self._cores:
            had_s, _, job = heapq.heappop(self._ready)
            self._least_s = max(self._least_s, had_s)
            self._running.append((job, self._slice_s))
