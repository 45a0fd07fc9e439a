"""The gateway over HTTP: recommendations through the cascade, and the calls of an instance, sent where they belong.

    POST /v1/recommend                         the cascade
    POST /v1/prefill /v1/rank /v1/release     as at an instance, for callers with a retrieval of their own
    POST /v1/events /v1/invalidate             to every instance; events to any, if all read one log
    GET  /healthz /readyz /metrics /openapi.json   alive; at least one instance answers; numbers; what calls take and give
    admin, on its own port with a token:       GET /members, POST /members {"name", "action": join|drain|leave, "url"}

Limits come before work: size and time of bodies, fields, and the number of requests in flight.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.errors import NestPipeError
from nestpipe.gateway.cascade import Cascade, CascadeRequest, StageError
from nestpipe.gateway.instance_client import InstanceError, PrefillAnswer, PrefillOutcome, is_address
from nestpipe.gateway.router import MAX_TICKET_CHARS, RouterError
from nestpipe.serve.config import BUCKETS_S, GatewayLimits
from nestpipe.serve.openapi import gateway_bodies, gateway_document
from nestpipe.serve.prefill_policy import ADMITTED
from nestpipe.serve.schemas import (
    BadRequestError,
    Call,
    Handler,
    RequestFields,
    RequestGuard,
    http_refusal,
    lacks_token,
    read_json,
    refusal,
)


class GatewayMetrics:
    """What /metrics says. Users are never labels."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        calls, stages = ["call", "status"], ["stage"]
        self.answers = Counter("nestpipe_gateway_answers", "Answers by call and status", calls, registry=registry)
        self.paths = Counter(
            "nestpipe_gateway_paths", "Recommendations by path of ranking", ["path"], registry=registry
        )
        self.seconds = Histogram(
            "nestpipe_gateway_stage_seconds", "Time of each stage", stages, buckets=BUCKETS_S, registry=registry
        )
        self.in_flight = Gauge("nestpipe_gateway_requests_in_flight", "Requests in flight", registry=registry)


