"""A generative instance over HTTP. Requests are parsed and limits are applied before anything is queued.

POST /v1/generate /v1/events /v1/invalidate      GET /healthz /readyz /metrics /openapi.json
admin, on its own port with a token:  GET /state, POST /drain
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.errors import DataError, NestPipeError
from nestpipe.serve.config import BUCKETS_S, Limits
from nestpipe.serve.generation_engine import FailedError, GenerationRequest, Generator
from nestpipe.serve.openapi import generative_calls, generative_document
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import Handler, RequestGuard, Run, http_refusal, lacks_token
from nestpipe.serve.requests import refuse_busy
from nestpipe.serve.schemas import (
    EventsReply,
    EventsRequest,
    GeneratedItems,
    GenerateRequest,
    InvalidateReply,
    InvalidateRequest,
)


class GenerativeInstance:
    """The handlers of one process."""

    def __init__(self, generator: Generator, *, name: str, budget_ms: float, limits: Limits | None = None):
        """`budget_ms` is the deadline of requests that name none."""
        self.generator, self.name, self.is_draining = generator, name, False
        self._budget_ms, self._limits = budget_ms, limits or Limits()
        config, beam = generator.config, generator.served.model.config.beam
        self._calls = generative_calls(self._limits, beam=beam, scenarios=list(generator.scenarios))
        self._ids = ServiceIds(lambda: generator.histories.sequences)
        self._guard = RequestGuard(
            max_in_flight=config.max_queue + config.max_batch,
            max_bytes=self._limits.body_bytes,
            body_s=self._limits.body_s,
        )
        self.metrics = GenerationMetrics(generator)

    def app(self) -> Starlette:
        """The ASGI application."""
        calls: dict[str, Run] = {
            "generate": self._generate,
            "events": self._events,
            "invalidate": self._invalidate,
        }
        routes = [Route(f"/v1/{name}", self._handler(name, call), methods=["POST"]) for name, call in calls.items()]
        gets = {"healthz": self._alive, "readyz": self._ready, "metrics": self._metrics, "openapi.json": self._document}
        routes += [Route(f"/{name}", handler) for name, handler in gets.items()]
        return Starlette(routes=routes, exception_handlers={404: http_refusal, 405: http_refusal})

    def admin_app(self, token: str) -> Starlette:
        """The admin application, with a token."""

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
        """The state of the process, for /state; it names no user."""
        generator = self.generator
        return {
            "instance": self.name,
            "model": generator.served.name,
            "semantic_ids": generator.served.trie.version,
            "scenarios": list(generator.scenarios),
            "draining": self.is_draining,
            "waiting": generator.num_waiting,
            "entries": len(generator.cache),
            "device": asdict(generator.cache.device),
            "host": asdict(generator.cache.host),
            "estimates": asdict(generator.estimates),
        }

    def _handler(self, name: str, run: Run) -> Handler:
        count, (kind, _) = self.metrics.answers.labels, self._calls[name]
        return self._guard.handler(kind, run, refuse=_refuse, counted=lambda status: count(name, str(status)).inc())

    async def _generate(self, request: GenerateRequest) -> GeneratedItems:
        generator, arrived = self.generator, self.generator.clock()
        if request.scenario is not None and request.scenario not in generator.scenarios:
            names = ", ".join(generator.scenarios) or "none"
            raise BadRequestError(
                f"there is no scenario {request.scenario!r}; there are: {names}.", code="bad_scenario"
            )
        deadline_ms, user, history = request.deadline_ms or self._budget_ms, self._ids.user(request.user), None
        if request.history is not None:
            events = [self._ids.event(one) for one in request.history]
            history = await run_in_threadpool(generator.histories.given, user, events)
        job = GenerationRequest(
            user=user,
            k=request.k,
            deadline=arrived + deadline_ms / 1000,
            scenario=request.scenario,
            trigger=None if request.trigger is None else self._ids.item(request.trigger),
            history=history,
        )
        generator.submit(job)
        answer = await asyncio.wrap_future(job.reply)
        self.metrics.generate_seconds.observe(answer.times_ms["total"] / 1e3)
        return replace(answer, items=self._ids.own_items(cast(list[int], answer.items)))

    async def _events(self, request: EventsRequest) -> EventsReply:
        # Events that the model cannot read would fail every later request of their user.
        add, check = self.generator.histories.add, self.generator.served.prepare
        events = [self._ids.event(one) for one in request.events]
        accepted, duplicates = await run_in_threadpool(add, events, check)
        return EventsReply(accepted=accepted, duplicates=duplicates)

    async def _invalidate(self, request: InvalidateRequest) -> InvalidateReply:
        return InvalidateReply(self.generator.cache.invalidate(self._ids.user(request.user)))

    async def _alive(self, http: Request) -> Response:
        return JSONResponse({"alive": True})

    async def _ready(self, http: Request) -> Response:
        is_ready = not self.is_draining and not self.generator.is_stopping
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def _metrics(self, http: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _document(self, http: Request) -> Response:
        return JSONResponse(generative_document(self.generator.histories.sequences.schema, self._calls))


def _refuse(error: NestPipeError) -> tuple[int, str] | None:
    match error:
        case DataError():
            return 400, "bad_data"
        case FailedError():
            return 503, "failed"
        case _:
            return refuse_busy(error)


class GenerationMetrics(Collector):
    """Metrics of the instance. Users are never labels."""

    def __init__(self, generator: Generator):
        self._generator = generator
        own = self._registry = CollectorRegistry()
        own.register(self)
        self.answers = Counter("nestpipe_answers", "Answers by call and status", ["call", "status"], registry=own)
        self.generate_seconds = Histogram(
            "nestpipe_generate_seconds", "Time of a request in the generator", buckets=BUCKETS_S, registry=own
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        generator = self._generator
        paths = CounterMetricFamily("nestpipe_generated", "Answers by path", labels=["path"])
        instructions = CounterMetricFamily(
            "nestpipe_instructions", "Answers by the instruction found", labels=["found"]
        )
        for (what, which), count in sorted(generator.counts.items()):
            (paths if what == "path" else instructions).add_metric([which], count)
        yield paths
        yield instructions
        used = GaugeMetricFamily("nestpipe_cache_used_bytes", "Bytes of encoder memories", labels=["tier"])
        used.add_metric(["device"], generator.cache.device.used)
        used.add_metric(["host"], generator.cache.host.used)
        yield used
        yield GaugeMetricFamily("nestpipe_waiting", "Requests that wait", value=generator.num_waiting)
