"""What instances that rank candidates share: ranking requests, and recommendations in two stages.

    history --retrieval, pre-rank--> candidates --the engine, as for /v1/rank--> items

Retrieval uses the item vectors of the run itself, or another run (`--retrieval RUN`).
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import numpy as np
from msgspec.structs import replace

from nestpipe.data.folder_merge import is_among
from nestpipe.gateway.candidates import Floats
from nestpipe.gateway.router import Ticket
from nestpipe.serve.config import Limits, Stages
from nestpipe.serve.known_items import CandidateSearch, KnownItems, RankingCandidates, ScoredItems
from nestpipe.serve.openapi import Calls
from nestpipe.serve.prometheus import RankingMetrics
from nestpipe.serve.recommendation import RecommendationAnswer, RecommendationJob
from nestpipe.serve.recommending import RecommendingInstance
from nestpipe.serve.request_guard import Run
from nestpipe.serve.requests import RankingRequest, public_error
from nestpipe.serve.schemas import RankedItems, RankRequest, StageTime
from nestpipe.serve.worker_thread import WorkerThread, replied

_NUM_SEARCHES = 2  # at a time


class RankingInstance(RecommendingInstance):
    """Ranks the caller's candidates, or its own."""

    def __init__(
        self,
        worker: WorkerThread,
        metrics: RankingMetrics,
        *,
        name: str,
        calls: Calls,
        limits: Limits,
        budget_ms: float,
        search: CandidateSearch | None,
        stages: Stages,
        wall_clock: Callable[[], float] = time.time,
    ):
        """`search` is that of another run; without it the items of the model that ranks are searched."""
        super().__init__(
            worker, metrics, name=name, calls=calls, limits=limits, budget_ms=budget_ms, wall_clock=wall_clock
        )
        self.metrics, self._search, self._stages = metrics, search, stages
        if search is None:
            self._known().search()  # before the first request
        self._searches = ThreadPoolExecutor(_NUM_SEARCHES, thread_name_prefix="retrieval")

    @abstractmethod
    def _submit(self, job: RankingRequest) -> None:
        """Queues a ranking request; raises BusyError."""

    def _handlers(self) -> dict[str, Run]:
        return {"rank": self._rank, **super()._handlers()}

    def _ticket(self, request: RankRequest, user: int) -> Ticket | None:
        """The ticket of a request, if it is one of this process."""
        return None

    async def _rank(self, request: RankRequest) -> RankedItems:
        arrived, ids, user = self._arrived(), self._ids, self._ids.user(request.user)
        ticket = self._ticket(request, user)
        items, unknown = ids.items(request.candidates)
        is_known, withdrawn = self._known(user).has(items), self._withdrawn()
        if np.count_nonzero(is_known) < len(is_known):
            unknown, items = unknown + ids.own_items(items[~is_known]), items[is_known]
        if len(withdrawn):
            items = items[~is_among(items, withdrawn)]
        if not len(items):
            return RankedItems(items=[], scores=[], path="full", model=self._model_name(user), unknown=unknown)
        query_time = request.query_time
        if query_time is None:
            query_time = self._now() if ticket is None or ticket.query_time is None else ticket.query_time
        deadline_ms = self._budget_ms if request.deadline_ms is None else request.deadline_ms
        job = RankingRequest(
            user=user,
            items=items,
            k=request.k,
            query_time=query_time,
            deadline=arrived + deadline_ms / 1000,
            request=ticket.request if ticket else "",
            history=await self._history(user, request.history),
        )
        scorer = self._scorer(_as_recommendation(job)) if request.explain else None
        answer = await self._ranked(job)
        found, because = self._shown(ScoredItems(cast(list[int], answer.items), answer.scores)), None
        if scorer is not None and self._num_events(job):
            because = await self._explained(_as_recommendation(job), scorer, found.items)
        own = ids.own_items(found.items)
        return replace(answer, items=own, scores=found.scores, unknown=unknown, because=because)

    async def _ranked(self, job: RankingRequest) -> RankedItems:
        self._submit(job)
        answer = await replied(job.reply, self._worker.waits)
        self.metrics.observe_rank(answer.model, answer.times_ms["total"] / 1e3)
        return answer

    async def _find(self, job: RecommendationJob) -> RecommendationAnswer:
        began, model = self._worker.clock(), self._model_name(job.user)
        if (popular := self._popular(job, model)) is not None:
            return popular
        found = await asyncio.get_running_loop().run_in_executor(self._searches, partial(self._candidates, job))
        found_at, items = self._worker.clock(), found.items
        stages = {"retrieval": self._stage(began, found_at, job, len(items))}
        if not items:
            nothing = ScoredItems([], [], found.allowed)
            return RecommendationAnswer(found=nothing, path="full", model=model, times_ms={}, stages=stages)
        self._worker.admit(job.deadline - self._worker.clock())  # others were queued meanwhile
        # The history stays unnamed unless the caller sent it: the engine reads it after it notes invalidations.
        request = RankingRequest(
            user=job.user,
            items=items,
            k=job.k if found.candidates.is_final else None,
            query_time=job.query_time,
            deadline=job.deadline,
            history=job.history,
        )
        ranked = await self._ranked(request)
        best = found.listed(cast(list[int], ranked.items), ranked.scores, job.k)
        ended = self._worker.clock()
        return RecommendationAnswer(
            found=best,
            path=ranked.path,
            model=ranked.model,
            times_ms={**ranked.times_ms, "total": round((ended - began) * 1e3, 3)},
            degraded=ranked.degraded,
            prefix_len=ranked.prefix_len,
            stages={**stages, "rank": self._stage(found_at, ended, job, len(best.items))},
        )

    def _stage(self, began: float, ended: float, job: RecommendationJob, count: int) -> StageTime:
        left_ms = max((job.deadline - began) * 1e3, 0.0)
        return StageTime(ms=round((ended - began) * 1e3, 3), deadline_ms=round(left_ms, 3), count=count)

    def _alike(self, known: KnownItems) -> Floats | None:
        return super()._alike(known) if self._search is None else self._search.retriever.directions

    def _candidates(self, job: RecommendationJob) -> RankingCandidates:
        """Retrieval and pre-rank, in a thread of their own; raises FailedError if they fail."""
        try:
            histories = self._worker.histories
            if job.history is None:
                histories.refresh()
            events = histories.of(job.user) if job.history is None else job.history
            search = self._search or self._known(job.user).search()
            return search.find(events, job.query_time, job.k, rules=job.rules, stages=self._stages)
        except Exception as error:
            raise public_error(error, "retrieval failed") from error


def _as_recommendation(job: RankingRequest) -> RecommendationJob:
    """The request of a ranking as explanations read it."""
    return RecommendationJob(
        user=job.user, k=len(job.items), deadline=job.deadline, query_time=job.query_time, history=job.history
    )
