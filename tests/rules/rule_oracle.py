"""Rules the slow and obvious way: one item after the other, in the words of the specification; and random cases for it.

All numbers are exact in binary: scores and boosts are quarters, vectors have the length 2. So equal means equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import StoredFeature
from nestpipe.data.vocabulary import TABLE_SCHEMA, Vocabulary

Item = str
Record = dict[str, Any]
FEATURES = {
    "price": Feature(name="price", kind="number", scope="item"),
    "category": Feature(name="category", kind="id", scope="item", encoding="dictionary"),
    "tags": Feature(name="tags", kind="ids", scope="item", encoding="dictionary"),
    "year": Feature(name="year", kind="id", scope="item"),
    "look": Feature(name="look", kind="vector", scope="item", dim=2),
}
CATEGORIES, TAGS = ["bed", "chair", "lamp", "sofa"], ["cheap", "new", "oak", "red", "tall"]


@dataclass(eq=False)
class Catalogue:
    """Items with records; the place of an item in the list is its position, 10 + 3 * position its number."""

    records: list[Record]
    withdrawn: Any = None
    version: str = "1"
    fields: dict[str, Feature] = field(default_factory=lambda: FEATURES)

    def __post_init__(self) -> None:
        self.items = 10 + 3 * np.arange(len(self.records))
        self.names = [f"p{place}" for place in range(len(self.records))]

    def vocabulary(self, name: str) -> Vocabulary:
        return _Named(self.names, self.items) if name == "item" else _vocabulary(name)  # type: ignore[return-value]

    def column(self, name: str) -> StoredFeature:
        values = [record.get(name) for record in self.records]
        if name == "price":
            return StoredFeature(np.array([np.nan if one is None else one for one in values], np.float32))
        lists = [[] if one is None else one if isinstance(one, list) else [one] for one in values]
        known = {"category": CATEGORIES, "tags": TAGS}.get(name)
        flat = [known.index(one) if known else one for own in lists for one in own]
        return StoredFeature(np.array(flat, np.int64), np.cumsum([0, *map(len, lists)]))


@cache
def _vocabulary(name: str) -> Vocabulary:
    if name == "year":
        return Vocabulary(name, "int64")
    texts = {"category": CATEGORIES, "tags": TAGS}[name]
    return Vocabulary(
        name, "dictionary", pl.DataFrame({"id": np.arange(len(texts)), "text": texts}, schema=TABLE_SCHEMA)
    )


class _Named:
    """The own ids of the items."""

    encoding = "dictionary"

    def __init__(self, texts: list[str], numbers: Any):
        self._numbers = dict(zip(texts, numbers.tolist(), strict=True))

    def numbers_of(self, own: Any) -> Any:
        found = [self._numbers.get(str(one)) for one in own]
        return np.array([one or 0 for one in found], np.int64), np.array([one is not None for one in found])


def passes(record: Record, filters: dict[str, Any]) -> bool:
    for name, wanted in filters.items():
        own = record.get(name)
        have = [] if own is None else own if isinstance(own, list) else [own]
        if isinstance(wanted, dict):
            low, high = wanted.get("gte", -np.inf), wanted.get("lte", np.inf)
            if not any(low <= one <= high for one in have):
                return False
        elif not set(have) & set(wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def allowed_items(catalogue: Catalogue, rules: Record, seen: set[Item], *, keeps_seen: bool = False) -> list[Item]:
    """What withdrawals, `exclude`, `filter` and `unseen` leave, in the order of the catalogue."""
    is_unseen = not keeps_seen if rules.get("unseen") is None else rules["unseen"]
    return [
        name
        for place, name in enumerate(catalogue.names)
        if not (catalogue.withdrawn is not None and catalogue.withdrawn[place])
        and name not in rules.get("exclude", ())
        and passes(catalogue.records[place], rules.get("filter", {}))
        and not (is_unseen and name in seen)
    ]


def pinned_items(catalogue: Catalogue, rules: Record, k: int) -> list[Item]:
    found = []
    for name in rules.get("pin", ()):
        if name in catalogue.names and name not in rules.get("exclude", ()) and name not in found:
            place = catalogue.names.index(name)
            if catalogue.withdrawn is None or not catalogue.withdrawn[place]:
                found.append(name)
    return found[:k]


def listed(
    catalogue: Catalogue, rules: Record, scores: dict[Item, float], vectors: Any, k: int, *, among: list[Item]
) -> list[tuple[Item, float]]:
    """The list of k, of the items `among` that may be shown; ties keep their order. Pins must have scores."""
    record = dict(zip(catalogue.names, catalogue.records, strict=True))
    vector = dict(zip(catalogue.names, vectors, strict=True))
    boosted = {
        name: score + sum(one["add"] for one in rules.get("boost", ()) if passes(record[name], one["filter"]))
        for name, score in scores.items()
    }
    pins = pinned_items(catalogue, rules, k)
    counts: dict[str, Counter[Any]] = {name: Counter() for name in rules.get("max_per", {})}

    def groups(item: Item, name: str) -> set[Any]:
        own = record[item].get(name)
        return set() if own is None else set(own) if isinstance(own, list) else {own}

    def count(item: Item) -> None:
        for name, counter in counts.items():
            counter.update(groups(item, name))

    for item in pins:
        count(item)
    diversity = rules.get("diversity") or 0
    most = max(200, 10 * k) if diversity else k - len(pins)
    pool: list[Item] = []
    for item in sorted((one for one in among if one not in pins), key=lambda one: -boosted[one]):
        if len(pool) < most and all(
            counts[name][one] < cap for name, cap in rules.get("max_per", {}).items() for one in groups(item, name)
        ):
            pool.append(item)
            count(item)
    shown = list(pins)
    if not diversity:
        shown += pool[: k - len(pins)]
    else:
        low, high = min((boosted[one] for one in pool), default=0), max((boosted[one] for one in pool), default=0)
        while len(shown) < k and pool:
            values = []
            for item in pool:
                relevance = (boosted[item] - low) / (high - low) if high > low else 0.0
                near = max((float(np.dot(vector[item], vector[one])) / 4 for one in shown), default=0.0)
                values.append((1 - diversity) * relevance - diversity * near)
            shown.append(pool.pop(int(np.argmax(values))))
    return [(item, boosted[item]) for item in shown]


def random_catalogue(rng: np.random.Generator, num_items: int, *, withdrawn: bool) -> Catalogue:
    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.15 else value

    records = [
        {
            "price": maybe(float(rng.integers(0, 40)) / 4),
            "category": maybe(str(rng.choice(CATEGORIES))),
            "tags": [str(one) for one in rng.choice(TAGS, rng.integers(0, 4))],  # may repeat
            "year": maybe(int(rng.integers(2019, 2024))),
        }
        for _ in range(num_items)
    ]
    return Catalogue(records, rng.random(num_items) < 0.2 if withdrawn else None)


def random_vectors(rng: np.random.Generator, num_items: int) -> Any:
    """Of length 2, so that cosines are exact: four halves, or one axis."""
    vectors = rng.choice([-1.0, 1.0], (num_items, 4))
    axes = rng.random(num_items) < 0.3
    vectors[axes] = 2 * np.eye(4)[rng.integers(0, 4, axes.sum())]
    return vectors.astype(np.float32)


def random_filter(rng: np.random.Generator) -> Record:
    choices: dict[str, Any] = {
        "price": rng.choice(
            [
                {"gte": float(rng.integers(0, 20)) / 4},
                {"lte": float(rng.integers(10, 40)) / 4},
                {"gte": 2.0, "lte": 6.25},
            ]
        ),
        "category": rng.choice([str(rng.choice(CATEGORIES)), None]) or [str(one) for one in rng.choice(CATEGORIES, 2)],
        "tags": [str(one) for one in rng.choice(TAGS, rng.integers(1, 6))],
        "year": int(rng.integers(2019, 2024)),
    }
    names = rng.permutation(list(choices))[: rng.choice([1, 1, 1, 2, 3])]
    return {str(name): choices[str(name)] for name in names}


def random_rules(rng: np.random.Generator, names: list[Item]) -> Record:
    rules: Record = {}
    if rng.random() < 0.6:
        rules["filter"] = random_filter(rng)
    if rng.random() < 0.4:
        rules["exclude"] = [str(one) for one in rng.choice([*names, "nothing"], rng.integers(0, 5))]
    if rng.random() < 0.5:
        fields = rng.permutation(["category", "tags", "year", "price"])[: rng.integers(1, 3)]
        rules["max_per"] = {str(name): int(rng.integers(1, 4)) for name in fields}
    if rng.random() < 0.5:
        rules["boost"] = [
            {"filter": random_filter(rng), "add": float(rng.integers(-8, 9)) / 4} for _ in range(rng.integers(1, 3))
        ]
    if rng.random() < 0.4:
        rules["pin"] = [str(one) for one in rng.choice([*names, "nothing"], rng.integers(0, 4))]
    if rng.random() < 0.4:
        rules["diversity"] = float(rng.choice([0.0, 0.25, 0.5, 1.0]))
    if rng.random() < 0.4:
        rules["unseen"] = bool(rng.random() < 0.5)
    return rules
