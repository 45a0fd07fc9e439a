"""Series for the movement of a row that Adam updates without gradients; skipped_steps.py says what it moves by.

    F(σ) = Σ_k a_k / (q_k σ + eps),  k = 1 .. the steps that the row has missed

With a centre c of the q_k and z_k = (q_k - c) / (q_k + c), every term is a geometric series in r = (eps - c σ) / (eps + c σ), |r| <= 1:

    F(σ) = 1 / (eps + c σ) · Σ_j D_j r^j              D_j = Σ_k a_k (1 - z_k) z_k^j           for every σ, also where eps matters
    F(σ) = 1 / σ · Σ_j E_j (-eps / σ)^j               E_j = Σ_k a_k q_k^-(j + 1)              short, where σ is far above eps

D_j and E_j are sums over the steps, so a batch adds one term to each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.series_kernels import Floats, advance_natively

ORDER = 8  # of the series; kOrder in adam.cpp
SHORT = 4  # terms of the short series; kShort in adam.cpp
NUM_SUMS = ORDER + 1 + SHORT
ENTRY = 2 + NUM_SUMS  # centre, keep, D, E
NEVER = 1 << 31
CUT = {torch.float32: 1e-9, torch.float64: 1e-15}  # of the movement that is left at the horizon
_TOLERANCE = 5e-7  # of the series, relative to the movement of a row
_SHORT_TOLERANCE = 1e-7
_OWN_CENTRE = 256  # entries with a centre each; later, where q_k change slowly, so many have one:
_SAME_CENTRE = 16
_LARGEST_SHORT = 0.02  # of eps / σ


@dataclass(slots=True, eq=False)
class Entries:
    """Series of consecutive numbers of batches seen, up to a step."""

    step: int
    seen: npt.NDArray[np.int64]  # [n]
    state: Floats  # [ENTRY, n]: centre, keep, D, E

    @staticmethod
    def empty(config: OptimizerConfig, first: int, last: int, step: int) -> Entries:
        state = np.zeros((ENTRY, last - first))
        state[0] = [_centre(config.beta1, config.beta2, seen) for seen in range(first, last)]
        state[1] = 1
        return Entries(step, np.arange(first, last), state)

    def cut(self, begin: int, end: int) -> Entries:
        """A range, in the same memory."""
        return Entries(self.step, self.seen[begin:end], self.state[:, begin:end])

    def advance(self, rates: Floats, config: OptimizerConfig, most: int, *, native: bool | None = None) -> Entries:
        """One step further: an entry more, for the rows that the batch `step` has updated, and the newest `most` of them."""
        begin, step = max(len(self.seen) + 1 - most, 0), self.step + 1
        num = len(self.seen) - begin
        seen, centre = np.append(self.seen[begin:], self.step), _centre(config.beta1, config.beta2, self.step)
        is_newest = not num or self.seen[-1] == self.step - 1  # a cut may end before
        if is_newest and (native is None or native):
            powers, lr = (_powers(config.beta1, step + 1), _powers(config.beta2, step + 1)), float(rates[step - 1])
            state = advance_natively(self.state, begin, centre, powers, step, lr, config.weight_decay)
            if state is not None:
                return Entries(step, seen, state)
        new = Entries(step, seen, np.zeros((ENTRY, num + 1)))
        new.state[:, :num] = self.state[:, begin:]
        new.state[:2, num] = centre, 1
        new.add(rates, config, step)
        return new

    def add(self, rates: Floats, config: OptimizerConfig, step: int | npt.NDArray[np.int64]) -> None:
        """Adds to each entry its term of a step, in place; only exactly rounded operations on single elements."""
        if not len(self.seen):
            return
        most = (step if isinstance(step, int) else int(step[-1])) + 1
        decays, fades = _powers(config.beta1, most), _powers(config.beta2, most)
        lr, num, centre = rates[step - 1], step - self.seen, self.state[0]
        q = np.sqrt(fades[num] / (1 - fades[step]))
        z = (q - centre) / (q + centre)
        terms = np.empty((NUM_SUMS, len(q)))
        moved = lr * decays[num] / (1 - decays[step])
        np.multiply(moved, 1 - z, out=terms[0])
        for j in range(ORDER):
            np.multiply(terms[j], z, out=terms[j + 1])
        np.divide(moved, q, out=terms[ORDER + 1])
        for j in range(ORDER + 1, NUM_SUMS - 1):
            np.divide(terms[j], q, out=terms[j + 1])
        if config.weight_decay:
            self.state[1:] *= 1 - lr * config.weight_decay
        self.state[2:] += terms

    def table(self) -> npt.NDArray[np.float32]:
        """[n, ENTRY]"""
        return np.ascontiguousarray(self.state.T, dtype=np.float32)


def horizon(config: OptimizerConfig, cut: float) -> int:
    """Number of steps without a gradient after which a row has made all but `cut` of its movement."""
    ratio = config.beta1 / math.sqrt(config.beta2) if config.beta1 else 0.0
    return max(math.ceil(math.log(cut) / math.log(ratio)), 1) if ratio else 1


@cache
def first_series(beta1: float, beta2: float) -> int:
    """The number of batches from which the series is exact to `_TOLERANCE`; `NEVER` if it converges too slowly."""
    low, high = 0, 1
    while _series_error(beta1, beta2, high) > _TOLERANCE:
        low, high = high, 2 * high
        if high > 1 << 20:
            return NEVER
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _series_error(beta1, beta2, middle) > _TOLERANCE else (low, middle)
    return high


@cache
def short_square(beta1: float, beta2: float, eps: float) -> float:
    """The second moment from which the short series is exact to `_SHORT_TOLERANCE`; infinity if it never is.

    Bias corrections only raise the q_k, so rows that have seen many batches decide.
    """
    a, q = _terms(beta1, beta2, _constant_after(beta1, beta2))
    if not a.any():
        return 0.0
    first_left_out = float((a * q ** -(SHORT + 1.0)).sum() / (a / q).sum())
    largest = min((_SHORT_TOLERANCE / first_left_out) ** (1 / SHORT), _LARGEST_SHORT)
    return (eps / largest) ** 2 if largest > 0 else math.inf


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
    k = np.arange(1, horizon(OptimizerConfig(beta1=beta1, beta2=beta2), CUT[torch.float32]) + 1)
    decays, fades = _powers(beta1, seen + len(k) + 1), _powers(beta2, seen + len(k) + 1)
    return decays[k] / (1 - decays[seen + k]), np.sqrt(fades[k] / (1 - fades[seen + k]))


def _centre(beta1: float, beta2: float, seen: int) -> float:
    """The centre of q for the entries of rows that have seen so many batches; any one near it serves, so few are computed."""
    if seen > _OWN_CENTRE:
        seen = min(seen // _SAME_CENTRE * _SAME_CENTRE, _constant_after(beta1, beta2))
    return _centre_of(beta1, beta2, seen)


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
