"""An instance over HTTP: every field is checked and every limit applied before anything is queued.

    POST /v1/prefill /v1/rank /v1/release /v1/events /v1/invalidate      GET /healthz /readyz /metrics /openapi.json

A ticket that is forged, expired, or of another process is counted and not used; its request is answered all the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.data.sequences import Sequences, truncate
from nestpipe.errors import DataError, NestPipeError
from nestpipe.gateway.router import MAX_TICKET_CHARS, Ticket, TicketError, sign, verify
from nestpipe.serve.config import Limits
from nestpipe.serve.engine import Engine
from nestpipe.serve.openapi import bodies, document
from nestpipe.serve.prefill_policy import ADMITTED, Reason, decide_early, helps_nobody
from nestpipe.serve.prometheus import EngineMetrics
from nestpipe.serve.requests import PrefillHint, RankingRequest, refuse_busy
from nestpipe.serve.schemas import (
    BadRequestError,
    Call,
    Handler,
    RequestFields,
    RequestGuard,
    http_refusal,
    posted_events,
)

Body = dict[str, Any]
_LATEST_S = 2**43 - 1
_QUIET_S = 1.0  # without signals, where no request is at risk
_MAX_WRITES, _NUM_WRITERS = 64, 2  # posts of events under way, and threads for them


class Instance:
    """The handlers of one process. Its epoch is another after every start, when no prefix of before is left."""

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
        self._fields = {
            call: frozenset(own) for call, (own, _) in bodies(engine.histories.sequences.schema, self._limits).items()
        }
        # As many as may wait and be answered together: more would be read, and their histories parsed, for nothing.
        self._guard = RequestGuard(
            max_in_flight=engine.config.max_queue + engine.config.max_batch,
            max_bytes=self._limits.body_bytes,
            body_s=self._limits.body_s,
        )
        # Writers take turns and wait for the disk: they have places and threads of their own, so that ranks keep theirs.
        self._writes = RequestGuard(
            max_in_flight=_MAX_WRITES, max_bytes=self._limits.body_bytes, body_s=self._limits.body_s
        )
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="events")
        self.numbers = EngineMetrics(engine)
        self.is_draining = False

    def app(self) -> Starlette:
        """What a server runs."""
        calls: dict[str, Call] = {
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

    def state(self) -> Body:
        """What there is to know about the process, without any user."""
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

    def _handler(self, name: str, call: Call) -> Handler:
        count, guard = self.numbers.answers.labels, self._writes if name == "events" else self._guard
        return guard.handler(call, refuse=_refuse, counted=lambda status: count(name, str(status)).inc())

    async def _prefill(self, body: Body) -> Body:
        fields = RequestFields(body, self._fields["prefill"])
        user, request = fields.integer("user"), fields.text("request")
        hold_s, num_candidates = (
            self.engine.config.device_ttl_s,
            fields.integer("candidates", 1, self._limits.candidates),
        )
        query_time, sent = self._query_time(body, fields), fields.history(most=self._limits.history)
        num_events = self.engine.histories.num_events(user) if sent is None else len(sent)
        if (reason := self._at_once(user, num_events, num_candidates)) is not None:
            said = {"ticket": None, "admitted": False, "reason": reason, "instance": self.name, "epoch": self.epoch}
            return said | {"quiet_s": self._quiet_s(num_candidates)}
        job = PrefillHint(
            user=user,
            num_candidates=num_candidates,
            query_time=self._now() if query_time is None else query_time,
            request=_holder(user, request),
            until=self.engine.clock() + hold_s,
            history=await self._history(user, fields),
        )
        self.engine.submit(job)
        decision = await asyncio.wrap_future(job.reply)
        ticket = Ticket(
            request=job.request,
            instance=self.name,
            epoch=self.epoch,
            key=decision.held,
            expiry=self._wall_clock() + hold_s,
            query_time=job.query_time,
        )
        return {
            "ticket": sign(ticket, self._secret) if decision.held else None,
            "admitted": decision.reason in ADMITTED,
            "reason": decision.reason,
            "instance": self.name,
            "epoch": self.epoch,
            "quiet_s": 0.0,
        }

    def _quiet_s(self, num_candidates: int) -> float:
        """How long no signals are needed: some time, if they would help no history with any model."""
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

    def _at_once(self, user: int, num_events: int, num_candidates: int) -> Reason | None:
        """The first reasons against a prefix, which need neither the events nor the engine: where the relay is of no use,
        a signal costs next to nothing."""
        engine, served = self.engine, self.engine.versions.of(user)
        kept = num_events - truncate(num_events, served.max_len, served.block)
        reason = decide_early(
            engine.trigger, served.costs, queue_ms=engine.queue_ms, num_events=kept, num_candidates=num_candidates
        )
        if reason is not None:
            engine.counts["reason", reason] += 1
        return reason

    async def _rank(self, body: Body) -> Body:
        arrived = self.engine.clock()
        fields, limits = RequestFields(body, self._fields["rank"]), self._limits
        user, request = fields.integer("user"), fields.text("request")
        ticket = self._ticket(body, fields, _holder(user, request))
        query_time = self._query_time(body, fields)
        if query_time is None:
            query_time = self._now() if ticket is None or ticket.query_time is None else ticket.query_time
        deadline_ms = fields.deadline_ms(most=limits.deadline_ms, default=self.engine.trigger.budget_ms)
        job = RankingRequest(
            user=user,
            items=fields.integers("candidates", least=1, most=limits.candidates),
            k=None if body.get("k") is None else fields.integer("k", 1, limits.candidates),
            query_time=query_time,
            deadline=arrived + deadline_ms / 1000,
            request=ticket.request if ticket else "",
            history=await self._history(user, fields),
        )
        self.engine.submit(job)
        answer = await asyncio.wrap_future(job.reply)
        self.numbers.rank_seconds.labels(answer.model).observe(answer.times_ms["total"] / 1e3)
        return {
            "items": answer.items,
            "scores": answer.scores,
            "path": answer.path,
            "prefix_len": answer.prefix_len,
            "degraded": answer.degraded,
            "model": answer.model,
            "times_ms": {name: round(ms, 3) for name, ms in answer.times_ms.items()},
        }

    async def _release(self, body: Body) -> Body:
        text = RequestFields(body, self._fields["release"]).text("ticket", most=MAX_TICKET_CHARS)
        ticket = verify(text, self._secret, now=self._wall_clock())
        ticket.require(instance=self.name, epoch=self.epoch, request=ticket.request)
        return {"released": self.engine.release(ticket.request)}

    async def _events(self, body: Body) -> Body:
        events = posted_events(body, most=self._limits.events)
        add = partial(self.engine.histories.add, events, self._check)
        accepted, duplicates = await asyncio.get_running_loop().run_in_executor(self._writers, add)
        return {"accepted": accepted, "duplicates": duplicates}

    def _check(self, events: Sequences) -> None:
        """Events that the model cannot read would spoil every later request of their user."""
        for served in self.engine.models:
            served.ask(events, 0)

    async def _invalidate(self, body: Body) -> Body:
        return {
            "entries": self.engine.cache.invalidate(RequestFields(body, self._fields["invalidate"]).integer("user"))
        }

    async def _history(self, user: int, fields: RequestFields) -> Sequences | None:
        sent = fields.history(most=self._limits.history)
        return None if sent is None else await run_in_threadpool(self.engine.histories.given, user, sent)

    def _ticket(self, body: Body, fields: RequestFields, request: str) -> Ticket | None:
        if body.get("ticket") is None:
            return None
        try:
            ticket = verify(fields.text("ticket", most=MAX_TICKET_CHARS), self._secret, now=self._wall_clock())
            ticket.require(instance=self.name, epoch=self.epoch, request=request)
        except (TicketError, BadRequestError):
            self.numbers.tickets.inc()
            return None
        return ticket

    def _query_time(self, body: Body, fields: RequestFields) -> int | None:
        return None if body.get("query_time") is None else fields.integer("query_time", 0, _LATEST_S)

    def _now(self) -> int:
        return int(self._wall_clock())

    async def _alive(self, http: Request) -> Response:
        return JSONResponse({"alive": True})

    async def _ready(self, http: Request) -> Response:
        is_ready = not self.is_draining and not self.engine.is_stopping
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def _metrics(self, http: Request) -> Response:
        return Response(self.numbers.text(), media_type="text/plain; version=0.0.4")

    async def _document(self, http: Request) -> Response:
        return JSONResponse(document(self.engine.histories.sequences.schema, self._limits))


def _refuse(error: NestPipeError) -> tuple[int, str] | None:
    match error:
        case DataError():
            return 400, "bad_data"
        case TicketError():
            return 403, "bad_ticket"
        case _:
            return refuse_busy(error)


def _holder(user: int, request: str) -> str:
    """Who a prefix is held for; of one length, whatever a request is called."""
    return hashlib.blake2b(f"{user}/{request}".encode(), digest_size=16).hexdigest()
