"""Connections: closed in time, never too many, and refused where a request is too large or has two lengths."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import threading
import time
from concurrent.futures import Future

import httpx
import msgspec
import pytest
import uvloop
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from nestpipe.serve import server
from nestpipe.serve.admission import ARRIVAL, Arrival, WaitEstimate
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import RequestGuard, ServiceApp
from nestpipe.serve.server import HttpArrival, ServiceProtocol, bind, run_apps, waited_s
from nestpipe.serve.worker_thread import replied

HEAD_S = 1


class Echo(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    times: int = 1


class Said(msgspec.Struct):
    text: str


async def say(request):
    await asyncio.sleep(0.01 if request.text == "slow" else 0)
    if request.text == "busy":
        raise BadRequestError("busy", status=503, code="busy")
    if request.text == "failed":  # as by a worker
        reply = Future()
        reply.set_exception(BadRequestError("failed"))
        await replied(reply, WaitEstimate())
    return Said(request.text * request.times)


@pytest.fixture
def port(monkeypatch):
    """An app behind `run_apps`, which runs in a thread of its own and so without signals."""
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *_: None)
    loops, ready = [], threading.Event()
    guard = RequestGuard(max_in_flight=8, max_bytes=1 << 20, body_s=5.0)
    counts = {"refuse": lambda error: None, "counted": lambda status: None}
    fields_of = lambda http: {"text": http.path_params["text"]}  # noqa: E731
    routes = [
        Route("/", lambda request: PlainTextResponse("here")),
        Route("/v1/echo/{text}", guard.handler(Echo, say, fields_of=fields_of, **counts), methods=["GET"]),
    ]
    app = ServiceApp({"echo": guard.handler(Echo, say, **counts)}, routes)

    async def body(listening):
        loops.append((asyncio.get_running_loop(), asyncio.current_task()))
        await run_apps([(app, listening)], on_stop=lambda: None, started=ready.set, head_s=HEAD_S)

    def run(listening):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(body(listening))

    listening = bind("127.0.0.1", 0)
    thread = threading.Thread(target=run, args=(listening,))
    thread.start()
    assert ready.wait(10)
    yield listening.getsockname()[1]
    loop, task = loops[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)
    listening.close()
    assert not thread.is_alive()


def ask(line):
    """One request on a connection, and all of its answer."""
    line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    said = b""
    while not said.endswith(b"here"):
        piece = line.recv(4096)
        assert piece, f"closed after {said!r}"
        said += piece


def is_closed_within(line, seconds):
    """Whether the other side ends the connection while half a head comes byte by byte."""
    end = time.monotonic() + seconds
    line.settimeout(0.05)
    while time.monotonic() < end:
        try:
            line.sendall(b"x")
            if line.recv(1) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("before", [0, 2])
def test_a_head_that_does_not_end_is_cut_off(port, before):
    with socket.create_connection(("127.0.0.1", port)) as line:
        for _ in range(before):
            ask(line)
        line.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert is_closed_within(line, 5 * HEAD_S)
    assert httpx.get(f"http://127.0.0.1:{port}/").text == "here"


def test_a_connection_too_many_is_closed_at_once(port, monkeypatch):
    monkeypatch.setattr(server, "max_connections", lambda: 3)
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    try:
        lines[-1].settimeout(HEAD_S / 2)
        assert lines[-1].recv(1) == b"", "closed before anything could be late"
        ask(lines[0])  # the others are served
    finally:
        for line in lines:
            line.close()


def refused(port, request):
    """The whole answer to bytes, after which the connection must be closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(request)
        said = b""
        while piece := line.recv(65536):
            said += piece
    return said


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKS = b"0\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"  # a second request, if the length does not count


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 41",
        b"Transfer-Encoding: Chunked\r\ncontent-length: 0",
        b"Content-Length: 5\r\nContent-Length: 41",
        b"Transfer-Encoding: xchunked",
        b"Content-Length: +5",
    ],
)
def test_a_request_with_two_lengths_is_refused_and_its_rest_is_no_request(port, framing):
    said = refused(port, HEAD + framing + b"\r\n\r\n" + CHUNKS)
    assert said.startswith(b"HTTP/1.1 400 "), said
    assert said.count(b"HTTP/1.1") == 1, "the rest would be another caller's request"
    assert b"here" not in said


