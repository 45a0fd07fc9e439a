"""Examples for people: what a run recommends to a few users after which history, and what is popular, in the ids of the log."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nestpipe.atomic_files import replace_file
from nestpipe.data.item_texts import read_item_texts
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split
from nestpipe.data.vocabulary import OwnId
from nestpipe.eval.catalogue_predictor import CataloguePredictor, training_counts
from nestpipe.eval.ranking_eval import RankingPredictor

EXAMPLES = "examples.json"
_NUM_USERS, _NUM_EVENTS, _NUM_POPULAR, _K = 6, 6, 10, 5
_MOST_SCORED = 1_000_000  # a ranker scores every item for every user


@dataclass(frozen=True, slots=True)
class NamedItem:
    """An item under its own id, with the title if the folder has texts, and a number: a score, or a count of events."""

    item: OwnId
    title: str = ""
    number: float | None = None


@dataclass(frozen=True, slots=True)
class ExampleUser:
    """The last events of a user, oldest first, and the best items that they have not had."""

    user: OwnId
    num_events: int
    history: list[NamedItem]
    items: list[NamedItem]


@dataclass(frozen=True, slots=True)
class Examples:
    """Some users, and the items with most training events."""

    users: list[ExampleUser]
    popular: list[NamedItem]

    def save(self, folder: Path) -> None:
        replace_file(folder / EXAMPLES, json.dumps(asdict(self), indent=1, ensure_ascii=False).encode())

    @staticmethod
    def load(folder: Path) -> Examples:
        content: dict[str, Any] = json.loads((folder / EXAMPLES).read_text(encoding="utf-8"))
        users = [
            ExampleUser(one["user"], one["num_events"], _named(one["history"]), _named(one["items"]))
            for one in content["users"]
        ]
        return Examples(users, _named(content["popular"]))


def make_examples(predictor: CataloguePredictor, sequences: Sequences, split: Split) -> Examples:
    """Users evenly spaced in the folder, with what `nestpipe recommend` answers them; none where that would take long."""
    items, titles = sequences.vocabulary("item"), read_titles(sequences)

    def named(own: OwnId, number: float | None = None) -> NamedItem:
        found = items.number_of(own)
        return NamedItem(own, "" if found is None else titles.get(found, ""), number)

    num_users = min(_NUM_USERS, len(sequences.users))
    is_slow = isinstance(predictor, RankingPredictor) and num_users * len(sequences.catalogue) > _MOST_SCORED
    rows = np.linspace(0, len(sequences.users) - 1, 0 if is_slow else num_users).astype(np.int64)
    own = sequences.vocabulary("user").own_ids(sequences.users[rows])
    users = []
    for row, user, found in zip(rows.tolist(), own, predictor.recommend_all(own, _K), strict=True):
        first, last = (int(edge) for edge in sequences.offsets[row : row + 2])
        events = items.own_ids(sequences.items[max(first, last - _NUM_EVENTS) : last])
        recommended = [named(*pair) for pair in zip(found.items, found.scores, strict=True)]
        users.append(ExampleUser(user, last - first, [named(one) for one in events], recommended))
    counts = training_counts(sequences, split)
    best = np.argsort(-counts, kind="stable")[:_NUM_POPULAR]
    popular = zip(items.own_ids(sequences.catalogue[best]), counts[best].tolist(), strict=True)
    return Examples(users, [named(*pair) for pair in popular])


def read_titles(sequences: Sequences) -> dict[int, str]:
    """Titles by item; empty if the folder has no texts."""
    return read_item_texts(sequences) or {}


def _named(content: list[dict[str, Any]]) -> list[NamedItem]:
    return [NamedItem(**one) for one in content]
