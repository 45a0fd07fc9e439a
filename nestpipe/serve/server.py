"""Runs ASGI apps on sockets until SIGINT or SIGTERM. Requests in flight are answered first; a second signal ends at once."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from nestpipe.errors import NestPipeError
from nestpipe.serve.admission import ARRIVAL, Arrival
from nestpipe.serve.route_headers import RETRY_LATER
from nestpipe.serve.schemas import ErrorReply, Problem

_DRAIN_S = 10
_OTHER_FILES = 128  # open files besides connections
# Connections that are accepted per turn of the loop: uvloop accepts one per listening socket. While a turn takes 10 ms because of
# overload, a thousand new connections would wait for ten seconds.
_NUM_ACCEPTED = 16
_MAX_HEAD_BYTES, _MAX_HEADERS = 16 << 10, 100
_MAX_REQUESTS = 10_000  # on one connection; then it is closed, so that clients spread over new instances
_GC_THRESHOLDS = 20_000, 10, 10  # the first exceeds the objects of some hundred requests in flight
_LAST_DATA_AT = 52  # of `tcpi_last_data_recv`, the milliseconds since the last bytes arrived, in `struct tcp_info`
_BAD_HTTP = 400, "bad_http", "this is no HTTP request."
_LARGE_HEAD = 431, "large_head", f"the request head has more than {_MAX_HEAD_BYTES:,} bytes or {_MAX_HEADERS} fields."
_TWO_LENGTHS = 400, "two_lengths", "Content-Length and Transfer-Encoding are both there; send one of them."


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


@dataclass(slots=True)
class HttpArrival(Arrival):
    """A request whose body is read, and whose answer is written, without the messages of ASGI, which cost 0.05 ms."""

    # A weak reference: uvicorn's cycle has the scope, and the scope has this.
    cycle_of: Callable[[], RequestResponseCycle | None] = lambda: None

    def take_body(self) -> bytes | None:
        cycle = self.cycle_of()
        return None if cycle is None or cycle.more_body else bytes(cycle.body)

    def answer(self, status: int, body: bytes) -> bool:
        cycle = self.cycle_of()
        if cycle is None or cycle.response_started or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
            return False
        cycle.response_started = True
        if cycle.disconnected:
            return True
        head = [STATUS_LINE[status], *(b"%b: %b\r\n" % one for one in cycle.default_headers)]
        head.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
        if status in RETRY_LATER:
            head.append(b"retry-after: 1\r\n")
        if not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        cycle.transport.write(b"".join([*head, b"\r\n", body]))
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


class ServiceProtocol(HttpToolsProtocol):
    """HTTP on one connection: notes when requests arrive, and refuses what is too large, too slow, or framed in two ways.

    Connections beyond the limit are closed, and those that send no complete request head in time: uvicorn's own timer ends with
    the first byte; the limits of a service begin with a complete head.
    """

    transport: asyncio.Transport
    running: asyncio.Task[Any] | None = None  # that a lost connection cancels; set by who answers
    is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        self._arrived = self._waits_since = time.monotonic()
        self._num_requests, self._num_head_bytes, self._in_head = 0, 0, True
        self._refusal = _BAD_HTTP
        self._late = self.loop.call_later(self.timeout_keep_alive, self._close_if_late)
        if len(self.connections) > max_connections():
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._arrived = time.monotonic() - waited_s(self._socket)
        if self._in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _LARGE_HEAD
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_requests += 1
        self._is_chunked = self._has_length = False
        cast(dict[str, Any], self.scope)[ARRIVAL] = self.arrival = HttpArrival(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._is_chunked |= self.headers[-1][0] == b"transfer-encoding"
        self._has_length |= self.headers[-1][0] == b"content-length"
        if len(self.headers) > _MAX_HEADERS:
            self._refuse(_LARGE_HEAD)

    def on_headers_complete(self) -> None:
        # Two lengths: a proxy in front may have used the other one, and the rest would be the next caller's request.
        if self._is_chunked and self._has_length:
            self._refuse(_TWO_LENGTHS)
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD_BYTES:
            self._refuse(_LARGE_HEAD)
        self._in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()
        self.arrival.cycle_of = ref(self.cycle)
        if self._num_requests >= _MAX_REQUESTS:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self.arrival.at, self._in_head = self._arrived, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._waits_since = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)
        self.is_lost = True
        if self.running is not None:
            self.running.cancel()
        self.cycle = self.scope = self.arrival = None  # type: ignore[assignment]  # they refer to this, or lead to it

    def send_400_response(self, msg: str) -> None:
        """Answers what could not be parsed, and closes the connection."""
        status, code, message = self._refusal
        body = msgspec.json.encode(ErrorReply(Problem(code, message)))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    def _refuse(self, refusal: tuple[int, str, str]) -> None:
        """Ends parsing: httptools reports what its callbacks raise, and `send_400_response` follows."""
        self._refusal = refusal
        raise ValueError(refusal[1])

    def _close_if_late(self) -> None:
        left_s = float(self.timeout_keep_alive)
        if self.cycle is None or self.cycle.response_complete:
            left_s -= time.monotonic() - self._waits_since
        if left_s <= 0:
            self.transport.close()
        else:
            self._late = self.loop.call_later(left_s, self._close_if_late)


def waited_s(connection: socket.socket) -> float:
    """How long the last bytes of a TCP connection were there before they are read now; the kernel counts in ticks of 1 to 10 ms.

    A loop that is behind reads what arrived long ago, from connections that may have waited to be accepted: only the kernel knows.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_AT + 4)
    return float(struct.unpack_from("=I", info, _LAST_DATA_AT)[0]) / 1000


def max_connections() -> int:
    """The limit on open files, less the other files of a process."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES, _OTHER_FILES)


class _Server(uvicorn.Server):
    """Leaves signals to `run_apps`, which runs several servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def freeze_loaded_objects() -> None:
    """Exempts loaded modules and models from garbage collection, and makes it rare: requests and connections leave no cycles.

    Else a collection takes 0.1 s, in which nothing is answered, every few hundred requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Runs on a new event loop of uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


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
                loop="none",  # `run_loop`, or whatever runs this
                http=ServiceProtocol,
                log_level="warning",
                access_log=False,
                ws="none",
                proxy_headers=False,  # nothing reads the address of a caller
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
    with ExitStack() as stack:
        # The socket itself is one of them: a server that stops closes all of its own, and then nobody can connect any more.
        own = [[one, *(stack.enter_context(one.dup()) for _ in range(_NUM_ACCEPTED - 1))] for _, one in apps]
        tasks = [asyncio.create_task(server.serve(sockets=each)) for server, each in zip(servers, own, strict=True)]
        while not all(server.started or task.done() for server, task in zip(servers, tasks, strict=True)):
            await asyncio.sleep(0.01)
        if all(server.started for server in servers):
            started()
        await asyncio.gather(*tasks)