@pytest.mark.parametrize(
    "lines",
    [
        b"X: " + b"a" * 20_000 + b"\r\n\r\n",
        b"X: " + b"a" * 20_000,  # a field that does not end
        b"".join(b"X%d: a\r\n" % number for number in range(101)) + b"\r\n",
        b"".join(b"X%d: %s\r\n" % (number, b"a" * 400) for number in range(50)) + b"\r\n",
    ],
)
def test_large_heads_are_refused(port, lines):
    said = refused(port, HEAD + lines)
    assert said.startswith(b"HTTP/1.1 431 "), said
    assert b"large_head" in said
    assert httpx.get(f"http://127.0.0.1:{port}/").text == "here"


def test_garbage_gets_one_answer_as_json(port):
    said = refused(port, b"\x16\x03\x01 no http\r\n\r\n")
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "bad_http"


def test_a_connection_ends_after_so_many_requests(port, monkeypatch):
    monkeypatch.setattr(server, "_MAX_REQUESTS", 3)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        for _ in range(2):
            ask(line)
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        said = b""
        while piece := line.recv(4096):
            said += piece
    assert b"connection: close" in said.lower()
    assert said.endswith(b"here")


def posted(text, times=1, *, more=""):
    body = json.dumps({"text": text, "times": times})
    return f"POST /v1/echo HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def answers(line, num, *, is_head=False):
    """Status, headers and body of some answers on a connection."""
    found, stream = [], line.makefile("rb")
    for _ in range(num):
        status = stream.readline().decode().strip()
        fields = dict(one.split(": ", 1) for one in iter(lambda: stream.readline().decode().strip(), ""))
        assert fields.pop("date")
        assert fields.pop("server")
        body = b"" if is_head else stream.read(int(fields["content-length"]))
        found.append((status, fields, msgspec.json.decode(body) if body else None))
    return found


@pytest.fixture(params=["directly", "by messages"])
def answered(request, monkeypatch):
    """Both ways of reading a body and writing an answer: without the messages of ASGI, and with them."""
    if request.param == "by messages":
        monkeypatch.setattr(HttpArrival, "take_body", Arrival.take_body)
        monkeypatch.setattr(HttpArrival, "answer", Arrival.answer)
    return request.param


def said(text, **fields):
    body = {"text": text}
    size = len(msgspec.json.encode(body))
    return "HTTP/1.1 200 OK", {"content-type": "application/json", "content-length": str(size), **fields}, body


