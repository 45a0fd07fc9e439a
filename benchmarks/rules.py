"""What rules cost: the best 10 of a million items for one query, under rules and without.

Every arm scores the catalogue exactly. `no rules` is what requests without rules take: a scan that a batch shares. Requests under
rules take one product with the catalogue each, so the ratios are over that product without rules. Figures are CPU time of one thread, so other load matters little. `new filter` compiles
a filter that no request has had before; the others find theirs compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import measure
import numpy as np
import torch

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import StoredFeature
from nestpipe.data.vocabulary import Vocabulary
from nestpipe.eval.ruled_ranking import RuledQuery, top_lists
from nestpipe.rules.compiled_rules import RuleCompiler, no_rules
from nestpipe.rules.rule_set import parse_rules
from nestpipe.rules.selection import best_by_vector

NAME, K, NUM_SEEN = "rules", 10, 50
AT_MOST = 1.5
RULES: dict[str, dict[str, Any]] = {
    "no rules": {},
    "filter, 2 % left": {"filter": {"category": 7}},
    "filter, half left": {"filter": {"price": {"lte": 50}}},
    "filter on a list": {"filter": {"tags": [3, 5]}},
    "boost and max_per": {"boost": [{"filter": {"category": [1, 2]}, "add": 1.5}], "max_per": {"category": 2}},
    "two caps, few groups": {"max_per": {"category": 1, "shelf": 1}, "filter": {"price": {"gte": 10}}},
    "diversity": {"diversity": 0.3},
    "pin": {"pin": [5, 8], "filter": {"price": {"lte": 50}}},
}


class GeneratedItems:
    """A million items with an id, an ids and a number field."""

    version, withdrawn = "1", None

    def __init__(self, num_items: int):
        rng = np.random.default_rng(0)
        self.items, each = np.arange(num_items), np.arange(num_items + 1)
        kinds = {"category": "id", "tags": "ids", "price": "number", "shelf": "id"}
        self.fields = {name: Feature(name=name, kind=kind, scope="item") for name, kind in kinds.items()}  # type: ignore[arg-type]
        self._columns = {
            "category": StoredFeature(rng.integers(0, 50, num_items), each),
            "shelf": StoredFeature(rng.integers(0, 6, num_items), each),
            "tags": StoredFeature(rng.integers(0, 30, 2 * num_items), 2 * each),
            "price": StoredFeature(rng.random(num_items, dtype=np.float32) * 100),
        }

    def column(self, field: str) -> StoredFeature:
        return self._columns[field]

    def vocabulary(self, name: str) -> Vocabulary:
        return Vocabulary(name, "int64")


def timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="50,000 items, result not recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_items, dim = (50_000 if options.quick else 1_000_000), 64
    rng = np.random.default_rng(1)
    vectors = torch.from_numpy(rng.standard_normal((num_items, dim), dtype=np.float32))
    query = torch.from_numpy(rng.standard_normal((1, dim), dtype=np.float32))
    attributes = GeneratedItems(num_items)
    compiler, seen = RuleCompiler(lambda: attributes), rng.choice(num_items, NUM_SEEN, replace=False)
    prices = (float(one) for one in itertools.count(20))

    def answer(content: dict[str, Any]) -> None:
        rules = compiler.compile(parse_rules(content), attributes.items)
        asked = RuledQuery(rules, rules.removed(seen, keeps_seen=False), K)
        top_lists(query, vectors, [asked], 1 << 28)

    arms: dict[str, Callable[[], float]] = {
        name: lambda content=content: timed(lambda: answer(content)) for name, content in RULES.items()
    }
    none, own = no_rules(num_items), query[0].numpy()
    arms["one product, no rules"] = lambda: timed(
        lambda: best_by_vector(vectors.numpy(), own, none, K, removed=np.unique(seen))
    )
    arms["new filter"] = lambda: timed(lambda: answer({"filter": {"price": {"lte": next(prices)}, "tags": [1, 2]}}))
    times = measure.alternate(arms)
    plain = times["one product, no rules"]
    ratios = {name: measure.ratio(spent, plain) for name, spent in times.items() if name != "one product, no rules"}
    cpu_ms = {name: round(1000 * measure.Spread.of(spent).median, 2) for name, spent in times.items()}
    print(
        measure.table(["arm", "CPU ms", "over no rules"], [[n, str(cpu_ms[n]), str(ratios.get(n, ""))] for n in times])
    )
    figures = {
        "ms": cpu_ms,
        "over_no_rules": {name: round(one.median, 3) for name, one in ratios.items()},
        "over_no_rules_range": {name: one.range for name, one in ratios.items()},
        "verdicts": {name: measure.verdict(one, at_most=AT_MOST) for name, one in ratios.items() if name != "no rules"},
    }
    if not options.quick:
        settings = {"items": num_items, "dim": dim, "k": K, "seen": NUM_SEEN}
        measure.append(NAME, measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
