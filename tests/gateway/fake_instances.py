"""A small real server that keeps the contract of an instance, with faults to switch on; and any app on loopback."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.gateway.router import InstanceAddress, Ticket, TicketError, routing_number, sign, verify
from nestpipe.rng import mix64
from nestpipe.serve.server import bind

SECRET = b"a secret of the tests"
CATALOGUE = list(range(100, 130))


def true_score(user: int, item: int) -> float:
    """What every instance must say about a user and an item, whatever happened before."""
    return mix64(mix64(user) ^ item) / 2**64


def true_ranking(user: int, items: list[int], k: int | None) -> list[int]:
    return sorted(items, key=lambda item: -true_score(user, item))[:k]


class Served:
    """An app under uvicorn on loopback, in a thread."""

    def __init__(self, app: Starlette, *, port: int = 0):
        self._socket = bind("127.0.0.1", port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            app, loop="asyncio", http="h11", log_level="critical", ws="none", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.002)

    def close(self) -> None:
        """Ends it in order."""
        self._server.should_exit = True
        self._join()

    def stop(self) -> None:
        """Ends it as a kill does: connections are closed, requests in flight get no answer."""
        self._server.should_exit = self._server.force_exit = True
        for one in list(self._server.server_state.connections):
            one.loop.call_soon_threadsafe(one.transport.abort)  # type: ignore[union-attr]
        self._join()

    def _join(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


class FakeInstance:
    """An instance by its name; `delay_s` and `status` switch on faults by call."""

    _epochs = itertools.count()

    def __init__(self, name: str):
        self.name = name
        self.delay_s: dict[str, float] = {}
        self.status: dict[str, int] = {}
        self.garbage = False
        self.holds_ranks = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.pinned: dict[str, int] = {}
        self.ready = True
        self.reason = "admitted"
        self.clock: Callable[[], float] = time.time
        self.start()

    def start(self, *, port: int = 0) -> None:
        """A process of its own epoch, without any prefix of before."""
        self.epoch = f"e{next(self._epochs)}"
        self.pinned.clear()
        names = ("recommend", "similar", "generate", "prefill", "rank", "release", "events", "invalidate")
        routes = [Route(f"/v1/{name}", getattr(self, f"_{name}"), methods=["POST"]) for name in names]
        routes += [Route("/v1/recommend/{user:path}", self._recommend), Route("/readyz", self._readyz)]
        self._served = Served(Starlette(routes=routes), port=port)
        self.url = self._served.url

    def stop(self) -> None:
        self._served.stop()

    def restart(self) -> None:
        self.stop()
        self.start(port=self._served.port)

    @property
    def member(self) -> InstanceAddress:
        return InstanceAddress(name=self.name, url=self.url)

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def _begin(self, request: Request, name: str) -> tuple[dict[str, Any], Response | None]:
        address = {**request.path_params, "k": int(request.query_params.get("k", 10)), "request": "r"}
        body = address if request.method == "GET" else await request.json()
        self.calls.append((name, body))
        await asyncio.sleep(self.delay_s.get(name, 0.0))
        while name == "rank" and self.holds_ranks:
            await asyncio.sleep(0.005)
        if name in self.status:
            error = {"code": "injected", "message": f"{self.name} refuses"}
            return body, JSONResponse({"error": error}, self.status[name])
        return body, None

    async def _recommend(self, request: Request) -> Response:
        body, refused = await self._begin(request, "recommend")
        if refused:
            return refused
        items = true_ranking(routing_number(body["user"]), CATALOGUE, body.get("k", 10))
        scores = [true_score(routing_number(body["user"]), item) for item in items]
        because = [[{"item": 100, "time": 5, "weight": 0.5}] for _ in items] if body.get("explain") else None
        answer = {"items": items, "scores": [] if self.garbage else scores, "path": "model", "model": "m1"}
        return JSONResponse({**answer, "request": body["request"], "instance": self.name, "because": because})

    async def _similar(self, request: Request) -> Response:
        body, refused = await self._begin(request, "similar")
        return refused or JSONResponse({"items": [body["item"] + 1], "scores": [0.5], "model": "m1"})

    async def _generate(self, request: Request) -> Response:
        body, refused = await self._begin(request, "generate")
        if refused:
            return refused
        items = true_ranking(routing_number(body["user"]), CATALOGUE, body.get("k", 10))
        about = {
            "instruction": {"source": "default", "reason": "none"},
            "num_events": 3,
            "beam": 8,
            "semantic_ids": "s",
        }
        scores = [true_score(routing_number(body["user"]), item) for item in items]
        answer = {"items": items, "log_probabilities": scores, "path": "full", "degraded": False, "model": "m1"}
        return JSONResponse({**answer, **about})

    async def _prefill(self, request: Request) -> Response:
        body, refused = await self._begin(request, "prefill")
        if refused:
            return refused
        ticket = Ticket(
            request=body["request"],
            instance=self.name,
            epoch=self.epoch,
            key="k",
            expiry=self.clock() + 30,
            query_time=body.get("query_time"),
        )
        text = sign(ticket, SECRET) if self.reason in {"admitted", "probe", "already_live"} else None
        if text is not None:
            self.pinned[text] = body["user"]
        said = {"admitted": self.reason in {"admitted", "probe"}, "reason": self.reason}
        answer = {"ticket": text, **said, "instance": self.name, "epoch": self.epoch}
        return JSONResponse(answer)

    async def _rank(self, request: Request) -> Response:
        body, refused = await self._begin(request, "rank")
        if refused:
            return refused
        if self.garbage:
            return JSONResponse({"items": [1], "scores": "none"})
        items = true_ranking(routing_number(body["user"]), body["candidates"], body.get("k"))
        hit = self._is_hit(body)
        self.pinned.pop(body.get("ticket"), None)  # used, as far as this request is concerned
        return JSONResponse(
            {
                "items": items,
                "scores": [true_score(routing_number(body["user"]), item) for item in items],
                "path": "hit_device" if hit else "full",
                "prefix_len": 7 if hit else 0,
                "degraded": False,
                "model": "m1",
                "times_ms": {"queue": 0.1, "compute": 0.2},
            }
        )

    def _is_hit(self, body: dict[str, Any]) -> bool:
        if body.get("ticket") is None:
            return False
        try:
            ticket = verify(body["ticket"], SECRET, now=self.clock())
            ticket.require(instance=self.name, epoch=self.epoch, request=body["request"])
        except TicketError:
            return False
        return self.pinned.get(body["ticket"]) == body["user"]

    async def _release(self, request: Request) -> Response:
        body, refused = await self._begin(request, "release")
        self.pinned.pop(body["ticket"], None)
        return refused or JSONResponse({})

    async def _events(self, request: Request) -> Response:
        return (await self._begin(request, "events"))[1] or JSONResponse(
            {"results": [], "accepted": 0, "duplicates": 0}
        )

    async def _invalidate(self, request: Request) -> Response:
        return (await self._begin(request, "invalidate"))[1] or JSONResponse({})

    async def _readyz(self, request: Request) -> Response:
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)
