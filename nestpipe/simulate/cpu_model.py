"""Who runs when there are more runnable threads than cores.

Sharing   each runs at the same rate at the same moment: what one worker sees of cores of which it has a share.
Turns     what an operating system does with threads that it knows one by one: a core runs one of them until it waits or its
          slice is over, then takes the one that has had the least. So equal threads drift apart: the first is done, and
          may wait for something else, while the last has not begun.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

_NOTHING_S = 1e-12  # what is left of work after so many subtractions


def slice_s(cores: int) -> float:
    """For how long Linux lets a thread run while others wait: sched_base_slice of the kernel's defaults, 0.7 ms scaled.

    It notices the end of one when a thread wakes or its clock ticks; where ranks share cores, threads wake all the time.
    """
    return 0.7e-3 * (1 + math.floor(math.log2(min(cores, 8))))


@dataclass(slots=True, eq=False)
class CpuJob:
    """Work for a core, of a thread."""

    left_s: float
    had_s: float = 0.0  # of a core, by its thread, as the scheduler counts it

    @property
    def is_done(self) -> bool:
        return self.left_s <= _NOTHING_S


class Cores(Protocol):
    """Runs jobs; the time until the next look is `until_s`, and `go_on` lets it pass."""

    def add(self, job: CpuJob) -> None:
        """A thread becomes runnable."""
        ...

    def until_s(self) -> float:
        """Seconds until a job ends or gives way; without end if there is none."""
        ...

    def go_on(self, seconds: float) -> list[CpuJob]:
        """Lets no more than `until_s()` pass; the jobs that are done."""
        ...


class CoreSharing:
    """All runnable jobs at the same rate; cores may be a fraction."""

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
    """Whole cores, each running one job for at most a slice; then whoever has had the least, in the order in which they came.

    A thread that wakes has had no less than the one that had least: sleeping saves up nothing. `speed` is what is left of
    a core beside threads that are never done.
    """

    def __init__(self, cores: int, *, speed: float = 1.0):
        if cores < 1 or not 0 < speed <= 1:
            raise ValueError(f"{cores} cores at a speed of {speed:.2f}: nothing would ever be done")
        self._cores, self._speed, self._slice_s = cores, speed, slice_s(cores)
        self._running: list[tuple[CpuJob, float]] = []  # and what is left of its slice
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
