"""An instance of a model without histories (DCN) over HTTP, in own ids.

POST /v1/recommend /v1/similar /v1/rank /v1/events /v1/invalidate      GET /v1/recommend/{user}?k=10
GET  /healthz /readyz /metrics /openapi.json                           admin, with a token: GET /state, POST /drain
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nestpipe.data.sequences import Sequences
from nestpipe.serve.config import Limits, Stages
from nestpipe.serve.known_items import CandidateSearch, KnownItems
from nestpipe.serve.openapi import pointwise_calls
from nestpipe.serve.pointwise_engine import PointwiseEngine
from nestpipe.serve.prometheus import RankingMetrics
from nestpipe.serve.ranking_instance import RankingInstance
from nestpipe.serve.recommendation import RecommendationJob
from nestpipe.serve.recommending import HistoryScores
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.requests import RankingRequest


class PointwiseInstance(RankingInstance):
    """The handlers of one process."""

    title = "An instance of nestpipe that ranks without histories"

    def __init__(
        self,
        engine: PointwiseEngine,
        *,
        name: str,
        budget_ms: float,
        limits: Limits | None = None,
        search: CandidateSearch | None = None,
        stages: Stages | None = None,
        wall_clock: Callable[[], float] = time.time,
    ):
        """`budget_ms` is the deadline of requests that name none."""
        self.engine, limits = engine, limits or Limits()
        super().__init__(
            engine,
            RankingMetrics(engine),
            name=name,
            calls=pointwise_calls(limits),
            limits=limits,
            budget_ms=budget_ms,
            search=search,
            stages=stages or Stages(),
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
            "answers": dict(engine.counts),
        }

    def _submit(self, job: RankingRequest) -> None:
        self.engine.submit(job)

    def _scorer(self, job: RecommendationJob) -> HistoryScores:
        message = (
            "field 'explain' cannot be answered: this model reads no history, so no event of it weighs. Leave it out."
        )
        raise BadRequestError(message, code="bad_explain")

    def _known(self, user: int | None = None) -> KnownItems:
        return self.engine.versions.of(user).known

    def _max_len(self) -> int:
        return 1

    def _model_name(self, user: int | None = None) -> str:
        return self.engine.versions.of(user).name

    def _check(self, events: Sequences) -> None:
        pass  # the model reads no history

    def _forget_inputs(self, user: int) -> int:
        return 0  # nothing of a user is kept between requests
