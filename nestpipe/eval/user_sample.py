"""The fixed random sample of users that `eval.max_users` evaluates."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.splits import Ints
from nestpipe.rng import Rng


def sampled_users(users: NDArray[np.int64], max_users: int) -> Ints:
    """Places, ascending, of at most `max_users` distinct user ids; all if it is 0.

    Taken are the smallest hashes of the ids. So runs of any seed and number of ranks evaluate the same users, which `compare`
    pairs, and a smaller sample is part of a larger one.
    """
    if not max_users or len(users) <= max_users:
        return np.arange(len(users))
    keys = Rng(0, 0).keys("evaluated users", torch.from_numpy(users.astype(np.int64))).numpy()
    return np.sort(np.argpartition(keys, max_users - 1)[:max_users])
