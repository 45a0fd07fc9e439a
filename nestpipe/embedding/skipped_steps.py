"""The steps that Adam makes on a row between two lookups, in closed form.

Dense Adam moves a row in every step: without a gradient its moments decay and it follows what is left of its mean. A row that has
seen s batches, with mean m and root σ of its second moment, is at batch t where t - s such steps lead, i = s + k:

    w  <-  Π keep_i · w  -  m · F(σ)          F(σ) = Σ_k  a_k / (q_k σ + eps)
    a_k = lr_i β1^k / (1 - β1^i) · (weight decay after i)            q_k = sqrt(β2^k / (1 - β2^i))

F depends on (s, t) and σ only. With a centre c of the q_k and z_k = (q_k - c) / (q_k + c), every term is a geometric series in

    r = (eps - c σ) / (eps + c σ),  |r| <= 1:         F(σ) = 1 / (eps + c σ) · Σ_j D_j r^j        D_j = Σ_k a_k (1 - z_k) z_k^j

It holds for every σ, also where eps matters. The D_j are sums over the steps, so a batch adds one term to each s: O(horizon) per batch
and table, whatever the number of rows. After `horizon` steps the mean has decayed, and an entry is *settled*: it does not change any more.
Of the first few batches the q_k are too far apart for the series; rows of those batches, and all rows in fp64, walk step by step.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestpipe.embedding.config import OptimizerConfig
from nestpipe.ops.device_memory import upload

ORDER = 8  # of the series; kOrder in adam.cpp
ENTRY = ORDER + 3  # centre, keep, coefficients
_TOLERANCE = 5e-7  # of the series, relative to the movement of a row
_CUT = {torch.float32: 1e-9, torch.float64: 1e-15}  # of the movement that is left at the horizon
_NEVER = 1 << 31
_MAX_CACHED = 16  # batches in flight, and a few more
_BLOCK = 1 << 14  # entries computed at a time
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class MissedSteps:
    """What rows have missed before batch `step`, by the number of batches that they have seen."""

    config: OptimizerConfig
    step: int
    settled: Tensor  # [S, ENTRY]
    recent: Tensor  # [step - S, ENTRY]; no rows where there is no series
    late: Tensor  # [S]: what weight decay leaves of a weight after the horizon; empty without decay
    rates: Tensor  # by step, of the steps that rows walk
    keeps: Tensor  # what weight decay leaves of a weight in these steps
    powers: Tensor  # [>= step + 1, 2]: beta ** steps for both betas
    corrections: Tensor  # [>= step + 2, 2]: 1 - beta ** steps
    horizon: int
    first_series: int

    @property
    def num_settled(self) -> int:
        return max(self.step - self.horizon, 0)

    def on(self, device: torch.device) -> MissedSteps:
        """The same on a device."""
        if device.type == self.settled.device.type:
            return self
        return replace(
            self,
            settled=upload(self.settled, device),
            recent=upload(self.recent, device),
            late=upload(self.late, device),
            rates=upload(self.rates, device),
            keeps=upload(self.keeps, device),
            powers=upload(self.powers, device),
            corrections=upload(self.corrections, device),
        )


class SkippedSteps:
    """The learning rates of a table's batches, and what they do to rows without a gradient. Any thread may call."""

    def __init__(self, config: OptimizerConfig, dtype: torch.dtype):
        self._config, self._dtype = config, dtype
        self.horizon = horizon(config, _CUT[dtype])
        self.first_series = first_series(config.beta1, config.beta2) if dtype == torch.float32 else _NEVER
        self._lock = threading.Lock()
        self._rates = np.empty(0)
        self._num_rates = 0
        self._base = 0  # steps before batch 0, of the run that this one was initialised from
        self._tables: dict[str, Tensor] = {}
        self._settled = torch.empty(0, ENTRY)
        self._num_settled = 0
        self._recent: _Entries | None = None
        self._cached: OrderedDict[int, MissedSteps] = OrderedDict()

    def record(self, batch: int, lr: float) -> None:
        """Notes the learning rate of a batch; a batch that is read again may bring another."""
        with self._lock:
            step = self._base + batch
            if step < self._num_rates and self._rates[step] == lr:
                return
            if step > self._num_rates:
                raise ValueError(
                    f"the learning rate of batch {batch} comes after that of batch {self._num_rates - self._base - 1}; "
                    "exact Adam needs that of every batch, also of skipped ones"
                )
            if step < self._num_rates:
                self._forget(step)
            self._rates = _grown(self._rates, step + 1)
            self._rates[step] = lr
            self._num_rates = step + 1

    def rates(self, num_batches: int) -> Tensor:
        """The learning rates up to a batch: what a checkpoint stores."""
        with self._lock:
            return torch.from_numpy(self._rates[: self._base + num_batches].copy())

    def load(self, rates: Tensor, num_batches: int) -> None:
        """Continues after `num_batches`; more rates than that are of an origin."""
        with self._lock:
            self._forget(0)
            self._rates, self._num_rates = rates.to(torch.float64).numpy().copy(), len(rates)
            self._base = len(rates) - num_batches

    def at(self, batch: int) -> MissedSteps:
        """What rows have missed before a batch."""
        with self._lock:
            step = self._base + batch
            if step > self._num_rates:
                raise ValueError(
                    f"rows of batch {batch} are read, but the learning rates of batches before it are unknown"
                )
            if step not in self._cached:
                self._cached[step] = self._missed(step)
                while len(self._cached) > _MAX_CACHED:
                    self._cached.popitem(last=False)
            return self._cached[step]

    def _forget(self, step: int) -> None:
        """Drops everything that depends on the rates from a step on."""
        for key in [key for key in self._cached if key > step]:
            del self._cached[key]
        if self._recent is not None and self._recent.step > step:
            self._recent = None
        self._num_settled = min(self._num_settled, max(step - self.horizon, 0))
        self._num_rates = min(self._num_rates, step)
        for name in ("rates", "keeps"):
            self._tables.pop(name, None)

    def _missed(self, step: int) -> MissedSteps:
        recent = torch.empty(0, ENTRY)
        late = np.empty(0)
        num_settled = max(step - self.horizon, 0)
        if self.first_series < _NEVER:
            recent = self._advanced(step).tensor()
        if self._config.weight_decay:
            logs = np.concatenate([[0.0], np.cumsum(np.log1p(-self._rates[:step] * self._config.weight_decay))])
            late = np.exp(logs[-1] - logs[self.horizon : self.horizon + num_settled])
        tables = self._step_tables(step)
        return MissedSteps(
            config=self._config,
            step=step,
            settled=self._settled[:num_settled] if self.first_series < _NEVER else recent,
            recent=recent,
            late=torch.from_numpy(late).to(self._dtype),
            horizon=self.horizon,
            first_series=self.first_series,
            **tables,
        )

    def _step_tables(self, step: int) -> dict[str, Tensor]:
        """Columns by step or by number of steps; as tables, because a vectorised pow rounds the tail of a tensor differently."""
        if len(self._tables.get("powers", ())) < step + 2:
            betas, size = (self._config.beta1, self._config.beta2), 2 * step + 64
            powers = torch.tensor([[beta**k for beta in betas] for k in range(size)], dtype=torch.float64)
            self._tables["powers"], self._tables["corrections"] = powers.to(self._dtype), (1 - powers).to(self._dtype)
        num_walked = min(step, self.first_series + self.horizon)  # later rows do not walk
        if "rates" not in self._tables or len(self._tables["rates"]) < num_walked:
            rates = torch.from_numpy(self._rates[: min(self._num_rates, self.first_series + self.horizon)].copy())
            self._tables["rates"] = rates.to(self._dtype)
            self._tables["keeps"] = (1 - rates * self._config.weight_decay).to(self._dtype)
        return dict(self._tables)

    def _advanced(self, step: int) -> _Entries:
        """The entries that are not settled at a step; those that settle on the way are stored."""
        recent = self._recent
        if recent is None or recent.step > step or step - recent.step > self.horizon:
            first = max(step - self.horizon, 0)
            for begin in range(self._num_settled, first, _BLOCK):
                self._settle(self._computed(begin, min(begin + _BLOCK, first), step))
            recent = self._computed(first, step, step)
        while recent.step < step:
            if len(recent.seen) == self.horizon:
                self._settle(recent.cut(0, 1))
                recent = recent.cut(1, self.horizon)
            recent = recent.extended(self._config)
            recent.add(self._rates, self._config, np.full(len(recent.seen), recent.step))
        self._recent = recent
        return recent

    def _computed(self, first: int, last: int, step: int) -> _Entries:
        """The entries first .. last at a step, from the rates alone; bitwise identical to adding batch after batch."""
        entries = _Entries.empty(self._config, first, last, step)
        for k in range(1, self.horizon + 1):
            some = entries.cut(0, min(max(step - k - first + 1, 0), last - first))
            some.add(self._rates, self._config, some.seen + k)
        return entries

    def _settle(self, entries: _Entries) -> None:
        begin, end = int(entries.seen[0]), int(entries.seen[-1]) + 1
        if end <= self._num_settled:
            return
        if end > len(self._settled):
            settled = torch.empty(2 * end, ENTRY)
            settled[: self._num_settled] = self._settled[: self._num_settled]
            self._settled = settled  # earlier results keep the old one
        self._settled[begin:end] = entries.tensor()
        self._num_settled = end


