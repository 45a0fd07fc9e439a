"""One recommendation: prefill hint, retrieval, pre-rank, ranking. Each stage has its own deadline; its time is in the answer.

    hint       ─►  the user's instance prefills the KV prefix
    retrieval  ━━━━━━━━━━━━┓
    pre-rank               ┗━━┓
    ranking                   ┗━━━━━━━  where the ticket says; the next instance in full if that is gone
    release                          ─►  failure, retry elsewhere, cancel, disconnect; a ranking that used the prefix unpins it

The hint may be lost: the ranking is then done in full. The ranking may be lost: the order of pre-rank is then the answer, and
marked as degraded. Retrieval and pre-rank may not: their filters decide what may be shown at all. A user without history gets the
most popular items, which are not ranked. The deadline of a request is divided among the stages in proportion to their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from msgspec import UNSET, structs

from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import DataError, NestPipeError
from nestpipe.gateway.candidates import CandidateItems, RetrievedItems, Retriever, past_from
from nestpipe.gateway.instance_client import InstanceClient, InstanceError, PrefillOutcome
from nestpipe.gateway.router import InstanceAddress
from nestpipe.rules.item_attributes import BareItems, FolderSource
from nestpipe.rules.rule_book import RuleBook
from nestpipe.rules.rule_set import RuleError
from nestpipe.serve.config import Stages
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.request_rules import requested_rules
from nestpipe.serve.schemas import (
    PrefillRequest,
    RankedItems,
    RankRequest,
    RecommendedItems,
    RecommendRequest,
    StageTime,
)

_log = logging.getLogger("nestpipe.serve")
Result = TypeVar("Result")


class StageError(NestPipeError):
    """Retrieval or pre-rank failed or missed its deadline."""

    def __init__(self, message: str, *, stage: str, code: str, status: int = 503):
        super().__init__(message)
        self.stage, self.code, self.status = stage, code, status


class CandidateStages(Protocol):
    """The stages before ranking."""

    async def retrieve(self, request: RecommendRequest, count: int) -> Any: ...

    async def prerank(self, request: RecommendRequest, found: Any, count: int) -> CandidateItems: ...

    async def listed(
        self, request: RecommendRequest, found: Any, items: Sequence[OwnId], scores: Sequence[float]
    ) -> CandidateItems:
        """The list under the rules, of candidates in the order of their ranking; for candidates that are not final."""


class LocalCandidateStages:
    """Retrieval and pre-rank in threads of this process, so that numpy, faiss and torch do not block the event loop."""

    def __init__(
        self,
        retriever: Retriever,
        executor: Executor,
        ids: ServiceIds | None = None,
        rules: RuleBook | None = None,
    ):
        """Without `ids`, users and items are the numbers themselves, and items have no attributes."""
        self._retriever, self._executor, self._ids = retriever, executor, ids
        bare = BareItems(retriever.items)
        self._rules = rules or RuleBook((lambda: bare) if ids is None else FolderSource(lambda: ids.sequences))

    async def retrieve(self, request: RecommendRequest, count: int) -> RetrievedItems:
        return await self._run(partial(self._retrieve, request, count))

    async def prerank(self, request: RecommendRequest, found: RetrievedItems, count: int) -> CandidateItems:
        return await self._run(partial(self._prerank, request, found, count))

    async def listed(
        self, request: RecommendRequest, found: RetrievedItems, items: Sequence[OwnId], scores: Sequence[float]
    ) -> CandidateItems:
        return await self._run(partial(self._listed, request.k, found, items, scores))

    def _listed(self, k: int, found: RetrievedItems, items: Sequence[OwnId], scores: Sequence[float]) -> CandidateItems:
        numbers = items if self._ids is None else self._ids.items(items)[0].tolist()
        return self._in_own_ids(self._retriever.listed(found, cast(list[int], numbers), scores, k))

    def _prerank(self, request: RecommendRequest, found: RetrievedItems, count: int) -> CandidateItems:
        best = self._retriever.popular(found, request.k) or self._retriever.prerank(found, count)
        if requested_rules(self._rules, request).is_empty:
            best = replace(best, allowed=None)
        return self._in_own_ids(best)

    def _in_own_ids(self, found: CandidateItems) -> CandidateItems:
        return found if self._ids is None else replace(found, items=self._ids.own_items(cast(list[int], found.items)))

    def _retrieve(self, request: RecommendRequest, count: int) -> RetrievedItems:
        user, history = cast(int, request.user), request.history
        if self._ids is not None:
            user = self._ids.user(request.user)
            history = None if history is None else [self._ids.event(event) for event in history]
        rules = requested_rules(self._rules, request).on(self._retriever.items)
        past = past_from(history, self._retriever.past_of(user))
        return self._retriever.retrieve(past, count, rules, query_time=request.query_time)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class Cascade:
    """Recommends through the instances of a fleet."""

    def __init__(
        self,
        remote: InstanceClient,
        candidate_stages: CandidateStages,
        stages: Stages | None = None,
        *,
        has_prefixes: bool = True,
    ):
        """`has_prefixes`: the instances take prefill hints; models without histories have no KV prefixes."""
        self.remote, self._candidate_stages = remote, candidate_stages
        self.stages, self._has_prefixes = stages or Stages(), has_prefixes

    @property
    def budget_ms(self) -> float:
        """The deadline of a ranking request that names none."""
        return self.stages.rank_ms

    async def recommend(self, request: RecommendRequest) -> RecommendedItems:
        """Raises StageError if retrieval or pre-rank fail, InstanceError if ranking refuses the request itself."""
        stages = self.stages.within(request.deadline_ms)
        count = max(stages.num_candidates, request.k)
        hint = PrefillRequest(
            user=request.user,
            request=uuid.uuid4().hex if request.request is UNSET else request.request,
            candidates=count,
            query_time=request.query_time,
            history=request.history,
        )
        chosen = self.remote.choose(request.user)
        with self.remote.holding(chosen):
            prefill = asyncio.create_task(self._prefill(hint, chosen, timeout_s=stages.whole_ms / 1e3))
            work, used = _CascadeWork(hint, request.k, request.explain, stages, chosen, prefill), False
            try:
                retrieving = self._candidate_stages.retrieve(request, max(stages.num_retrieved, count))
                retrieved = await work.timed("retrieval", retrieving, stages.retrieval_ms)
                preranking = self._candidate_stages.prerank(request, retrieved, count)
                candidates = await work.timed("prerank", preranking, stages.prerank_ms)
                relist = partial(self._candidate_stages.listed, request, retrieved)
                answer, used = await self._rank(work, candidates, relist)
                return answer
            finally:
                if not used:
                    self.remote.release(prefill)

    async def _prefill(self, hint: PrefillRequest, chosen: InstanceAddress, *, timeout_s: float) -> PrefillOutcome:
        if self._has_prefixes:
            return await self.remote.prefill(hint, chosen, timeout_s=timeout_s)
        return PrefillOutcome(instance=chosen, reason="no_prefixes")

    async def _rank(
        self,
        work: _CascadeWork,
        candidates: CandidateItems,
        relist: Callable[[Sequence[OwnId], Sequence[float]], Awaitable[CandidateItems]],
    ) -> tuple[RecommendedItems, bool]:
        """The answer, and whether the instance of the ticket gave it: that instance has unpinned the prefix itself."""
        start, hint, k = time.monotonic(), work.hint, work.k
        outcome, ranked, problem = PrefillOutcome(instance=work.chosen, reason="not_ranked"), None, ""
        if candidates.items and not candidates.is_popular:
            outcome = await work.hint_outcome()
            request = RankRequest(
                user=hint.user,
                candidates=list(candidates.items),
                request=hint.request,
                ticket=outcome.ticket,
                k=k if candidates.is_final else None,
                query_time=hint.query_time,
                history=hint.history,
                explain=work.is_explained,
            )
            try:
                left = work.stages.rank_ms / 1e3 - (time.monotonic() - start)
                ranked = await self.remote.rank(request, outcome.instance, deadline_s=left)
            except InstanceError as error:
                if error.is_final:
                    raise
                problem = error.code
        ranking = ranked.answer if ranked else _unranked(candidates, k if candidates.is_final else None)
        if not candidates.is_final:
            ranking = _relisted(ranking, await relist(ranking.items, ranking.scores))
        took = StageTime(ms=_ms_since(start), deadline_ms=work.stages.rank_ms, count=len(ranking.items[:k]))
        answer = RecommendedItems(
            items=ranking.items[:k],
            scores=ranking.scores[:k],
            path=ranking.path,
            prefix_len=ranking.prefix_len,
            degraded=ranking.degraded,
            model=ranking.model,
            times_ms=ranking.times_ms,
            unknown=[*ranking.unknown, *candidates.unknown],
            allowed=candidates.allowed,
            because=ranking.because,
            request=hint.request,
            instance=ranked.instance if ranked else None,
            attempts=ranked.num_attempts if ranked else 0,
            prefill_hint=outcome.reason,
            problem=problem,
            stages=work.times | {"rank": took},
        )
        return answer, outcome.ticket is not None and answer.attempts == 1


@dataclass(frozen=True, slots=True, eq=False)
class _CascadeWork:
    """A recommendation in work: what the instance was told, and the times of the stages so far."""

    hint: PrefillRequest
    k: int
    is_explained: bool
    stages: Stages
    chosen: InstanceAddress
    prefill: asyncio.Task[PrefillOutcome]
    times: dict[str, StageTime] = field(default_factory=dict)

    async def hint_outcome(self) -> PrefillOutcome:
        """The answer to the prefill hint, which ranking does not wait for long."""
        await asyncio.wait({self.prefill}, timeout=self.stages.prefill_hint_ms / 1e3)
        unanswered = PrefillOutcome(instance=self.chosen, reason="unanswered")
        return self.prefill.result() if self.prefill.done() else unanswered

    async def timed(self, name: str, work: Awaitable[Result], deadline_ms: float) -> Result:
        """Runs a stage inside its deadline and records its time; raises StageError."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(deadline_ms / 1e3):
                result = await work
        except TimeoutError:
            message = f"{name} missed its deadline of {deadline_ms:.0f} ms; raise it, or let it return fewer items."
            raise StageError(message, stage=name, code="deadline") from None
        except RuleError:
            raise
        except DataError as error:  # in the request
            raise StageError(f"{name}: {error}", stage=name, code="refused", status=422) from error
        except NestPipeError as error:
            raise StageError(f"{name}: {error}", stage=name, code="failed") from error
        except Exception as error:
            _log.exception("%s failed", name)
            message = f"{name} failed unexpectedly; the gateway's log has the traceback."
            raise StageError(message, stage=name, code="failed") from error
        count = len(result.items) if isinstance(result, CandidateItems) else len(getattr(result, "places", ()))
        self.times[name] = StageTime(ms=_ms_since(start), deadline_ms=deadline_ms, count=count)
        return result


def _relisted(ranking: RankedItems, best: CandidateItems) -> RankedItems:
    """A ranking with the items of a list that was made of it."""
    reasons = None if ranking.because is None else dict(zip(ranking.items, ranking.because, strict=True))
    return structs.replace(
        ranking,
        items=list(best.items),
        scores=list(best.scores),
        because=None if reasons is None else [reasons[item] for item in best.items],
    )


def _unranked(candidates: CandidateItems, k: int | None) -> RankedItems:
    """Popular items, or the order of pre-rank for want of a ranking, which is degraded unless there was nothing to rank."""
    return RankedItems(
        items=list(candidates.items[:k]),
        scores=list(candidates.scores[:k]),
        path="popular" if candidates.is_popular else "fallback",
        prefix_len=0,
        degraded=len(candidates.items) > 0 and not candidates.is_popular,
        model="",
    )


def _ms_since(start: float) -> float:
    return round((time.monotonic() - start) * 1e3, 3)
