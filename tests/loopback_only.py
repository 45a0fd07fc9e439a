"""Processes that may talk to this machine alone: for tests of the promise that nothing is sent anywhere else.

`LoopbackOnly(folder).environment()` is an environment in which every Python process, and every process it starts, installs an
audit hook before its first import. The hook sees each address that Python connects to, sends to or looks up, whoever asks,
libraries included; one that is not of this machine is written down and refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_HOOK = """
import os, sys

def _write(name, text):
    with open(os.path.join({folder!r}, name), "a") as file:
        file.write(text + "\\n")

def _is_here(host):
    host = host.decode() if isinstance(host, bytes) else host
    own = os.uname().nodename
    return host in (None, "", "localhost", "::1", own) or str(host).startswith(("127.", "::ffff:127.", own + "."))

def _hook(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # else it is a file, or nobody
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if not _is_here(host):
        _write("refused", f"{{os.getpid()}} {{event}} {{host}} {{sys.argv[:4]}}")
        raise PermissionError(f"{{event}} to {{host}}: only this machine may be talked to")

sys.addaudithook(_hook)
_write("guarded", str(os.getpid()))
"""


class LoopbackOnly:
    """A folder with the hook, and what it wrote down."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_HOOK.format(folder=str(folder)))

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        base = os.environ if base is None else base
        path = os.pathsep.join(filter(None, [str(self._folder), base.get("PYTHONPATH", "")]))
        return {**base, "PYTHONPATH": path}

    def num_processes(self) -> int:
        """How many processes ran with the hook."""
        return len(self._lines("guarded"))

    def refused(self) -> list[str]:
        """Whom somebody wanted to talk to, and who it was."""
        return self._lines("refused")

    def _lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().splitlines() if path.exists() else []
