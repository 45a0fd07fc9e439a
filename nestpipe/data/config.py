"""Settings of data: the `data` section of a run's configuration, and those of generated logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nestpipe.errors import ConfigError

Format = Literal["auto", "csv", "jsonl", "parquet", "lines"]  # of a log
SYNTHETIC_TOP = 10  # list length of a synthetic log's known metrics

# The generated click log; here, so that its recipe does not import the generator.
CLICKS_START = 1_700_000_000  # seconds since 1970
CLICKS_DAYS, CLICKS_TRAIN_DAYS = 30, 24
CLICKS_SPLIT_TIME = CLICKS_START + CLICKS_TRAIN_DAYS * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which sequences to train on, and how they become batches."""

    path: str = "data/tiny"
    """Sequence folder written by 'nestpipe data'; of s3://... or gs://... every host makes one copy."""
    split: Literal["last", "time"] = "last"
    """Test target: each user's last event, or the first event at or after `split_time`."""
    split_time: str | None = None
    """With split 'time': ISO date or seconds since 1970."""
    validation: bool = False
    """Hold out one more event before the test target for validation; it is not trained on."""
    max_len: int = 200
    """Longest history of a sample; HSTU and FuXi divide attention sums by it (HSTU not if model.divisor is given)."""
    truncate_block: int = 1
    """Histories are cut at multiples of this many events; 1 follows the published protocols, serving likes 256."""
    windows: Literal["last", "all"] = "last"
    """Ranking: train on the last window of each user, or on windows that together have every event as a target once."""
    batch_size: int = 128
    """Samples in a global batch, over all ranks; ignored with a token budget."""
    batch_tokens: int = 0
    """If not 0: fill each global batch with samples up to this many events instead."""
    group_size: int = 1
    """Consecutive samples of the epoch order that form a group: a loss may mix them, and ranks and micro-batches keep them together."""
    balance: bool = False
    """Give ranks samples of equal cost instead of equal numbers of samples; changes the order of sums, nothing else.
    Where pipeline.micro_batches is left open, several ranks do so if it saves 2 % of a step, with costs from FLOP counts."""
    cost_linear: float = 1.0
    """balance: cost per event, in any unit; `nestpipe tune balance RECIPE` measures both costs."""
    cost_square: float = 0.002
    """balance: cost per squared number of events of a sample, in the same unit."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""
    read_ahead: int = 4
    """Batches prepared in the background."""

    def problems(self) -> Iterator[str]:
        if self.group_size > 1 and (self.batch_tokens or self.batch_size % self.group_size):
            yield f"group_size is {self.group_size}, but a batch must hold whole groups; use a batch_size that it divides (not {self.batch_size}) and no batch_tokens"
        for name in ("max_len", "truncate_block", "batch_size", "group_size", "read_ahead"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if min(self.cost_linear, self.cost_square) < 0 or self.cost_linear + self.cost_square == 0:
            yield f"cost_linear and cost_square are {self.cost_linear} and {self.cost_square}; neither may be negative, nor may both be 0"
        if self.batch_tokens < 0:
            yield f"batch_tokens is {self.batch_tokens}; it must be 0 (off) or more"
        if self.truncate_block > self.max_len:
            yield f"truncate_block {self.truncate_block} is above max_len {self.max_len}: nothing would be left of a long history"
        if self.windows == "all" and self.truncate_block == 1 < self.max_len:
            yield f"windows 'all' with truncate_block 1 would be a window per event; use for example {(self.max_len + 1) // 2}"
        if self.split == "time" and self.split_time is None:
            yield "split is 'time', but split_time is not given; name a date, such as --data.split-time 2024-06-01"
        if self.split != "time" and self.split_time is not None:
            yield f"split_time is {self.split_time!r}, but split is '{self.split}'; add --data.split time, or leave the time out"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """The size of a synthetic log and the strength of its signal."""

    num_users: int = 3000
    """Users."""
    num_items: int = 300
    """Items in the catalogue."""
    mean_len: float = 24.0
    """Mean of the log-normal lengths before clipping."""
    spread_len: float = 0.8
    """Standard deviation of the logarithm of the lengths."""
    min_len: int = 5
    """Shortest history."""
    max_len: int = 100
    """Longest history."""
    num_successors: int = 8
    """Items that tend to follow an item; the k-th with a weight of 1 / k."""
    signal: float = 0.8
    """Share of events that follow the planted successors; the others follow popularity."""
    zipf: float = 1.05
    """Exponent of the popularity."""
    tie_share: float = 0.05
    """Share of events at the same second as the event before."""
    seed: int = 0
    """Everything is a function of this and the fields above."""

    def problems(self) -> Iterator[str]:
        for name in ("num_users", "num_successors"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if not 2 <= self.min_len <= self.max_len:
            yield f"lengths from {self.min_len} to {self.max_len}; it takes 2 <= min_len <= max_len"
        if self.num_items < max(2 * self.max_len, SYNTHETIC_TOP + 1) or self.num_items <= self.num_successors:
            yield f"num_items is {self.num_items}; items do not repeat, so it takes at least 2 * max_len = {2 * self.max_len}"
        if not 0 <= self.signal <= 0.99:
            yield f"signal is {self.signal}; it must be in 0 .. 0.99, else a user with all successors seen has no next item"
        if not 0 <= self.tie_share < 1:
            yield f"tie_share is {self.tie_share}; it must be in 0 .. 1, 1 excluded"
        for name in ("mean_len", "spread_len"):
            if not getattr(self, name) > 0:
                yield f"{name} is {getattr(self, name)}; it must be above 0"

    def check(self) -> None:
        """Raises ConfigError with every problem at once."""
        if found := list(self.problems()):
            raise ConfigError("the synthetic data has problems:\n" + "\n".join(f"  - {problem}" for problem in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClicksConfig:
    """The size of a click log and the strength of its interactions."""

    num_users: int = 3000
    """Users."""
    num_items: int = 300
    """Items."""
    num_events: int = 300_000
    """Impressions; four of five are before the split time."""
    strength: float = 0.8
    """Standard deviation of each planted interaction, as a logit."""
    seed: int = 0
    """Everything is a function of this and the fields above."""

    def problems(self) -> Iterator[str]:
        for name in ("num_users", "num_items", "num_events"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if not self.strength >= 0:
            yield f"strength is {self.strength}; it must not be negative"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentLogConfig:
    """The size of a log whose items have content, and the strength of its signal."""

    num_users: int = 3000
    """Users."""
    num_series: int = 60
    """Series of items, each with content of its own."""
    series_items: int = 12
    """Items of a series."""
    new_items: int = 3
    """Items of a series that occur as last events only, so that none is trained on."""
    new_share: float = 0.3
    """Share of the last events by content that are such new items."""
    min_len: int = 5
    """Shortest history."""
    max_len: int = 15
    """Longest history."""
    stay: float = 0.4
    """Share of events of the last item's series."""
    move: float = 0.4
    """Share of events of the series that follows the last item's; the others follow popularity."""
    zipf: float = 1.0
    """Exponent of the popularity."""
    seed: int = 0
    """Everything is a function of this and the fields above."""

    def problems(self) -> Iterator[str]:
        for name in ("num_users", "num_series"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if not 0 <= self.new_items < self.series_items:
            yield f"new_items is {self.new_items} of series_items {self.series_items}; a series needs an item that is not new"
        if not 2 <= self.min_len <= self.max_len:
            yield f"lengths from {self.min_len} to {self.max_len}; it takes 2 <= min_len <= max_len"
        if min(self.stay, self.move) < 0 or self.stay + self.move > 1:
            yield f"stay and move are {self.stay} and {self.move}; they are shares whose sum is at most 1"
        if not 0 <= self.new_share <= 1:
            yield f"new_share is {self.new_share}; it must be in 0 .. 1"

    def check(self) -> None:
        """Raises ConfigError with every problem at once."""
        if found := list(self.problems()):
            raise ConfigError("the content log has problems:\n" + "\n".join(f"  - {problem}" for problem in found))
