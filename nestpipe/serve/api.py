"""An instance over HTTP. Requests are parsed and limits are applied before anything is queued.

    POST /v1/recommend /v1/similar /v1/rank /v1/prefill /v1/release /v1/events /v1/invalidate
    GET  /v1/recommend/{user}?k=10 /healthz /readyz /metrics /openapi.json

A ticket that is forged, expired, or of another process is counted and not used; its request is answered all the same.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nestpipe.data.sequences import Sequences, truncate
from nestpipe.errors import NestPipeError
from nestpipe.gateway.router import Ticket, TicketError, sign, verify
from nestpipe.serve.config import Limits, Stages
from nestpipe.serve.engine import Engine
from nestpipe.serve.known_items import CandidateSearch, KnownItems
from nestpipe.serve.nearline_prefill import fill_version
from nestpipe.serve.openapi import instance_calls
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.prefill_policy import ADMITTED, Reason, decide_early, helps_nobody
from nestpipe.serve.prometheus import EngineMetrics
from nestpipe.serve.ranking_instance import RankingInstance
from nestpipe.serve.recommendation import RecommendationJob
from nestpipe.serve.recommending import HistoryScores
from nestpipe.serve.request_guard import Run
from nestpipe.serve.requests import PrefillHint, RankingRequest
from nestpipe.serve.schemas import (
    InstancePrefillReply,
    NearlineRequest,
    PrefillRequest,
    RankRequest,
    ReleaseReply,
    ReleaseRequest,
)
from nestpipe.serve.worker_thread import replied

_QUIET_S = 1.0  # without prefill hints, while none would be admitted


class Instance(RankingInstance):
    """The handlers of one process. Its epoch changes with every start, because no pinned KV prefix survives a restart."""

    metrics: EngineMetrics

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        secret: bytes,
        limits: Limits | None = None,
        search: CandidateSearch | None = None,
        stages: Stages | None = None,
        wall_clock: Callable[[], float] = time.time,
    ):
        self.engine, self.epoch, self._secret = engine, uuid.uuid4().hex[:16], secret
        limits = limits or Limits()
        super().__init__(
            engine,
            EngineMetrics(engine),
            name=name,
            calls=instance_calls(limits),
            limits=limits,
            budget_ms=engine.trigger.budget_ms,
            search=search,
            stages=stages or Stages(),
            wall_clock=wall_clock,
        )

    def _handlers(self) -> dict[str, Run]:
        return {"prefill": self._prefill, "release": self._release, **super()._handlers()}

    def state(self) -> dict[str, Any]:
        """The state of the process, for /state; it names no user."""
        engine = self.engine
        return {
            "instance": self.name,
            "epoch": self.epoch,
            **engine.describe_versions(),
            "models": {one.name: {"answers": dict(one.counts), "costs": one.costs.as_dict()} for one in engine.models},
            "draining": self.is_draining,
            "waiting": engine.num_waiting,
            "entries": len(engine.cache),
            "device": asdict(engine.cache.device),
            "host": asdict(engine.cache.host),
            **self._store_state(),
        }

    def _store_state(self) -> dict[str, Any]:
        stored, nearline = self.engine.tiers.stored, self.engine.nearline
        if stored is None or nearline is None:
            return {}
        store = stored.store
        counts = {"entries": len(store), "used": store.used, "cap": store.cap, **store.counts}
        waiting = {"waiting": len(nearline), "rate_ms_per_s": nearline.rate_ms_per_s}
        results = {name: nearline.counts[name] for name in ("stored", "passed_over", "failed")}
        return {"store": counts, "nearline": {**waiting, **results}}

    def prefill_users(self, request: NearlineRequest) -> None:
        nearline = self.engine.nearline
        if nearline is None:
            super().prefill_users(request)
        elif request.rate_ms_per_s is not None:
            nearline.limit(request.rate_ms_per_s)
        if nearline is not None:
            nearline.request([self._ids.user(one) for one in request.users])
            self.engine.wake()

    def prefill_version(self, model: ServedModel, rate_ms_per_s: float) -> None:
        engine = self.engine
        if engine.tiers.stored is None:
            super().prefill_version(model, rate_ms_per_s)
        else:
            engine.models.add(model)  # so that its files are not removed before it is in use
            fill_version(
                engine.tiers.stored, engine.histories, model, chunk=engine.config.chunk, rate_ms_per_s=rate_ms_per_s
            )

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
        decision = await replied(job.reply, self._worker.waits)
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

    async def _release(self, request: ReleaseRequest) -> ReleaseReply:
        ticket = verify(request.ticket, self._secret, now=self._wall_clock())
        ticket.require(instance=self.name, epoch=self.epoch, request=ticket.request)
        return ReleaseReply(self.engine.release(ticket.request))

    def _submit(self, job: RankingRequest) -> None:
        self.engine.submit(job)

    def _scorer(self, job: RecommendationJob) -> HistoryScores:
        """In full, because the KV prefix of a history without one of its events serves no other request."""
        served, own = self.engine.versions.of(job.user), self.engine.histories.sequences

        def score(histories: Sequence[Sequences], items: Sequence[int]) -> Tensor:
            inputs = [served.prepare(one, job.query_time) for one in histories]
            return torch.stack(served.scores(inputs, [served.candidates(items, own)] * len(inputs)))

        return score

    def _known(self, user: int | None = None) -> KnownItems:
        return self.engine.versions.of(user).known

    def _model_name(self, user: int | None = None) -> str:
        return self.engine.versions.of(user).name

    def _max_len(self) -> int:
        return self.engine.versions.main.max_len

    def _check(self, events: Sequences) -> None:
        for served in self.engine.models:
            served.prepare(events, 0)

    def _forget_inputs(self, user: int) -> int:
        return self.engine.invalidate(user)

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
