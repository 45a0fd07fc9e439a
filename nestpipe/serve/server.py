"""Runs ASGI apps on sockets until SIGINT or SIGTERM. Requests in flight are answered first; a second signal ends at once."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from nestpipe.errors import NestPipeError

_DRAIN_S = 10
_OTHER_FILES = 128  # open files besides connections


class PortError(NestPipeError):
    """A port cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; raises PortError. Port 0 takes a free one.

    It does not listen yet: connections to a process that is still loading are refused at once.
    """
    # asyncio sets TCP_NODELAY only if the protocol is named; with Nagle's algorithm the end of an answer waits 40 ms.
    bound = socket.socket(proto=socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise PortError(
                f"port {port} of {host} is in use, perhaps by another instance; choose another port, or end what listens there."
            ) from None
        raise PortError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another address."
        ) from None
    return bound


class _Limited(H11Protocol):
    """Closes connections beyond the limit, and those that send no complete request head in time.

    uvicorn's own timer ends with the first byte; the limits of a service begin with a complete head.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.close()
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(self.timeout_keep_alive, self._close_unless_busy)

    def _close_unless_busy(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def max_connections() -> int:
    """The limit on open files, less the other files of a process."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES, _OTHER_FILES)


class _Server(uvicorn.Server):
    """Leaves signals to `run_apps`, which runs several servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def freeze_loaded_objects() -> None:
    """Exempts loaded modules and models from garbage collection.

    A full collection takes 0.1 s, in which nothing is answered, every few hundred requests.
    """
    gc.collect()
    gc.freeze()


async def run_apps(
    apps: Sequence[tuple[Starlette, socket.socket]],
    *,
    on_stop: Callable[[], None],
    started: Callable[[], None],
    head_s: int = 30,
) -> None:
    """Serves until SIGINT or SIGTERM; `on_stop` is called at once, before the last answers.

    A connection that sends no complete request head for `head_s` seconds is closed.
    """
    servers = [
        _Server(
            uvicorn.Config(
                app,
                loop="asyncio",  # tested and measured; not whatever else is installed
                http=_Limited,
                log_level="warning",
                access_log=False,
                ws="none",
                lifespan="off",
                timeout_keep_alive=head_s,
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

    freeze_loaded_objects()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    tasks = [asyncio.create_task(server.serve(sockets=[one])) for server, (_, one) in zip(servers, apps, strict=True)]
    while not all(server.started or task.done() for server, task in zip(servers, tasks, strict=True)):
        await asyncio.sleep(0.01)
    if all(server.started for server in servers):
        started()
    await asyncio.gather(*tasks)
