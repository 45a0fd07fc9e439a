"""Whether one sequence folder holds all that another holds, under the same numbers: then a model of the one serves the other's users."""

from __future__ import annotations

from collections import Counter

import numpy as np

from nestpipe.data.sequences import Sequences

_SAMPLE = 200  # users whose events are compared; ids alone may agree by chance


def why_no_extension(old: Sequences, new: Sequences) -> str:
    """Why a folder is not another one that has grown; empty if it is."""
    if new.digest == old.digest or new.grew_from(old.digest):
        return ""
    if new.schema != old.schema:
        return "has another schema"
    if not _are_numbers_kept(old, new):
        return "numbers users, items or features in another way"
    for name, own, other in (("users", old.users, new.users), ("items", old.catalogue, new.catalogue)):
        if num := int((~np.isin(own, other)).sum()):
            return f"lacks {num:,} {name}"
    places = np.unique(np.linspace(0, max(len(old.users) - 1, 0), min(len(old.users), _SAMPLE)).astype(np.int64))
    users = old.users[places].tolist()
    if num := sum(bool(_events(old, user) - _events(new, user)) for user in users):
        return f"lacks events of {num} of {len(users)} users"
    return ""


def _are_numbers_kept(old: Sequences, new: Sequences) -> bool:
    for name, about in old.meta["encodings"].items():
        if about["encoding"] == "dictionary":
            before = old.vocabulary(name).table
            numbers, known = new.vocabulary(name).numbers_of(before["text"].to_list())
            if not (known.all() and np.array_equal(numbers, before["id"].to_numpy())):
                return False
    return True


def _events(sequences: Sequences, user: int) -> Counter[tuple[int, int]]:
    """How often a user has each item at each time."""
    place = int(np.searchsorted(sequences.users, user))
    own = slice(*sequences.offsets[place : place + 2].tolist())
    items = sequences.items[own].tolist()
    times = [0] * len(items) if sequences.times is None else sequences.times[own].tolist()
    return Counter(zip(items, times, strict=True))
