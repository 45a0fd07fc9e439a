"""An instance of a next-item model over HTTP, in own ids: every item of the catalogue is scored for each request.

POST /v1/recommend /v1/similar /v1/events /v1/invalidate      GET /v1/recommend/{user}?k=10
GET  /healthz /readyz /metrics /openapi.json                  admin, with a token: GET /state, POST /drain
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from nestpipe.data.sequences import Sequences
from nestpipe.serve.config import Limits
from nestpipe.serve.known_items import KnownItems
from nestpipe.serve.next_item_engine import NextItemEngine
from nestpipe.serve.openapi import next_item_calls
from nestpipe.serve.prometheus import InstanceMetrics
from nestpipe.serve.recommendation import RecommendationAnswer, RecommendationJob
from nestpipe.serve.recommending import HistoryScores, RecommendingInstance
from nestpipe.serve.worker_thread import replied


class NextItemInstance(RecommendingInstance):
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
        self.engine, limits = engine, limits or Limits()
        super().__init__(
            engine,
            InstanceMetrics(engine),
            name=name,
            calls=next_item_calls(limits),
            limits=limits,
            budget_ms=budget_ms,
            wall_clock=wall_clock,
        )

    def state(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "instance": self.name,
            **engine.describe_versions(),
            "items": len(engine.versions.main.known),
            "draining": self.is_draining,
            "waiting": engine.num_waiting,
        }

    async def _find(self, job: RecommendationJob) -> RecommendationAnswer:
        self.engine.submit(job)
        return await replied(job.reply, self._worker.waits)

    def _scorer(self, job: RecommendationJob) -> HistoryScores:
        job.served = self.engine.versions.of(job.user)
        return partial(job.served.scores, query_time=job.query_time)

    def _known(self, user: int | None = None) -> KnownItems:
        return self.engine.versions.of(user).known

    def _max_len(self) -> int:
        return self.engine.versions.main.max_len

    def _model_name(self, user: int | None = None) -> str:
        return self.engine.versions.of(user).name

    def _check(self, events: Sequences) -> None:
        for served in self.engine.models:
            served.prepare(events, 0)

    def _forget_inputs(self, user: int) -> int:
        return 0  # nothing of a user is kept between requests
