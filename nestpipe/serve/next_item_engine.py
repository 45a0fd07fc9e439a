"""One instance of a next-item model: requests are answered in batches, the most urgent first.

    queue --by deadline--> histories --encode--> queries [B, D] --exact top k of the catalogue--> items

A user without history gets the most popular items. One thread takes the steps; requests come from any thread and wait for
a future.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

from nestpipe.data.sequences import Sequences
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.known_items import ScoredItems
from nestpipe.serve.kv_cache import settle
from nestpipe.serve.next_item_model import NextItemModel, PreparedHistory
from nestpipe.serve.recommendation import RecommendationAnswer, RecommendationJob
from nestpipe.serve.requests import LateError, public_error
from nestpipe.serve.user_history import UserHistories
from nestpipe.serve.versioned_worker import VersionedWorker

_FOLLOW_S = 0.2  # between two looks at the living catalogue


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedJob:
    job: RecommendationJob
    served: NextItemModel
    events: Sequences
    prepared: PreparedHistory


class NextItemEngine(VersionedWorker[NextItemModel]):
    """Answers recommendation requests."""

    def __init__(
        self,
        served: NextItemModel,
        histories: UserHistories,
        *,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__("recommender", served, histories, config=config, clock=clock)
        self._queue: list[RecommendationJob] = []  # a heap by deadline
        self._follow_at = float("-inf")
        self.follow(served)

    def submit(self, job: RecommendationJob) -> None:
        """Queues a job, whose `reply` will have the answer; raises BusyError. From any thread."""
        with self.admitting(job.reply, deadline=job.deadline):
            job.arrived = self.clock()
            job.served = job.served or self.versions.of(job.user)
            heapq.heappush(self._queue, job)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def step(self) -> bool:
        """One batch; False if there was nothing to do."""
        jobs = self._next_jobs()  # 1 the most urgent requests whose deadline has not passed
        ready = [one for job in jobs if (one := self._prepare(job)) is not None]  # 2 histories as the model reads them
        for one in ready:
            if not len(one.events.items):  # 3 nothing to encode
                self._popular(one)
        known = [one for one in ready if len(one.events.items)]
        for served in {id(one.served): one.served for one in known}.values():
            self._recommend(served, [one for one in known if one.served is served])  # 4 one call of each model
        return bool(jobs)

    def _refresh(self) -> None:
        self.histories.refresh()
        if self.clock() >= self._follow_at:
            self._follow_at = self.clock() + _FOLLOW_S
            for served in self.models:
                self.follow(served)

    def follow(self, served: NextItemModel) -> None:
        """Brings a model up to date with the living catalogue; before its first request, else a withdrawn item could be shown."""
        served.follow(getattr(self.histories.sequences, "live", None))

    def _next_jobs(self) -> list[RecommendationJob]:
        jobs: list[RecommendationJob] = []
        with self._queueing:
            while self._queue and len(jobs) < self.config.max_batch:
                job = heapq.heappop(self._queue)
                if job.reply.cancelled():
                    continue
                if self.clock() >= job.deadline:
                    waited_ms = (self.clock() - job.arrived) * 1e3
                    settle(job.reply, LateError(f"the deadline passed after {waited_ms:.0f} ms in the queue."))
                    continue
                jobs.append(job)
        return jobs

    def _prepare(self, job: RecommendationJob) -> _PreparedJob | None:
        try:
            events = self.histories.of(job.user) if job.history is None else job.history
            prepared = job.served.prepare(events, job.query_time, rules=job.rules)
            return _PreparedJob(job, job.served, events, prepared)
        except Exception as error:
            settle(job.reply, public_error(error, "a history could not be read"))
            return None

    def _popular(self, one: _PreparedJob) -> None:
        try:
            known = one.served.known
            self._answer(one, known.popular(one.job.k, one.prepared.rules, vectors=known.vector_array), "popular")
        except Exception as error:
            settle(one.job.reply, public_error(error, "popular items could not be listed"))

    def _recommend(self, served: NextItemModel, ready: list[_PreparedJob]) -> None:
        """One encoding and one product with the catalogue for all of them."""
        try:
            found = served.recommend([one.prepared for one in ready], [one.job.k for one in ready])
        except Exception as error:
            for one in ready:
                settle(one.job.reply, public_error(error, "a batch could not be scored"))
            return
        for one, items in zip(ready, found, strict=True):
            self._answer(one, items, "model")

    def _answer(self, one: _PreparedJob, found: ScoredItems, path: str) -> None:
        times_ms = {"total": round((self.clock() - one.job.arrived) * 1e3, 3)}
        answer = RecommendationAnswer(found=found, path=path, model=one.served.name, times_ms=times_ms)
        settle(one.job.reply, answer)
