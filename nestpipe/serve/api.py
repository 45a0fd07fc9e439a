"""An instance over HTTP. Requests are parsed and limits are applied before anything is queued.

    POST /v1/prefill /v1/rank /v1/release /v1/events /v1/invalidate      GET /healthz /readyz /metrics /openapi.json

A ticket that is forged, expired, or of another process is counted and not used; its request is answered all the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from nestpipe.data.sequences import Sequences, truncate
from nestpipe.errors import NestPipeError
from nestpipe.gateway.router import Ticket, TicketError, sign, verify
from nestpipe.serve.config import Limits
from nestpipe.serve.engine import Engine
from nestpipe.serve.http_instance import HttpInstance
from nestpipe.serve.openapi import instance_calls
from nestpipe.serve.prefill_policy import ADMITTED, Reason, decide_early, helps_nobody
from nestpipe.serve.prometheus import EngineMetrics
from nestpipe.serve.request_guard import Run
from nestpipe.serve.requests import PrefillHint, RankingRequest
from nestpipe.serve.schemas import (
    InstancePrefillReply,
    PrefillRequest,
    RankedItems,
    RankRequest,
    ReleaseReply,
    ReleaseRequest,
)

_QUIET_S = 1.0  # without prefill hints, while none would be admitted


class Instance(HttpInstance):
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
        limits, self.metrics = limits or Limits(), EngineMetrics(engine)
        super().__init__(
            engine, self.metrics, name=name, calls=instance_calls(limits), limits=limits, wall_clock=wall_clock
        )
        self.engine, self.epoch, self._secret = engine, uuid.uuid4().hex[:16], secret

    def _handlers(self) -> dict[str, Run]:
        return {"prefill": self._prefill, "rank": self._rank, "release": self._release}

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

    def _check(self, events: Sequences) -> None:
        for served in self.engine.models:
            served.prepare(events, 0)

    def _forget_inputs(self, user: int) -> int:
        return self.engine.cache.invalidate(user)

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

    def _refuse(self, error: NestPipeError) -> tuple[int, str] | None:
        return (403, "bad_ticket") if isinstance(error, TicketError) else super()._refuse(error)


def _holder(user: int, request: str) -> str:
    """The pin's holder: a digest, so that tickets have one length whatever the request id."""
    return hashlib.blake2b(f"{user}/{request}".encode(), digest_size=16).hexdigest()
