"""Search over pipeline settings: a readable cost model of the step, fitted to measurements.

    step = compute(micro-batches) + exposed messages(edge rows) + rest

- Compute is linear in the number of micro-batches; exposed messages are linear in the rows of the
  first and the last micro-batch ("edge rows"). Two measured settings determine a line, one gives an
  estimate.
- The share of rows in an edge micro-batch is a power of its share of samples, fitted to the rows
  sent.
- A measured setting counts with its measured time, any other with the model's time plus a margin.
  The fastest wins.

With `explore` (a run that adapts) settings are also measured without a predicted gain: first half
as many micro-batches, then half and twice the best, unless the model predicts a much longer step. A
trial takes a few steps. One trial may be unlucky: every setting is measured twice, a nearly equal
one three times, and most again after some thousand steps. A setting with several measurements
counts with their median.

All functions are pure, so ranks with the same measurements make the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median_low
from typing import Any, NamedTuple

from nestpipe.pipeline.micro_batch import micro_batch_sizes

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
RAMPS = (1.0, 0.5, 0.25)
MAX_MICRO_BATCHES, MAX_DEPTH = 32, 4
SAME_SIZE = 0.1  # relative; batches whose rows or tokens differ by more are another workload
_MARGIN = 0.01  # relative gain needed for a change; twice for a setting that was not measured
_EXPOSED_LOOKUP = 0.01  # share of a step; above it, depth is increased
# Overhead of a micro-batch as a share of its compute, until two numbers of micro-batches are measured: optimistic for more
# and for fewer, so that either direction is tried.
_LITTLE, _MUCH = 0.02, 0.25
_EXPONENT = 0.8  # a share s of the samples has s ** 0.8 of the rows, until it is measured
_BUFFER_MARGIN = 1.25
_FAR_LONGER, _NEARLY = 1.6, 1.15
_SOON, _LATER = 3000, 12_000  # steps until a nearly as fast setting, and a slower one, is measured again
_MAX_PATIENCE = 8  # periods; bounds how late a change is noticed that batch sizes do not show
_TWICE, _ENOUGH = 2, 3  # measurements: against one unlucky moment, and for a reliable time
_MEMORY = 16  # measurements that are kept
_OTHER_TIMES = 0.25  # relative; _ENOUGH measurements in a row that differ by more are not noise
_Times = tuple[float, float, float]  # of step, busy and comm


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """A setting. Micro-batches and ramp decide results bitwise; depth and buffer size do not."""

    micro_batches: int
    ramp: float = 1.0
    depth: int = 1
    buffer_rows: int = 0  # initial size of the prefetch buffer

    @property
    def cut(self) -> tuple[int, float]:
        """What decides how a batch is divided."""
        return self.micro_batches, self.ramp

    def is_within(self, other: PipelineChoice) -> bool:
        """Whether the other is the same setting, with a buffer at least as large."""
        return (self.cut, self.depth) == (other.cut, other.depth) and self.buffer_rows <= other.buffer_rows

    def __str__(self) -> str:
        ramp = f", ramp {self.ramp:g}" if self.micro_batches > 2 and self.ramp < 1 else ""
        return f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}{ramp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Typical seconds and rows per step with one setting."""

    choice: PipelineChoice
    step_s: float
    busy_s: float
    lookup_s: float  # exposed
    comm_s: float  # exposed
    rows: float  # requested by a rank
    tokens: float  # per rank
    edge_rows: float  # rows of the first and gradients of the last micro-batch
    buffer_rows: float = 0.0  # that an owner holds per batch
    samples: float = 0.0  # per rank
    num_measurements: int = 1
    measurements: tuple[_Times, ...] = ()  # the last of them, if there were several
    num_steps: int = 0  # since the previous measurement of any setting
    idle_steps: int = 0  # with other settings, since the last measurement of this one

    def after(self, before: Measurement) -> Measurement:
        """Combined with earlier measurements of the same setting; lookup time, which decides depth, is the latest."""
        weight = min(before.num_measurements, _MEMORY - 1)
        means = {
            name: (weight * getattr(before, name) + getattr(self, name)) / (weight + 1)
            for name in ("rows", "tokens", "edge_rows")
        }
        return replace(self, **means).with_median(
            (*before.recent, *self.recent)[-_MEMORY:], before.num_measurements + 1
        )

    @property
    def recent(self) -> tuple[_Times, ...]:
        return self.measurements or ((self.step_s, self.busy_s, self.comm_s),)

    def with_median(self, times: tuple[_Times, ...], num_measurements: int) -> Measurement:
        """With the median of these times; of two the shorter, because noise only makes steps longer."""
        middle = sorted(times)[(len(times) - 1) // 2 : len(times) // 2 + (len(times) != 2)]
        step_s, busy_s, comm_s = map(fmean, zip(*middle, strict=True))
        return replace(
            self, step_s=step_s, busy_s=busy_s, comm_s=comm_s, num_measurements=num_measurements, measurements=times
        )

    @property
    def is_changed(self) -> bool:
        """Whether steps have changed their time for good on the same workload: another job on the machine."""
        times = [step_s for step_s, *_ in self.recent]
        before, late = times[:-_ENOUGH], times[-_ENOUGH:]
        if len(before) < 2:
            return False
        usual, share = median_low(before), 1 + _OTHER_TIMES
        return min(late) > usual * share or max(late) * share < usual

    @property
    def patience(self) -> int:
        """Periods until the next measurement: exponential back-off while times are stable, 0 before they are known."""
        if self.num_measurements < _ENOUGH:
            return 0
        last_s, usual_s = self.recent[-1][0], self.step_s
        if max(last_s, usual_s) > (1 + _OTHER_TIMES) * min(last_s, usual_s):
            return 1
        return int(min(2 ** (self.num_measurements - _ENOUGH), _MAX_PATIENCE))

    @property
    def numbers(self) -> list[float]:
        """The measured values, in the order of NUMBERS."""
        return [getattr(self, name) for name in NUMBERS]

    def of_ranks(self, numbers: Sequence[Mapping[str, float]]) -> Measurement:
        """With the values of all ranks: the slowest step, the fullest buffer, the mean of the rest."""
        of_all: dict[str, Any] = {
            name: (max if name in ("step_s", "buffer_rows") else fmean)([own[name] for own in numbers])
            for name in NUMBERS
        }
        return replace(self, **of_all)


NUMBERS = ("step_s", "busy_s", "lookup_s", "comm_s", "rows", "tokens", "edge_rows", "buffer_rows", "samples")


@dataclass(frozen=True, slots=True)
class LinearCost:
    """y = base + slope · x, neither below 0."""

    base: float
    slope: float

    @staticmethod
    def through(points: Sequence[tuple[float, float]], *, slope: float) -> LinearCost:
        """Least squares; with a single x the given slope, at most y / x."""
        x, y = fmean(x for x, _ in points), fmean(y for _, y in points)
        spread = sum((one - x) ** 2 for one, _ in points)
        if spread > 0:
            slope = sum((one - x) * (value - y) for one, value in points) / spread
        slope = min(max(slope, 0.0), y / x if x else 0.0)
        return LinearCost(y - slope * x, slope)

    def at(self, x: float) -> float:
        return self.base + self.slope * x


@dataclass(frozen=True, slots=True)
class StepCostModel:
    """Predicted step time, fitted to measurements of one workload."""

    compute: LinearCost  # by number of micro-batches
    fewer: LinearCost  # for fewer micro-batches than were measured
    fewest: int  # micro-batches measured
    messages: LinearCost  # by edge rows
    knows_link: bool  # two settings were measured, so the slope of `messages` is the time per row
    exponent: float
    rows: float
    samples: int
    rest_s: float

    @staticmethod
    def of(measurements: Sequence[Measurement]) -> StepCostModel:
        last = measurements[-1]
        exponents = [
            math.log(one.edge_rows / (2 * one.rows)) / math.log(share)
            for one in measurements
            if (share := edge_share(one.choice, round(one.samples))) < 1 and 0 < one.edge_rows < 2 * one.rows
        ]
        by_micro_batches = [(one.choice.micro_batches, one.busy_s) for one in measurements]
        per_micro_batch = last.busy_s / last.choice.micro_batches
        return StepCostModel(
            compute=LinearCost.through(by_micro_batches, slope=_LITTLE * per_micro_batch),
            fewer=LinearCost.through(by_micro_batches, slope=_MUCH * per_micro_batch),
            fewest=min(micro_batches for micro_batches, _ in by_micro_batches),
            messages=LinearCost.through([(one.edge_rows, one.comm_s) for one in measurements], slope=math.inf),
            knows_link=len({one.choice.cut for one in measurements}) > 1,
            exponent=fmean(exponents) if exponents else _EXPONENT,
            rows=last.rows,
            samples=round(last.samples),
            rest_s=fmean(max(one.step_s - one.busy_s - one.comm_s, 0.0) for one in measurements),
        )

    def edge_rows(self, choice: PipelineChoice) -> float:
        """Rows of the first and gradients of the last micro-batch."""
        share = edge_share(choice, self.samples)
        return float(2 * self.rows * share**self.exponent)

    def busy_s(self, choice: PipelineChoice) -> float:
        """Compute time."""
        return (self.fewer if choice.micro_batches < self.fewest else self.compute).at(choice.micro_batches)

    def step_s(self, choice: PipelineChoice) -> float:
        """Compute, exposed messages, and the messages between that compute is too short to hide."""
        edge, busy = self.edge_rows(choice), self.busy_s(choice)
        between = self.messages.slope * max(2 * self.rows - edge, 0.0) - busy
        return busy + self.messages.at(edge) + (max(between, 0.0) if self.knows_link else 0.0) + self.rest_s


@lru_cache(4096)
def edge_share(choice: PipelineChoice, num_samples: int) -> float:
    """The mean share of samples in the first and the last micro-batch."""
    if choice.micro_batches == 1 or not num_samples:
        return 1.0
    sizes = micro_batch_sizes(num_samples, choice.micro_batches, choice.ramp)
    return max(sizes[0] + sizes[-1], 1) / 2 / num_samples


class TuningDecision(NamedTuple):
    """The next setting, its reason, and when to measure again."""

    choice: PipelineChoice
    why: str
    patience: int = 1  # periods until the next measurement; 0 for a short trial


def same_workload(measurements: Iterable[Measurement], now: Measurement) -> list[Measurement]:
    """Measurements of the same workload as `now`, one per setting; `now`, combined with its earlier ones, is last."""
    alike = {
        one.choice.cut: replace(one, idle_steps=one.idle_steps + now.num_steps)
        for one in measurements
        if _is_same_size(one, now)
    }
    before = alike.pop(now.choice.cut, None)
    both = now.after(before) if before else now
    if both.is_changed:  # times of other settings are outdated
        return [both.with_median(both.recent[-_ENOUGH:], 1)]
    return [*alike.values(), both]


def _is_same_size(one: Measurement, now: Measurement) -> bool:
    return all(
        abs(before - after) <= SAME_SIZE * after for before, after in ((one.rows, now.rows), (one.tokens, now.tokens))
    )


def is_new(measurements: Sequence[Measurement], now: Measurement) -> bool:
    """Whether the workload is new: many rows are admitted for the first time, so times say little."""
    return not any(_is_same_size(one, now) for one in measurements)


def after_measurement(
    measurements: Sequence[Measurement],
    now: Measurement,
    *,
    max_micro_batches: int = MAX_MICRO_BATCHES,
    max_depth: int = MAX_DEPTH,
) -> tuple[list[Measurement], TuningDecision]:
    """All measurements after one more, and the decision."""
    known = same_workload(measurements, now)
    if is_new(measurements, now):
        why = f"new workload of {now.rows:,.0f} rows and {now.tokens:,.0f} tokens per step: measured once more before a change"
        return known, TuningDecision(now.choice, why, patience=0)
    return known, choose(known, max_micro_batches=max_micro_batches, max_depth=max_depth, explore=True)


def choose(
    measurements: Sequence[Measurement],
    *,
    max_micro_batches: int = MAX_MICRO_BATCHES,
    max_depth: int = MAX_DEPTH,
    explore: bool = False,
) -> TuningDecision:
    """The best setting after these measurements of one workload; the current setting is last."""
    now, model = measurements[-1], StepCostModel.of(measurements)
    tried = {one.choice.cut: one.step_s for one in measurements}
    low, high = (
        min(cut[0] for cut in tried) / 2,
        max(cut[0] for cut in tried) * 2,
    )  # the model is unreliable further away
    times = {
        choice: tried.get(choice.cut) or model.step_s(choice) * (1 + _MARGIN)
        for micro_batches in MICRO_BATCHES
        for ramp in (RAMPS if micro_batches > 2 else (1.0,))
        if (choice := PipelineChoice(micro_batches=micro_batches, ramp=ramp))
        and low <= micro_batches <= min(high, max_micro_batches)
    }
    own = next((one for one in times if one.cut == now.choice.cut), replace(now.choice, depth=1, buffer_rows=0))
    times.setdefault(own, now.step_s)
    best = min(times, key=lambda one: (times[one], one.micro_batches, -one.ramp))
    is_faster = times[best] < now.step_s * (1 - _MARGIN)
    if not is_faster:
        best = own
    trial = (
        _trial(measurements, model, max_micro_batches)
        if explore and (len(measurements) == 1 or not is_faster)
        else None
    )
    best = trial or best
    depth, why_depth = _depth(now, max_depth)
    buffer_rows = now.choice.buffer_rows
    if buffer_rows < now.buffer_rows * (depth + 2):
        buffer_rows = math.ceil(_BUFFER_MARGIN * now.buffer_rows * (depth + 2))
    on_trial = explore and best.cut != now.choice.cut and (trial is not None or best.cut not in tried)
    reasons = [("on trial, " if on_trial else "") + _why(now, best, model, tried), why_depth]
    if buffer_rows:
        reasons.append(f"buffer of {buffer_rows:,} rows: {depth + 2} batches of {now.buffer_rows:,.0f} plus a quarter")
    new = on_trial or depth != now.choice.depth
    patience = (
        0 if new else next((_patience(one, measurements) for one in measurements if one.choice.cut == best.cut), 0)
    )
    return TuningDecision(replace(best, depth=depth, buffer_rows=buffer_rows), "; ".join(reasons), patience)


def _trial(measurements: Sequence[Measurement], model: StepCostModel, max_micro_batches: int) -> PipelineChoice | None:
    """A setting to measure without a predicted gain; None if enough is known."""
    now, tried = measurements[-1], {one.choice.cut for one in measurements}
    neighbours = [
        PipelineChoice(micro_batches=micro_batches)
        for micro_batches in ((now.choice.micro_batches + 1) // 2, now.choice.micro_batches * 2)
        if micro_batches <= max_micro_batches
    ]
    untried = [one for one in neighbours if one.cut not in tried]
    if len(measurements) == 1 and untried:
        return untried[0]
    if near := [one for one in untried if model.step_s(one) <= _FAR_LONGER * now.step_s]:
        return min(near, key=model.step_s)
    doubtful = [
        one for one in measurements[:-1] if _is_doubtful(one, now) and one.choice.micro_batches <= max_micro_batches
    ]
    return min(doubtful, key=lambda one: one.num_measurements).choice if doubtful else None


def _is_doubtful(one: Measurement, now: Measurement) -> bool:
    """Whether a setting should be measured again: few measurements, or the last long ago, and not far slower."""
    if one.step_s > _FAR_LONGER * now.step_s:
        return one.num_measurements < _TWICE
    near = one.step_s <= _NEARLY * now.step_s
    return one.num_measurements < (_ENOUGH if near else _TWICE) or one.idle_steps >= (_SOON if near else _LATER)


def _patience(one: Measurement, measurements: Sequence[Measurement]) -> int:
    """Patience with a chosen setting; one that replaces a better known setting is measured more often."""
    newcomer = one.num_measurements < min(max(other.num_measurements for other in measurements), _MEMORY)
    return min(one.patience, 1) if newcomer else one.patience


def _depth(now: Measurement, most: int) -> tuple[int, str]:
    share, depth = now.lookup_s / now.step_s, now.choice.depth
    more = share > _EXPOSED_LOOKUP and depth < most
    return depth + more, f"depth {depth + more}: {share:.1%} of a step waited for lookup at depth {depth}"


def _why(now: Measurement, best: PipelineChoice, model: StepCostModel, tried: dict[tuple[int, float], float]) -> str:
    text = f"{best}: {_ms(tried.get(best.cut, model.step_s(best)))} {'measured' if best.cut in tried else 'expected'}"
    if best.cut == now.choice.cut:
        return f"{text}, {_ms(now.comm_s)} of it exposed messages; no other setting is expected to be faster"
    edge = model.messages.at(model.edge_rows(best))
    return (
        f"{text} against {_ms(now.step_s)} with {now.choice}: exposed messages {_ms(now.comm_s)} -> {_ms(edge)}, "
        f"compute {_ms(now.busy_s)} -> {_ms(model.busy_s(best))}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
