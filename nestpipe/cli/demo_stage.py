"""What demo steps share: a folder, commands and services run as a user would, and cleanup that leaves no process.

Every process starts in its own session, so Ctrl-C in a terminal reaches only the demo, which then ends the others. All carry
a mark in their environment, by which orphans are found.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape

from nestpipe.errors import NestPipeError

_MARK = "NESTPIPE_DEMO"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_READY_S, _STOP_S, _GRACE_S = 120.0, 30.0, 10.0


class StepError(NestPipeError):
    """A step of the demo failed."""


class InterruptedDemo(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; `number` is the signal's."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise InterruptedDemo."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals only reach the main thread
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptedDemo(number)

    previous = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def scratch_in(folder: Path) -> Iterator[None]:
    """Temporary files of this process and of those it starts go to a folder that is removed at the end."""
    before = dict(os.environ)
    (folder / "tmp").mkdir(parents=True)
    os.environ["TMPDIR"] = str((folder / "tmp").resolve())
    tempfile.tempdir = None  # it is looked for anew
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)


class DemoProcesses:
    """All processes of a demo, including those that its processes started."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(16)
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, command: Sequence[str], *, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        environment = {**os.environ, _MARK: self._value}
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, text=True, env=environment, start_new_session=True
        )
        self._started.append(process)
        return process

    def left(self) -> list[int]:
        """The processes that still run."""
        mark, found = f"{_MARK}={self._value}".encode(), []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # another user's, or it has ended
                if mark in environment.read_bytes().split(b"\0"):
                    found.append(int(environment.parent.name))
        return found

    def end(self) -> None:
        """Terminates the processes that the demo started, which end theirs; kills the rest after some seconds."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a second Ctrl-C must not interrupt the cleanup
        try:
            for process in self._started:
                if process.poll() is None:
                    process.terminate()
            if not self._until_gone(_GRACE_S):
                for pid in self.left():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._until_gone(_GRACE_S)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _until_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self._started) or self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service, its address and its log file."""

    name: str
    process: subprocess.Popen[str]
    url: str
    log: Path


class DemoStage:
    """The demo's folder, and commands run as a user would."""

    def __init__(self, out: Path, *, quick: bool, console: Console):
        self.out, self.quick, self.console = out, quick, console
        self.processes = DemoProcesses()
        self.services: dict[str, Service] = {}

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def report(self) -> Path:
        return self.out / "run" / "report.html"

    def say(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def command(self, *arguments: str, ranks: int = 1) -> str:
        """Runs `nestpipe ARGUMENTS`, returns what it printed; raises StepError if it fails."""
        self._show(ranks, arguments)
        process = self.processes.start([*_nestpipe(ranks), *arguments])
        out, errors = process.communicate()
        _check_exit(process.returncode, errors or out, arguments)
        return out

    def kill_a_rank(self, marker: Path, *arguments: str, ranks: int) -> None:
        """Runs `nestpipe ARGUMENTS` on several ranks and kills one without warning once a file exists; waits for the end."""
        self._show(ranks, arguments, "   (one rank is killed in the middle; the launcher starts all again)")
        process = self.processes.start([*_nestpipe(ranks), *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _READY_S
        while not marker.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StepError(f"the run ended or stalled before it wrote {marker}.")
            time.sleep(0.01)
        os.kill(_children(process.pid)[-1], signal.SIGKILL)
        errors = process.communicate(timeout=240)[1]
        _check_exit(process.returncode, errors, arguments)

    def serve(self, name: str, *arguments: str, says: str) -> Service:
        """Starts `nestpipe serve ARGUMENTS`; returns when it prints its address."""
        arguments, log = ("serve", *arguments, "--port", "0", "--admin-port", "0"), self.out / f"{name}.log"
        self._show(1, arguments, " &")
        with log.open("w") as file:
            process = self.processes.start([*_nestpipe(1), *arguments], stdout=file.fileno(), stderr=file.fileno())
        deadline = time.monotonic() + _READY_S
        while True:
            ready = [line for line in log.read_text().splitlines() if line.startswith(says)]
            if ready:
                self.say(ready[0])
                url = re.split("[,; ]", ready[0].partition(" on ")[2])[0]
                self.services[name] = Service(name=name, process=process, url=url, log=log)
                return self.services[name]
            if process.poll() is not None or time.monotonic() > deadline:
                raise StepError(f"the service did not start; it said:\n{log.read_text()}")
            time.sleep(0.05)

    def stop(self, service: Service) -> None:
        """Sends Ctrl-C to a service; raises StepError unless it exits with code 0."""
        self.say(f"$ kill -INT {service.process.pid}   ({service.name})")
        service.process.send_signal(signal.SIGINT)
        try:
            code = service.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            raise StepError(
                f"{service.name} did not end in {_STOP_S:.0f} s; it said:\n{service.log.read_text()}"
            ) from None
        _check_exit(code, service.log.read_text(), ("serve",))

    def _show(self, ranks: int, arguments: Sequence[str], note: str = "") -> None:
        start = f"nestpipe launch -n {ranks}" if ranks > 1 else "nestpipe"
        line = escape(f"$ {start} {shlex.join(arguments)}{note}")
        self.console.print(f"[bold]{line}[/bold]", soft_wrap=True, highlight=False)


def check(held: bool, message: str) -> None:
    """Raises StepError unless a condition holds."""
    if not held:
        raise StepError(message)


def listening(pids: Iterable[int]) -> set[int]:
    """The ports that some processes listen on."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # it may have been closed
                sockets.add(str(link.readlink()))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(line[1].partition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets
    }


def _nestpipe(ranks: int) -> list[str]:
    program = [sys.executable, "-m", "nestpipe.cli"]
    return program if ranks == 1 else [*program, "launch", "-n", str(ranks), "--max-restarts", "1"]


def _children(pid: int) -> list[int]:
    """The processes that a process started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
    return sorted(found)


def _check_exit(code: int, output: str, arguments: Sequence[str]) -> None:
    if code:
        raise StepError(f"'nestpipe {shlex.join(arguments)}' exited with {code}:\n{output}")
