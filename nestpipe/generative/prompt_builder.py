"""Builds instruction requests: the events of a user before a given position, as text.

One function reads events, and its caller says where they end. In the near-line job that is the end of the history. For a
training row it is the row's target: **the instruction of a training row never uses its target or anything after it**.
Co-visits of other users (`CoVisits`) end at the target's time too. A request is a function of events, not of the clock: equal
events give an equal digest, so no instruction is generated twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.features import label_values
from nestpipe.data.schema import Label
from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.errors import DataError
from nestpipe.generative.instruction_store import ANY

Ints = NDArray[np.int64]
Encode = Callable[[Sequence[str]], Tensor]  # texts to vectors [n, D]
_SEASONS = ("winter", "spring", "summer", "autumn")
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One event: the item's text, the level of its behaviour (0 is the weakest) and the weight of that level."""

    text: str
    level: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionRequest:
    """Actions, oldest first, and their context. `user` assigns the result and is never sent to a provider."""

    user: int
    scenario: str = ANY
    actions: tuple[Action, ...] = ()
    trigger: str = ""
    complements: tuple[str, ...] = ()
    season: str = ""

    def content(self) -> dict[str, object]:
        """Everything but the user."""
        return {name: value for name, value in asdict(self).items() if name != "user"}

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(self.content()).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionResult:
    """A text and its provenance."""

    text: str
    provenance: str


class InstructionProvider(Protocol):
    """Writes instructions. A failing service is no exception: every request gets a result."""

    @property
    def provenance(self) -> str:
        """Provenance of its own results; results of a fallback have another."""
        ...

    def generate(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        """One result for each request, in their order."""
        ...


class CoVisits:
    """Which items follow which in the histories of all users, as of a given time."""

    def __init__(self, sequences: Sequences):
        """Raises DataError for a log without times: it does not say what was known when."""
        if sequences.times is None:
            raise DataError(f"{sequences.path} has no times; co-visits need them to exclude later events.")
        is_follower = np.ones(len(sequences.items), bool)
        is_follower[sequences.offsets[:-1][np.diff(sequences.offsets) > 0]] = False
        follows = np.flatnonzero(is_follower)
        before = sequences.items[follows - 1]
        order = np.lexsort((sequences.times[follows], before))
        self._before = before[order]
        self._after = sequences.items[follows][order]
        self._times = sequences.times[follows][order]

    def of(self, item: int, *, before_ms: int | None, most: int = 3) -> list[int]:
        """The items that followed most often before a time; ties by id."""
        first, last = np.searchsorted(self._before, [item, item + 1])
        if before_ms is not None:
            last = first + int(np.searchsorted(self._times[first:last], before_ms))
        items, counts = np.unique(self._after[first:last], return_counts=True)
        by_count = items[np.argsort(-counts, kind="stable")].tolist()
        return [one for one in by_count if one != item][:most]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBuilder:
    """Builds requests from sequences."""

    texts: Mapping[int, str]
    co_visits: CoVisits | None = None
    behaviour: Label | None = None
    behaviour_weights: tuple[float, ...] = (1.0,)
    max_actions: int = 50
    items: Vocabulary | None = None
    """Names items without a text as the log does; None: by number."""

    def build(
        self,
        sequences: Sequences,
        row: int,
        end: int,
        *,
        scenario: str = ANY,
        trigger: int | None = None,
        before_ms: int | None = None,
    ) -> InstructionRequest:
        """From the first `end` events of a user and the co-visits before a time; the default trigger is the last item."""
        first = int(sequences.offsets[row])
        places = np.arange(first + max(end - self.max_actions, 0), first + end)
        items = sequences.items[places].tolist()
        trigger = trigger if trigger is not None or not items else items[-1]
        complements = (
            [] if trigger is None or self.co_visits is None else self.co_visits.of(trigger, before_ms=before_ms)
        )
        season = "" if sequences.times is None or not len(places) else season_of(int(sequences.times[places[-1]]))
        return InstructionRequest(
            user=int(sequences.users[row]),
            scenario=scenario,
            actions=tuple(map(self._action, items, self._levels(sequences, places))),
            trigger="" if trigger is None else self._text(trigger),
            complements=tuple(map(self._text, complements)),
            season=season,
        )

    def before_target(
        self, sequences: Sequences, row: int, place: int, *, scenario: str = ANY, trigger: int | None = None
    ) -> InstructionRequest:
        """The request of a training row whose target is the user's event at `place`."""
        at = int(sequences.offsets[row]) + place
        if not 0 <= place < int(sequences.offsets[row + 1]) - int(sequences.offsets[row]):
            raise ValueError(f"the user at row {row} has no event {place}")
        before_ms = None if sequences.times is None else int(sequences.times[at])
        return self.build(sequences, row, place, scenario=scenario, trigger=trigger, before_ms=before_ms)

    def _levels(self, sequences: Sequences, places: Ints) -> list[int]:
        if self.behaviour is None:
            return [0] * len(places)
        levels = np.nan_to_num(label_values(self.behaviour, sequences.event_features, places))
        return [int(level) for level in levels]

    def _action(self, item: int, level: int) -> Action:
        weights = self.behaviour_weights
        return Action(text=self._text(item), level=level, weight=weights[min(level, len(weights) - 1)])

    def _text(self, item: int) -> str:
        if text := self.texts.get(item, ""):
            return text[:_MAX_TEXT]
        own = item if self.items is None else self.items.own_ids([item])[0]
        return f"item {own}"[:_MAX_TEXT]


def season_of(time_ms: int) -> str:
    """The season on the northern hemisphere."""
    return _SEASONS[datetime.fromtimestamp(time_ms / 1000, UTC).month % 12 // 3]
