"""The steps that Adam makes on a row between two lookups, in closed form.

Dense Adam moves a row in every step: without a gradient its moments decay and it follows what is left of its mean. A row that has
seen s batches, with mean m and root σ of its second moment, is at batch t where t - s such steps lead, i = s + k:

    w  <-  Π keep_i · w  -  m · F(σ)          F(σ) = Σ_k  a_k / (q_k σ + eps)
    a_k = lr_i β1^k / (1 - β1^i) · (weight decay after i)            q_k = sqrt(β2^k / (1 - β2^i))

F depends on (s, t) and σ only. It is a series (adam_series.py) whose coefficients a batch changes by one term for each s: O(horizon) per
batch and table, whatever the number of rows. After `horizon` steps the mean has decayed, and an entry is *settled*: it does not change
any more. Of the first few batches the q_k are too far apart for the series; rows of those batches, and all rows in fp64, walk step by step.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.embedding.adam_series import CUT, ENTRY, NEVER, Entries, first_series, horizon, short_square
from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.series_kernels import Floats
from nestpipe.embedding.shared_tables import SharedTables
from nestpipe.ops.device_memory import upload, used_here

_MAX_CACHED = 16  # batches in flight, and a few more
_BLOCK = 1 << 14  # entries computed at a time
_GROWING = ("settled", "rates", "keeps", "powers", "corrections")  # a later batch has the same rows, and more
_OWN = ("recent", "late")


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
    short_square: float  # second moments from this on: the short series
    shared: SharedTables
    _uploaded: dict[torch.device, tuple[MissedSteps, torch.Event]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_settled(self) -> int:
        return max(self.step - self.horizon, 0)

    def on(self, device: torch.device) -> MissedSteps:
        """The same on a device, uploaded at the first call; any stream may use it."""
        if device.type == self.settled.device.type:
            return self
        if device not in self._uploaded:
            copies: dict[str, Any] = {name: upload(getattr(self, name), device) for name in _OWN}
            copies |= self.shared.on({name: getattr(self, name) for name in _GROWING}, device)
            uploaded = replace(self, **copies), torch.accelerator.current_stream().record_event()
            self._uploaded.setdefault(device, uploaded)
        found, done = self._uploaded[device]
        torch.accelerator.current_stream().wait_event(done)
        used_here(*(getattr(found, name) for name in _GROWING + _OWN))  # freed when the batch is forgotten
        return found


class SkippedSteps:
    """The learning rates of a table's batches, and what they do to rows without a gradient. Any thread may call."""

    def __init__(self, config: OptimizerConfig, dtype: torch.dtype):
        self._config, self._dtype = config, dtype
        self.horizon = horizon(config, CUT[dtype])
        self.first_series = first_series(config.beta1, config.beta2) if dtype == torch.float32 else NEVER
        self._short_square = short_square(config.beta1, config.beta2, config.eps)
        self._lock = threading.Lock()
        self._rates = np.empty(0)
        self._num_rates = 0
        self._base = 0  # steps before batch 0, of the run that this one was initialised from
        self._tables: dict[str, Tensor] = {}
        self._settled = np.empty((0, ENTRY), dtype=np.float32)
        self._num_settled = 0
        self._recent: Entries | None = None
        self._kept, self._num_kept = np.zeros(1), 0
        self._cached: OrderedDict[int, MissedSteps] = OrderedDict()
        self._shared = SharedTables()

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
        self._shared = SharedTables()  # batches that were read keep theirs
        self._num_settled = min(self._num_settled, max(step - self.horizon, 0))
        self._num_rates, self._num_kept = min(self._num_rates, step), min(self._num_kept, step)
        for name in ("rates", "keeps"):
            self._tables.pop(name, None)

    def _missed(self, step: int) -> MissedSteps:
        recent = torch.empty(0, ENTRY)
        late = np.empty(0)
        num_settled = max(step - self.horizon, 0)
        if self.first_series < NEVER:
            recent = torch.from_numpy(self._advanced(step).table())
        if self._config.weight_decay:
            kept = self._kept_logs(step)
            late = np.exp(kept[step] - kept[self.horizon : self.horizon + num_settled])
        tables = self._step_tables(step)
        return MissedSteps(
            config=self._config,
            step=step,
            settled=torch.from_numpy(self._settled[:num_settled]) if self.first_series < NEVER else recent,
            recent=recent,
            late=torch.from_numpy(late).to(self._dtype),
            horizon=self.horizon,
            first_series=self.first_series,
            short_square=self._short_square,
            shared=self._shared,
            **tables,
        )

    def _kept_logs(self, step: int) -> Floats:
        """The logarithm [>= step + 1] of what weight decay leaves of a weight after so many steps; grows step by step."""
        logs = self._kept = _grown(self._kept, step + 1)
        for i in range(self._num_kept, step):
            logs[i + 1] = logs[i] + math.log1p(-self._rates[i] * self._config.weight_decay)
        self._num_kept = max(self._num_kept, step)
        return logs

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

    def _advanced(self, step: int) -> Entries:
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
            recent = recent.advance(self._rates, self._config, self.horizon)
        self._recent = recent
        return recent

    def _computed(self, first: int, last: int, step: int) -> Entries:
        """The entries first .. last at a step, from the rates alone; bitwise identical to adding batch after batch."""
        entries = Entries.empty(self._config, first, last, step)
        for k in range(1, self.horizon + 1):
            some = entries.cut(0, min(max(step - k - first + 1, 0), last - first))
            some.add(self._rates, self._config, some.seen + k)
        return entries

    def _settle(self, entries: Entries) -> None:
        begin, end = int(entries.seen[0]), int(entries.seen[-1]) + 1
        if end <= self._num_settled:
            return
        if end > len(self._settled):
            settled = np.empty((2 * end, ENTRY), dtype=np.float32)
            settled[: self._num_settled] = self._settled[: self._num_settled]
            self._settled = settled  # earlier results keep the old one
        self._settled[begin:end] = entries.table()
        self._num_settled = end


def _grown(values: Floats, num: int) -> Floats:
    return values if num <= len(values) else np.concatenate([values, np.empty(max(num, 64))])
