"""What is asked of an instance, what it answers, and the paths between them in the order in which they are tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from nestpipe.data.sequences import Sequences
from nestpipe.errors import NestPipeError
from nestpipe.models.kv_prefix import KVPrefix
from nestpipe.models.prefix_inference import CandidateBatch
from nestpipe.serve.kv_cache import CacheEntry, EntryState
from nestpipe.serve.prefill import HistoryRequest
from nestpipe.serve.prefill_policy import Kind, RankingCosts, Reason
from nestpipe.serve.schemas import RankedItems

Path = Literal["hit_device", "join", "hit_host", "extend", "full", "shorter", "fallback"]
_BOTH: tuple[Kind, Kind] = ("hit", "full")
HITS = frozenset({"hit_device", "join", "hit_host", "extend"})
DEGRADED = frozenset({"shorter", "fallback"})


class BusyError(NestPipeError):
    """Too much is waiting already; nothing was queued."""


class StoppingError(BusyError):
    """The instance is stopping; nothing was queued."""


class LateError(NestPipeError):
    """The deadline passed before anything could be answered."""


def refuse_busy(error: NestPipeError) -> tuple[int, str] | None:
    """The status and code of an instance that cannot answer now."""
    match error:
        case StoppingError():
            return 503, "stopping"
        case BusyError():
            return 429, "overloaded"
        case LateError():
            return 503, "deadline"
    return None


@dataclass(slots=True, eq=False, kw_only=True)
class RankingRequest:
    """A request to rank before a deadline. `request` names who holds the prefix that was computed for it."""

    user: int
    items: Sequence[int]
    query_time: int
    deadline: float
    request: str = ""
    k: int | None = None
    history: Sequences | None = None
    reply: Future[RankedItems] = field(default_factory=Future)
    # What the engine notes.
    arrived: float = 0.0
    since: int = 0  # how often users had been invalidated before its events were read
    asked: HistoryRequest | None = None
    candidates: CandidateBatch | None = None
    joined: Future[KVPrefix] | None = None

    def __lt__(self, other: RankingRequest) -> bool:
        return self.deadline < other.deadline


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillHint:
    """A request to come, whose prefix may be worth computing now. It is held until `until` for `request`."""

    user: int
    num_candidates: int
    query_time: int
    request: str
    until: float
    history: Sequences | None = None
    reply: Future[HintDecision] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class HintDecision:
    """What became of a signal; `held` is the digest of the prefix that waits for its request, if any."""

    reason: Reason
    held: str = ""


class RankingPath(NamedTuple):
    """A path, what it will cost, and of a shorter history the number of events."""

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
) -> RankingPath:
    """The first path that fits into the slack.

    Of a prefill that has not begun there is nothing to join: full inference makes the same, and the prefill is done with it.
    `begun` is how many events of the prefix are there: those done if it is in work, those of a shorter one if there is none.
    """
    hit_ms, full_ms = (costs.usual_ms(kind, num_events, num_candidates) for kind in _BOTH)
    rest_ms, copy_ms = costs.rest_ms(num_events, num_candidates, before=begun), costs.copy_ms(num_bytes)
    in_work = state in {EntryState.RESERVED, EntryState.COMPUTING}
    tries: tuple[tuple[Path, bool, float], ...] = (
        ("hit_device", state in {EntryState.READY, EntryState.PINNED}, hit_ms),
        ("join", in_work and begun > 0, rest_ms),
        ("hit_host", state == EntryState.HOST and copy_ms < costs.usual_ms("pre", num_events), copy_ms + hit_ms),
        ("extend", state is None and begun > 0 and rest_ms <= full_ms, rest_ms),
        ("full", True, full_ms),
    )
    for path, is_open, cost_ms in tries:
        if is_open and cost_ms <= slack_ms:
            return RankingPath(path, cost_ms)
    for kept in range(num_events - block, 0, -block):
        if (cost_ms := costs.usual_ms("full", kept, num_candidates)) <= slack_ms:
            return RankingPath("shorter", cost_ms, kept)
    return RankingPath("fallback", 0.0)


_FEW = 32  # of which no percentile says anything


@dataclass(slots=True, eq=False)
class PrefillWork:
    """A prefill under way, perhaps from a shorter prefix on."""

    asked: HistoryRequest
    lease: CacheEntry[KVPrefix]
    kept: KVPrefix | None

    @property
    def rest(self) -> tuple[int, int]:
        """From how many events to how many."""
        return self.asked.key.length, length_of(self.kept)


@dataclass(slots=True, eq=False)
class RankingPlan:
    """A rank, the path it takes, and what that needs."""

    rank: RankingRequest
    asked: HistoryRequest
    choice: RankingPath
    prefix: KVPrefix | None = None
    take_made: Callable[[], KVPrefix] | None = None  # the prefix that full inference made on its way


class RecentTimes:
    """Milliseconds that were measured, each with its time."""

    def __init__(self, clock: Callable[[], float], *, window_s: float):
        self._clock, self._window_s = clock, window_s
        self._measured: deque[tuple[float, float]] = deque(maxlen=512)

    def note(self, ms: float) -> None:
        self._measured.append((self._clock(), ms))

    def p99(self) -> float:
        """Of the window; nothing if there were only few. From any thread."""
        since = self._clock() - self._window_s
        late = [ms for at, ms in list(self._measured) if at > since]
        return float(np.percentile(late, 99)) if len(late) >= _FEW else 0.0


def length_of(prefix: KVPrefix | None) -> int:
    return prefix.key.length if prefix else 0
