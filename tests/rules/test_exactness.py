"""Lists under rules equal those of a plain oracle, on random catalogues, rules and histories: retrieval, cascade, decoding.

Each check can fail: mutants that break one sentence of the specification are caught.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from nestpipe.gateway.candidates import ExactIndex, PastEvents, Retriever
from nestpipe.generative import beam
from nestpipe.generative.allowed_pools import AllowedPools
from nestpipe.generative.beam import path_scores
from nestpipe.generative.ruled_decoding import RuledRequest, decode_lists
from nestpipe.generative.trie import Trie
from nestpipe.rules import selection
from nestpipe.rules.compiled_rules import CompiledRules, RuleCompiler, no_rules
from nestpipe.rules.rule_set import parse_rules
from nestpipe.rules.selection import SelectedItems, best_by_vector
from tests.generative.known_trees import TableDecoder, plain_search
from tests.rules.rule_oracle import (
    allowed_items,
    listed,
    pinned_items,
    random_catalogue,
    random_rules,
    random_vectors,
)

NOTHING = np.empty(0, np.int64)
SIZES = (4, 3, 3)


class RuleCase:
    """A random catalogue, a history, rules and k."""

    def __init__(self, seed: int, *, most: int = 260):
        rng = self.rng = np.random.default_rng(seed)
        num_items = min(int(rng.choice([1, 5, 30, 30, 60, 260])), most)
        self.catalogue = random_catalogue(rng, num_items, withdrawn=rng.random() < 0.3)
        self.vectors, self.query = random_vectors(rng, num_items), (rng.integers(-4, 5, 4) / 4).astype(np.float32)
        self.k, self.keeps_seen = int(rng.choice([1, 3, 10, 40])), bool(rng.random() < 0.3)
        self._compiler = RuleCompiler(lambda: self.catalogue)
        self.draw_request()

    def draw_request(self):
        rng, names = self.rng, self.catalogue.names
        self.rules = random_rules(rng, names)
        self.seen = {str(one) for one in rng.choice(names, rng.integers(0, 8))}
        self.compiled = self._compiler.compile(parse_rules(self.rules), self.catalogue.items)
        self.seen_places = np.array([names.index(one) for one in sorted(self.seen)], np.int64)
        self.removed = self.compiled.removed(self.seen_places, keeps_seen=self.keeps_seen)
        self.allowed = allowed_items(self.catalogue, self.rules, self.seen, keeps_seen=self.keeps_seen)

    def names(self, positions):
        return [self.catalogue.names[place] for place in positions]

    def listed(self, scores, among):
        return listed(self.catalogue, self.rules, scores, self.vectors, self.k, among=among)


def check_retrieval(seed):
    case = RuleCase(seed)
    found = best_by_vector(case.vectors, case.query, case.compiled, case.k, removed=case.removed)
    scores = dict(zip(case.catalogue.names, (case.vectors @ case.query).tolist(), strict=True))
    made = list(zip(case.names(found.positions), found.scores.tolist(), strict=True))
    assert made == case.listed(scores, case.allowed), (seed, case.rules)
    assert found.num_left == len(case.allowed), (seed, case.rules)


def check_cascade(seed):
    case = RuleCase(seed)
    items, names = case.catalogue.items, case.catalogue.names
    retriever = Retriever(
        items=items,
        vectors=case.vectors,
        index=ExactIndex(case.vectors),
        encode=lambda past, query_time: case.query,
        past_of=lambda user: PastEvents(NOTHING),
        keeps_seen=case.keeps_seen,
    )
    count = int(case.rng.choice([case.k, case.k + 5, 60]))
    rank = dict(zip(names, (case.rng.integers(0, 12, len(names)) / 4).tolist(), strict=True))
    found = retriever.retrieve(PastEvents(items[case.seen_places]), count + 3, case.compiled)
    candidates = retriever.prerank(found, count)
    order = sorted(candidates.items, key=lambda item: -rank[names[(item - 10) // 3]])  # as a ranker answers
    scores = [rank[names[(item - 10) // 3]] for item in order]
    assert not candidates.is_final or not case.rules.get("boost")
    best = retriever.listed(found, order, scores, case.k)
    by_vector = dict(zip(names, (case.vectors @ case.query).tolist(), strict=True))
    top = sorted(case.allowed, key=lambda name: -by_vector[name])[:count]  # of a ranker, the exact filtered top N
    wanted = case.listed(rank, sorted(top, key=lambda name: -rank[name]))
    made = list(zip(case.names((np.array(best.items, int) - 10) // 3), best.scores, strict=True))
    assert made == wanted, (seed, case.rules)
    if candidates.is_final:
        assert order[: case.k] == best.items
    assert best.allowed == len(case.allowed)


KNOWN = {}


class CachedDecoder(TableDecoder):
    """Logits are a pure function of request and path, so all cases share them."""

    def __init__(self, num_requests):
        super().__init__(num_requests, SIZES)
        self._known = KNOWN


class OneRequest(CachedDecoder):
    """The decoder of one of several requests, alone."""

    def __init__(self, row):
        super().__init__(1)
        self._row = row

    def logits(self, request, path):
        return super().logits(self._row, path)


def check_decoding(seed):
    case = RuleCase(seed, most=60)
    items, num_items = torch.from_numpy(case.catalogue.items), len(case.catalogue.items)
    codes = torch.from_numpy(np.stack([case.rng.integers(0, size, num_items) for size in SIZES], 1))
    trie, width = Trie(items, codes, SIZES, version="v1"), int(case.rng.choice([2, 5, 50]))
    softmax = str(case.rng.choice(["legal", "full"]))
    pools, cases, requests = AllowedPools(trie), [], []
    for _ in range(2):
        requests.append(RuledRequest(case.compiled, case.removed, case.k))
        cases.append((case.rules, case.allowed))
        case.draw_request()
    found = decode_lists(
        lambda: CachedDecoder(2), trie, pools, requests, width=width, softmax=softmax, vectors=case.vectors
    )
    for row, (made, (rules, allowed)) in enumerate(zip(found, cases, strict=True)):
        case.rules = rules
        scores, among = {}, []
        if allowed:
            kept = {case.catalogue.names.index(name) for name in allowed}
            of_leaf = [set(trie.leaf_items[start:end].tolist()) & kept for start, end in pairwise(trie.first[-1])]
            live = torch.tensor([bool(one) for one in of_leaf])
            best = plain_search(trie, OneRequest(row), 0, live, width, softmax)
            scores = {case.catalogue.names[place]: score for leaf, score in best for place in sorted(of_leaf[leaf])}
            among = list(scores)
        for name in pinned_items(case.catalogue, rules, len(case.catalogue.names)):
            place = torch.tensor([case.catalogue.names.index(name)])
            scores[name] = float(path_scores(OneRequest(row), trie, place, softmax=softmax))
        wanted = case.listed(scores, among)
        assert case.names(made.positions) == [name for name, _ in wanted], (seed, row, rules)
        # A log-softmax adds in another order.
        np.testing.assert_allclose(made.scores, [score for _, score in wanted], atol=1e-12)
        assert made.num_left == len(allowed)


CHECKS = {"retrieval": check_retrieval, "cascade": check_cascade, "decoding": check_decoding}


@pytest.mark.parametrize("check", CHECKS)
def test_lists_are_those_of_the_oracle(check, scale):
    for seed in range(scale(300, 5000)):
        CHECKS[check](seed)


SELECT, POOL, CHILDREN = selection.select, AllowedPools.pool, beam._children


def filter_after_the_top(scores, rules, k, *, removed, positions=None, vectors=None):
    best = SELECT(scores, no_rules(rules.num_items), k, removed=NOTHING, positions=positions, vectors=vectors)
    kept = ~np.isin(best.positions, removed)
    kept &= rules.allowed[best.positions] if rules.allowed is not None else True
    return SelectedItems(best.positions[kept], best.scores[kept], rules.num_left(removed))


def pins_obey_the_filter(scores, rules, k, **options):
    if rules.allowed is not None:
        rules = replace(rules, pins=rules.pins[rules.allowed[rules.pins]])
    return SELECT(scores, rules, k, **options)


def caps_before_boosts(scores, rules, k, **options):
    """The list is made by raw scores, and boosts only order it."""
    best = SELECT(scores, replace(rules, bias=None), k, **options)
    if rules.bias is None:
        return best
    scores, num_pins = best.scores + rules.bias[best.positions], min(len(rules.pins), k)
    order = np.concatenate([np.arange(num_pins), num_pins + np.argsort(-scores[num_pins:], kind="stable")])
    return SelectedItems(best.positions[order], scores[order], best.num_left)


def caps_without_pins(scores, rules, k, **options):
    best = SELECT(scores, replace(rules, pins=NOTHING), k, **options)
    return SELECT(scores, rules, k, **options) if not rules.caps else best


def live_everywhere(self, requests):
    """The search does not know the rules; what it finds is filtered."""
    pool = POOL(self, requests)
    return replace(pool, live=tuple(torch.ones_like(one) for one in pool.live))


def renormalised(trie, level, pool, *given):
    """What is left of a branch inherits the probability of what was removed."""
    children, log_probs = CHILDREN(trie, level, pool, *given)
    return children, (log_probs - log_probs.logsumexp(2, keepdim=True)).masked_fill(children < 0, -torch.inf)


def searched_then_filtered(self, query, k, rules, removed):
    found = self.index.search(query, k)
    allowed = np.ones(len(self.items), bool) if rules.allowed is None else rules.allowed
    return found[allowed[found] & ~np.isin(found, removed)]


MUTANTS = [
    ("retrieval", selection, "select", filter_after_the_top),
    ("retrieval", selection, "select", pins_obey_the_filter),
    ("retrieval", selection, "select", caps_before_boosts),
    ("retrieval", selection, "select", caps_without_pins),
    ("retrieval", CompiledRules, "removed", lambda self, seen, *, keeps_seen: np.unique(self.excluded)),
    ("cascade", Retriever, "_search", searched_then_filtered),
    ("cascade", CompiledRules, "removed", lambda self, seen, *, keeps_seen: np.unique(self.excluded)),
    ("decoding", AllowedPools, "pool", live_everywhere),
    ("decoding", beam, "_children", renormalised),
    ("decoding", CompiledRules, "removed", lambda self, seen, *, keeps_seen: np.unique(self.excluded)),
]


@pytest.mark.parametrize(("check", "owner", "name", "mutant"), MUTANTS)
def test_mutants_are_caught(check, owner, name, mutant, monkeypatch):
    monkeypatch.setattr(owner, name, mutant)
    assert any(differs(check, seed) for seed in range(100))


def differs(check, seed):
    try:
        CHECKS[check](seed)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("rank", "is_found"), [(150, True), (250, False)])
def test_diversity_looks_at_the_best_200(rank, is_found):
    """The only item that is unlike the others is taken if it is among them."""
    vectors = np.tile([1.0, 0.0], (300, 1)).astype(np.float32)
    vectors[rank] = [0.0, 1.0]
    rules = replace(no_rules(300), diversity=1.0)
    found = selection.select(-np.arange(300.0), rules, 2, removed=NOTHING, vectors=vectors)
    assert found.positions.tolist() == [0, rank if is_found else 1]
