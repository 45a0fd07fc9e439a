"""Order of events that share a time: as in the log, as Meta's preprocessing leaves them, or shuffled.

A log that is rounded to seconds does not say which of two events was first, but the last one is the test target. So the rule
belongs to every figure: in MovieLens-1M the last movie of a quarter of the users depends on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import ConfigError

Ints = NDArray[np.int64]
FILE, META, NO_TIMES = "file", "meta", "none"
_SHUFFLE = "shuffle:"
_MEANING = {
    FILE: "equal times keep the order of the log",
    META: "equal times are ordered as in Meta's generative-recommenders, by numpy's quicksort of the log",
    NO_TIMES: "the log has no times, its records are in order",
}


def check_ties(ties: str) -> None:
    """Raises ConfigError unless `ties` is file, meta or shuffle:SEED."""
    if ties not in (FILE, META) and not (ties.startswith(_SHUFFLE) and ties.removeprefix(_SHUFFLE).isdecimal()):
        raise ConfigError(f"ties is {ties!r}; it must be {FILE}, {META} or {_SHUFFLE}SEED, for example {_SHUFFLE}0.")


def describe_ties(ties: str) -> str:
    """The rule in words."""
    return _MEANING.get(ties) or f"equal times are shuffled with seed {ties.removeprefix(_SHUFFLE)}"


def order_numbers(ties: str, times: Ints) -> Ints:
    """A number for each event of a log, in the order of the log: of two events with equal times the lower one is first."""
    if ties == FILE:
        return np.arange(len(times))
    if ties == META:
        # pandas' sort_values is this sort. numpy sorts integers with the vector instructions of the machine, which leave equal
        # times in another order; dates take the scalar code, the same everywhere.
        places = np.argsort(times.view("datetime64[ms]"), kind="quicksort")
    else:
        places = np.random.default_rng(int(ties.removeprefix(_SHUFFLE))).permutation(len(times))
    numbers = np.empty(len(times), np.int64)
    numbers[places] = np.arange(len(times))
    return numbers
