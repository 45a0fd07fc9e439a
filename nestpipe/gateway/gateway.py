"""The gateway over HTTP: recommendations of a fleet, and the calls of its instances, routed by user.

    POST /v1/recommend, GET /v1/recommend/{user}   by the cascade of a ranker, or by the user's instance
    POST /v1/similar                           by any instance
    POST /v1/prefill /v1/rank /v1/release     of a ranker, for callers with a retrieval of their own
    POST /v1/generate                          of a generative run
    POST /v1/invalidate                        to every instance
    POST /v1/events, /v1/items, /v1/users      to every instance, or to any one if all have one state (state_forwarding.py)
    GET  /healthz /readyz /metrics /openapi.json
    admin, on its own port with a token:       GET /members, POST /members {"name", "action": join|drain|leave, "url"}

Ready means that an instance is, and that one real recommendation went through every stage. Limits come before work: requests in
flight, size and time of bodies, fields.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Protocol

from msgspec import UNSET
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.errors import NestPipeError
from nestpipe.gateway.cascade import StageError
from nestpipe.gateway.instance_client import InstanceClient, InstanceError, is_address
from nestpipe.gateway.router import RouterError
from nestpipe.gateway.state_forwarding import StateForwarding
from nestpipe.rules.rule_set import RuleError
from nestpipe.serve.config import BUCKETS_S, GatewayLimits
from nestpipe.serve.openapi import ServiceKind, gateway_calls, gateway_document
from nestpipe.serve.prefill_policy import ADMITTED
from nestpipe.serve.prometheus import status_counter
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import (
    CallEndpoint,
    RequestGuard,
    Run,
    ServiceApp,
    lacks_token,
    parse,
    read_json,
    refuse_with,
    user_and_numbers,
    user_route,
)
from nestpipe.serve.request_rules import refuse_rules
from nestpipe.serve.schemas import (
    GeneratedItems,
    GenerateRequest,
    InstanceRecommendRequest,
    InstancesReply,
    InvalidateRequest,
    MemberRequest,
    PrefillReply,
    PrefillRequest,
    RankedItems,
    RankRequest,
    RecommendedItems,
    RecommendRequest,
    ReleaseReply,
    ReleaseRequest,
    SimilarItems,
    SimilarRequest,
)
from nestpipe.serve.state_routes import state_routes

_log = logging.getLogger("nestpipe.serve")
_PROBE_MS = 2000.0  # that the recommendation of a readiness check may take
_PROVEN_S = 1.0  # how long one that went through proves readiness


class FleetRecommender(Protocol):
    """How a gateway recommends: `Cascade`, or `Forwarding` to the user's instance."""

    remote: InstanceClient

    @property
    def budget_ms(self) -> float:
        """The deadline of a request to an instance that names none."""

    async def recommend(self, request: RecommendRequest) -> RecommendedItems: ...


