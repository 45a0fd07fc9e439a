"""A real PostgreSQL server from the wheel `pgserver`, which tests can kill and start again."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import psycopg

_SMALL = [
    "-c",
    "shared_buffers=16MB",
    "-c",
    "max_connections=40",
    "-c",
    "max_wal_size=64MB",
    "-c",
    "min_wal_size=32MB",
    "-c",
    "autovacuum=off",
]


@cache
def _binaries() -> Path:
    with warnings.catch_warnings(action="ignore"):  # it looks for a folder that containers do not have
        import pgserver

    return Path(pgserver.__file__).parent / "pginstall" / "bin"


@cache
def _user() -> str | None:
    """PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        return None
    _binaries()
    from pgserver.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists

    ensure_user_exists("pgserver")
    ensure_prefix_permissions(_binaries())
    ensure_folder_permissions(_binaries(), 0o55)
    ensure_folder_permissions(_binaries().parent / "lib", 0o44)
    return "pgserver"


@cache
def _new_cluster() -> Path:
    """The data folder of a server that has never run; made once, because it takes seconds."""
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    atexit.register(shutil.rmtree, folder)
    if (user := _user()) is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    words = ["-D", str(folder / "data"), "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync"]
    subprocess.run([str(_binaries() / "initdb"), *words], check=True, capture_output=True, user=user, cwd="/")
    return folder / "data"


class PostgresProcess:
    """A server with a data folder of its own, on a socket in it and on a TCP port."""

    def __init__(self, *, host: str = "127.0.0.1", before: Sequence[str] = ()):
        """`before` are words before the command, such as those that enter a network namespace."""
        self._folder = tempfile.TemporaryDirectory(prefix="pg")
        self.host, self._before = host, before
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        folder = Path(self._folder.name)
        if (user := _user()) is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
            folder.chmod(0o755)
        self._data = folder / "data"
        subprocess.run(["cp", "-a", str(_new_cluster()), str(self._data)], check=True)
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 198.18.0.0/16 trust\n")
        self.start()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@{self.host}:{self.port}/{database}"

    def empty(self) -> str:
        """Removes what a state has made; the address of the database."""
        with psycopg.connect(self._local("postgres"), autocommit=True) as connection:
            for name in ("entries", "numbers", "state"):
                connection.execute(f"DROP TABLE IF EXISTS nestpipe_{name}")
        return self.url()

    def _local(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self._folder.name}&port={self.port}"

    def start(self) -> None:
        """Starts the server and waits until it answers, also after it was killed."""
        command = [str(_binaries() / "postgres"), "-D", str(self._data), "-k", self._folder.name, *_SMALL]
        command += ["-h", self.host, "-p", str(self.port)]
        if (user := _user()) is not None:
            command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
        for _ in range(200):
            if (
                self._process is None or self._process.poll() is not None
            ):  # children of a killed server may still hold its memory
                (self._data / "postmaster.pid").unlink(missing_ok=True)
                with (Path(self._folder.name) / "log").open("ab") as log:
                    self._process = subprocess.Popen([*self._before, *command], stdout=log, stderr=log)
            try:
                psycopg.connect(self._local("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                time.sleep(0.05)
        raise AssertionError((Path(self._folder.name) / "log").read_text())

    def kill(self) -> None:
        """kill -9 of the server and its processes, as when a machine loses power."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, children)):
            os.kill(one, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._folder.cleanup()