@dataclass(slots=True, eq=False)
class _Entries:
    """Series of consecutive numbers of batches seen, up to a step."""

    step: int
    seen: npt.NDArray[np.int64]  # [n]
    centre: Floats  # [n]
    keep: Floats  # [n]
    sums: Floats  # [n, ORDER + 1]

    @staticmethod
    def empty(config: OptimizerConfig, first: int, last: int, step: int) -> _Entries:
        num = last - first
        centres = np.array([_centre(config.beta1, config.beta2, seen) for seen in range(first, last)], dtype=np.float64)
        return _Entries(step, np.arange(first, last), centres, np.ones(num), np.zeros((num, ORDER + 1)))

    def cut(self, begin: int, end: int) -> _Entries:
        """A range, in the same memory."""
        own = slice(begin, end)
        return _Entries(self.step, self.seen[own], self.centre[own], self.keep[own], self.sums[own])

    def extended(self, config: OptimizerConfig) -> _Entries:
        """A copy with an entry for the rows that the batch `step` has updated, one step further."""
        new = _Entries.empty(config, self.step, self.step + 1, self.step)
        joined = (
            np.concatenate([getattr(self, name), getattr(new, name)]) for name in ("seen", "centre", "keep", "sums")
        )
        return _Entries(self.step + 1, *joined)

    def add(self, rates: Floats, config: OptimizerConfig, steps: npt.NDArray[np.int64]) -> None:
        """Adds to each entry its term of a step, in place; only exactly rounded operations on single elements."""
        if not len(steps):
            return
        lr = rates[steps - 1]
        decays, fades = _powers(config.beta1, int(steps[-1]) + 1), _powers(config.beta2, int(steps[-1]) + 1)
        num = steps - self.seen
        q = np.sqrt(fades[num] / (1 - fades[steps]))
        z = (q - self.centre) / (q + self.centre)
        term = lr * decays[num] / (1 - decays[steps]) * (1 - z)
        keep = 1 - lr * config.weight_decay
        self.keep *= keep
        for j in range(ORDER + 1):
            self.sums[:, j] = self.sums[:, j] * keep + term
            term = term * z

    def tensor(self) -> Tensor:
        return torch.from_numpy(np.column_stack([self.centre, self.keep, self.sums])).to(torch.float32)


