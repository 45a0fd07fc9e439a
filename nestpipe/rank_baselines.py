"""What a ranking model must beat: the mean of the item, and biases of user and item."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nestpipe.ranking_metrics import Array, Counts

Index = NDArray[np.int64]


def item_mean(items: Counts, answers: Array, num_items: int, *, prior: float = 5.0) -> Array:
    """The mean answer of each item [I], drawn towards the mean of all by as many events as the prior says."""
    overall = float(answers.mean())
    sums = np.bincount(items, weights=answers, minlength=num_items)
    counts = np.bincount(items, minlength=num_items)
    return np.asarray((sums + prior * overall) / (counts + prior))


def user_item_bias(
    users: Counts,
    items: Counts,
    answers: Array,
    *,
    num_users: int,
    num_items: int,
    prior: float = 10.0,
    rounds: int = 20,
) -> tuple[float, Array, Array]:
    """Ridge regression answer = mean + user + item by alternating exact steps: the mean, biases [U] and [I]."""
    overall = float(answers.mean())
    of_user, of_item = np.zeros(num_users), np.zeros(num_items)
    for _ in range(rounds):
        of_item = _bias(items, answers - overall - of_user[users], num_items, prior)
        of_user = _bias(users, answers - overall - of_item[items], num_users, prior)
    return overall, of_user, of_item


def _bias(groups: Index, rest: Array, num_groups: int, prior: float) -> Array:
    sums = np.bincount(groups, weights=rest, minlength=num_groups)
    return np.asarray(sums / (np.bincount(groups, minlength=num_groups) + prior))
