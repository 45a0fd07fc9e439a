"""An instance over HTTP. Requests are parsed and limits are applied before anything is queued.

    POST /v1/prefill /v1/rank /v1/release /v1/events /v1/invalidate      GET /healthz /readyz /metrics /openapi.json

A ticket that is forged, expired, or of another process is counted and not used; its request is answered all the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.data.sequences import Sequences, truncate
from nestpipe.errors import DataError, NestPipeError
from nestpipe.gateway.router import Ticket, TicketError, sign, verify
from nestpipe.serve.config import Limits
from nestpipe.serve.engine import Engine
from nestpipe.serve.openapi import instance_calls, instance_document
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.prefill_policy import ADMITTED, Reason, decide_early, helps_nobody
from nestpipe.serve.prometheus import EngineMetrics
from nestpipe.serve.request_guard import Handler, RequestGuard, Run, http_refusal
from nestpipe.serve.requests import PrefillHint, RankingRequest, refuse_busy
from nestpipe.serve.schemas import (
    Event,
    EventsReply,
    EventsRequest,
    InstancePrefillReply,
    InvalidateReply,
    InvalidateRequest,
    PrefillRequest,
    RankedItems,
    RankRequest,
    ReleaseReply,
    ReleaseRequest,
)

_QUIET_S = 1.0  # without prefill hints, while none would be admitted
_MAX_WRITES, _NUM_WRITERS = 64, 2  # posts of events in flight, and threads for them


class Instance:
    """The handlers of one process. Its epoch changes with every start, because no KV prefix survives a restart."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        secret: bytes,
        limits: Limits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ):
        self.engine, self.name, self.epoch = engine, name, uuid.uuid4().hex[:16]
        self._secret, self._limits, self._wall_clock = secret, limits or Limits(), wall_clock
        self._calls = instance_calls(self._limits)
        self._ids = ServiceIds(lambda: engine.histories.sequences)
        # As many as the queue and one batch hold: further bodies would be read and parsed for nothing.
        self._guard = RequestGuard(
            max_in_flight=engine.config.max_queue + engine.config.max_batch,
            max_bytes=self._limits.body_bytes,
            body_s=self._limits.body_s,
        )
        # Writes wait for the disk, so they have their own limit and threads: ranking requests are not delayed.
        self._writes = RequestGuard(
            max_in_flight=_MAX_WRITES, max_bytes=self._limits.body_bytes, body_s=self._limits.body_s
        )
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="events")
        self.metrics = EngineMetrics(engine)
        self.is_draining = False

    def app(self) -> Starlette:
        """The ASGI application."""
        calls: dict[str, Run] = {
            "prefill": self._prefill,
            "rank": self._rank,
            "release": self._release,
            "events": self._events,
            "invalidate": self._invalidate,
        }
        routes = [Route(f"/v1/{name}", self._handler(name, call), methods=["POST"]) for name, call in calls.items()]
        gets = {"healthz": self._alive, "readyz": self._ready, "metrics": self._metrics, "openapi.json": self._document}
        routes += [Route(f"/{name}", handler) for name, handler in gets.items()]
        return Starlette(routes=routes, exception_handlers={404: http_refusal, 405: http_refusal})

    def state(self) -> dict[str, Any]:
        """The state of the process, for /state; it names no user."""
        engine = self.engine
        return {
            "instance": self.name,
            "epoch": self.epoch,
            "model": engine.versions.main.name,
            "compared": engine.versions.other.name if engine.versions.other else None,
            "share": engine.versions.share,
            "models": {one.name: {"answers": dict(one.counts), "costs": one.costs.as_dict()} for one in engine.models},
            "draining": self.is_draining,
            "waiting": engine.num_waiting,
            "entries": len(engine.cache),
            "device": asdict(engine.cache.device),
            "host": asdict(engine.cache.host),
        }

    def _handler(self, name: str, run: Run) -> Handler:
        count, guard = self.metrics.answers.labels, self._writes if name == "events" else self._guard
        kind, _ = self._calls[name]
        return guard.handler(kind, run, refuse=_refuse, counted=lambda status: count(name, str(status)).inc())

    async def _prefill(self, hint: PrefillRequest) -> InstancePrefillReply:
        engine, reply = self.engine, partial(InstancePrefillReply, instance=self.name, epoch=self.epoch)
        user = self._ids.user(hint.user)
        num_events = engine.histories.num_events(user) if hint.history is None else len(hint.history)
        if (reason := self._decide_early(user, num_events, hint.candidates)) is not None:
            return reply(ticket=None, admitted=False, reason=reason, quiet_s=self._quiet_s(hint.candidates))
        job = PrefillHint(
            user=user,
            num_candidates=hint.candidates,
            query_time=self._now() if hint.query_time is None else hint.query_time,
            request=_holder(user, hint.request),
            until=engine.clock() + engine.config.device_ttl_s,
            history=await self._history(user, hint.history),
        )
        engine.submit(job)
        decision = await asyncio.wrap_future(job.reply)
        ticket = Ticket(
            request=job.request,
            instance=self.name,
            epoch=self.epoch,
            key=decision.held,
            expiry=self._wall_clock() + engine.config.device_ttl_s,
            query_time=job.query_time,
        )
        text = sign(ticket, self._secret) if decision.held else None
        return reply(ticket=text, admitted=decision.reason in ADMITTED, reason=decision.reason)

    def _quiet_s(self, num_candidates: int) -> float:
        """How long to send no prefill hints: some time if none would be admitted, whatever the history and the model."""
        engine, main, other = self.engine, self.engine.versions.main, self.engine.versions.other
        is_quiet = all(
            helps_nobody(
                engine.trigger,
                served.costs,
                queue_ms=engine.queue_ms,
                max_events=served.max_len,
                num_candidates=num_candidates,
            )
            for served in (main, other or main)
        )
        return _QUIET_S if is_quiet else 0.0

    def _decide_early(self, user: int, num_events: int, num_candidates: int) -> Reason | None:
        """Reasons against a prefill that need neither events nor engine: where prefills do not help, hints stay cheap."""
        engine, served = self.engine, self.engine.versions.of(user)
        kept = num_events - truncate(num_events, served.max_len, served.block)
        reason = decide_early(
            engine.trigger, served.costs, queue_ms=engine.queue_ms, num_events=kept, num_candidates=num_candidates
        )
        if reason is not None:
            engine.counts["reason", reason] += 1
        return reason

    async def _rank(self, request: RankRequest) -> RankedItems:
        engine, ids = self.engine, self._ids
        arrived, user = engine.clock(), ids.user(request.user)
        ticket = self._ticket(request, user)
        items, unknown = ids.items(request.candidates)
        if not len(items):
            model = engine.versions.of(user).name
            return RankedItems(items=[], scores=[], path="full", model=model, unknown=unknown)
        query_time = request.query_time
        if query_time is None:
            query_time = self._now() if ticket is None or ticket.query_time is None else ticket.query_time
        deadline_ms = engine.trigger.budget_ms if request.deadline_ms is None else request.deadline_ms
        job = RankingRequest(
            user=user,
            items=items.tolist(),
            k=request.k,
            query_time=query_time,
            deadline=arrived + deadline_ms / 1000,
            request=ticket.request if ticket else "",
            history=await self._history(user, request.history),
        )
        engine.submit(job)
        answer = await asyncio.wrap_future(job.reply)
        self.metrics.rank_seconds.labels(answer.model).observe(answer.times_ms["total"] / 1e3)
        return replace(answer, items=ids.own_items(cast(list[int], answer.items)), unknown=unknown)

    async def _release(self, request: ReleaseRequest) -> ReleaseReply:
        ticket = verify(request.ticket, self._secret, now=self._wall_clock())
        ticket.require(instance=self.name, epoch=self.epoch, request=ticket.request)
        return ReleaseReply(self.engine.release(ticket.request))

    async def _events(self, request: EventsRequest) -> EventsReply:
        events = [self._ids.event(event) for event in request.events]
        add = partial(self.engine.histories.add, events, self._check)
        accepted, duplicates = await asyncio.get_running_loop().run_in_executor(self._writers, add)
        return EventsReply(accepted=accepted, duplicates=duplicates)

    def _check(self, events: Sequences) -> None:
        """Raises DataError for events that a model cannot read: they would fail every later request of their user."""
        for served in self.engine.models:
            served.prepare(events, 0)

    async def _invalidate(self, request: InvalidateRequest) -> InvalidateReply:
        return InvalidateReply(self.engine.cache.invalidate(self._ids.user(request.user)))

    async def _history(self, user: int, events: Sequence[Event] | None) -> Sequences | None:
        if events is None:
            return None
        return await run_in_threadpool(self.engine.histories.given, user, [self._ids.event(one) for one in events])

    def _ticket(self, request: RankRequest, user: int) -> Ticket | None:
        if request.ticket is None:
            return None
        try:
            ticket = verify(request.ticket, self._secret, now=self._wall_clock())
            ticket.require(instance=self.name, epoch=self.epoch, request=_holder(user, request.request))
        except TicketError:
            self.metrics.tickets.inc()
            return None
        return ticket

    def _now(self) -> int:
        return int(self._wall_clock())

    async def _alive(self, http: Request) -> Response:
        return JSONResponse({"alive": True})

    async def _ready(self, http: Request) -> Response:
        is_ready = not self.is_draining and not self.engine.is_stopping
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def _metrics(self, http: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _document(self, http: Request) -> Response:
        return JSONResponse(instance_document(self.engine.histories.sequences.schema, self._limits))


def _refuse(error: NestPipeError) -> tuple[int, str] | None:
    match error:
        case DataError():
            return 400, "bad_data"
        case TicketError():
            return 403, "bad_ticket"
        case _:
            return refuse_busy(error)


def _holder(user: int, request: str) -> str:
    """The pin's holder: a digest, so that tickets have one length whatever the request id."""
    return hashlib.blake2b(f"{user}/{request}".encode(), digest_size=16).hexdigest()
