"""One instance of a model without histories: ranking requests are scored in batches, the most urgent first.

One thread takes the steps; requests come from any thread and wait for a future.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nestpipe.jagged import Batch
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.kv_cache import settle
from nestpipe.serve.pointwise_model import PointwiseModel
from nestpipe.serve.prefill_policy import Floats
from nestpipe.serve.requests import FailedError, LateError, RankingRequest, public_error
from nestpipe.serve.schemas import RankedItems
from nestpipe.serve.user_history import UserHistories
from nestpipe.serve.versioned_worker import VersionedWorker

_log = logging.getLogger("nestpipe.serve")


class _PointwiseJob(NamedTuple):
    """A ranking request with the model that answers it."""

    job: RankingRequest
    served: PointwiseModel
    batch: Batch


class PointwiseEngine(VersionedWorker[PointwiseModel]):
    """Answers ranking requests."""

    def __init__(
        self,
        served: PointwiseModel,
        histories: UserHistories,
        *,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__("scorer", served, histories, config=config, clock=clock)
        self.counts = Counter[str]()  # answers by path
        self._queue: list[RankingRequest] = []  # a heap by deadline

    def submit(self, job: RankingRequest) -> None:
        """Queues a job, whose `reply` gets the answer; raises BusyError. From any thread."""
        with self.admitting(job.reply, deadline=job.deadline):
            job.arrived = self.clock()
            heapq.heappush(self._queue, job)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def step(self) -> bool:
        """One batch; False if there was nothing to do."""
        jobs = self._next_jobs()  # 1 the most urgent requests whose deadline has not passed
        ready = [one for job in jobs if (one := self._prepare(job)) is not None]  # 2 features
        for served in {id(one.served): one.served for one in ready}.values():
            self._score([one for one in ready if one.served is served])  # 3 one call of each model; reply
        return bool(jobs)

    def _refresh(self) -> None:
        self.histories.refresh()

    def _next_jobs(self) -> list[RankingRequest]:
        jobs: list[RankingRequest] = []
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

    def _prepare(self, job: RankingRequest) -> _PointwiseJob | None:
        try:
            events = self.histories.of(job.user) if job.history is None else job.history
            served = self.versions.of(job.user)
            return _PointwiseJob(job, served, served.prepare(events, job.items, self.histories.sequences))
        except Exception as error:
            settle(job.reply, public_error(error, "a request could not be read"))
            return None

    def _score(self, ready: list[_PointwiseJob]) -> None:
        """One call for all requests of a model; if it fails, one for each."""
        try:
            scores = [one.numpy().astype(np.float64) for one in ready[0].served.scores([one.batch for one in ready])]
        except Exception as error:
            if len(ready) == 1:
                settle(ready[0].job.reply, public_error(error, "the model failed on the request"))
                return
            _log.exception("a batch failed; its requests are scored one by one")
            for one in ready:
                self._score([one])
            return
        for one, own in zip(ready, scores, strict=True):
            self._reply(one, own)

    def _reply(self, one: _PointwiseJob, scores: Floats) -> None:
        job = one.job
        if not np.isfinite(scores).all():
            settle(
                job.reply, FailedError("a score is not finite; the model has diverged. Serve an earlier checkpoint.")
            )
            return
        self.counts["full"] += 1
        order = np.argsort(-scores, kind="stable")[: job.k]
        answer = RankedItems(
            items=np.asarray(job.items)[order].tolist(),
            scores=scores[order].tolist(),
            path="full",
            model=one.served.name,
            times_ms={"total": round((self.clock() - job.arrived) * 1e3, 3)},
        )
        settle(job.reply, answer)
