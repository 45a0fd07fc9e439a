"""Hot and cold: of the rows of a window, those that a neighbouring window needs too, and the others.

Only rows in two neighbouring batches make one wait for the other. So the rows of the first part and the gradients of the
last one may travel in two messages each: *cold* rows leave while the batch before computes, and *cold* gradients arrive and
are applied while the batch after computes. Hot is what

    into    the batch before holds, on whatever rank: its update comes before the row leaves
    out     the batch after holds, on whatever rank: it waits for the update of this one

Only the owner of a row knows, and tells the askers. What is hot between two batches is known when the ids of the later one
have come from all ranks; it goes to the askers of both in one message. The last batch before a barrier has nothing that is
hot out, the first one after it nothing that is hot in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.embedding.ids import cut
from nestpipe.embedding.route import Requests


@dataclass(slots=True, eq=False)
class Hot:
    """Which rows are hot: a bit for each (uint8); None if no batch comes before or after."""

    into: Tensor | None = None
    out: Tensor | None = None


class Half(NamedTuple):
    """Places of one half, ascending, and how many of them each rank has."""

    places: Tensor
    counts: list[int]


class Cut(NamedTuple):
    """Places 0 .. n-1 of something that ranks share, so many each, cut into two halves."""

    cold: Half
    hot: Half

    @staticmethod
    def of(bits: Tensor | None, among: Tensor | int, counts: list[int]) -> Cut:
        """By the bit of each place: of all n, or of the members `among` [n] to whom the bits belong."""
        if not isinstance(among, int):
            bits, among = None if bits is None else bits.index_select(0, among), len(among)
        cold, hot, hot_counts = cut(hot_bits(bits, among), counts)
        return Cut(
            Half(cold, [count - own for count, own in zip(counts, hot_counts, strict=True)]), Half(hot, hot_counts)
        )


def hot_bits(known: Tensor | None, size: int) -> Tensor:
    """The bits, all 0 where nobody shares anything."""
    return torch.zeros(size, dtype=torch.uint8) if known is None else known


def order_of_halves(requests: Requests, last: Cut) -> Tensor:
    """`requests.arrivals`, if those of the last part are counted through its cold half first and then through the hot one."""
    places = torch.cat([last.cold.places, last.hot.places])
    before = len(requests.arrivals) - len(places)
    number = torch.arange(len(requests.arrivals))
    number[before:].index_copy_(0, places, torch.arange(before, len(number)))
    return number.index_select(0, requests.arrivals)
