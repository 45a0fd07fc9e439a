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

import torch
from torch import Tensor

from nestpipe.embedding.ids import cut
from nestpipe.embedding.route import Requests


@dataclass(slots=True, eq=False)
class Hot:
    """Which rows are hot: a bit for each (uint8); None if no batch comes before or after."""

    into: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Places 0 .. n-1 of something that ranks share, so many each, cut into a cold and a hot half."""

    cold: Tensor
    hot: Tensor
    cold_counts: list[int]  # of each rank
    hot_counts: list[int]

    @staticmethod
    def of(bits: Tensor, counts: list[int]) -> Cut:
        """By the bit of each place."""
        cold, hot, hot_counts = cut(bits, counts)
        return Cut(cold, hot, [count - own for count, own in zip(counts, hot_counts, strict=True)], hot_counts)

    def order(self) -> Tensor:
        """The places of the cold half, then those of the hot one."""
        return torch.cat([self.cold, self.hot])

    def halves(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Room in a buffer [n, ...] for what each rank has in the cold half and in the hot one."""
        pieces = buffer.split(self.cold_counts + self.hot_counts)
        return list(pieces[: len(self.cold_counts)]), list(pieces[len(self.cold_counts) :])


def hot_bits(known: Tensor | None, size: int) -> Tensor:
    """The bits, all 0 where nobody shares anything."""
    return torch.zeros(size, dtype=torch.uint8) if known is None else known


def order_of_halves(requests: Requests, last: Cut) -> Tensor:
    """`requests.arrivals`, if those of the last part are counted through its cold half first and then through the hot one."""
    before = len(requests.arrivals) - len(last.cold) - len(last.hot)
    number = torch.arange(len(requests.arrivals))
    number[before:].index_copy_(0, last.order(), torch.arange(before, len(number)))
    return number.index_select(0, requests.arrivals)