class Gateway:
    """The handlers and what they share."""

    def __init__(self, cascade: Cascade, limits: GatewayLimits | None = None, *, shared_log: bool = False):
        self.cascade, self._remote = cascade, cascade.remote
        self._limits = limits or GatewayLimits()
        self._shared_log = shared_log  # all instances read one event log, so one of them is enough to write it
        own = self._limits
        self._fields = {call: frozenset(fields) for call, (fields, _) in gateway_bodies(own).items()}
        self._guard = RequestGuard(max_in_flight=own.max_in_flight, max_bytes=own.max_bytes, body_s=own.body_s)
        self.numbers = GatewayMetrics()
        self.numbers.in_flight.set_function(lambda: self._guard.num_in_flight)

    def app(self, *more: Route) -> Starlette:
        """What a server runs, with further routes if there are any."""
        calls = {
            "recommend": self._recommend,
            "prefill": self._prefill,
            "rank": self._rank,
            "release": self._release,
            "events": self._events,
            "invalidate": self._invalidate,
        }
        routes = [Route(f"/v1/{name}", self._handler(name, call), methods=["POST"]) for name, call in calls.items()]
        routes.extend(more)
        gets = {"healthz": _alive, "readyz": self._ready, "metrics": self._metrics, "openapi.json": self._document}
        routes += [Route(f"/{name}", handler) for name, handler in gets.items()]
        return Starlette(
            routes=routes, lifespan=self._lifespan, exception_handlers={404: http_refusal, 405: http_refusal}
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self._remote.close()

    def _handler(self, name: str, call: Call) -> Handler:
        count = self.numbers.answers.labels
        return self._guard.handler(call, refuse=_refuse, counted=lambda status: count(name, str(status)).inc())

    async def _recommend(self, body: dict[str, Any]) -> dict[str, Any]:
        fields, limits = RequestFields(body, self._fields["recommend"]), self._limits
        request = CascadeRequest(
            user=fields.integer("user"),
            request=fields.text("request", uuid.uuid4().hex),
            k=fields.integer("k", 1, limits.max_k, 10),
            query_time=fields.optional_integer("query_time"),
            history=fields.history(most=limits.max_history),
            exclude=tuple(fields.integers("exclude", most=limits.max_candidates)),
        )
        answer = await self.cascade.recommend(request)
        self.numbers.paths.labels(answer.path).inc()
        for stage, took in answer.stages.items():
            self.numbers.seconds.labels(stage).observe(took.ms / 1e3)
        return answer.to_json()

    async def _prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = RequestFields(body, self._fields["prefill"])
        asked = self._asked(fields, fields.integer("candidates", 1, self._limits.max_candidates))
        instance = self._remote.choose(asked.user)
        hint = await self._remote.prefill(asked, instance, timeout_s=self.cascade.stages.rank_ms / 1e3)
        return {
            "ticket": hint.ticket,
            "admitted": hint.reason in ADMITTED,
            "reason": hint.reason,
            "instance": instance.name,
            "epoch": hint.epoch,
        }

    async def _rank(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = RequestFields(body, self._fields["rank"])
        items = fields.integers("candidates", least=1, most=self._limits.max_candidates)
        asked = self._asked(fields, len(items))
        ticket = None if body.get("ticket") is None else fields.text("ticket", most=MAX_TICKET_CHARS)
        k = None if body.get("k") is None else fields.integer("k", 1, self._limits.max_k)
        deadline_ms = fields.deadline_ms(most=self._limits.deadline_ms, default=self.cascade.stages.rank_ms)
        chosen = self._remote.choose(asked.user)
        hint = PrefillOutcome(instance=chosen, ticket=ticket, reason="")
        is_used = False  # the prefix, by the instance that holds it
        try:
            with self._remote.holding(chosen):
                ranked = await self._remote.rank(asked, hint, items, k, deadline_s=deadline_ms / 1e3)
            is_used = ranked.num_attempts == 1
        finally:
            if ticket and not is_used:
                self._remote.start(self._remote.let_go(ticket))
        return ranked.answer

    async def _release(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "released": await self._remote.release_ticket(
                RequestFields(body, self._fields["release"]).text("ticket", most=MAX_TICKET_CHARS)
            )
        }

    async def _events(self, body: dict[str, Any]) -> dict[str, Any]:
        events = body.get("events")
        if not isinstance(events, list) or len(events) > self._limits.max_events:
            raise BadRequestError(
                f"field 'events' must be a list of at most {self._limits.max_events:,}.", code="bad_events"
            )
        if self._shared_log:
            return {"instances": [await self._remote.to_any("/v1/events", body, timeout_s=self._limits.write_s)]}
        return await self._to_all("/v1/events", body)

    async def _invalidate(self, body: dict[str, Any]) -> dict[str, Any]:
        RequestFields(body, self._fields["invalidate"]).integer("user")
        return await self._to_all("/v1/invalidate", body)

    async def _to_all(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The same to every instance. Both calls are idempotent: a caller that is told of a failure sends again."""
        said = await self._remote.broadcast(path, body, timeout_s=self._limits.write_s)
        if failed := {name: error for name, error in said.items() if error is not None}:
            first = next(iter(failed.values()))
            message = f"{len(failed)} of {len(said)} instances did not take it ({first}); send the same again."
            raise InstanceError(message, status=first.status if first.is_final else 503, code=first.code)
        return {"instances": sorted(said)}

    def _asked(self, fields: RequestFields, num_candidates: int) -> PrefillAnswer:
        return PrefillAnswer(
            user=fields.integer("user"),
            request=fields.text("request", uuid.uuid4().hex),
            num_candidates=num_candidates,
            query_time=fields.optional_integer("query_time"),
            history=fields.history(most=self._limits.max_history),
        )

    async def _ready(self, http: HttpRequest) -> Response:
        ready = await self._remote.ready(timeout_s=1.0)
        return JSONResponse({"ready": ready}, 200 if any(ready.values()) else 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self.numbers.registry), media_type="text/plain; version=0.0.4")

    async def _document(self, http: HttpRequest) -> Response:
        return JSONResponse(gateway_document(self._limits))


def admin_app(cascade: Cascade, token: str) -> Starlette:
    """Membership over HTTP, for who knows the token."""
    members = cascade.remote.members

    async def handle(http: HttpRequest) -> Response:
        if (refused := lacks_token(http, token)) is not None:
            return refused
        try:
            if http.method == "POST":
                body = await read_json(http, max_bytes=4096, timeout_s=5.0)
                _change(body)
        except BadRequestError as error:
            status, content = refusal(error.status, error.code, str(error))
            return JSONResponse(content, status)
        except NestPipeError as error:
            status, content = refusal(404, "no_instance", str(error))
            return JSONResponse(content, status)
        return JSONResponse({"members": [asdict(one) for one in members], "loads": dict(cascade.remote.loads)})

    def _change(body: dict[str, Any]) -> None:
        fields = RequestFields(body, frozenset({"name", "action", "url"}))
        name, action = fields.text("name"), fields.text("action")
        if action == "join":
            url = fields.text("url")
            if not is_address(url):
                raise BadRequestError("field 'url' must be an http address with a host.", code="bad_url")
            members.join(name, url.rstrip("/"))
        elif action in ("drain", "leave"):
            {"drain": members.drain, "leave": members.leave}[action](name)
        else:
            raise BadRequestError(f"there is no action {action!r}; there are join, drain and leave.", code="bad_action")

    return Starlette(routes=[Route("/members", handle, methods=["GET", "POST"])])


def _refuse(error: NestPipeError) -> tuple[int, str] | None:
    match error:
        case StageError():
            return error.status, f"{error.stage}_{error.code}"
        case InstanceError():
            return error.status, error.code
        case RouterError():
            return 503, "no_instance"
    return None


async def _alive(http: HttpRequest) -> Response:
    return JSONResponse({"alive": True})
