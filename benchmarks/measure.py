"""Shared by all benchmarks: alternating blocks, ratios with their spread, verdicts, and result files.

Arms alternate (A B A B ...), so that a slow phase of the machine affects all of them. A figure is the median of per-block ratios
with its 10-90 % range. A threshold is met or missed only if the whole range is on one side of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar, cast

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
MIN_BLOCKS = 9
T = TypeVar("T")
Verdict = Literal["met", "missed", "undecided"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the range that holds the middle 80 %."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) < 2:
            raise ValueError(f"a spread needs at least 2 values, got {len(values)}.")
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return Spread(statistics.median(values), tenths[0], tenths[-1])

    @property
    def range(self) -> list[float]:
        return [round(self.low, 4), round(self.high, 4)]

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def alternate(
    arms: Mapping[str, Callable[[], float]], *, num_blocks: int = MIN_BLOCKS, warm_up: int = 1
) -> dict[str, list[float]]:
    """Runs one block of each arm in turn; returns their seconds by block, without the warm-up blocks."""
    if num_blocks < MIN_BLOCKS:
        raise ValueError(f"{num_blocks} blocks are too few for a 10-90 % range; use at least {MIN_BLOCKS}.")
    found: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(warm_up + num_blocks):
        for name, arm in arms.items():
            seconds = arm()
            if block >= warm_up:
                found[name].append(seconds)
    return found


def ratio(times: Sequence[float], base: Sequence[float] | float) -> Spread:
    """times / base, block by block; the base is another arm or one value for all blocks."""
    bases = [base] * len(times) if isinstance(base, int | float) else base
    return Spread.of([time / other for time, other in zip(times, bases, strict=True)])


def verdict(found: Spread, *, at_most: float | None = None, at_least: float | None = None) -> Verdict:
    """Met or missed if the whole range lies on one side of the threshold, otherwise undecided."""
    if (at_most is None) == (at_least is None):
        raise ValueError("give one of at_most and at_least.")
    if at_most is not None:
        return "met" if found.high <= at_most else "missed" if found.low > at_most else "undecided"
    assert at_least is not None
    return "met" if found.low >= at_least else "missed" if found.high < at_least else "undecided"


def machine() -> dict[str, str | float | int]:
    """Facts about the machine that figures depend on, with its current load."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def commit() -> str:
    """The measured commit, with a + if tracked files differ from it."""
    found = _git("rev-parse", "--short=12", "HEAD")
    return found + "+" * bool(_git("status", "--porcelain", "--untracked-files=no")) if found else "unknown"


def record(
    *, seed: int, figures: Mapping[str, object], settings: Mapping[str, object], packages: Sequence[str] = ()
) -> dict[str, object]:
    """One line of a result file."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions("torch", "numpy", "nestpipe", *packages),
        "seed": seed,
        "settings": dict(settings),
        "figures": dict(figures),
    }


def append(name: str, line: Mapping[str, object], *, folder: Path = RESULTS) -> Path:
    """Adds a record to NAME.jsonl."""
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return path


class Kept:
    """Results of a long benchmark, written one by one, so that the same command resumes after the last of them.

    Results of another commit or other settings are discarded.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]):
        self._path, key = path, json.loads(json.dumps({"commit": commit(), "settings": settings}))
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._found: dict[str, object] = {}
        if lines and lines[0] == key:
            self._found = {name: value for line in lines[1:] for name, value in line.items()}
            print(f"resumes after {', '.join(self._found) or 'nothing'} ({path})")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(key) + "\n")

    def once(self, name: str, act: Callable[[], T]) -> T:
        """The result `name`, computed now or in an earlier run; must be JSON."""
        if name not in self._found:
            self._found[name] = act()
            with self._path.open("a") as file:
                file.write(json.dumps({name: self._found[name]}) + "\n")
        return cast(T, self._found[name])

    def clear(self) -> None:
        """Deletes the file, once all results are in a record."""
        self._path.unlink(missing_ok=True)


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keeps all cores awake with one SCHED_IDLE process per core.

    Waking a virtual core on a shared host sometimes takes milliseconds. P99 lateness of a thread that slept for 50 ms was
    2.4 ms without and 0.5 ms with this (one machine, 300 sleeps each).
    """
    if not hasattr(os, "SCHED_IDLE"):
        yield
        return
    program = "import os, sys\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
    program += "os.sched_setaffinity(0, {int(sys.argv[1])})\nparent = os.getppid()\n"
    program += "while os.getppid() == parent:\n    for _ in range(10**6): pass\n"  # exits with its parent
    idlers = [
        subprocess.Popen([sys.executable, "-S", "-c", program, str(core)]) for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for one in idlers:
            one.kill()
            one.wait()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: first column left-aligned, the others right-aligned."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def show(line: Sequence[str]) -> str:
        first, *others = (
            text.ljust(width) if not place else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([show(header), "  ".join("-" * width for width in widths), *map(show, rows)])


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
