"""The synthetic data as batches of the generative model, and the value of its lists."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nestpipe.data.synthetic_scenarios import SCENARIOS, ScenarioLog
from nestpipe.generative.text_encoder import hashed_words
from nestpipe.generative.trie import Trie
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of, ranges
from nestpipe.rng import Rng, integers

TEXT_DIM = 48
FIRST_TARGET = 12  # requests are made from here on, so that all have a history
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stage:
    """A world with what models need of it: the tree of its ids (topic, style, place), and vectors of its texts."""

    world: ScenarioLog

    @cached_property
    def trie(self) -> Trie:
        items = torch.arange(self.world.config.num_items)
        codes = torch.stack(torch.unravel_index(items, self.world.config.sizes), 1)
        return Trie(items, codes, self.world.config.sizes, version="world")

    @cached_property
    def texts(self) -> Tensor:
        return _vectors(self.world.texts())

    @cached_property
    def instructions(self) -> Tensor:
        return _vectors(self.world.instructions())

    @property
    def test_place(self) -> int:
        return self.world.config.num_events - 1

    def histories(self, users: Tensor, *, groups: int = 0) -> Batch:
        """All training events of some users, each a query for the next one."""
        ends = torch.full((len(users),), self.test_place - 1)
        return self.requests(users, ends, newest=self.test_place, groups=groups)

    def requests(self, users: Tensor, places: Tensor, *, newest: int, groups: int = 0) -> Batch:
        """For each user the event at a place as target, and at most `newest` events before it."""
        first = (places - newest).clamp(min=0)
        events = ranges(users * self.world.config.num_events + first, places - first)
        offsets, longest = offsets_of(places - first), int((places - first).max())
        return Batch(
            cursor=Cursor(0, 0),
            sample_ids=users,
            items=Jagged(self._flat(self.world.items, events), offsets, longest),
            targets=Jagged(self._flat(self.world.items, events + 1), offsets, longest),
            event_features={"scenario": Jagged.singles(self._flat(self.world.scenarios, events))},
            target_features=self._given(events + 1),
            groups=torch.arange(len(users)) // groups if groups else None,
        )

    def with_instructions(self, batch: Batch) -> Batch:
        """The same requests as at serving time: the instruction of the last event's target, and no targets."""
        last = batch.items.offsets[1:] - 1
        given = {name: one.select(last) for name, one in batch.target_features.items()}
        return Batch(
            cursor=batch.cursor,
            sample_ids=batch.sample_ids,
            items=batch.items,
            event_features=batch.event_features,
            sample_features=given,
        )

    def draw_requests(self, rng: Rng, num: int, scenario: int | None = None) -> tuple[Tensor, Tensor]:
        """Users and places of training events, of one scenario or of all."""
        places = np.arange(FIRST_TARGET, self.test_place)
        fits = np.ones_like(self.world.scenarios[:, places], dtype=bool)
        if scenario is not None:
            fits = self.world.scenarios[:, places] == scenario
        users, columns = np.nonzero(fits)
        picks = integers(rng.keys("requests", torch.arange(num)), width=1, high=len(users)).flatten().numpy()
        return torch.from_numpy(users[picks]), torch.from_numpy(places[columns[picks]])

    def utilities(self, users: Tensor, places: Tensor) -> Tensor:
        """The true utility [n, I] of every item for the events of users at places."""
        found = torch.empty(len(users), self.world.config.num_items, dtype=torch.float64)
        for place in places.unique().tolist():
            rows = (places == place).nonzero().flatten()
            found[rows] = self._at(place)[1].index_select(0, users[rows])
        return found

    def worth(self, lists: Tensor, users: Tensor) -> dict[str, float]:
        """What lists [U, 10] for the last events expect under the world's own probabilities, intent known."""
        chances, utilities = (one.index_select(0, users) for one in self._at(self.test_place))
        at = chances.gather(1, lists)
        discounts = 1 / torch.arange(2, 12, dtype=torch.float64).log2()
        return {
            "ndcg10": round(float((at * discounts).sum(1).mean()), 5),
            "hr10": round(float(at.sum(1).mean()), 5),
            "hr1": round(float(at[:, 0].mean()), 5),
            "utility1": round(float(utilities.gather(1, lists[:, :1]).mean()), 5),
        }

    def _at(self, place: int) -> tuple[Tensor, Tensor]:
        if place not in self._known:
            intent = np.eye(self.world.config.num_topics)[self.world.intents[:, place]]
            found = self.world.chances(place, intent), self.world.utilities(place, intent)
            self._known[place] = (torch.from_numpy(found[0]), torch.from_numpy(found[1]))
        return self._known[place]

    @cached_property
    def _known(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def _given(self, events: Tensor) -> dict[str, Jagged]:
        triggers = self._flat(self.world.triggers, events)
        has = triggers >= 0
        reasoning = self.instructions.index_select(0, self._flat(self.world.named_topics, events))
        return {
            "scenario": Jagged.singles(self._flat(self.world.scenarios, events)),
            "trigger": Jagged(triggers[has], offsets_of(has.to(torch.int64)), 1),
            "reasoning": Jagged(reasoning, torch.arange(len(events) + 1), 1),
        }

    def _flat(self, column: Ints, events: Tensor) -> Tensor:
        return torch.from_numpy(column).flatten().index_select(0, events)


def _vectors(texts: list[str]) -> Tensor:
    """Hashed words in fewer dimensions, which random directions keep apart well enough."""
    wide = hashed_words(texts)
    directions = np.random.default_rng(7).normal(size=(wide.shape[1], TEXT_DIM)) / TEXT_DIM**0.5
    return F.normalize(wide @ torch.from_numpy(directions).float(), dim=1)


NUM_SCENARIOS = len(SCENARIOS)
