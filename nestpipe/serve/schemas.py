"""Requests and answers of the HTTP services, each defined once.

    nestpipe.client   builds requests and reads answers
    request_guard.py  parses requests with `limited(RankRequest, candidates=2048, ...)`, the limits of one service
    openapi.py        describes both in /openapi.json

Features of events depend on the log, so events stay plain objects and `UserHistories` checks their features. The client imports
this file, so it must need neither torch nor starlette.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from nestpipe.serve.config import MAX_TICKET_CHARS
from nestpipe.serve.rule_schema import Boosts, Filter, MaxPer, Share

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
OwnId = Int64 | Annotated[str, Meta(min_length=1, max_length=512)]
"""A user, an item or a value of an id feature as it is in the log: a whole number or a text."""
Seconds = Annotated[int, Meta(ge=0, le=2**43 - 1, description="Seconds since 1970.")]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
TicketText = Annotated[str, Meta(min_length=1, max_length=MAX_TICKET_CHARS)]
InstructionText = Annotated[str, Meta(min_length=1, max_length=500, description="What the user wants, in plain words.")]
Milliseconds = Annotated[float, Meta(gt=0)]
Event = Mapping[str, Any]
"""An event as JSON: item, time in seconds and the features of the log; a posted one has an id and a user too."""


# Requests.


class HistoryEvent(Struct):
    """One event of a history that the caller sends; the features of the log come on top."""

    item: OwnId
    time: Seconds | UnsetType = UNSET


class PostedEvent(HistoryEvent, kw_only=True):
    """One event for the event log. An id is stored once."""

    id: Name
    user: OwnId


class _Request(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that are left at their default are not sent."""


class _OfUser(_Request):
    user: OwnId


class _Ruled(_Request, kw_only=True):
    """Rules, in their order: `exclude` and `filter` remove; `boost`; `max_per` and `diversity`; `pin` stands first."""

    filter: Filter = {}
    exclude: Sequence[OwnId] = ()
    boost: Boosts = ()
    max_per: MaxPer = {}
    diversity: Share | None = None
    pin: Annotated[Sequence[OwnId], Meta(max_length=1000)] = ()
    rules: Name | None = None


class _TopK(_Ruled):
    user: OwnId
    k: Count = 10


class RecommendRequest(_TopK, kw_only=True):
    """Recommends items. `history` replaces the stored one, `exclude` lists items not to show, `explain` asks for reasons.

    `filter`, `boost`, `max_per`, `diversity`, `pin`, `unseen` and the named set `rules` are rules.
    """

    request: Name | UnsetType = UNSET
    query_time: Seconds | None = None
    history: Sequence[Event] | None = None
    unseen: bool | None = None
    deadline_ms: Milliseconds | None = None
    explain: bool = False


class InstanceRecommendRequest(RecommendRequest):
    """Recommends items to a user, or to whoever has a `history`, which replaces the stored one.

    `exclude` lists items not to show, `explain` asks for reasons.
    """

    user: OwnId | UnsetType = UNSET  # type: ignore[assignment]


class SteeredRecommendRequest(InstanceRecommendRequest, kw_only=True):
    """Recommends items to a user, or to whoever has a `history`, which replaces the stored one.

    `exclude` lists items not to show, `explain` asks for reasons. `scenario`, `trigger` (an item) and `instruction` (a text)
    steer a generative run.
    """

    scenario: Name | None = None
    trigger: OwnId | None = None
    instruction: InstructionText | None = None


class SimilarRequest(_Ruled):
    """Items that are like an item, or like several together, under rules."""

    item: OwnId | Annotated[list[OwnId], Meta(min_length=1, max_length=100)]
    k: Count = 10


class PrefillRequest(_OfUser, kw_only=True):
    """Prefill hint: a ranking request with this many candidates will follow. Its answer has the ticket for `rank`."""

    request: Name
    candidates: Count
    query_time: Seconds | None = None
    history: Sequence[Event] | None = None


class _OfCandidates(_OfUser):
    candidates: Annotated[Sequence[OwnId], Meta(min_length=1)]


class RankRequest(_OfCandidates, kw_only=True):
    """Orders candidates, best first: the best `k`, or all of them; `explain` asks for reasons."""

    request: Name
    ticket: TicketText | None = None
    k: Count | None = None
    history: Sequence[Event] | None = None
    query_time: Seconds | None = None
    deadline_ms: Milliseconds | None = None
    explain: bool = False


class GenerateRequest(_TopK, kw_only=True):
    """Generates items, best first, under rules. `scenario`, `trigger` (an item) and `instruction` (a text) steer it."""

    unseen: bool | None = None

    scenario: Name | None = None
    trigger: OwnId | None = None
    instruction: InstructionText | None = None
    history: Sequence[Event] | None = None
    deadline_ms: Milliseconds | None = None


class ReleaseRequest(_Request):
    """Unpins the KV prefix of a ticket that no ranking request will use."""

    ticket: TicketText


class EventsRequest(_Request):
    """Appends events to histories. Each id is stored once, so a request may be repeated."""

    events: Sequence[Event]


class InvalidateRequest(_OfUser):
    """Drops all KV prefixes of a user."""


class SwapRequest(_Request):
    """Switches new requests to the model of another run."""

    run: Annotated[str, Meta(min_length=1, max_length=1024)]
    step: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    prefill_ms_per_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None


class NearlineRequest(_Request):
    """Stores the KV prefixes of users, near-line."""

    users: Annotated[list[OwnId], Meta(max_length=1000)]
    rate_ms_per_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None


