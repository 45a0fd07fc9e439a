"""What is asked of an instance, what it answers, and the paths between them in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nestpipe.data.sequences import Sequences
from nestpipe.errors import NestPipeError
from nestpipe.models.prefix import Prefix
from nestpipe.models.ranker import Candidates
from nestpipe.serve.cache import State
from nestpipe.serve.prefix import Asked
from nestpipe.serve.trigger import Costs, Kind, Reason

Path = Literal["hit_device", "join", "hit_host", "extend", "full", "shorter", "upstream"]
_BOTH: tuple[Kind, Kind] = ("hit", "full")
HITS = frozenset({"hit_device", "join", "hit_host", "extend"})


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


@dataclass(frozen=True, slots=True)
class Answer:
    """Candidates, best first, and how that was found out."""

    items: list[int]
    scores: list[float]
    path: Path
    prefix_len: int
    model: str
    times_ms: dict[str, float]

    @property
    def degraded(self) -> bool:
        return self.path in {"shorter", "upstream"}


@dataclass(slots=True, eq=False, kw_only=True)
class Rank:
    """A request to rank before a deadline. `request` names who holds the prefix that was computed for it."""

    user: int
    items: Sequence[int]
    query_time: int
    deadline: float
    request: str = ""
    k: int | None = None
    history: Sequences | None = None
    reply: Future[Answer] = field(default_factory=Future)
    # What the engine notes.
    arrived: float = 0.0
    since: int = 0  # how often users had been invalidated before its events were read
    asked: Asked | None = None
    candidates: Candidates | None = None
    joined: Future[Prefix] | None = None

    def __lt__(self, other: Rank) -> bool:
        return self.deadline < other.deadline


@dataclass(slots=True, eq=False, kw_only=True)
class Signal:
    """A request to come, whose prefix may be worth computing now. It is held until `until` for `request`."""

    user: int
    num_candidates: int
    query_time: int
    request: str
    until: float
    history: Sequences | None = None
    reply: Future[Decision] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a signal; `held` is the digest of the prefix that waits for its request, if any."""

    reason: Reason
    held: str = ""


class Choice(NamedTuple):
    """A path, what it will cost, and of a shorter history the number of events."""

    path: Path
    cost_ms: float
    num_events: int = 0


def choose(
    costs: Costs,
    *,
    state: State | None,
    slack_ms: float,
    num_events: int,
    num_candidates: int,
    num_bytes: int,
    begun: int,
    block: int,
) -> Choice:
    """The first path that fits into the slack.

    Of a prefill that has not begun there is nothing to join: full inference makes the same, and the prefill is done with it.
    `begun` is how many events of the prefix are there: those done if it is in work, those of a shorter one if there is none.
    """
    hit_ms, full_ms = (costs.usual_ms(kind, num_events, num_candidates) for kind in _BOTH)
    rest_ms, copy_ms = costs.rest_ms(num_events, num_candidates, before=begun), costs.copy_ms(num_bytes)
    in_work = state in {State.RESERVED, State.COMPUTING}
    tries: tuple[tuple[Path, bool, float], ...] = (
        ("hit_device", state in {State.READY, State.PINNED}, hit_ms),
        ("join", in_work and begun > 0, rest_ms),
        ("hit_host", state == State.HOST and copy_ms < costs.usual_ms("pre", num_events), copy_ms + hit_ms),
        ("extend", state is None and begun > 0 and rest_ms <= full_ms, rest_ms),
        ("full", True, full_ms),
    )
    for path, is_open, cost_ms in tries:
        if is_open and cost_ms <= slack_ms:
            return Choice(path, cost_ms)
    for kept in range(num_events - block, 0, -block):
        if (cost_ms := costs.usual_ms("full", kept, num_candidates)) <= slack_ms:
            return Choice("shorter", cost_ms, kept)
    return Choice("upstream", 0.0)