def horizon(config: OptimizerConfig, cut: float) -> int:
    """Number of steps without a gradient after which a row has made all but `cut` of its movement."""
    ratio = config.beta1 / math.sqrt(config.beta2) if config.beta1 else 0.0
    return max(math.ceil(math.log(cut) / math.log(ratio)), 1) if ratio else 1


@cache
def first_series(beta1: float, beta2: float) -> int:
    """The number of batches from which the series is exact to `_TOLERANCE`; `_NEVER` if it converges too slowly."""
    low, high = 0, 1
    while _series_error(beta1, beta2, high) > _TOLERANCE:
        low, high = high, 2 * high
        if high > 1 << 20:
            return _NEVER
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _series_error(beta1, beta2, middle) > _TOLERANCE else (low, middle)
    return high


def _series_error(beta1: float, beta2: float, seen: int) -> float:
    """The largest relative error of the series over all σ, at a constant learning rate."""
    a, q = _terms(beta1, beta2, seen)
    if not a.any():
        return 0.0  # without a mean nothing moves
    centre = _centre(beta1, beta2, seen)
    z = (q - centre) / (q + centre)
    root = np.concatenate([[0.0], 10.0 ** np.linspace(-3, 9, 49)])[:, None]  # in units of eps
    exact = (a / (q * root + 1)).sum(1)
    ratio, value = (1 - centre * root[:, 0]) / (1 + centre * root[:, 0]), np.zeros(len(root))
    for j in range(ORDER, -1, -1):
        value = value * ratio + (a * (1 - z) * z**j).sum()
    return float(np.abs(value / (1 + centre * root[:, 0]) / exact - 1).max())


def _terms(beta1: float, beta2: float, seen: int) -> tuple[Floats, Floats]:
    """a and q of a row that has seen so many batches, at learning rate 1."""
    k = np.arange(1, horizon(OptimizerConfig(beta1=beta1, beta2=beta2), _CUT[torch.float32]) + 1)
    decays, fades = _powers(beta1, seen + len(k) + 1), _powers(beta2, seen + len(k) + 1)
    return decays[k] / (1 - decays[seen + k]), np.sqrt(fades[k] / (1 - fades[seen + k]))


def _centre(beta1: float, beta2: float, seen: int) -> float:
    """The centre of q for the entries of rows that have seen so many batches."""
    return _centre_of(beta1, beta2, min(seen, _constant_after(beta1, beta2)))


@cache
def _centre_of(beta1: float, beta2: float, seen: int) -> float:
    a, q = _terms(beta1, beta2, seen)
    return float(a.sum() / (a / q).sum()) if a.any() else 1.0


@cache
def _constant_after(beta1: float, beta2: float) -> int:
    """The number of batches after which the bias corrections are 1 in fp64."""
    return math.ceil(40 / -math.log(max(beta1, beta2, 1e-3)))


_POWERS: dict[float, Floats] = {}


def _powers(beta: float, num: int) -> Floats:
    """beta ** k for k < num, at least."""
    known = _POWERS.get(beta)
    if known is None or len(known) < num:
        known = _POWERS[beta] = np.array([beta**k for k in range(2 * num)])
    return known


def _grown(values: Floats, num: int) -> Floats:
    return values if num <= len(values) else np.concatenate([values, np.empty(max(num, 64))])
