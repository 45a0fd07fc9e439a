"""One recommendation: hint, retrieval, pre-rank, rank. Each stage has its own deadline, and its time is in the answer.

    hint     ─►  the user's instance computes the prefix
    retrieval  ━━━━━━━━━━━━┓
    pre-rank               ┗━━┓
    rank                      ┗━━━━━━━  where the ticket says; the next instance in full if that is gone
    release                          ─►  failure, retry elsewhere, cancel, disconnect; a ranking that used it lets go by itself

What may be lost: the hint (ranking is then done in full), the ranking (the order of pre-rank is then the answer, and
says that it is degraded). What may not: retrieval, and pre-rank, whose filters decide what may be shown at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from nestpipe.errors import DataError, NestPipeError
from nestpipe.gateway.candidates import CandidateItems, Floats, Ints, PastEvents, Retriever, past_from, without
from nestpipe.gateway.instance_client import InstanceClient, InstanceError, PrefillAnswer, PrefillOutcome, RankingReply
from nestpipe.gateway.router import InstanceAddress
from nestpipe.serve.config import Stages

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeRequest:
    """Who wants how many recommendations; `history` replaces the one on file, `exclude` names items not to show."""

    user: int
    request: str
    k: int = 10
    query_time: int | None = None
    history: list[Any] | None = None
    exclude: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """How long a stage took, of how long it had, and how many items it left."""

    ms: float
    deadline_ms: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeAnswer:
    """Items with scores, best first, and how they were found."""

    items: list[int]
    scores: list[float]
    path: str
    prefix_len: int
    degraded: bool
    model: str
    request: str
    instance: str | None
    attempts: int
    prefill_hint: str  # why there was a prefix to wait for, or none
    problem: str  # why there is no ranking
    stages: dict[str, StageTime]
    times_ms: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class StageError(NestPipeError):
    """A stage that cannot be done without failed or missed its deadline."""

    def __init__(self, message: str, *, stage: str, code: str, status: int = 503):
        super().__init__(message)
        self.stage, self.code, self.status = stage, code, status


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RetrievedItems:
    """What retrieval hands to pre-rank."""

    past: PastEvents
    query: Floats
    places: Ints


class CandidateStages(Protocol):
    """The stages before ranking."""

    async def retrieve(self, request: CascadeRequest, count: int) -> Any: ...

    async def prerank(self, request: CascadeRequest, found: Any, count: int) -> CandidateItems: ...


class LocalCandidateStages:
    """Retrieval and pre-rank in threads of this process: their numpy, faiss and torch leave the event loop alone."""

    def __init__(self, retriever: Retriever, executor: Executor):
        self._retriever, self._executor = retriever, executor

    async def retrieve(self, request: CascadeRequest, count: int) -> RetrievedItems:
        return await self._run(partial(self._retrieve, request, count))

    async def prerank(self, request: CascadeRequest, found: RetrievedItems, count: int) -> CandidateItems:
        own = (without(request.exclude),) if request.exclude else ()
        rank = partial(self._retriever.prerank, found.query, found.places, found.past, count, filters=own)
        return await self._run(rank)

    def _retrieve(self, request: CascadeRequest, count: int) -> RetrievedItems:
        past = past_from(request.history, self._retriever.past_of(request.user))
        query, places = self._retriever.retrieve(past, count + len(request.exclude), asked=request.query_time)
        return RetrievedItems(past=past, query=query, places=places)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class Cascade:
    """Recommends through a fleet."""

    def __init__(self, remote: InstanceClient, candidate_stages: CandidateStages, stages: Stages | None = None):
        self.remote, self._candidate_stages = remote, candidate_stages
        self.stages = stages or Stages()

    async def recommend(self, request: CascadeRequest) -> CascadeAnswer:
        """Raises StageError if retrieval or pre-rank fail, RemoteError if the request itself is refused by ranking."""
        stages, times = self.stages, dict[str, StageTime]()
        asked = PrefillAnswer(
            user=request.user,
            request=request.request,
            num_candidates=stages.num_candidates,
            query_time=request.query_time,
            history=request.history,
        )
        chosen = self.remote.choose(request.user)
        whole_s = (stages.retrieval_ms + stages.prerank_ms + stages.rank_ms) / 1e3
        with self.remote.holding(chosen):
            hint = asyncio.create_task(self.remote.prefill(asked, chosen, timeout_s=whole_s))
            used = False
            try:
                retrieving = self._candidate_stages.retrieve(request, stages.num_retrieved)
                found = await self._timed("retrieval", retrieving, stages.retrieval_ms, times)
                preranking = self._candidate_stages.prerank(request, found, stages.num_candidates)
                candidates = await self._timed("prerank", preranking, stages.prerank_ms, times)
                answer, used = await self._rank(request, asked, candidates, hint, chosen, times)
                return answer
            finally:
                if not used:
                    self.remote.release(hint)

    async def _rank(
        self,
        request: CascadeRequest,
        asked: PrefillAnswer,
        candidates: CandidateItems,
        hint: asyncio.Task[PrefillOutcome],
        chosen: InstanceAddress,
        times: dict[str, StageTime],
    ) -> tuple[CascadeAnswer, bool]:
        """The answer, and whether the instance of the ticket gave it: that has let go of the prefix by itself."""
        start, deadline_s = time.monotonic(), self.stages.rank_ms / 1e3
        await asyncio.wait({hint}, timeout=self.stages.prefill_hint_ms / 1e3)
        found = hint.result() if hint.done() else PrefillOutcome(instance=chosen, reason="unanswered")
        items, ranked, problem = candidates.items.tolist(), None, ""
        if items:
            try:
                left = deadline_s - (time.monotonic() - start)
                ranked = await self.remote.rank(asked, found, items, request.k, deadline_s=left)
            except InstanceError as error:
                if error.is_final:
                    raise
                problem = error.code
        parts = _parts_of(ranked, candidates, request.k)
        took = StageTime(ms=_ms_since(start), deadline_ms=self.stages.rank_ms, count=len(parts["items"]))
        answer = CascadeAnswer(
            **parts,
            request=request.request,
            instance=ranked.instance if ranked else None,
            attempts=ranked.num_attempts if ranked else 0,
            prefill_hint=found.reason,
            problem=problem,
            stages=times | {"rank": took},
        )
        return answer, found.ticket is not None and answer.attempts == 1

    async def _timed(
        self, name: str, work: Awaitable[Result], deadline_ms: float, times: dict[str, StageTime]
    ) -> Result:
        """A stage inside its deadline; raises StageError."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(deadline_ms / 1e3):
                result = await work
        except TimeoutError:
            message = f"{name} was not done after its {deadline_ms:.0f} ms; give it more, or fewer items to look at."
            raise StageError(message, stage=name, code="deadline") from None
        except DataError as error:  # what the request brought cannot be used
            raise StageError(f"{name}: {error}", stage=name, code="refused", status=422) from error
        except NestPipeError as error:
            raise StageError(f"{name}: {error}", stage=name, code="failed") from error
        count = len(result.items) if isinstance(result, CandidateItems) else len(getattr(result, "places", ()))
        times[name] = StageTime(ms=_ms_since(start), deadline_ms=deadline_ms, count=count)
        return result


def _parts_of(ranked: RankingReply | None, candidates: CandidateItems, k: int) -> dict[str, Any]:
    """The parts of an answer that ranking gives; without it the order of pre-rank, which is degraded unless it is empty."""
    if ranked is None:
        return {
            "items": candidates.items[:k].tolist(),
            "scores": candidates.scores[:k].tolist(),
            "path": "fallback",
            "prefix_len": 0,
            "degraded": len(candidates.items) > 0,
            "model": "",
        }
    answer = ranked.answer
    return {
        "items": list(answer["items"])[:k],
        "scores": list(answer["scores"])[:k],
        "path": str(answer["path"]),
        "prefix_len": int(answer["prefix_len"]),
        "degraded": bool(answer["degraded"]),
        "model": str(answer["model"]),
        "times_ms": dict(answer.get("times_ms", {})),
    }


def _ms_since(start: float) -> float:
    return round((time.monotonic() - start) * 1e3, 3)
