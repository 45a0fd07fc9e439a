"""Connections that bring no request: closed in time, and never too many."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from nestpipe.serve import server
from nestpipe.serve.server import bind, run_apps

HEAD_S = 1


@pytest.fixture
def port(monkeypatch):
    """An app behind `run_apps`, which runs in a thread of its own and so without signals."""
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *_: None)
    loops, ready = [], threading.Event()
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])

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
