"""How evaluation is shared among ranks: batches are dealt, what they give is put back in the order of the batches.

    batch     0   1   2   3   4       of a fixed order and size, whatever the number of ranks
    rank      0   1   2   0   1   (2: repeats a batch, because encoding is collective, and drops what it gives)

Nothing here needs a process group: `OneRank` is all ranks of a single process, and training/distributed_eval.py has the ranks of
torchrun. Serving loads this package without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.errors import TrainError


class EvalRanks(Protocol):
    """The processes that evaluate together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, name: str, send: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Sends send[p] to each rank p; returns what each rank sent. Collective.

        All tensors have one type and one shape, but for the first dimension. `sizes`: the first dimension of what each rank
        sends here, if it is known; otherwise sizes are exchanged first.
        """
        ...


class OneRank:
    """A single process."""

    rank, size = 0, 1

    def exchange(self, name: str, send: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        return list(send)


def gather(ranks: EvalRanks, name: str, own: Tensor) -> list[Tensor]:
    """The tensor of every rank; first dimensions may differ. Collective."""
    return ranks.exchange(name, [own] * ranks.size)


def packed(*tensors: Tensor) -> Tensor:
    """The bytes of several tensors, on the host: one message costs less than many."""
    return torch.cat([one.reshape(-1).cpu().view(torch.uint8) for one in tensors])


class Unpacked:
    """Takes the tensors of a packed message, one after the other."""

    def __init__(self, data: Tensor):
        self._data, self._at = data, 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        start, self._at = self._at, self._at + math.prod(shape) * dtype.itemsize
        return self._data[start : self._at].clone().view(dtype).reshape(shape)  # a copy is aligned


def raise_on_all(ranks: EvalRanks, problem: str | None) -> None:
    """Raises TrainError on every rank with the first problem that any of them has. Collective.

    A rank that raised alone would leave the others waiting for it.
    """
    own = torch.tensor(list((problem or "").encode()), dtype=torch.uint8)
    for text in gather(ranks, "problem", own):
        if len(text):
            raise TrainError(bytes(text.tolist()).decode())


def dealt(num_batches: int, ranks: EvalRanks) -> Iterator[tuple[int, bool]]:
    """The batches of this rank, and whether each is its own: all ranks get equally many, so that they stay in step."""
    for turn in range(math.ceil(num_batches / ranks.size)):
        number = turn * ranks.size + ranks.rank
        yield min(number, num_batches - 1), number < num_batches


def in_batch_order(ranks: EvalRanks, name: str, found: Sequence[tuple[int, Tensor]], empty: Tensor) -> Tensor:
    """The rows of all batches of all ranks, in the order of the batches. Collective.

    `found` has (number of the batch, rows) of this rank; `empty` has no rows, but their type and shape.
    """
    numbers = [torch.full((len(rows),), number) for number, rows in found]
    of_row = torch.cat(gather(ranks, f"{name}/batches", torch.cat([torch.empty(0, dtype=torch.int64), *numbers])))
    rows = torch.cat(gather(ranks, name, torch.cat([empty, *(rows for _, rows in found)])))
    return rows.index_select(0, of_row.argsort(stable=True))


def part_of(num_items: int, block: int, ranks: EvalRanks) -> slice:
    """The catalogue positions that this rank scores: whole blocks, as equally many as possible."""
    num_blocks = math.ceil(num_items / block)
    first, last = (num_blocks * rank // ranks.size * block for rank in (ranks.rank, ranks.rank + 1))
    return slice(min(first, num_items), min(last, num_items))
