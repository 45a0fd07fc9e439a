"""Top-k metrics of ranks: coverage, per-user metrics, bootstrap intervals, slices by history length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.errors import DataError
from nestpipe.eval.eval_ranks import EvalRanks, gather

Array = NDArray[np.float64]
Counts = NDArray[np.int64]


class Coverage:
    """The best rank of each item in any top list; 4 bytes per item, for any number of users."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._best = torch.full((num_items + 1,), torch.iinfo(torch.int32).max, dtype=torch.int32)

    def add(self, top: Tensor) -> None:
        """Adds lists [B, k]; padding (-1) goes to the spare last entry."""
        places = torch.arange(1, top.shape[1] + 1, dtype=torch.int32).expand(top.shape)
        positions = top.cpu().remainder(self._num_items + 1)
        self._best.scatter_reduce_(0, positions.reshape(-1), places.reshape(-1), "amin")

    def shares(self, ks: Sequence[int], ranks: EvalRanks) -> dict[str, float]:
        """coverage@k: the share of the catalogue that is in a top-k list of any rank. Collective.

        Each rank takes the minimum over all ranks for its share of the items, and counts.
        """
        own = torch.stack(ranks.exchange("coverage", self._best[: self._num_items].tensor_split(ranks.size))).amin(0)
        counts = sum(gather(ranks, "covered", torch.tensor([[int((own <= k).sum()) for k in ks]])))
        found = torch.as_tensor(counts)[0].tolist()
        return {f"coverage@{k}": num / max(1, self._num_items) for k, num in zip(ks, found, strict=True)}


def list_length(ks: Sequence[int]) -> int:
    """The list length at which lists themselves are measured: the largest up to 10, else the shortest."""
    return max((k for k in ks if k <= 10), default=min(ks))


def user_metrics(ranks: Counts, ks: Sequence[int], num_items: int) -> dict[str, Array]:
    """hr@k, ndcg@k and mrr of each user (one target each); 0 if the target was removed from the ranking."""
    is_ranked = ranks <= num_items
    metrics: dict[str, Array] = {}
    for k in ks:
        metrics[f"hr@{k}"] = (is_ranked & (ranks <= k)).astype(np.float64)
    for k in ks:
        metrics[f"ndcg@{k}"] = metrics[f"hr@{k}"] / np.log2(ranks + 1.0)
    metrics["mrr"] = is_ranked / ranks
    return metrics


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over users and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def resamples(num_users: int, *, seed: int, num: int) -> Iterator[Counts]:
    """How often each user is drawn in each bootstrap resample; one at a time, to bound memory."""
    random = np.random.default_rng(seed)
    for _ in range(num):
        yield np.bincount(random.integers(num_users, size=num_users), minlength=num_users)


def bootstrap_all(columns: Mapping[str, Array], *, seed: int, num: int = 1000) -> dict[str, Interval]:
    """95 % percentile intervals of the means of several per-user columns, from the same resamples of users."""
    values = np.stack(list(columns.values()), axis=1).astype(np.float64)
    num_users = len(values)
    if not num_users:
        raise DataError(
            "there are no users to average over: the evaluation had no samples. Use a split with test targets."
        )
    means = np.empty((num, values.shape[1]))
    for index, counts in enumerate(resamples(num_users, seed=seed, num=num)):
        means[index] = counts @ values / num_users
    lows, highs = np.percentile(means, [2.5, 97.5], axis=0)
    table = zip(columns, values.mean(axis=0), lows, highs, strict=True)
    return {name: Interval(float(mean), float(low), float(high)) for name, mean, low, high in table}


def bootstrap(values: Array, seed: int, num: int = 1000) -> Interval:
    """The 95 % percentile interval of the mean of per-user values [n]."""
    return bootstrap_all({"": values}, seed=seed, num=num)[""]


def paired_difference(a: Array, b: Array, seed: int, num: int = 1000) -> Interval:
    """The interval of mean(b - a) over the same users, in the same order."""
    if a.shape != b.shape:
        raise DataError(
            f"a paired difference needs the same users in both, but there are {len(a)} and {len(b)} values. Evaluate both runs on the same users."
        )
    return bootstrap(b - a, seed, num)


class Tertile(NamedTuple):
    """Users with history lengths low .. high, inclusive."""

    name: str
    low: int
    high: int
    mask: NDArray[np.bool_]


def tertiles(lengths: Counts) -> list[Tertile]:
    """Short, medium and long histories, about a third of the users each; empty ones are left out."""
    first, second = np.quantile(lengths, [1 / 3, 2 / 3], method="lower")
    masks = {
        "short": lengths <= first,
        "medium": (lengths > first) & (lengths <= second),
        "long": lengths > second,
    }
    return [
        Tertile(name, int(lengths[mask].min()), int(lengths[mask].max()), mask)
        for name, mask in masks.items()
        if mask.any()
    ]
