"""A list made of scored items under compiled rules: the same code behind retrieval, ranking, decoding and popularity.

    scores --boost--> the best by score --max_per--> the best max(200, 10 k) --diversity--> behind the pins

Ties keep the order of the items. Pinned items count for `max_per`, and the others are compared with them for `diversity`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.errors import TrainError
from nestpipe.rules.compiled_rules import CompiledRules
from nestpipe.rules.field_masks import ItemGroups
from nestpipe.rules.item_attributes import Ints, Mask
from nestpipe.rules.rule_set import RuleError

Scores = NDArray[Any]
_MIN_POOL, _POOL_PER_ITEM = 200, 10  # of `diversity`
_CHUNK = 1024  # best items that `max_per` looks at together, and four times as many as it wants
_FEW = 4  # with fewer than a quarter of the items allowed, their vectors are gathered


class SelectedItems(NamedTuple):
    """Positions in the catalogue with their scores, best first but for pins; `num_left` items passed what removes."""

    positions: Ints
    scores: Scores
    num_left: int


def select(
    scores: Scores,
    rules: CompiledRules,
    k: int,
    *,
    removed: Ints,
    positions: Ints | None = None,
    vectors: Scores | None = None,
) -> SelectedItems:
    """The list of k under the rules, of items at distinct positions [n], or of all [I].

    `removed` is `rules.removed(...)`; `vectors` [I, D] are those of all items, for `diversity`. Raises RuleError without them.
    """
    if not np.isfinite(scores).all():
        raise TrainError("a score is not finite; the model has diverged. Serve an earlier checkpoint.")
    if rules.bias is not None:
        scores = scores + (rules.bias if positions is None else rules.bias[positions])
    pins = _places(rules.pins, positions)[:k]
    left = np.where(_usable(rules, removed, pins, positions, len(scores)), scores, -np.inf)
    wanted = k - len(pins)
    pool = max(_MIN_POOL, _POOL_PER_ITEM * k) if rules.diversity else wanted
    found = _best_capped(left, rules, pool, pins, positions) if rules.caps else top_places(left, pool)
    if rules.diversity:
        if vectors is None:
            raise RuleError("diversity", "needs item vectors, which this model does not have. Leave it out.")
        among = np.concatenate([pins, found])
        chosen = _diverse(scores[found], vectors[among if positions is None else positions[among]], rules, wanted)
        found = found[chosen]
    order = np.concatenate([pins, found])
    return SelectedItems(order if positions is None else positions[order], scores[order], rules.num_left(removed))


def best_by_vector(
    vectors: Scores, query: Scores, rules: CompiledRules, k: int, *, removed: Ints, directions: Scores | None = None
) -> SelectedItems:
    """The list of k by dot products with all vectors [I, D]; only allowed ones are read where these are few.

    `directions` are the vectors of `diversity`, by default the same.
    """
    about = vectors if directions is None else directions
    if rules.allowed is not None and _FEW * rules.num_allowed < rules.num_items:
        few = np.flatnonzero(rules.allowed)
        positions = np.concatenate([few, rules.pins[~rules.allowed[rules.pins]]])
        return select(vectors[positions] @ query, rules, k, removed=removed, positions=positions, vectors=about)
    return select(vectors @ query, rules, k, removed=removed, vectors=about)


def top_places(values: Scores, k: int) -> Ints:
    """The places of the k highest values above -inf, best first; equal ones in their order."""
    if 0 < k < len(values):
        bar = torch.from_numpy(values).topk(k, sorted=False).values.amin().item()
        above, level = np.flatnonzero(values > bar), np.flatnonzero(values == bar)
        places = np.sort(np.concatenate([above, level[: k - len(above)]]))
    else:
        places = np.arange(len(values) if k > 0 else 0)
    places = places[values[places] > -np.inf]
    ordered: Ints = places[np.argsort(-values[places], kind="stable")]
    return ordered


def _places(pins: Ints, positions: Ints | None) -> Ints:
    """The places of pinned items among the scored ones, in the order of the pins."""
    if positions is None:
        return pins
    order = np.argsort(positions, kind="stable")
    found = np.minimum(np.searchsorted(positions[order], pins), max(len(order) - 1, 0))
    places = order[found] if len(order) else order
    return places[positions[places] == pins] if len(order) else places


def _usable(rules: CompiledRules, removed: Ints, pins: Ints, positions: Ints | None, num_scores: int) -> Mask:
    """The places that the rules leave; pins are placed already."""
    if positions is None:
        mask = np.ones(num_scores, np.bool_) if rules.allowed is None else rules.allowed.copy()
        mask[removed] = False
    else:
        mask = ~np.isin(positions, removed)
        if rules.allowed is not None:
            mask &= rules.allowed[positions]
    mask[pins] = False
    return mask


def _best_capped(left: Scores, rules: CompiledRules, most: int, pins: Ints, positions: Ints | None) -> Ints:
    """Greedily the best `most` places whose groups are not full. After each chunk no item of a full group is left.

    So the first item of a chunk is always taken, and a chunk is as long as the catalogue only if all of it is taken.
    """
    caps = [(cap.at(positions), cap.most) for cap in rules.caps]
    counts = [np.bincount(groups.take(pins).values, minlength=groups.size) for groups, _ in caps]
    found: list[int] = []
    left = left.copy()
    while len(found) < most:
        for (groups, cap), count in zip(caps, counts, strict=True):
            left[groups.rows_in(count >= cap)] = -np.inf
        chunk = top_places(left, _CHUNK + 4 * (most - len(found)))
        if not len(chunk):
            break
        taken = _take_capped(chunk, [(groups.take(chunk), cap) for groups, cap in caps], counts, most - len(found))
        found += chunk[taken].tolist()
        left[chunk] = -np.inf
    return np.array(found, np.int64)


def _take_capped(
    chunk: Ints, caps: list[tuple[ItemGroups, int]], counts: list[NDArray[np.int64]], most: int
) -> list[int]:
    """Which of a chunk are taken, in its order; raises the counts of their groups."""
    rows = list(zip(*(groups.lists() for groups, _ in caps), strict=True))
    taken: list[int] = []
    for place, own in enumerate(rows):
        if len(taken) == most:
            break
        if all(counts[one][group] < caps[one][1] for one, groups in enumerate(own) for group in groups):
            taken.append(place)
            for one, groups in enumerate(own):
                counts[one][groups] += 1
    return taken


def _diverse(scores: Scores, vectors: Scores, rules: CompiledRules, wanted: int) -> list[int]:
    """Greedy MMR: each step takes the highest (1 - d) relevance - d cosine, of the nearest item taken before.

    Relevance is the score, scaled to 0 .. 1 over the pool. `vectors` begin with those of the pins.
    """
    if not len(scores) or wanted < 1:
        return []
    length = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    directions = np.divide(vectors, length, out=np.zeros(vectors.shape), where=length > 0)
    first = len(vectors) - len(scores)
    pins, pool = directions[:first], directions[first:]
    lowest, highest = float(scores.min()), float(scores.max())
    relevance = (scores.astype(np.float64) - lowest) / (highest - lowest) if highest > lowest else np.zeros(len(scores))
    weighed = (1 - rules.diversity) * relevance
    nearest = (pool @ pins.T).max(axis=1) if first else np.full(len(pool), -np.inf)
    chosen: list[int] = []
    for _ in range(min(wanted, len(pool))):
        # Nothing is near the first item of a list.
        values = weighed - rules.diversity * nearest if np.isfinite(nearest[0]) else weighed.copy()
        values[chosen] = -np.inf
        chosen.append(int(values.argmax()))
        nearest = np.maximum(nearest, pool @ pool[chosen[-1]])
    return chosen
