"""`nestpipe serve RUN --instances N` as a process, and clients that ask it from several threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from nestpipe.client import Client, RecommendedItems, ServiceError

# The machine may be busy; what is tested is that nothing is wrong, not that it is fast.
ROOMY = ["--trigger.budget-ms", "30000"]
for _stage in ("retrieval", "prerank", "rank"):
    ROOMY += [f"--stages.{_stage}-ms", "30000"]


class FleetProcess:
    """A gateway with its instances, ended with the block."""

    def __init__(self, run: Path, log: Path, *flags: object, instances: int = 2):
        self._log = log
        words = [str(run), "--port", 0, "--admin-port", 0, "--instances", instances, *ROOMY, *flags]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nestpipe.cli", "serve", *map(str, words)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Self:
        self.wait(lambda: "gateway with" in self.output())
        line = next(line for line in self.output().splitlines() if "gateway with" in line)
        self.url = next(word for word in line.split() if word.startswith("http://")).rstrip(";")
        # Both were free ones: the administration follows the instances.
        self.admin_port = int(self.url.rpartition(":")[2]) + len(self.instances()) + 1
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(timeout=60) == 0, self.output()

    def output(self) -> str:
        return self._log.read_text()

    def wait(self, holds: Callable[[], bool], *, seconds: float = 100) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(self.output())
            time.sleep(0.02)

    def instances(self) -> list[int]:
        """The process ids of its instances."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:  # noqa: PTH123
            return [int(one) for one in file.read().split()]

    def kill_instance(self) -> None:
        os.kill(min(self.instances()), signal.SIGKILL)


class Clients:
    """Threads that ask for recommendations again and again until they are stopped."""

    def __init__(self, url: str, users: list[Any], *, num_threads: int = 4, **fields: Any):
        self._url, self._users, self._fields = url, users, fields
        self.answers: list[tuple[Any, RecommendedItems]] = []
        self.failures: Counter[str] = Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_threads)]
        for one in self._threads:
            one.start()

    def _ask(self, number: int) -> None:
        with Client(self._url, timeout_s=60) as client:
            while not self._stop.is_set():
                number += 1
                user = self._users[number % len(self._users)]
                try:
                    self.answers.append((user, client.recommend(user, **self._fields)))
                except ServiceError as error:
                    self.failures[f"{error.status} {error.code}: {error}"] += 1
                    self._stop.wait(0.02)

    def more(self, count: int) -> None:
        """Waits for so many further answers, or any failure."""
        wanted, deadline = len(self.answers) + count, time.monotonic() + 100
        while len(self.answers) < wanted and not self.failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()
        for one in self._threads:
            one.join()
