"""Recommendations of instances that find and order items themselves: the gateway forwards, and retries elsewhere.

Next-item and generative runs answer in one stage, so that is what the gateway reports; a ranker's stages are in cascade.py.
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from nestpipe.gateway.instance_client import InstanceClient
from nestpipe.serve.schemas import RecommendedItems, RecommendRequest, StageTime


class Forwarding:
    """Recommends by asking the user's instance. `budget_ms` is the deadline of requests that name none."""

    def __init__(self, remote: InstanceClient, *, budget_ms: float):
        self.remote, self.budget_ms = remote, budget_ms

    async def recommend(self, request: RecommendRequest) -> RecommendedItems:
        """Raises InstanceError if no instance answers, or one refuses the request itself."""
        deadline_ms = self.budget_ms if request.deadline_ms is None else request.deadline_ms
        start = time.monotonic()
        reply = await self.remote.of_user("/v1/recommend", request, RecommendedItems, deadline_s=deadline_ms / 1e3)
        took_ms = round((time.monotonic() - start) * 1e3, 3)
        stage = StageTime(ms=took_ms, deadline_ms=deadline_ms, count=len(reply.answer.items))
        return replace(reply.answer, instance=reply.instance, attempts=reply.num_attempts, stages={"instance": stage})
