"""Metrics of recommended lists beyond hits: novelty, diversity, concentration, coverage, and debiased hits; cold and warm targets.

    novelty@k    mean of -log2 p(item) over a list; p = (training events + 1) / (all training events + items)
    ild@k        intra-list diversity: 1 - mean cosine, over pairs of a list, of the sets of training users of the items
    gini@k       inequality of how often items are recommended: 0 all alike, 1 a single item
    coverage@k   share of the catalogue that is in some list
    hr@k/ips     hits weighted by 1 / sqrt(training events + 1) of the target, divided by the sum of the weights; likewise ndcg

Every metric is the mean of one value per user, so that the bootstrap over users gives its interval and `compare` pairs it.
For gini, coverage and ips, which are no means, the value of a user is metric + num_users * influence, where the influence is
what the metric changes by with that user (derivative, or leave-one-out for coverage), less its mean.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split
from nestpipe.eval.eval_report import EvalReport, EvalSlice
from nestpipe.eval.item_neighbours import TrainingEvents, sums_by_key
from nestpipe.eval.topk_metrics import Array, Counts, bootstrap_all, list_length, user_metrics
from nestpipe.eval.user_sample import sampled_users
from nestpipe.jagged import ranges

Lists = NDArray[np.int32]  # [num_users, k], -1 pads
_MAX_EVENTS = 200_000  # of the users that define how alike items are: all, or a fixed sample
_AT_ONCE = 1 << 22


def with_list_metrics(report: EvalReport, sequences: Sequences, split: Split, config: Config) -> EvalReport:
    """The report with the metrics of its lists, and with slices of cold and warm targets."""
    if report.lists is None:
        raise ValueError("a report from a file has no lists")
    events = TrainingEvents.of(sequences, split)
    counts, k, num = events.counts(), list_length(report.ks), config.eval.num_bootstrap
    own = user_metrics(report.rank, (k,), report.num_items)
    weights = 1 / np.sqrt(counts[report.target] + 1.0)
    extra = {
        f"novelty@{k}": novelty(report.lists, counts),
        f"ild@{k}": diversity(report.lists, events, sequences.users),
        f"gini@{k}": gini(report.lists, report.num_items),
        f"coverage@{k}": coverage(report.lists, report.num_items),
        f"hr@{k}/ips": weighted(own[f"hr@{k}"], weights),
        f"ndcg@{k}/ips": weighted(own[f"ndcg@{k}"], weights),
    }
    slices = _by_target(report, counts[report.target], seed=config.seed, num=num)
    return replace(
        report,
        extra=extra,
        metrics=report.metrics | bootstrap_all(extra, seed=config.seed, num=num),
        slices=(*report.slices, *slices),
        coverage={name: share for name, share in report.coverage.items() if name not in extra},
    )


def novelty(lists: Lists, counts: Counts) -> Array:
    """Mean self-information of the items of each list, in bits; 0 for an empty list."""
    bits = -np.log2((counts + 1) / (counts.sum() + len(counts)))
    filled = lists >= 0
    return np.asarray(np.where(filled, bits[lists], 0).sum(1) / np.maximum(filled.sum(1), 1))


def diversity(lists: Lists, events: TrainingEvents, users: Counts) -> Array:
    """1 - mean cosine over the pairs of each list; 1 for a list without pairs.

    With unit vectors x of items over users, the sum over pairs is (|sum x|^2 - sum |x|^2) / 2.
    """
    once = events.once()
    kept = sampled_users(users, max(1, len(users) * _MAX_EVENTS // max(len(once.items), _MAX_EVENTS)))
    is_kept = np.isin(once.users, kept)
    order = np.argsort(once.items[is_kept], kind="stable")
    owner = np.searchsorted(kept, once.users[is_kept][order])
    offsets = np.searchsorted(once.items[is_kept][order], np.arange(events.num_items + 1))
    num_owners = np.diff(offsets)
    entries = np.concatenate([[0], np.cumsum(np.where(lists >= 0, num_owners[lists], 0).sum(1))])
    found, low = np.empty(len(lists)), 0
    while low < len(lists):
        high = max(low + 1, int(np.searchsorted(entries, entries[low] + _AT_ONCE, side="right")) - 1)
        rows, columns = np.nonzero(lists[low:high] >= 0)
        items = lists[low:high][rows, columns]
        num = num_owners[items]
        at = ranges(torch.from_numpy(offsets[items]), torch.from_numpy(num)).numpy()
        entry = np.repeat(1 / np.sqrt(np.maximum(num, 1)), num)  # of a unit vector
        keys, sums = sums_by_key(np.repeat(rows, num) * len(kept) + owner[at], entry, (high - low) * len(kept))
        square = np.bincount(keys // len(kept), sums**2, minlength=high - low)
        single = np.bincount(rows, num > 0, minlength=high - low)
        length = np.bincount(rows, minlength=high - low)
        found[low:high] = 1 - (square - single) / np.maximum(length * (length - 1), 1)
        low = high
    return found


def gini(lists: Lists, num_items: int) -> Array:
    """Gini index of how often each item is recommended, as a value per user."""
    shown = np.bincount(lists[lists >= 0], minlength=num_items)
    total = max(int(shown.sum()), 1)
    _, place, number = np.unique(shown, return_inverse=True, return_counts=True)
    rank = (np.cumsum(number) - (number - 1) / 2)[place]  # mean rank of items that are shown equally often
    moment = float((rank * shown).sum())
    value = 2 * moment / (num_items * total) - (num_items + 1) / num_items if shown.any() else 0.0
    slope = 2 * rank / (num_items * total) - 2 * moment / (num_items * total**2)
    return _per_user(value, np.where(lists >= 0, slope[lists], 0).sum(1))


def coverage(lists: Lists, num_items: int) -> Array:
    """Share of the catalogue in some list, as a value per user; a user's influence is the items that only they are shown."""
    shown = np.bincount(lists[lists >= 0], minlength=num_items)
    only = np.where(lists >= 0, (shown == 1)[lists], False).sum(1)
    return _per_user(float((shown > 0).mean()), only / num_items)


def weighted(values: Array, weights: Array) -> Array:
    """The weighted mean of values, as a value per user."""
    mean = float((weights * values).sum() / weights.sum())
    return _per_user(mean, weights * (values - mean) / weights.sum())


def _per_user(value: float, influence: Array) -> Array:
    return np.asarray(value + len(influence) * (influence - influence.mean()))


def _by_target(report: EvalReport, counts: Counts, *, seed: int, num: int) -> list[EvalSlice]:
    """Slices of users whose target has no training event (cold) and some (warm); none if there is only one kind."""
    masks = {"cold": counts == 0, "warm": counts > 0}
    if not all(mask.any() for mask in masks.values()):
        return []
    per_user = user_metrics(report.rank, report.ks, report.num_items)
    return [
        EvalSlice(
            name,
            int(counts[mask].min()),
            int(counts[mask].max()),
            int(mask.sum()),
            bootstrap_all({metric: values[mask] for metric, values in per_user.items()}, seed=seed, num=num),
            "target",
        )
        for name, mask in masks.items()
    ]
