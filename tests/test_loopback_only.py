"""The hook behind 'no telemetry' can fail: it notices a lookup and a connection, and lets this machine's own pass.

The promise itself is asked of `nestpipe demo` (test_demo.py) and of `nestpipe serve` (serve/test_command.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.loopback_only import LoopbackOnly

_TALK = """
import socket
for ask in (lambda: socket.getaddrinfo("example.org", 80), lambda: socket.create_connection(("192.0.2.1", 80), 1)):
    try:
        ask()
    except PermissionError as error:
        print(error)
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print("here is allowed")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.sendto(b"metrics", ("192.0.2.2", 8125))
"""


def test_the_hook_refuses_whatever_is_not_this_machine(tmp_path: Path) -> None:
    guard = LoopbackOnly(tmp_path / "guard")
    done = subprocess.run(
        [sys.executable, "-c", _TALK], env=guard.environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "here is allowed"
    assert "PermissionError" in done.stderr.splitlines()[-1]
    assert [line.split()[1:3] for line in guard.refused()] == [
        ["socket.getaddrinfo", "example.org"],
        ["socket.getaddrinfo", "192.0.2.1"],
        ["socket.sendto", "192.0.2.2"],
    ]
    assert guard.num_processes() == 1
