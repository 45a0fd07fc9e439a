"""Baselines that every model should beat, fitted on training events in seconds and ranked like a model.

    popularity          items with most training events, for everyone
    last_item           what follows the last item (transitions within 5 events)
    transitions         the same for the last 5 items, the d-th last with weight 1 / d
    item_knn            items that share users with the last 50 items (cosine, 100 neighbours each), weighted likewise
    content_knn         items whose features are like those of the last 50 items, weighted likewise; for logs with item features

An item that a baseline gives no score comes behind all others, in the order of popularity. Settings were
set by hand after a look at test figures of MovieLens-1M and Amazon Beauty: there the baselines are, if anything, too good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from nestpipe.config import Config
from nestpipe.data.item_feature_rows import item_feature_rows
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split
from nestpipe.eval.catalogue_predictor import catalogue_positions
from nestpipe.eval.catalogue_ranking import RankedTargets, removed
from nestpipe.eval.content_neighbours import MAX_ITEMS, content_neighbours
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.item_neighbours import ItemNeighbours, TrainingEvents, cosine_neighbours, transitions
from nestpipe.eval.predictor import EvalBatches, popularity
from nestpipe.eval.protocol import Target, protocol_of
from nestpipe.eval.retrieval_eval import EvalBatch, evaluate_ranked
from nestpipe.eval.topk_metrics import Array, Counts
from nestpipe.jagged import Jagged, ranges

Baseline = Literal["popularity", "last_item", "transitions", "item_knn", "content_knn"]
BASELINES: dict[Baseline, str] = {
    "popularity": "popularity baseline",
    "last_item": "last-item transitions",
    "transitions": "transitions of 5 items",
    "item_knn": "item kNN",
    "content_knn": "content kNN",
}
_WINDOW, _NUM_NEIGHBOURS = 5, 100
_NUM_RECENT: dict[Baseline, int] = {"last_item": 1, "transitions": 5, "item_knn": 50, "content_knn": 50}


@dataclass(frozen=True, slots=True, eq=False)
class NeighbourScorer:
    """Scores items by the neighbours of the last `num_recent` items of a history; the d-th last one counts 1 / d."""

    neighbours: ItemNeighbours
    num_items: int
    num_recent: int

    def scores(self, histories: Jagged) -> Array:
        """Sums of weights [B, I] for histories of catalogue positions; 0 for an item that is no neighbour."""
        lengths = histories.lengths().numpy()
        used = np.minimum(lengths, self.num_recent)
        rows = np.repeat(np.arange(len(lengths)), used)
        ends = histories.offsets[1:].numpy()
        events = ranges(torch.from_numpy(ends - used), torch.from_numpy(used)).numpy()
        sources = histories.values.numpy()[events]
        rates = 1.0 / (ends[rows] - events)
        edges = self.neighbours
        num = np.diff(edges.offsets)[sources]
        at = ranges(torch.from_numpy(edges.offsets[sources]), torch.from_numpy(num)).numpy()
        keys = np.repeat(rows, num) * self.num_items + edges.items[at]
        weights = np.repeat(rates, num) * edges.weights[at]
        sums = np.bincount(keys, weights, minlength=len(lengths) * self.num_items)
        return sums.astype(np.float64).reshape(-1, self.num_items)


def evaluate_baselines(
    sequences: Sequences,
    split: Split,
    config: Config,
    target: Target = "test",
    *,
    names: Iterable[Baseline] = tuple(BASELINES),
) -> dict[Baseline, EvalReport]:
    """The reports of baselines on the targets, and in the protocol, of a run with these settings."""
    events = TrainingEvents.of(sequences, split)
    counts = events.counts()
    found: dict[Baseline, EvalReport] = {}
    for name in names:
        if name == "content_knn" and not has_content(sequences, config):
            continue
        if name == "popularity":
            report = popularity(sequences, split, config, target)
        else:
            scorer = _scorer(name, events, sequences, config)
            rank = _ranker(sequences, scorer, counts, config)
            samples = EvalBatches(sequences, split, config, target)
            report = evaluate_ranked(rank, events.num_items, samples, config.eval, config.seed)
        found[name] = replace(report, protocol=protocol_of(sequences, config, target))
    return found


def has_content(sequences: Sequences, config: Config) -> bool:
    """Whether items can be compared by content: they have features, and are few enough to compare all pairs."""
    return bool(content_names(sequences, config)) and len(sequences.catalogue) <= MAX_ITEMS


def content_names(sequences: Sequences, config: Config) -> list[str]:
    """The item features that a run reads, or all of the log; without texts, whose vectors belong to a model."""
    known = [feature.name for feature in sequences.schema.of_scope("item")]
    wanted = getattr(config.model, "item_features", ())
    return [name for name in known if name in wanted] or known


def _scorer(name: Baseline, events: TrainingEvents, sequences: Sequences, config: Config) -> NeighbourScorer:
    if name == "content_knn":
        content = item_feature_rows(sequences, content_names(sequences, config))
        edges = content_neighbours(content, np.array(sequences.catalogue), num_neighbours=_NUM_NEIGHBOURS)
    elif name == "item_knn":
        edges = cosine_neighbours(events, num_neighbours=_NUM_NEIGHBOURS)
    else:
        edges = transitions(events, window=_WINDOW)
    return NeighbourScorer(edges, events.num_items, _NUM_RECENT[name])


def _ranker(
    sequences: Sequences, scorer: NeighbourScorer, counts: Counts, config: Config
) -> Callable[[EvalBatch, bool], RankedTargets]:
    at_once = max(1, config.eval.max_bytes // (32 * scorer.num_items))  # four arrays of eight bytes

    def rank(sample: EvalBatch, is_own: bool) -> RankedTargets:
        seen = None if config.eval.seen == "none" else sample.seen
        history = sample.batch.items.with_values(
            torch.from_numpy(catalogue_positions(sequences, sample.batch.items.values.numpy()))
        )
        parts = []
        for rows in torch.arange(len(sample.users)).split(at_once):
            own = None if seen is None else seen.select(rows)
            targets = sample.target_positions[rows]
            parts.append(
                rank_by_scores(scorer.scores(history.select(rows)), counts, targets.numpy(), own, k=max(config.eval.ks))
            )
        return RankedTargets(torch.cat([one.ranks for one in parts]), torch.cat([one.top for one in parts]))

    return rank


def rank_by_scores(scores: Array, counts: Counts, targets: Counts, seen: Jagged | None, *, k: int) -> RankedTargets:
    """Ranks by scores [B, I]; items without a score follow by training counts [I], then position. `seen` is removed."""
    num_users, num_items = scores.shape
    order = np.argsort(-counts, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(num_items)
    final = np.where(scores > 0, scores, -1.0 - place)
    if seen is not None:
        final[seen.row_of_value().numpy(), seen.values.numpy()] = -np.inf
    users = np.arange(num_users)
    own, own_place = final[users, targets][:, None], place[targets][:, None]
    before = (final > own).sum(1) + ((final == own) & (place < own_place)).sum(1)
    k_best = min(k, num_items)
    lowest = torch.from_numpy(final).topk(k_best, dim=1).values[:, -1:].numpy()
    rows, items = np.nonzero((final >= lowest) & (final > -np.inf))
    ranked = np.lexsort((place[items], -final[rows, items], rows))
    rows, items = rows[ranked], items[ranked]
    at = np.arange(len(rows)) - np.searchsorted(rows, rows)
    top = np.full((num_users, k_best), -1)
    top[rows[at < k_best], at[at < k_best]] = items[at < k_best]
    ranks = torch.from_numpy(before + 1)
    is_removed = removed(torch.from_numpy(targets), seen)
    return RankedTargets(
        ranks.masked_fill(is_removed, num_items + 1), F.pad(torch.from_numpy(top), (0, k - k_best), value=-1)
    )
