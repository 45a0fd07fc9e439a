"""Jobs of the engine (ranking requests and prefill hints), and the choice of the path that answers a request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.sequences import Sequences
from nestpipe.errors import NestPipeError
from nestpipe.models.kv_prefix import KVPrefix, PrefixKey
from nestpipe.models.prefix_inference import CandidateBatch
from nestpipe.serve.kv_cache import EntryState
from nestpipe.serve.prefill import HistoryInputs, ServedModel
from nestpipe.serve.prefill_policy import RankingCosts, Reason, quantile
from nestpipe.serve.prefix_store import StoredMatch
from nestpipe.serve.schemas import RankedItems
from nestpipe.serve.user_history import UserHistories

_log = logging.getLogger("nestpipe.serve")

Path = Literal["hit_device", "join", "hit_host", "extend", "hit_store", "full", "shorter", "fallback"]
HITS = frozenset({"hit_device", "join", "hit_host", "extend", "hit_store"})
_IN_WORK = frozenset({EntryState.RESERVED, EntryState.COMPUTING})  # of a prefill, which may be joined
_LEAST_MS = 1e-3  # of a request whose cost is unknown
DEGRADED = frozenset({"shorter", "fallback"})


class BusyError(NestPipeError):
    """The queue is full; nothing was queued."""


class StoppingError(BusyError):
    """The instance is stopping; nothing was queued."""


class LateError(NestPipeError):
    """The deadline passed before anything could be answered."""


class FailedError(NestPipeError):
    """The model failed on a request; the log says why."""


def public_error(error: Exception, what: str) -> NestPipeError:
    """The error for the caller: its own mistake as it is; anything else is logged and told without internals."""
    if isinstance(error, NestPipeError):
        return error
    _log.error(what, exc_info=error)
    return FailedError(f"{what}; try again. The service's log has the traceback.")


def refuse_busy(error: NestPipeError) -> tuple[int, str] | None:
    """The status and code of an instance that cannot answer now."""
    match error:
        case StoppingError():
            return 503, "stopping"
        case BusyError():
            return 429, "overloaded"
        case LateError():
            return 503, "deadline"
        case FailedError():
            return 503, "failed"
    return None


@dataclass(slots=True, eq=False, kw_only=True)
class RankingRequest:
    """Rank items before a deadline. `request` is the holder of the prefix that was prefilled for it."""

    user: int
    items: Sequence[int] | NDArray[np.int64]
    query_time: int
    deadline: float
    request: str = ""
    k: int | None = None
    history: Sequences | None = None
    reply: Future[RankedItems] = field(default_factory=Future)
    # Set by the engine.
    arrived: float = 0.0
    served: ServedModel | None = None
    since: int = 0  # `KVCache.num_invalidations` before its events were read
    inputs: HistoryInputs | None = None
    candidates: CandidateBatch | None = None
    joined: Future[KVPrefix] | None = None

    def __lt__(self, other: RankingRequest) -> bool:
        return self.deadline < other.deadline

    def work_ms(self, histories: UserHistories, served: ServedModel) -> float:
        """The expected time of full inference; the history is not read."""
        num_events = histories.num_events(self.user) if self.history is None else len(self.history.items)
        found = served.costs.expected("full", min(num_events, served.max_len), len(self.items))
        return max(found, _LEAST_MS)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillHint:
    """A ranking request will follow. If its prefix is worth computing now, it is pinned for `request` until `until`."""

    user: int
    num_candidates: int
    query_time: int
    request: str
    until: float
    history: Sequences | None = None
    reply: Future[HintDecision] = field(default_factory=Future)

    @property
    def deadline(self) -> float:
        """When its request has gone."""
        return self.until

    def work_ms(self, histories: UserHistories, served: ServedModel) -> float:
        """Nothing that a ranking request waits for."""
        return 0.0


@dataclass(frozen=True, slots=True)
class HintDecision:
    """Whether a hint was admitted, and why; `held` is the digest of the pinned prefix, if any."""

    reason: Reason
    held: str = ""


class RankingPath(NamedTuple):
    """A path, its estimated cost, and for `shorter` the number of events."""

    path: Path
    cost_ms: float
    num_events: int = 0


def choose(
    costs: RankingCosts,
    *,
    state: EntryState | None,
    slack_ms: float,
    num_events: int,
    num_candidates: int,
    num_bytes: int,
    begun: int,
    block: int,
    stored: int = 0,
) -> RankingPath:
    """The first path that fits into the slack.

    `begun` is the number of events that a prefix in work has done, or that the longest shorter prefix has. A prefill that has
    not started is not joined: full inference computes the same prefix, and completes the prefill. `stored` is the number of
    events of a prefix on disk, or of one that is being read for a prefill; its cost is that of the slowest reads.
    """
    paths = _open_paths(
        costs,
        state=state,
        num_events=num_events,
        num_candidates=num_candidates,
        num_bytes=num_bytes,
        begun=begun,
        block=block,
        stored=stored,
    )
    return next((one for one in paths if one.cost_ms <= slack_ms), RankingPath("fallback", 0.0))


def _open_paths(
    costs: RankingCosts,
    *,
    state: EntryState | None,
    num_events: int,
    num_candidates: int,
    num_bytes: int,
    begun: int,
    block: int,
    stored: int,
) -> Iterator[RankingPath]:
    """The paths of a request, best first. Each cost is computed when it is its turn: most requests take the first path."""
    if state in {EntryState.READY, EntryState.PINNED}:
        yield RankingPath("hit_device", costs.usual_ms("hit", num_events, num_candidates))
    if state == EntryState.HOST and (copy_ms := costs.copy_ms(num_bytes)) < costs.usual_ms("pre", num_events):
        yield RankingPath("hit_host", copy_ms + costs.usual_ms("hit", num_events, num_candidates))
    full_ms, is_in_work = costs.usual_ms("full", num_events, num_candidates), state in _IN_WORK
    if begun and (is_in_work or state is None):
        rest_ms = costs.rest_ms(num_events, num_candidates, before=begun)
        if is_in_work:
            yield RankingPath("join", rest_ms)
        elif rest_ms <= full_ms:
            yield RankingPath("extend", rest_ms)
    if stored and (is_in_work or state is None):
        stored_ms = costs.read_ms(stored) + costs.rest_ms(num_events, num_candidates, before=stored)
        if stored_ms <= full_ms:
            yield RankingPath("join" if is_in_work else "hit_store", stored_ms)
    yield RankingPath("full", full_ms)
    for kept in range(num_events - block, 0, -block):
        yield RankingPath("shorter", costs.usual_ms("full", kept, num_candidates), kept)


@dataclass(slots=True, eq=False)
class RankingPlan:
    """A request with the path that answers it."""

    request: RankingRequest
    inputs: HistoryInputs
    choice: RankingPath
    prefix: KVPrefix | None = None
    stored: StoredMatch | None = None  # of `hit_store`
    pinned: PrefixKey | None = None  # for this request
    take_prefix: Callable[[], KVPrefix] | None = None  # of a full inference, whose prefix is worth keeping


class RecentTimes:
    """Measured milliseconds of a time window."""

    _FEW = 32  # too few for a percentile

    def __init__(self, clock: Callable[[], float], *, window_s: float):
        self._clock, self._window_s = clock, window_s
        self._measured: deque[tuple[float, float]] = deque(maxlen=512)

    def note(self, ms: float) -> None:
        self._measured.append((self._clock(), ms))

    def p99(self) -> float:
        """0 if there are too few measurements. From any thread."""
        since = self._clock() - self._window_s
        recent = sorted(ms for at, ms in list(self._measured) if at > since)
        return quantile(recent, 0.99) if len(recent) >= self._FEW else 0.0
