"""HTTP/1.1 of a gateway to its instances, as a transport of httpx: connections stay open and are used again, the newest first.

httpx's own transport polls all idle connections for every request, so under load each request costs more than the one before.
Here a connection that the other side closes removes itself. `https` is left to httpx.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import cached_property

import httpx
from httptools import HttpParserError, HttpResponseParser

_KEPT_S = 30.0  # of an idle connection: a network on the way may drop one without a word

_Place = tuple[str, int]  # host and port


class KeepAliveTransport(httpx.AsyncBaseTransport):
    """At most `max_connections` requests at a time, the others wait; at most `max_idle` connections stay open without one."""

    def __init__(self, *, max_connections: int = 1024, max_idle: int = 128):
        self._free, self._max_idle = asyncio.Semaphore(max_connections), max_idle
        self._idle = deque[_Connection]()  # the one used last is the last

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.scheme != "http":
            return await self._of_others.handle_async_request(request)
        message = _head(request) + await request.aread()
        async with self._free:
            connection = self._take((request.url.host, request.url.port or 80)) or await self._open(request)
            try:
                response = await connection.ask(message)
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
        return response

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if "_of_others" in vars(self):
            await self._of_others.aclose()

    @cached_property
    def _of_others(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=self._max_idle), trust_env=False)

    def _take(self, place: _Place) -> _Connection | None:
        while self._idle and self._idle[0].idle_s > _KEPT_S:
            self._idle.popleft().close()
        for connection in reversed(self._idle):
            if connection.place == place:
                self._idle.remove(connection)
                return connection
        return None

    async def _open(self, request: httpx.Request) -> _Connection:
        place = request.url.host, request.url.port or 80
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(place, self._idle), *place, happy_eyeballs_delay=0.25
            )
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return connection

    def _keep(self, connection: _Connection) -> None:
        if not connection.can_stay:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > self._max_idle:
            self._idle.popleft().close()


class _Connection(asyncio.Protocol):
    """One request at a time; callbacks of the parser collect its answer."""

    def __init__(self, place: _Place, idle: deque[_Connection]):
        self.place, self._idle = place, idle
        self._loop, self._used_at = asyncio.get_running_loop(), 0.0
        self._answer: asyncio.Future[httpx.Response] | None = None
        self._parser, self._headers, self._body = HttpResponseParser(self), list[tuple[bytes, bytes]](), bytearray()
        self.can_stay = True

    @property
    def idle_s(self) -> float:
        return self._loop.time() - self._used_at

    async def ask(self, message: bytes) -> httpx.Response:
        """Sends a request; raises httpx.RemoteProtocolError if no whole answer comes back."""
        self._answer = self._loop.create_future()
        if self._transport.is_closing():
            self._fail("the connection is closed")
        else:
            self._transport.write(message)
        return await self._answer

    def close(self) -> None:
        self.can_stay = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"the answer is no HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self.can_stay = False
        if self in self._idle:
            self._idle.remove(self)
        self._fail("the connection was closed before the answer was complete")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers, body, self._body = self._headers, [], bytes(self._body), bytearray()
        if status < httpx.codes.OK or self._answer is None:
            return  # an interim response
        self.can_stay = self.can_stay and self._parser.should_keep_alive()
        self._used_at = self._loop.time()
        if not self._answer.done():
            self._answer.set_result(httpx.Response(status, headers=headers, content=body))

    def _fail(self, why: str) -> None:
        self.can_stay = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(httpx.RemoteProtocolError(why))


def _head(request: httpx.Request) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b\r\n" % one for one in request.headers.raw]
    return b"".join([*lines, b"\r\n"])
