"""A real HTTP server that behaves like a language model's endpoint, or as badly as it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """A status and what is said with it."""

    status: int
    body: bytes


class Endpoint:
    """`behave(body)` gives what is sent: results, bytes, a status, a refusal, or a generator of bytes that drip."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_under_way = self.most_under_way = 0
        self.behave: Callable[[dict[str, Any]], Any] = honest
        self.lock = threading.Lock()
        self.url = ""
        self.over = threading.Event()

    def silent(self, body: dict[str, Any]) -> Any:
        """Says nothing for as long as anybody could wait."""
        self.over.wait(60)
        return []


def shoppers_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(body["messages"][1]["content"])
    return found


def honest(body: dict[str, Any]) -> Any:
    """One text for each shopper, which names the first action."""
    return [{"id": one["id"], "text": f"wants {one['actions'][0]['text']}"} for one in shoppers_of(body)]


def answer_with(content: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


@contextmanager
def serve_endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with endpoint.lock:
                endpoint.calls.append(body)
                endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
                endpoint.num_under_way += 1
                endpoint.most_under_way = max(endpoint.most_under_way, endpoint.num_under_way)
            try:
                self._send(endpoint.behave(body) if self.path == "/v1/chat/completions" else 404)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with endpoint.lock:
                    endpoint.num_under_way -= 1

        def _send(self, said: Any) -> None:
            status = said if isinstance(said, int) else 200
            if isinstance(said, Refusal):
                status, said = said
            if isinstance(said, list):
                said = answer_with(json.dumps({"results": said}))
            self.send_response(status)
            self.end_headers()
            parts = [b""] if isinstance(said, int) else [said] if isinstance(said, bytes) else said
            for part in parts:
                self.wfile.write(part)
                self.wfile.flush()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def drip(total: bytes, pause_s: float) -> Iterator[bytes]:
    for one in total:
        yield bytes([one])
        time.sleep(pause_s)