def test_answers_are_the_same_directly_and_by_messages(port, answered):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(posted("slow") + posted("a", 2) + posted("b", 3))  # at once: answered one after the other
        assert answers(line, 3) == [said("slow"), said("aa"), said("bbb")]
        whole = posted("late")
        for part in (whole[:-5], whole[-5:]):  # the head, and later the rest of the body
            line.sendall(part)
            time.sleep(0.05)
        assert answers(line, 1) == [said("late")]
        line.sendall(posted("busy"))
        ((status, fields, body),) = answers(line, 1)
        assert (status, fields["retry-after"]) == ("HTTP/1.1 503 Service Unavailable", "1")
        assert body["error"]["code"] == "busy"
        line.sendall(posted("x" * (1 << 20)))
        assert answers(line, 1)[0][0].startswith("HTTP/1.1 413")
        line.sendall(b"HEAD /v1/echo/me HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answers(line, 1, is_head=True) == [(*said("me")[:2], None)]
        line.sendall(posted("end", more="Connection: close\r\n"))
        assert answers(line, 1) == [said("end", connection="close")]
        assert line.recv(1) == b""


def test_a_caller_that_reads_late_gets_all_of_many_answers(port, answered):
    num, text = 24, "x" * 1000
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(b"".join(posted(text, 500) for _ in range(num)))
        time.sleep(0.3)  # more than the buffers of both sides hold waits to be written
        assert answers(line, num) == [said(text * 500)] * num
        line.sendall(posted("on"))
        assert answers(line, 1) == [said("on")]


def test_an_answer_is_written_at_once(port, monkeypatch):
    """One call of the system, and one wake-up of the caller, for each answer."""
    written, write = [], asyncio.selector_events._SelectorSocketTransport.write
    monkeypatch.setattr(
        asyncio.selector_events._SelectorSocketTransport,
        "write",
        lambda self, data: written.append(len(data)) or write(self, data),
    )
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(posted("a"))
        assert answers(line, 1) == [said("a")]
    assert len(written) == 1


def test_requests_and_connections_leave_nothing_to_collect(port, answered):
    """Cycles of references wait for a collection, which stops all requests for up to 0.2 s."""
    kinds = (ServiceProtocol, RequestResponseCycle, HttpArrival, Future, BadRequestError)

    def traffic():
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
                for text in ("a", "busy", "failed", "slow"):
                    line.sendall(posted(text))
                    answers(line, 1)
                line.sendall(posted("slow"))  # its connection is lost

    gc.collect()
    gc.disable()
    try:
        traffic()
        end = time.monotonic() + 10
        while any(isinstance(one, kinds) for one in gc.get_objects()):
            assert time.monotonic() < end, [one for one in gc.get_objects() if isinstance(one, kinds)]
            time.sleep(0.05)
    finally:
        gc.enable()


def test_bytes_are_as_old_as_the_last_that_arrived():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as line:
        line.sendall(b"first")
        own, _ = listening.accept()
        with own:
            time.sleep(0.1)
            line.sendall(b"last")
            time.sleep(0.2)
            own.sendall(b"ours says nothing")
            assert 0.18 <= waited_s(own) < 0.28


def test_what_waits_for_a_busy_loop_is_accepted_soon_and_as_old_as_it_is():
    """Also on connections that waited to be accepted."""
    num, num_turns, ages, lines = 64, 0, [], []

    async def app(scope, receive, send):
        ages.append(time.monotonic() - scope[ARRIVAL].at)
        await PlainTextResponse("here")(scope, receive, send)

    async def body():
        nonlocal num_turns
        ready, listening = asyncio.Event(), bind("127.0.0.1", 0)
        service = asyncio.create_task(run_apps([(app, listening)], on_stop=lambda: None, started=ready.set))
        await ready.wait()
        for _ in range(num):
            lines.append(line := socket.create_connection(listening.getsockname()))
            line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.3)  # the loop is busy
        while len(ages) < num:
            num_turns += 1
            await asyncio.sleep(0)
        for line in lines:
            line.close()
        signal.raise_signal(signal.SIGTERM)
        await service
        listening.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(body(), 30))
    assert num_turns < num / 4, "one connection per turn"
    assert min(ages) >= 0.28, "they came before the pause"
    assert max(ages) < 2


def test_nobody_connects_to_a_service_that_stops():
    """Else clients would wait for a service that ends, instead of trying another."""

    async def app(scope, receive, send):
        await asyncio.sleep(1.0)
        await PlainTextResponse("here")(scope, receive, send)

    async def body():
        ready, listening = asyncio.Event(), bind("127.0.0.1", 0)
        service = asyncio.create_task(run_apps([(app, listening)], on_stop=lambda: None, started=ready.set))
        await ready.wait()
        address = listening.getsockname()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.1)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.4)
        try:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=5)
            assert not service.done()
            assert (await reader.read()).endswith(b"here")
        finally:
            writer.close()
            await service
            listening.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(body(), 30))
