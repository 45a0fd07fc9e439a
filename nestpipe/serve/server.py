"""Apps on sockets until a signal: what is under way is answered first, a second signal ends at once."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from nestpipe.errors import NestPipeError

_DRAIN_S = 10


class PortError(NestPipeError):
    """A port cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A socket with a port; raises PortError that says what to do. Port 0 takes a free one.

    Nobody can connect before an app runs on it: whoever asks a process that still loads is told at once that it is not there.
    """
    # asyncio switches off Nagle's algorithm only where the protocol is named; with it the second part of an answer waits 40 ms.
    found = socket.socket(proto=socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise PortError(
                f"port {port} of {host} is in use, perhaps by another instance; choose another port, or end what listens there."
            ) from None
        raise PortError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another address."
        ) from None
    return found


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs several servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def spare_what_is_loaded() -> None:
    """The collector leaves alone what lives as long as the process anyway.

    To look through all of it takes a tenth of a second, in which nobody is answered, every few hundred requests.
    """
    gc.collect()
    gc.freeze()


async def run_apps(
    apps: Sequence[tuple[Starlette, socket.socket]], *, on_stop: Callable[[], None], started: Callable[[], None]
) -> None:
    """Serves until SIGINT or SIGTERM; `on_stop` is called at once, before the last answers."""
    servers = [
        _Server(
            uvicorn.Config(
                app,
                loop="asyncio",  # and not what else is installed: this is what is tested and measured
                http="h11",
                log_level="warning",
                access_log=False,
                ws="none",
                lifespan="off",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        for app, _ in apps
    ]

    def stop() -> None:
        for server in servers:
            server.force_exit = server.should_exit
            server.should_exit = True
        on_stop()

    spare_what_is_loaded()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    tasks = [asyncio.create_task(server.serve(sockets=[one])) for server, (_, one) in zip(servers, apps, strict=True)]
    while not all(server.started or task.done() for server, task in zip(servers, tasks, strict=True)):
        await asyncio.sleep(0.01)
    if all(server.started for server in servers):
        started()
    await asyncio.gather(*tasks)
