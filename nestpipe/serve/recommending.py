"""The calls that the instances of all kinds of runs answer alike, in own ids:

    POST /v1/recommend /v1/similar      GET /v1/recommend/{user}?k=10

A user without history gets the most popular items. Ready means that one real recommendation went through every stage.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route
from torch import Tensor

from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError, NestPipeError
from nestpipe.gateway.candidates import Floats
from nestpipe.rules.compiled_rules import CompiledRules
from nestpipe.rules.rule_book import RuleBook
from nestpipe.serve.admission import age_s
from nestpipe.serve.config import Limits
from nestpipe.serve.http_instance import HttpInstance
from nestpipe.serve.known_items import Ints, KnownItems, ScoredItems
from nestpipe.serve.live_attributes import LiveSource
from nestpipe.serve.openapi import Calls
from nestpipe.serve.prometheus import InstanceMetrics
from nestpipe.serve.recommendation import (
    EXPLAINED_EVENTS,
    RecommendationAnswer,
    RecommendationJob,
    heaviest,
    influence,
)
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import Admit, Run, user_and_numbers, user_route
from nestpipe.serve.request_rules import requested_rules
from nestpipe.serve.requests import BusyError, LateError, RankingRequest, StoppingError, public_error
from nestpipe.serve.schemas import Influence, InstanceRecommendRequest, RecommendedItems, SimilarItems, SimilarRequest
from nestpipe.serve.user_history import NOBODY
from nestpipe.serve.worker_thread import WorkerThread

_log = logging.getLogger("nestpipe.serve")
HistoryScores = Callable[[Sequence[Sequences], Sequence[int]], Tensor]
"""Scores [n, K] of K items for n histories."""
_QUEUED = frozenset({"rank", "recommend", "generate"})  # calls that wait for the worker
_READY_S = 2.0  # that a recommendation for readiness may take
_PROVEN_S = 10.0  # how long an answer proves that a full instance works
_SAMPLE = 8  # events of the history for readiness


class RecommendingInstance(HttpInstance):
    """Recommends, explains and finds similar items; a kind brings how items are found and scored."""

    def __init__(
        self,
        worker: WorkerThread,
        metrics: InstanceMetrics,
        *,
        name: str,
        calls: Calls,
        limits: Limits,
        budget_ms: float,
        wall_clock: Callable[[], float] = time.time,
    ):
        """`budget_ms` is the deadline of requests that name none."""
        super().__init__(worker, metrics, name=name, calls=calls, limits=limits, wall_clock=wall_clock)
        self.rules = RuleBook(LiveSource(lambda: worker.histories.sequences, worker.histories.living))
        self._budget_ms, self._proven_at, self._problem = budget_ms, float("-inf"), ""
        # One at a time and outside the worker: an explanation takes up to 33 inferences.
        self._explaining = ThreadPoolExecutor(1, thread_name_prefix="explain")

    @abstractmethod
    async def _find(self, job: RecommendationJob) -> RecommendationAnswer:
        """The best items of a request."""

    @abstractmethod
    def _known(self, user: int | None = None) -> KnownItems:
        """The items of the model that answers a user."""

    @abstractmethod
    def _scorer(self, job: RecommendationJob) -> HistoryScores:
        """What scores items for other histories of a request's user; raises BadRequestError if the model reads none."""

    @abstractmethod
    def _max_len(self) -> int:
        """How many of the last events the model reads."""

    def _handlers(self) -> dict[str, Run]:
        return {"recommend": self._recommend, "similar": self._similar}

    def _more_routes(self) -> Sequence[Route]:
        from_address = self._handler("recommend", self._recommend, fields_of=user_and_numbers)
        return [user_route("recommend", from_address)]

    def _admission(self, name: str) -> Admit | None:
        def admit(deadline_ms: float | None) -> None:
            self._worker.admit((self._budget_ms if deadline_ms is None else deadline_ms) / 1e3 - age_s())

        return admit if name in _QUEUED else None

    async def _recommend(self, request: InstanceRecommendRequest) -> RecommendedItems:
        if request.user is UNSET and request.history is None:
            raise BadRequestError("field 'user' is missing; name a user, or send a 'history'.", code="bad_user")
        arrived, ids = self._arrived(), self._ids
        user = NOBODY if request.user is UNSET else ids.user(request.user)
        deadline_ms = self._budget_ms if request.deadline_ms is None else request.deadline_ms
        rules = requested_rules(self.rules, request)
        compiled = rules.on(self._known(user).items)  # what does not exist is refused before anything is queued
        job = RecommendationJob(
            user=user,
            k=request.k,
            deadline=arrived + deadline_ms / 1000,
            query_time=self._now() if request.query_time is None else request.query_time,
            rules=rules,
            history=await self._history(user, request.history),
        )
        await self._steer(job, request)
        scorer = self._scorer(job) if request.explain else None
        answer = await self._find(job)
        answer = replace(answer, found=self._shown(answer.found))
        because = None
        if scorer is not None and answer.path != "popular":
            because = await self._explained(job, scorer, answer.found.items)
        self._note(answer)
        self._answers.recommended.labels(answer.model, answer.path).inc()
        self._answers.recommend_seconds.observe(self._worker.clock() - arrived)
        return RecommendedItems(
            items=ids.own_items(answer.found.items),
            scores=answer.found.scores,
            path=answer.path,
            prefix_len=answer.prefix_len,
            degraded=answer.degraded,
            model=answer.model,
            times_ms=answer.times_ms,
            unknown=compiled.unknown,
            allowed=None if rules.is_empty else answer.found.allowed,
            request=uuid.uuid4().hex if request.request is UNSET else request.request,
            instance=self.name,
            stages=answer.stages,
            because=because,
            instruction=answer.instruction,
        )

    async def _steer(self, job: RecommendationJob, request: InstanceRecommendRequest) -> None:
        """Adds what steers a job: of generative runs."""

    def _popular(self, job: RecommendationJob, model: str) -> RecommendationAnswer | None:
        """The answer for a user without history; None for any other."""
        if self._num_events(job):
            return None
        known = self._known(job.user)
        found = known.popular(job.k, self._popular_rules(job, known), vectors=self._alike(known))
        return RecommendationAnswer(found=found, path="popular", model=model, times_ms={"total": 0.0})

    def _alike(self, known: KnownItems) -> Floats | None:
        """The item vectors that `diversity` compares."""
        return known.vector_array

    def _popular_rules(self, job: RecommendationJob, known: KnownItems) -> CompiledRules:
        """The rules of a user without history."""
        return job.rules.on(known.items)

    def _withdrawn(self) -> Ints:
        """The items that must not be shown."""
        return self._worker.histories.living.catalogue.withdrawn()

    def _shown(self, found: ScoredItems) -> ScoredItems:
        """Without what was withdrawn while the answer was made."""
        is_shown = self._worker.histories.living.catalogue.shows
        if all(map(is_shown, found.items)):
            return found
        kept = [place for place, item in enumerate(found.items) if is_shown(item)]
        return replace(
            found, items=[found.items[place] for place in kept], scores=[found.scores[place] for place in kept]
        )

    def _num_events(self, job: RecommendationJob | RankingRequest) -> int:
        return self._worker.histories.num_events(job.user) if job.history is None else len(job.history.items)

    async def _explained(
        self, job: RecommendationJob, scorer: HistoryScores, items: Sequence[int]
    ) -> list[list[Influence]]:
        explain = partial(self._because, job, scorer, items)
        return await asyncio.get_running_loop().run_in_executor(self._explaining, explain)

    def _because(self, job: RecommendationJob, scorer: HistoryScores, items: Sequence[int]) -> list[list[Influence]]:
        """For each item the events of the history without which its score falls most."""
        if not items:
            return []
        events = self._worker.histories.of(job.user) if job.history is None else job.history
        num_events = min(len(events.items), self._max_len(), EXPLAINED_EVENTS)
        try:
            weights = influence(
                events,
                num_events,
                lambda histories: scorer(histories, items),
                check_deadline=partial(self._check_deadline, job),
            )
        except Exception as error:
            raise public_error(error, "an answer could not be explained") from error
        return [
            [Influence(item=self._ids.own_items([one.item])[0], time=one.time, weight=one.weight) for one in shown]
            for shown in heaviest(events, weights)
        ]

    def _check_deadline(self, job: RecommendationJob) -> None:
        if self._worker.clock() >= job.deadline:
            raise LateError("the deadline passed before the answer was explained; raise deadline_ms.")

    async def _similar(self, request: SimilarRequest) -> SimilarItems:
        known, ids = self._known(), self._ids
        asked = request.item if isinstance(request.item, list) else [request.item]
        numbers, unknown = ids.items(asked)
        is_known = known.has(numbers)
        unknown, numbers = unknown + ids.own_items(numbers[~is_known]), numbers[is_known]
        if not len(numbers):
            raise DataError(f"item {asked[0]!r} is not in the catalogue, which has {len(known):,} items.")
        rules = requested_rules(self.rules, request)
        compiled = rules.on(known.items)
        found = self._shown(await run_in_threadpool(known.similar, numbers, request.k, compiled))
        return SimilarItems(
            items=ids.own_items(found.items),
            scores=found.scores,
            model=self._model_name(),
            unknown=[*unknown, *compiled.unknown],
            allowed=None if rules.is_empty else found.allowed,
        )

    @abstractmethod
    def _model_name(self, user: int | None = None) -> str:
        """The name of the model that answers a user."""

    async def _works(self) -> bool:
        """Whether a real recommendation goes through every stage in time."""
        worker = self._worker
        history = await run_in_threadpool(worker.histories.sample, min(_SAMPLE, self._max_len()))
        job = RecommendationJob(
            user=NOBODY, k=1, deadline=worker.clock() + _READY_S, query_time=self._now(), history=history
        )
        try:
            answer = await asyncio.wait_for(self._find(job), _READY_S)
            problem = "the model failed" if answer.path == "fallback" else ""
            if not answer.found.items and len(self._known()) > _SAMPLE:
                problem = "nothing was found"
        except StoppingError as error:
            problem = str(error)
        except (BusyError, LateError, TimeoutError) as error:  # full: then answers to others are the proof
            is_proven = worker.clock() - self._proven_at < _PROVEN_S
            problem = "" if is_proven else str(error) or "no recommendation went through in time"
        except NestPipeError as error:
            problem = str(error)
        if problem and problem != self._problem:
            _log.warning("the instance is not ready: %s", problem)
        self._problem = problem
        return not problem

    def _note(self, answer: RecommendationAnswer) -> None:
        """A recommendation of a model went through every stage."""
        if answer.path not in {"popular", "fallback"}:
            self._proven_at = self._worker.clock()