class GatewayMetrics:
    """Metrics of the gateway. Users are never labels."""

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

    def __init__(
        self,
        recommender: FleetRecommender,
        limits: GatewayLimits | None = None,
        *,
        kind: ServiceKind = "ranker",
        probe: Callable[[], RecommendRequest],
        shared_log: bool = False,
    ):
        """`probe` is a request of a user with a history, which must be answered for the gateway to be ready.

        `shared_log`: all instances have one state, so any one of them may write it.
        """
        self._recommender, self._remote = recommender, recommender.remote
        self._limits, self._kind = limits or GatewayLimits(), kind
        self._probe, own = probe, self._limits
        self._state = StateForwarding(self._remote, shared=shared_log, timeout_s=own.write_s, max_events=own.max_events)
        self._calls = gateway_calls(own, kind)
        self._guard = RequestGuard(max_in_flight=own.max_in_flight, max_bytes=own.max_bytes, body_s=own.body_s)
        self.metrics = GatewayMetrics()
        self.metrics.in_flight.set_function(lambda: self._guard.num_in_flight)
        self._proven_at, self._problem = -float("inf"), ""

    def app(self, *more: Route) -> Starlette:
        """The ASGI application, with further routes."""
        handlers: dict[str, Run] = {
            "recommend": self._recommend,
            "similar": self._similar,
            "prefill": self._prefill,
            "rank": self._rank,
            "release": self._release,
            "generate": self._generate,
            "events": self._state.events,
            "invalidate": self._invalidate,
        }
        calls = {name: self._handler(name, handlers[name]) for name in self._calls}
        from_address = self._handler("recommend", self._recommend, fields_of=user_and_numbers)
        routes = [
            user_route("recommend", from_address),
            *state_routes(
                self._state.handlers(),
                reads=self._guard,
                writes=self._guard,
                refuse=_refuse,
                counted=lambda name, status: self.metrics.answers.labels(name, str(status)).inc(),
                max_elements=self._limits.max_events,
            ),
            *more,
        ]
        gets = {"healthz": _alive, "readyz": self._ready, "metrics": self._metrics, "openapi.json": self._document}
        routes += [Route(f"/{name}", handler) for name, handler in gets.items()]
        return ServiceApp(calls, routes, lifespan=self._lifespan)

    async def readiness(self) -> tuple[dict[str, bool], str]:
        """Which instances are ready, and why the gateway is not; empty if it is."""
        ready = await self._remote.ready(timeout_s=1.0)
        if not any(ready.values()):
            return ready, "no instance is ready"
        problem = await self._recommends()
        if problem and problem != self._problem:
            _log.warning("the gateway is not ready: %s", problem)
        self._problem = problem
        return ready, problem

    async def _recommends(self) -> str:
        """Why no recommendation goes through every stage; empty if one does, or did a moment ago."""
        if time.monotonic() - self._proven_at < _PROVEN_S:
            return ""
        try:
            answer = await self._recommender.recommend(replace(self._probe(), deadline_ms=_PROBE_MS))
        except NestPipeError as error:
            return str(error)
        except Exception:
            _log.exception("a readiness check failed")
            return "the readiness check failed unexpectedly; the gateway's log has the traceback."
        self._note(answer)
        return f"ranking failed: {answer.problem}" if answer.problem else ""

    def _note(self, answer: RecommendedItems) -> None:
        """A recommendation that an instance answered has been through every stage."""
        if answer.instance is not None:
            self._proven_at = time.monotonic()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self._remote.close()

    def _handler(self, name: str, run: Run, **options: Any) -> CallEndpoint:
        counted = status_counter(self.metrics.answers, name)
        return self._guard.handler(self._calls[name][0], run, refuse=_refuse, counted=counted, **options)

    async def _recommend(self, request: InstanceRecommendRequest) -> RecommendedItems:
        if request.user is UNSET:
            if request.history is None:
                raise BadRequestError("field 'user' is missing; name a user, or send a 'history'.", code="bad_user")
            request = replace(request, user=uuid.uuid4().hex)  # of nobody, to route by
        answer = await self._recommender.recommend(request)
        self._note(answer)
        self.metrics.paths.labels(answer.path).inc()
        for stage, took in answer.stages.items():
            self.metrics.seconds.labels(stage).observe(took.ms / 1e3)
        return answer

    async def _similar(self, request: SimilarRequest) -> SimilarItems:
        return await self._remote.similar(request, deadline_s=self._limits.similar_s)

    async def _generate(self, request: GenerateRequest) -> GeneratedItems:
        deadline_ms = self._recommender.budget_ms if request.deadline_ms is None else request.deadline_ms
        reply = await self._remote.of_user("/v1/generate", request, GeneratedItems, deadline_s=deadline_ms / 1e3)
        self.metrics.paths.labels(reply.answer.path).inc()
        return reply.answer

    async def _prefill(self, hint: PrefillRequest) -> PrefillReply:
        instance = self._remote.choose(hint.user)
        outcome = await self._remote.prefill(hint, instance, timeout_s=self._recommender.budget_ms / 1e3)
        return PrefillReply(
            ticket=outcome.ticket,
            admitted=outcome.reason in ADMITTED,
            reason=outcome.reason,
            instance=instance.name,
            epoch=outcome.epoch,
        )

    async def _rank(self, request: RankRequest) -> RankedItems:
        deadline_ms = self._recommender.budget_ms if request.deadline_ms is None else request.deadline_ms
        chosen = self._remote.choose(request.user)
        is_used = False  # the prefix, by the instance that holds it
        try:
            with self._remote.holding(chosen):
                ranked = await self._remote.rank(request, chosen, deadline_s=deadline_ms / 1e3)
            is_used = ranked.num_attempts == 1
        finally:
            if request.ticket and not is_used:
                self._remote.start(self._remote.let_go(request.ticket))
        return ranked.answer

    async def _release(self, request: ReleaseRequest) -> ReleaseReply:
        return ReleaseReply(await self._remote.release_ticket(request.ticket))

    async def _invalidate(self, request: InvalidateRequest) -> InstancesReply:
        """Sends it to every instance. It is idempotent: after a failure the caller sends it again."""
        errors = await self._remote.broadcast("/v1/invalidate", request, timeout_s=self._limits.write_s)
        if failed := {name: error for name, error in errors.items() if error is not None}:
            first = next(iter(failed.values()))
            message = f"{len(failed)} of {len(errors)} instances did not take it ({first}); send the same again."
            raise InstanceError(message, status=first.status if first.is_final else 503, code=first.code)
        return InstancesReply(sorted(errors))

    async def _ready(self, http: HttpRequest) -> Response:
        ready, problem = await self.readiness()
        return JSONResponse({"ready": ready, "problem": problem}, 503 if problem else 200)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def metric_texts(self) -> list[str]:
        """The metrics of the gateway and of the members that answer."""
        own = generate_latest(self.metrics.registry).decode()
        return [own, *await self._remote.metric_texts(timeout_s=1.0)]

    async def _document(self, http: HttpRequest) -> Response:
        return JSONResponse(gateway_document(self._kind, self._limits))


def admin_app(remote: InstanceClient, token: str) -> Starlette:
    """Membership over HTTP, with a token."""
    members = remote.members

    async def handle(http: HttpRequest) -> Response:
        if (refused := lacks_token(http, token)) is not None:
            return refused
        try:
            if http.method == "POST":
                change(parse(await read_json(http, max_bytes=4096, timeout_s=5.0), MemberRequest))
        except BadRequestError as error:
            return refuse_with(error.status, error.code, str(error))
        except NestPipeError as error:
            return refuse_with(404, "no_instance", str(error))
        return JSONResponse({"members": [asdict(one) for one in members], "loads": dict(remote.loads)})

    def change(request: MemberRequest) -> None:
        match request.action:
            case "join":
                if request.url is UNSET or not is_address(request.url):
                    raise BadRequestError("field 'url' must be an http address with a host.", code="bad_url")
                members.join(request.name, request.url.rstrip("/"))
            case "drain":
                members.drain(request.name)
            case "leave":
                members.leave(request.name)

    return Starlette(routes=[Route("/members", handle, methods=["GET", "POST"])])


def _refuse(error: NestPipeError) -> tuple[int, str] | None:
    match error:
        case RuleError():
            return refuse_rules(error)
        case StageError():
            return error.status, f"{error.stage}_{error.code}"
        case InstanceError():
            return error.status, error.code
        case RouterError():
            return 503, "no_instance"
    return None


async def _alive(http: HttpRequest) -> Response:
    return JSONResponse({"alive": True})
