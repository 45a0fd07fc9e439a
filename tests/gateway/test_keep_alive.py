"""Connections of a gateway: used again, never with another request's answer, and opened anew once they are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from nestpipe.gateway import keep_alive
from nestpipe.gateway.instance_client import make_client
from nestpipe.gateway.keep_alive import KeepAliveTransport

Handler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


class Server:
    """Raw HTTP: `answer` gets each request and says whether the connection stays open."""

    def __init__(self, answer: Handler) -> None:
        self._answer, self.requests, self.url = answer, list[bytes](), ""
        self.num_connections = self.most_at_once = self.num_at_work = 0
        self.writers = list[asyncio.StreamWriter]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                request = head + await reader.readexactly(length)
                self.requests.append(request)
                self.num_at_work += 1
                self.most_at_once = max(self.most_at_once, self.num_at_work)
                await asyncio.sleep(0)
                stays = await self._answer(request, reader, writer)
                self.num_at_work -= 1
                if not stays:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def served(answer: Handler) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, make_client() as client:
        yield server, client


def whole(body: bytes, *fields: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", *fields, b"content-length: %d" % len(body), b"", body])


async def echo(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(whole(request.partition(b"\r\n\r\n")[2]))
    return True


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def test_a_connection_serves_one_request_after_the_other_and_one_at_a_time():
    async def body() -> None:
        async with served(echo) as (server, client):
            for number in range(5):
                reply = await client.post(server.url + "/x?a=%20b", content=b"%d" % number, headers={"x-one": "1"})
                assert (reply.status_code, reply.content) == (200, b"%d" % number)
            assert server.num_connections == 1
            assert server.requests[0].startswith(b"POST /x?a=%20b HTTP/1.1\r\n")
            assert b"x-one: 1\r\n" in server.requests[0]
            replies = await asyncio.gather(*(client.post(server.url, content=b"%d" % n) for n in range(20)))
            assert [one.content for one in replies] == [b"%d" % n for n in range(20)]
            assert server.num_connections == 20
            await client.post(server.url, content=b"again")
            assert server.num_connections == 20

    run(body)


@pytest.mark.parametrize(
    "answer",
    [
        whole(b'{"a": [1, 2]}'),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n" + b'{"a": \r\n7\r\n[1, 2]}\r\n0\r\n\r\n',
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + whole(b'{"a": [1, 2]}'),
    ],
    ids=["length", "chunks", "interim"],
)
def test_an_answer_may_arrive_in_any_two_parts(answer):
    async def body() -> None:
        cuts = iter(range(1, len(answer)))

        async def in_parts(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            cut = next(cuts)
            writer.write(answer[:cut])
            await writer.drain()
            await asyncio.sleep(0.001)
            writer.write(answer[cut:])
            return True

        async with served(in_parts) as (server, client):
            for _ in range(1, len(answer)):
                assert (await client.get(server.url)).json() == {"a": [1, 2]}
            assert server.num_connections == 1

    run(body)


def test_a_connection_that_the_server_closes_while_idle_is_not_used_again():
    async def body() -> None:
        async with served(echo) as (server, client):
            for number in range(3):
                await client.post(server.url, content=b"one")
                assert server.num_connections == number + 1
                server.writers[-1].close()
                await asyncio.sleep(0.02)

    run(body)


@pytest.mark.parametrize("last", [b"connection: close", b"x-any: 1"])
def test_a_server_may_end_a_connection_with_its_answer(last):
    async def answer(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(whole(b"1", last))
        return last != b"connection: close"

    async def body() -> None:
        async with served(answer) as (server, client):
            for _ in range(3):
                assert (await client.get(server.url)).content == b"1"
            assert server.num_connections == (3 if last == b"connection: close" else 1)

    run(body)


def test_a_cancelled_request_takes_its_connection_with_it():
    async def slow(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        content = request.partition(b"\r\n\r\n")[2]
        if content == b"slow":
            await asyncio.sleep(0.1)
        writer.write(whole(content))
        return True

    async def body() -> None:
        async with served(slow) as (server, client):
            await client.post(server.url, content=b"first")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await client.post(server.url, content=b"slow")
            replies = [await client.post(server.url, content=b"%d" % n) for n in range(3)]
            assert [one.content for one in replies] == [b"0", b"1", b"2"], "not the late answer of another request"
            await asyncio.sleep(0.15)
            assert (await client.post(server.url, content=b"end")).content == b"end"
            assert server.num_connections == 2

    run(body)


def test_bytes_that_nobody_asked_for_answer_no_request():
    async def twice(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(whole(b"mine"))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(whole(b"of nobody"))
        return True

    async def body() -> None:
        async with served(twice) as (server, client):
            for number in range(3):
                assert (await client.get(server.url)).content == b"mine"
                await asyncio.sleep(0.05)
                assert server.num_connections == number + 1

    run(body)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"what?\r\n\r\n"])
def test_no_whole_answer_is_an_error_of_the_protocol(answer):
    async def broken(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        return False

    async def body() -> None:
        async with served(broken) as (server, client):
            for _ in range(2):
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get(server.url)
            assert server.num_connections == 2

    run(body)


def test_a_port_where_nobody_listens_is_an_error_of_the_connection():
    async def body() -> None:
        async with served(echo) as (server, client):
            pass
        async with make_client() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url)

    run(body)


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch):
    monkeypatch.setattr(keep_alive, "_KEPT_S", 0.1)

    async def body() -> None:
        async with served(echo) as (server, client):
            await asyncio.gather(*(client.post(server.url, content=b"%d" % n) for n in range(3)))
            await client.post(server.url, content=b"soon")
            assert server.num_connections == 3
            await asyncio.sleep(0.15)
            assert (await client.post(server.url, content=b"late")).content == b"late"
            assert server.num_connections == 4
            await asyncio.sleep(0.02)
            assert [one.is_closing() for one in server.writers] == [True] * 3 + [False]

    run(body)


def test_more_requests_than_connections_wait_for_one():
    async def body() -> None:
        few = httpx.AsyncClient(transport=KeepAliveTransport(max_connections=3, max_idle=2))
        async with served(echo) as (server, _), few as client:
            replies = await asyncio.gather(*(client.post(server.url, content=b"%d" % n) for n in range(12)))
            assert [one.content for one in replies] == [b"%d" % n for n in range(12)]
            assert server.most_at_once == 3
            await asyncio.sleep(0.02)
            assert len([one for one in server.writers if not one.is_closing()]) == 2, "of which so many stay open"

    run(body)
