"""An instance of a next-item model over HTTP, in own ids.

    POST /v1/recommend /v1/similar /v1/events /v1/invalidate      GET /v1/recommend/{user}?k=10
    GET  /healthz /readyz /metrics /openapi.json                  admin, with a token: GET /state, POST /drain

Ready means that one real recommendation went through the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError, NestPipeError
from nestpipe.serve.config import Limits
from nestpipe.serve.http_instance import HttpInstance
from nestpipe.serve.next_item_engine import EngineAnswer, NextItemEngine, RecommendationJob
from nestpipe.serve.openapi import next_item_calls
from nestpipe.serve.prometheus import NextItemMetrics
from nestpipe.serve.request_guard import Run, user_and_numbers
from nestpipe.serve.schemas import Influence, RecommendedItems, RecommendRequest, SimilarItems, SimilarRequest

_READY_S = 2.0  # that a recommendation for readiness may take


class NextItemInstance(HttpInstance):
    """The handlers of one process."""

    title = "An instance of nestpipe that recommends"

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
        limits, self.metrics = limits or Limits(), NextItemMetrics(engine)
        super().__init__(
            engine, self.metrics, name=name, calls=next_item_calls(limits), limits=limits, wall_clock=wall_clock
        )
        self.engine, self._budget_ms = engine, budget_ms

    def _handlers(self) -> dict[str, Run]:
        return {"recommend": self._recommend, "similar": self._similar}

    def _more_routes(self) -> Sequence[Route]:
        from_address = self._handler("recommend", self._recommend, fields_of=user_and_numbers)
        return [Route("/v1/recommend/{user:path}", from_address, methods=["GET"])]

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

    async def _recommend(self, request: RecommendRequest) -> RecommendedItems:
        engine, ids, arrived = self.engine, self._ids, self.engine.clock()
        deadline_ms = self._budget_ms if request.deadline_ms is None else request.deadline_ms
        user = ids.user(request.user)
        excluded, _ = ids.items(request.exclude)  # what is not in the catalogue is not shown anyway
        job = RecommendationJob(
            user=user,
            k=request.k,
            deadline=arrived + deadline_ms / 1000,
            query_time=self._now() if request.query_time is None else request.query_time,
            excluded=excluded,
            history=await self._history(user, request.history),
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

    def _check(self, events: Sequences) -> None:
        self.engine.served.prepare(events, 0)

    def _forget_inputs(self, user: int) -> int:
        return 0  # nothing of a user is kept between requests

    async def _works(self) -> bool:
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