class CompareRequest(_Request):
    """Answers a share of the users with a second model; 0 ends the comparison."""

    share: Annotated[float, Meta(ge=0, le=1)]
    run: Annotated[str, Meta(min_length=1, max_length=1024)] | UnsetType = UNSET
    step: Annotated[int, Meta(ge=0, le=2**63 - 1)] | UnsetType | None = UNSET


class MemberRequest(_Request):
    """Changes the members of a gateway's fleet."""

    name: Name
    action: Literal["join", "drain", "leave"]
    url: Name | UnsetType = UNSET


# Answers.


class Influence(Struct, frozen=True, kw_only=True):
    """An event of the history, and by how much the score of an item falls without it."""

    item: int | str
    time: int | None
    weight: float


class RankedItems(Struct, frozen=True, kw_only=True):
    """Items with scores, best first. `path` is how they were ranked; `degraded` marks a shortened or missing ranking.

    Candidates that are not in the catalogue are listed as `unknown`. With `explain`, `because` has the events that weighed
    most, for each item.
    """

    items: list[int | str]
    scores: list[float]
    path: str
    prefix_len: int = 0
    degraded: bool = False
    model: str
    times_ms: dict[str, float] = {}
    unknown: list[int | str] = []
    because: list[list[Influence]] | None = None

    def pairs(self) -> list[tuple[int | str, float]]:
        return list(zip(self.items, self.scores, strict=True))


class StageTime(Struct, frozen=True, kw_only=True):
    """Latency of a stage, its deadline, and the number of items that it returned."""

    ms: float
    deadline_ms: float
    count: int


class RecommendedItems(RankedItems, frozen=True, kw_only=True):
    """Recommended items. `allowed` is how many items the rules left, null without rules; pinned items that are not in the
    catalogue are listed as `unknown`. Of a cascade also: `prefill_hint` is the reason for or against a KV prefix, `problem`
    why there is no ranking. Of a generative run also: the `instruction` that steered it.
    """

    allowed: int | None = None
    request: str
    instance: str | None = None
    attempts: int = 1
    prefill_hint: str = ""
    problem: str = ""
    stages: dict[str, StageTime] = {}
    instruction: Provenance | None = None


class SimilarItems(Struct, frozen=True, kw_only=True):
    """Items with cosines, best first; asked or pinned items that are not in the catalogue are listed as `unknown`.

    `allowed` is how many items the rules left, null without rules.
    """

    items: list[int | str]
    scores: list[float]
    model: str
    unknown: list[int | str] = []
    allowed: int | None = None


class Provenance(Struct, frozen=True, kw_only=True):
    """Which instruction steered a request: the request's own, the scenario's, the user's (any) or the default, and the
    reason. `kind` says who wrote its `text`, `version` names the semantic ids and the encoder of its vector.
    """

    source: Literal["request", "scenario", "any", "default"]
    reason: str
    kind: Literal["none", "template", "model", "request"] = "none"
    version: str = ""
    text: str = ""
    written_by: str = ""
    written_s: float | None = None


class GeneratedItems(Struct, frozen=True, kw_only=True):
    """Items with the log-probabilities of their semantic ids, best first; `num_events` of the history were used.

    `allowed` is how many items the rules left, null without rules; pinned items that are not in the catalogue are `unknown`.
    """

    items: list[int | str]
    log_probabilities: list[float]
    path: str
    degraded: bool
    instruction: Provenance
    num_events: int
    beam: int
    model: str
    semantic_ids: str
    times_ms: dict[str, float] = {}
    unknown: list[int | str] = []
    allowed: int | None = None


class PrefillReply(Struct, frozen=True, kw_only=True):
    """Decision about a prefill hint. The ticket belongs to the ranking request that follows."""

    ticket: str | None
    admitted: bool
    reason: str
    instance: str
    epoch: str


class InstancePrefillReply(PrefillReply, frozen=True, kw_only=True):
    """Of an instance, which also says for how long no prefill hint would be admitted."""

    quiet_s: float = 0.0


class ReleaseReply(Struct, frozen=True):
    released: bool


class InvalidateReply(Struct, frozen=True):
    entries: int


class InstancesReply(Struct, frozen=True):
    """Names of the instances that have done it."""

    instances: list[str]


class Problem(Struct, frozen=True):
    code: str
    message: str


class ErrorReply(Struct, frozen=True):
    error: Problem


# Limits and routing.

Request = TypeVar("Request", bound=Struct)


def limited(kind: type[Request], **limits: Any) -> type[Request]:
    """The definition with the limits of one service: the longest list or largest number, a Meta,
    or another type with its default.
    """
    known = {one.name: one for one in msgspec.structs.fields(kind)}
    fields: list[tuple[str, Any, Any]] = []
    for name, limit in limits.items():
        own = known[name]
        if isinstance(limit, tuple):
            hint, default = limit
        else:
            bound = (
                limit if isinstance(limit, Meta) else Meta(max_length=limit) if _is_list(own.type) else Meta(le=limit)
            )
            hint, default = _narrowed(own.type, bound), own.default
        fields.append((name, hint, msgspec.field() if default is msgspec.NODEFAULT else default))
    namespace = {"__doc__": kind.__doc__}
    return cast(
        type[Request], msgspec.defstruct(kind.__name__, fields, bases=(kind,), namespace=namespace, kw_only=True)
    )


def members(hint: Any) -> Iterator[Any]:
    """The types of a union, without annotations."""
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from members(one)
    else:
        yield get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_list(hint: Any) -> bool:
    return any(get_origin(one) is Sequence for one in members(hint))


def _narrowed(hint: Any, meta: Meta) -> Any:
    """A type with a further constraint, which null and unset are exempt from."""
    if get_origin(hint) in (Union, UnionType):
        return reduce(or_, (one if one in (type(None), UnsetType) else _narrowed(one, meta) for one in get_args(hint)))
    return Annotated[hint, meta]
