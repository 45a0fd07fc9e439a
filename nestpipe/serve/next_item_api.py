"""An instance of a next-item model over HTTP, in own ids.

    POST /v1/recommend /v1/similar /v1/events /v1/invalidate      GET /v1/recommend/{user}?k=10
    GET  /healthz /readyz /metrics /openapi.json                  admin, with a token: GET /state, POST /drain

Ready means that one real recommendation went through the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec import UNSET
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError, NestPipeError
from nestpipe.serve.config import BUCKETS_S, Limits
from nestpipe.serve.next_item_engine import EngineAnswer, FailedModelError, NextItemEngine, RecommendationJob
from nestpipe.serve.openapi import next_item_calls, next_item_document
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.request_guard import Handler, RequestGuard, Run, http_refusal, lacks_token, user_and_numbers
from nestpipe.serve.requests import refuse_busy
from nestpipe.serve.schemas import (
    EventsReply,
    EventsRequest,
    Influence,
    InvalidateReply,
    InvalidateRequest,
    RecommendedItems,
    RecommendRequest,
    SimilarItems,
    SimilarRequest,
)

_READY_S = 2.0  # that a recommendation for readiness may take


class NextItemInstance:
    """The handlers of one process."""

    def __init__(
        self,
        engine: NextItemEngine,
        *,
        name: str,
        budget_ms: float,
        limits: Limits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ):
        """`budget_ms` is the deadline of requests that name none."""
        self.engine, self.name, self.is_draining = engine, name, False
        self._budget_ms, self._limits, self._wall_clock = budget_ms, limits or Limits(), wall_clock
        self._calls = next_item_calls(self._limits)
        self._ids = ServiceIds(lambda: engine.histories.sequences)
        self._guard = RequestGuard(
            max_in_flight=engine.config.max_queue + engine.config.max_batch,
            max_bytes=self._limits.body_bytes,
            body_s=self._limits.body_s,
        )
        self.metrics = NextItemMetrics(engine)

    def app(self) -> Starlette:
        """The ASGI application."""
        calls: dict[str, Run] = {
            "recommend": self._recommend,
            "similar": self._similar,
            "events": self._events,
            "invalidate": self._invalidate,
        }
        routes = [Route(f"/v1/{name}", self._handler(name, call), methods=["POST"]) for name, call in calls.items()]
        from_address = self._handler("recommend", self._recommend, fields_of=user_and_numbers)
        routes.append(Route("/v1/recommend/{user:path}", from_address, methods=["GET"]))
        gets = {"healthz": self._alive, "readyz": self._ready, "metrics": self._metrics, "openapi.json": self._document}
        routes += [Route(f"/{name}", handler) for name, handler in gets.items()]
        return Starlette(routes=routes, exception_handlers={404: http_refusal, 405: http_refusal})

    def admin_app(self, token: str) -> Starlette:
        """State and draining, for callers with the token."""

        async def handle(http: Request) -> Response:
            if (refused := lacks_token(http, token)) is not None:
                return refused
            if http.method == "POST":
                self.is_draining = True
            return JSONResponse(self.state())

        return Starlette(
            routes=[Route("/state", handle), Route("/drain", handle, methods=["POST"])],
            exception_handlers={404: http_refusal, 405: http_refusal},
        )

    def state(self) -> dict[str, Any]:
        """The state of the process; it names no user."""
        engine = self.engine
        return {
            "instance": self.name,
            "model": engine.served.name,
            "items": len(engine.served.items),
            "draining": self.is_draining,
            "waiting": engine.num_waiting,
            "answers": dict(engine.counts),
        }

    def _handler(self, name: str, run: Run, **options: Any) -> Handler:
        count, (kind, _) = self.metrics.answers.labels, self._calls[name]
        counted = lambda status: count(name, str(status)).inc()  # noqa: E731
        return self._guard.handler(kind, run, refuse=_refuse, counted=counted, **options)

    async def _recommend(self, request: RecommendRequest) -> RecommendedItems:
        engine, ids, arrived = self.engine, self._ids, self.engine.clock()
        deadline_ms = self._budget_ms if request.deadline_ms is None else request.deadline_ms
        user = ids.user(request.user)
        excluded, _ = ids.items(request.exclude)  # what is not in the catalogue is not shown anyway
        history = None
        if request.history is not None:
            events = [ids.event(event) for event in request.history]
            history = await run_in_threadpool(engine.histories.given, user, events)
        job = RecommendationJob(
            user=user,
            k=request.k,
            deadline=arrived + deadline_ms / 1000,
            query_time=int(self._wall_clock()) if request.query_time is None else request.query_time,
            excluded=excluded,
            history=history,
            is_explained=request.explain,
        )
        engine.submit(job)
        answer = await asyncio.wrap_future(job.reply)
        self.metrics.seconds.observe(answer.times_ms["total"] / 1e3)
        return RecommendedItems(
            items=ids.own_items(answer.found.items),
            scores=answer.found.scores,
            path=answer.path,
            degraded=False,
            model=engine.served.name,
            times_ms=answer.times_ms,
            request=uuid.uuid4().hex if request.request is UNSET else request.request,
            instance=self.name,
            because=self._because(answer),
        )

    def _because(self, answer: EngineAnswer) -> list[list[Influence]] | None:
        if answer.because is None:
            return None
        return [
            [Influence(item=self._ids.own_items([one.item])[0], time=one.time, weight=one.weight) for one in events]
            for events in answer.because
        ]

    async def _similar(self, request: SimilarRequest) -> SimilarItems:
        served, ids = self.engine.served, self._ids
        asked = request.item if isinstance(request.item, list) else [request.item]
        numbers, unknown = ids.items(asked)
        if not len(numbers):
            raise DataError(f"item {asked[0]!r} is not in the catalogue, which has {len(served.items):,} items.")
        found = await run_in_threadpool(served.similar, numbers, request.k)
        return SimilarItems(items=ids.own_items(found.items), scores=found.scores, model=served.name, unknown=unknown)

    async def _events(self, request: EventsRequest) -> EventsReply:
        events = [self._ids.event(event) for event in request.events]
        add = partial(self.engine.histories.add, events, self._check)
        accepted, duplicates = await run_in_threadpool(add)
        return EventsReply(accepted=accepted, duplicates=duplicates)

    def _check(self, events: Sequences) -> None:
        """Raises DataError for events that the model cannot read: they would fail every later request of their user."""
        self.engine.served.prepare(events, 0)

    async def _invalidate(self, request: InvalidateRequest) -> InvalidateReply:
        return InvalidateReply(0)  # nothing of a user is kept between requests

    async def _alive(self, http: Request) -> Response:
        return JSONResponse({"alive": True})

    async def _ready(self, http: Request) -> Response:
        is_ready = not self.is_draining and not self.engine.is_stopping and await self._recommends()
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def _recommends(self) -> bool:
        """Whether a real request goes through the engine in time."""
        engine = self.engine
        history = await run_in_threadpool(engine.histories.sample, min(8, engine.served.max_len))
        job = RecommendationJob(
            user=-1, k=1, deadline=engine.clock() + _READY_S, query_time=int(self._wall_clock()), history=history
        )
        try:
            engine.submit(job)
            answer = await asyncio.wait_for(asyncio.wrap_future(job.reply), _READY_S)
        except (NestPipeError, TimeoutError):
            return False
        return bool(answer.found.items) or len(engine.served.items) <= 8

    async def _metrics(self, http: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _document(self, http: Request) -> Response:
        return JSONResponse(next_item_document(self.engine.histories.sequences.schema, self._calls))


def _refuse(error: NestPipeError) -> tuple[int, str] | None:
    match error:
        case DataError():
            return 400, "bad_data"
        case FailedModelError():
            return 503, "failed"
        case _:
            return refuse_busy(error)


class NextItemMetrics(Collector):
    """What /metrics says. Users are never labels."""

    def __init__(self, engine: NextItemEngine):
        self._engine = engine
        own = self._registry = CollectorRegistry()
        own.register(self)
        self.answers = Counter("nestpipe_answers", "Answers by call and status", ["call", "status"], registry=own)
        self.seconds = Histogram(
            "nestpipe_recommend_seconds", "Time of a request in the engine", buckets=BUCKETS_S, registry=own
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        paths = CounterMetricFamily("nestpipe_recommended", "Answers by path", labels=["path"])
        for path, count in sorted(self._engine.counts.items()):
            paths.add_metric([path], count)
        yield paths
        yield GaugeMetricFamily("nestpipe_waiting", "Requests that wait", value=self._engine.num_waiting)
