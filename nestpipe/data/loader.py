"""The data loader: training batches of a split, with a cursor to resume from.

The global batch at a cursor is a pure function of (seed, epoch, number): the epoch's samples in the order of a keyed bijection,
divided by count or by a token budget. The loader keeps no state between batches, so resuming is starting at a cursor, and reading
ahead in a thread does not change the batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.config import DataConfig
from nestpipe.data.features import NumberStats
from nestpipe.data.load_balance import SampleCost, assign
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.splits import Split, Windows, disjoint_windows, overlapping_windows
from nestpipe.errors import DataError
from nestpipe.jagged import Batch, Cursor
from nestpipe.rng import EpochOrder

_PART = 1 << 16  # samples whose lengths are read at a time


class Loader:
    """The training batches of a split."""

    def __init__(
        self,
        sequences: Sequences,
        split: Split,
        config: DataConfig,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        inputs: ModelInputs | None = None,
    ):
        self._config, self._seed = config, seed
        self._rank, self._world_size = rank, world_size
        inputs = inputs or ModelInputs()
        self._builder = BatchBuilder(sequences, split, inputs)
        num_rows = split.train_end - (inputs.layout == "next")
        if config.windows == "all":
            first, max_len = np.zeros_like(num_rows), config.max_len
            if inputs.layout == "next":
                self._windows = overlapping_windows(first, num_rows, max_len=max_len, block=config.truncate_block)
            else:
                self._windows = disjoint_windows(first, num_rows, max_len=max_len)
            self._samples = torch.arange(len(self._windows))
        else:
            start = truncate(np.maximum(num_rows, 0), config.max_len, config.truncate_block)
            self._windows = Windows(np.arange(len(num_rows)), start, start, num_rows)
            self._samples = torch.from_numpy(np.flatnonzero(num_rows >= 1))
        if not len(self._samples):
            raise DataError(
                f"{sequences.path} has no user with two training events under this split, so there is nothing to predict. Ingest longer histories, or use another split (--data.split)."
            )
        self._cuts = lru_cache(maxsize=2)(self._epoch)

    @property
    def statistics(self) -> dict[str, NumberStats]:
        """Statistics that transform the number features."""
        return self._builder.statistics

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def num_batches(self, epoch: int) -> int:
        return len(self._cuts(epoch)[1]) - 1

    def batch(self, cursor: Cursor) -> Batch:
        """This rank's share of the global batch at a cursor."""
        order, cuts = self._cuts(cursor.epoch)
        first, last = cuts[cursor.number], cuts[cursor.number + 1]
        places, groups = self._balanced(order, first, last) if self._config.balance else self._share(first, last)
        return dataclasses.replace(self.batch_of(self._samples_at(order, places), cursor), groups=groups)

    def batch_of(self, samples: Tensor, cursor: Cursor) -> Batch:
        """A training batch of some samples."""
        return self._builder.training(cursor, samples, self._windows.pick(samples.numpy()))

    def lengths(self, samples: Tensor | None = None) -> Tensor:
        """The number of events of some samples, or of all samples of an epoch."""
        windows = self._windows.pick((self._samples if samples is None else samples).numpy())
        return torch.from_numpy(windows.end - windows.start)

    def batch_lengths(self, number: int) -> Tensor:
        """The number of events of each sample of a global batch of the first epoch."""
        order, cuts = self._cuts(0)
        return self.lengths(self._samples_at(order, torch.arange(cuts[number], cuts[number + 1])))

    @property
    def samples(self) -> Tensor:
        """All samples of an epoch."""
        return self._samples

    def _share(self, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Epoch positions of this rank's samples of a global batch, and their groups, which are never divided."""
        size, places = self._config.group_size, torch.arange(first, last)
        if size == 1:
            return places.tensor_split(self._world_size)[self._rank], None
        own = torch.arange(first // size, -(-last // size)).tensor_split(self._world_size)[self._rank]
        places = places[torch.isin(places // size, own)]
        return places, places // size

    def _samples_at(self, order: EpochOrder, places: Tensor) -> Tensor:
        return self._samples.index_select(0, order.at(places))

    def _balanced(self, order: EpochOrder, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """The same with load balance; every rank computes the whole assignment and takes its own samples."""
        size, places = self._config.group_size, torch.arange(first, last)
        samples = self._samples_at(order, places)
        costs = SampleCost(self._config.cost_linear, self._config.cost_square).of(self.lengths(samples).numpy())
        if size == 1:
            rank_of = assign(costs, samples.numpy(), self._world_size)
            return places[torch.from_numpy(rank_of == self._rank)], None
        groups = places // size
        numbers, unit = groups.unique(return_inverse=True)
        of_groups = np.bincount(unit.numpy(), weights=costs).astype(np.float64)
        own = assign(of_groups, numbers.numpy(), self._world_size)[unit.numpy()] == self._rank
        return places[torch.from_numpy(own)], groups[torch.from_numpy(own)]

    def iterate(self, start: Cursor) -> Generator[Batch]:
        """An endless iterator of batches from a cursor on; its reader thread ends with it."""
        ready: queue.Queue[Batch | BaseException] = queue.Queue(self._config.read_ahead)
        stop = threading.Event()

        def put(entry: Batch | BaseException) -> None:
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(entry, timeout=0.1)
                    return

        def read() -> None:
            try:
                for cursor in self._cursors(start):
                    if stop.is_set():
                        return
                    put(self.batch(cursor))
            except BaseException as error:  # raised by the consumer
                put(error)

        thread = threading.Thread(target=read, name="nestpipe-loader", daemon=True)
        thread.start()
        try:
            while True:
                entry = ready.get()
                if isinstance(entry, BaseException):
                    raise entry
                yield entry
        finally:
            stop.set()
            with contextlib.suppress(queue.Empty):  # unblocks the reader thread
                while True:
                    ready.get_nowait()
            thread.join()

    def next_cursor(self, cursor: Cursor) -> Cursor:
        if cursor.number + 1 < self.num_batches(cursor.epoch):
            return Cursor(cursor.epoch, cursor.number + 1)
        return Cursor(cursor.epoch + 1, 0)

    def _cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        while True:
            yield cursor
            cursor = self.next_cursor(cursor)

    def _epoch(self, epoch: int) -> tuple[EpochOrder, Sequence[int]]:
        """The order of an epoch, of which only a batch's samples are computed, and where its batches begin and end."""
        num_samples = len(self._samples)
        order = EpochOrder(num_samples, seed=self._seed, epoch=epoch)
        if self._config.batch_tokens:
            cuts = self._token_cuts(order)
        else:
            cuts = [*range(0, num_samples, self._config.batch_size), num_samples]
        # The short last batch is kept if it is the only one.
        if self._config.drop_last and len(cuts) > 2:
            cuts = cuts[:-1] if self._config.batch_tokens or num_samples % self._config.batch_size else cuts
        return order, cuts

    def _token_cuts(self, order: EpochOrder) -> list[int]:
        """Batch boundaries: as many samples as fit the budget, at least one."""
        budget, cuts, filled, place = self._config.batch_tokens, [0], 0, 0
        for places in torch.arange(order.size).split(_PART):
            for tokens in self.lengths(self._samples_at(order, places)).tolist():
                if filled and filled + tokens > budget:
                    cuts.append(place)
                    filled = 0
                filled += tokens
                place += 1
        return [*cuts, order.size]


@contextlib.contextmanager
def closing_batches(batches: Generator[Batch]) -> Iterator[Generator[Batch]]:
    """Closes the batches at the end."""
    try:
        yield batches
    finally:
        with contextlib.suppress(ValueError):  # after a failure a stream may still be reading
            batches.close()
