"""Open-loop HTTP load: requests start at the times of a Poisson process, whether or not earlier ones are answered.

Each request takes an idle connection or opens one. The generator's own lateness is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from nestpipe.serve.server import freeze_loaded_objects

_END_S = 5.0  # that answers may take after the last arrival
_MAX_CONNECTIONS = 4000


@dataclass(slots=True)
class Arrivals:
    """What happened to the requests of a load."""

    seconds: float
    useful_ms: list[float] = field(default_factory=list)  # of answers that are not degraded
    lag_ms: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    num_failed: int = 0

    def useful(self, deadline_ms: float) -> int:
        return sum(one <= deadline_ms for one in self.useful_ms)

    def p99_ms(self) -> float:
        return float(np.percentile(self.useful_ms, 99)) if self.useful_ms else float("inf")

    def lag_p99_ms(self) -> float:
        return float(np.percentile(self.lag_ms, 99))


class _Line(asyncio.Protocol):
    """A connection, which sends one request at a time."""

    def __init__(self, found: Arrivals, idle: list[_Line]):
        self._found, self._idle = found, idle
        self._data, self._began, self._is_busy = b"", 0.0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def send(self, request: bytes, began: float) -> None:
        self._began, self._is_busy = began, True
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        status, self._data, self._is_busy = int(head[9:12]), b"", False
        self._found.statuses[status] = self._found.statuses.get(status, 0) + 1
        if status == 200 and b'"degraded":true' not in body:
            self._found.useful_ms.append(1e3 * (time.perf_counter() - self._began))
        self._idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_busy:
            self._found.num_failed += 1
        if self in self._idle:
            self._idle.remove(self)


def load(url: str, bodies: Path, *, rate: float, seconds: float, seed: int = 0) -> Arrivals:
    """Sends POST /v1/rank at a rate; waits some seconds for the last answers."""
    freeze_loaded_objects()  # a collection of the generator would make answers late
    return asyncio.run(_load(url, requests_of(url, bodies), rate=rate, seconds=seconds, seed=seed))


def requests_of(url: str, bodies: Path) -> list[bytes]:
    head = f"POST /v1/rank HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    texts = [line.encode() for line in bodies.read_text().splitlines()]
    return [f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text for text in texts]


async def _load(url: str, requests: Sequence[bytes], *, rate: float, seconds: float, seed: int) -> Arrivals:
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds * 2) + 20)
    at_s = np.cumsum(gaps)
    loop, place = asyncio.get_running_loop(), urlsplit(url)
    found, idle, lines, opening = Arrivals(seconds), list[_Line](), list[_Line](), set[asyncio.Task[None]]()

    async def open_and_send(request: bytes, began: float) -> None:
        try:
            _, line = await loop.create_connection(lambda: _Line(found, idle), place.hostname, place.port)
        except OSError:
            found.num_failed += 1
            return
        lines.append(line)
        line.send(request, began)

    start = time.perf_counter()
    for number, at in enumerate(at_s[at_s < seconds].tolist()):
        if (early := start + at - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        else:
            await asyncio.sleep(0)
        found.lag_ms.append(max(1e3 * (time.perf_counter() - start - at), 0.0))
        request, began = requests[number % len(requests)], start + at
        if idle:
            idle.pop().send(request, began)
        elif len(lines) + len(opening) < _MAX_CONNECTIONS:
            task = asyncio.create_task(open_and_send(request, began))
            opening.add(task)
            task.add_done_callback(opening.discard)
        else:
            found.num_failed += 1
    end = time.perf_counter() + _END_S
    while (opening or len(idle) < len(lines)) and time.perf_counter() < end:
        await asyncio.sleep(0.02)
    for line in lines:
        line.transport.close()
    return found
