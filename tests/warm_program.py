"""`nestpipe` for tests that run many commands: the same entry, in a process forked from one that has imported everything.

Starting Python with torch takes seconds, and pages of documentation start it dozens of times. `warm_program(folder)` puts a
small program `nestpipe` into a folder for PATH. It hands its arguments, environment, working folder and open files to a
server, which forks; the child runs `nestpipe.cli.main` on them and its exit code comes back. That the installed program
itself starts is a test of its own (test_cli.py).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_START_S = 60.0
_PROGRAM = """#!/bin/sh
exec '{python}' -IS '{client}' {name} "$@"
"""
_CLIENT = """import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    if child := int.from_bytes(server.recv(4), "big"):  # the command gets the signals that its program gets
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda number, frame: os.kill(child, number))
    answer = server.recv(1)
sys.exit(answer[0] if answer else "the command ended without an exit code")
"""


@contextlib.contextmanager
def warm_program(folder: Path) -> Iterator[Path]:
    """A folder with the program, and with `warm-python`, which runs code from its input; the server ends with the context."""
    folder.mkdir(parents=True, exist_ok=True)
    address, client = str(folder / "server"), folder / "client.py"
    client.write_text(_CLIENT.format(address=address))
    for name in ("nestpipe", "warm-python"):
        (folder / name).write_text(_PROGRAM.format(python=sys.executable, client=client, name=name))
        (folder / name).chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.warm_program", address], cwd=Path(__file__).parent.parent
    ) as server:
        try:
            end = time.monotonic() + _START_S
            while not Path(address).exists():
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the server of the warm program did not start")
                time.sleep(0.02)
            yield folder
        finally:
            server.terminate()


def _serve(address: str) -> None:
    import torch

    import nestpipe.cli.demo
    import nestpipe.cli.eval
    import nestpipe.training.loop  # noqa: F401

    assert torch.get_num_threads() >= 1
    gc.freeze()  # else every child's collections copy the pages of what it shares with the others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for: their answer goes to who asked
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address + ".new")
        server.listen()
        Path(address + ".new").rename(address)
        while True:
            asker, _ = server.accept()
            with asker:
                if os.fork() == 0:
                    server.close()
                    _run(asker)


def _run(asker: socket.socket) -> None:
    """One command, in the process that was forked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(asker, 8, 3)
    sys.argv, folder, environment = json.loads(asker.makefile("rb").read(int.from_bytes(length, "big")))
    for number, file in enumerate(files):
        os.dup2(file, number)
    asker.sendall(os.getpid().to_bytes(4, "big"))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        if sys.argv[0] == "warm-python":
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
            code = 0
        else:
            from nestpipe.cli import main

            code = main()
    except SystemExit as wanted:
        code = wanted.code if isinstance(wanted.code, int) else 0 if wanted.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        asker.sendall(bytes([code]))
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
