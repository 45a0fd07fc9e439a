"""One recommendation: prefill hint, retrieval, pre-rank, ranking. Each stage has its own deadline; its time is in the answer.

    hint       ─►  the user's instance prefills the KV prefix
    retrieval  ━━━━━━━━━━━━┓
    pre-rank               ┗━━┓
    ranking                   ┗━━━━━━━  where the ticket says; the next instance in full if that is gone
    release                          ─►  failure, retry elsewhere, cancel, disconnect; a ranking that used the prefix unpins it

The hint may be lost: the ranking is then done in full. The ranking may be lost: the order of pre-rank is then the answer, and
marked as degraded. Retrieval and pre-rank may not: their filters decide what may be shown at all.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from msgspec import UNSET

from nestpipe.errors import DataError, NestPipeError
from nestpipe.gateway.candidates import CandidateItems, Floats, Ints, PastEvents, Retriever, past_from, without
from nestpipe.gateway.instance_client import InstanceClient, InstanceError, PrefillOutcome
from nestpipe.gateway.router import InstanceAddress
from nestpipe.serve.config import Stages
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.schemas import (
    PrefillRequest,
    RankedItems,
    RankRequest,
    RecommendedItems,
    RecommendRequest,
    StageTime,
)

Result = TypeVar("Result")


class StageError(NestPipeError):
    """Retrieval or pre-rank failed or missed its deadline."""

    def __init__(self, message: str, *, stage: str, code: str, status: int = 503):
        super().__init__(message)
        self.stage, self.code, self.status = stage, code, status


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RetrievedItems:
    """The result of retrieval, for pre-rank."""

    past: PastEvents
    query: Floats
    places: Ints


class CandidateStages(Protocol):
    """The stages before ranking."""

    async def retrieve(self, request: RecommendRequest, count: int) -> Any: ...

    async def prerank(self, request: RecommendRequest, found: Any, count: int) -> CandidateItems: ...


class LocalCandidateStages:
    """Retrieval and pre-rank in threads of this process, so that numpy, faiss and torch do not block the event loop."""

    def __init__(self, retriever: Retriever, executor: Executor, ids: ServiceIds | None = None):
        """Without `ids`, users and items are the numbers themselves."""
        self._retriever, self._executor, self._ids = retriever, executor, ids

    async def retrieve(self, request: RecommendRequest, count: int) -> RetrievedItems:
        return await self._run(partial(self._retrieve, request, count))

    async def prerank(self, request: RecommendRequest, found: RetrievedItems, count: int) -> CandidateItems:
        return await self._run(partial(self._prerank, request, found, count))

    def _prerank(self, request: RecommendRequest, found: RetrievedItems, count: int) -> CandidateItems:
        ids, excluded = self._ids, cast(Sequence[int], request.exclude)
        if ids is not None:
            excluded = ids.items(request.exclude)[0].tolist()
        rules = (without(excluded),) if excluded else ()
        best = self._retriever.prerank(found.query, found.places, found.past, count, filters=rules)
        return best if ids is None else CandidateItems(ids.own_items(cast(list[int], best.items)), best.scores)

    def _retrieve(self, request: RecommendRequest, count: int) -> RetrievedItems:
        user, history = cast(int, request.user), request.history
        if self._ids is not None:
            user = self._ids.user(request.user)
            history = None if history is None else [self._ids.event(event) for event in history]
        past = past_from(history, self._retriever.past_of(user))
        query, places = self._retriever.retrieve(past, count + len(request.exclude), query_time=request.query_time)
        return RetrievedItems(past=past, query=query, places=places)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class Cascade:
    """Recommends through the instances of a fleet."""

    def __init__(self, remote: InstanceClient, candidate_stages: CandidateStages, stages: Stages | None = None):
        self.remote, self._candidate_stages = remote, candidate_stages
        self.stages = stages or Stages()

    async def recommend(self, request: RecommendRequest) -> RecommendedItems:
        """Raises StageError if retrieval or pre-rank fail, InstanceError if ranking refuses the request itself."""
        stages, times = self.stages, dict[str, StageTime]()
        request_id = uuid.uuid4().hex if request.request is UNSET else request.request
        hint = PrefillRequest(
            user=request.user,
            request=request_id,
            candidates=stages.num_candidates,
            query_time=request.query_time,
            history=request.history,
        )
        chosen = self.remote.choose(request.user)
        whole_s = (stages.retrieval_ms + stages.prerank_ms + stages.rank_ms) / 1e3
        with self.remote.holding(chosen):
            prefill = asyncio.create_task(self.remote.prefill(hint, chosen, timeout_s=whole_s))
            used = False
            try:
                retrieving = self._candidate_stages.retrieve(request, stages.num_retrieved)
                retrieved = await self._timed("retrieval", retrieving, stages.retrieval_ms, times)
                preranking = self._candidate_stages.prerank(request, retrieved, stages.num_candidates)
                candidates = await self._timed("prerank", preranking, stages.prerank_ms, times)
                answer, used = await self._rank(hint, request.k, candidates, prefill, chosen, times)
                return answer
            finally:
                if not used:
                    self.remote.release(prefill)

    async def _rank(
        self,
        hint: PrefillRequest,
        k: int,
        candidates: CandidateItems,
        prefill: asyncio.Task[PrefillOutcome],
        chosen: InstanceAddress,
        times: dict[str, StageTime],
    ) -> tuple[RecommendedItems, bool]:
        """The answer, and whether the instance of the ticket gave it: that instance has unpinned the prefix itself."""
        start, deadline_s = time.monotonic(), self.stages.rank_ms / 1e3
        await asyncio.wait({prefill}, timeout=self.stages.prefill_hint_ms / 1e3)
        outcome = prefill.result() if prefill.done() else PrefillOutcome(instance=chosen, reason="unanswered")
        items, ranked, problem = list(candidates.items), None, ""
        if items:
            request = RankRequest(
                user=hint.user,
                candidates=items,
                request=hint.request,
                ticket=outcome.ticket,
                k=k,
                query_time=hint.query_time,
                history=hint.history,
            )
            try:
                left = deadline_s - (time.monotonic() - start)
                ranked = await self.remote.rank(request, outcome.instance, deadline_s=left)
            except InstanceError as error:
                if error.is_final:
                    raise
                problem = error.code
        ranking = ranked.answer if ranked else _fallback(candidates, k)
        took = StageTime(ms=_ms_since(start), deadline_ms=self.stages.rank_ms, count=len(ranking.items[:k]))
        answer = RecommendedItems(
            items=ranking.items[:k],
            scores=ranking.scores[:k],
            path=ranking.path,
            prefix_len=ranking.prefix_len,
            degraded=ranking.degraded,
            model=ranking.model,
            times_ms=ranking.times_ms,
            unknown=ranking.unknown,
            request=hint.request,
            instance=ranked.instance if ranked else None,
            attempts=ranked.num_attempts if ranked else 0,
            prefill_hint=outcome.reason,
            problem=problem,
            stages=times | {"rank": took},
        )
        return answer, outcome.ticket is not None and answer.attempts == 1

    async def _timed(
        self, name: str, work: Awaitable[Result], deadline_ms: float, times: dict[str, StageTime]
    ) -> Result:
        """Runs a stage inside its deadline and records its time; raises StageError."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(deadline_ms / 1e3):
                result = await work
        except TimeoutError:
            message = f"{name} missed its deadline of {deadline_ms:.0f} ms; raise it, or let it return fewer items."
            raise StageError(message, stage=name, code="deadline") from None
        except DataError as error:  # in the request
            raise StageError(f"{name}: {error}", stage=name, code="refused", status=422) from error
        except NestPipeError as error:
            raise StageError(f"{name}: {error}", stage=name, code="failed") from error
        count = len(result.items) if isinstance(result, CandidateItems) else len(getattr(result, "places", ()))
        times[name] = StageTime(ms=_ms_since(start), deadline_ms=deadline_ms, count=count)
        return result


def _fallback(candidates: CandidateItems, k: int) -> RankedItems:
    """The order of pre-rank, for want of a ranking; degraded unless there was nothing to rank."""
    return RankedItems(
        items=list(candidates.items[:k]),
        scores=list(candidates.scores[:k]),
        path="fallback",
        prefix_len=0,
        degraded=len(candidates.items) > 0,
        model="",
    )


def _ms_since(start: float) -> float:
    return round((time.monotonic() - start) * 1e3, 3)
