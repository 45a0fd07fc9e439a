"""Which parts, ramp, depth and pool fit a workload: chosen from what steps took, by a model that can be read, with its reasons.

    step = busy + a + b · parts + exposed messages of the first and the last part + what is left over

*busy* and *exposed* are medians of a few recorded steps (overlap.py). Two settings that were tried give a and b of compute and of
messages, one gives a guess. How many rows the first part needs is a power of its share of samples, from the rows that were
sent. A setting that was tried counts with the time it took, any other with what the model says and a margin; the best wins.

The model is a guess where it has seen one setting, and machines are noisy. A run that looks again and again can afford to
*explore*: it begins with half as many parts, because many cost more than few; where nothing promises more, half and twice as
many are tried for a workload, unless the model expects them to take far longer. A trial takes a few steps instead of a period.
One trial may be unlucky, so everything is tried twice and what is nearly as fast thrice before it is given up, and most of it again
after some thousand steps; and a setting that was looked at often counts with the median: one bad look does not end it.

Everything here is a function of its arguments, so ranks that hold the same observations choose the same.
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
SAME_SIZE = 0.1  # batches whose rows or tokens differ by more are another workload
_MARGIN = 0.01  # what is chosen must be better by more than this, and once more by as much if it has not been tried
_EXPOSED_LOOKUP = 0.01  # of a step: above that, rows are retrieved further ahead
# What a part costs by itself, of its compute, until two numbers of parts have been tried: little for more parts and much
# for fewer, so that either is tried if there is something to gain.
_LITTLE, _MUCH = 0.02, 0.25
_EXPONENT = 0.8  # rows of a share s of the samples are s ** 0.8 of all rows, until two parts have been seen
_POOL_ROOM = 1.25
_FAR_LONGER, _NEARLY = 1.6, 1.15
_SOON, _LATER = 3000, 12_000  # steps after which it is worth trying again what is nearly as fast, and what is not
_MOST_PATIENCE = 8  # periods; so long it takes to notice what rows do not show, say another job on the machine
_TWICE, _ENOUGH = 2, 3  # looks: so that one unlucky moment does not decide, and that say how long a setting takes
_MEMORY = 16  # looks that are remembered
_OTHER_TIMES = 0.25  # so many looks in a row that differ by more from those before are no noise
_Times = tuple[float, float, float]  # of step, busy and comm


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """What is chosen. Parts and ramp decide bits; depth and the room of a pool do not."""

    micro_batches: int
    ramp: float = 1.0
    depth: int = 1
    buffer_rows: int = 0  # room that a pool of rows starts with

    @property
    def cut(self) -> tuple[int, float]:
        return self.micro_batches, self.ramp

    def is_within(self, other: PipelineChoice) -> bool:
        """Whether the other is the same, but for a pool that may be larger."""
        return (self.cut, self.depth) == (other.cut, other.depth) and self.buffer_rows <= other.buffer_rows

    def __str__(self) -> str:
        ramp = f", ramp {self.ramp:g}" if self.micro_batches > 2 and self.ramp < 1 else ""
        return f"{self.micro_batches} part{'s' * (self.micro_batches > 1)}{ramp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Steps with one choice: what is usual, in seconds per step, and rows per step."""

    choice: PipelineChoice
    step_s: float
    busy_s: float
    lookup_s: float  # exposed
    comm_s: float  # exposed
    rows: float  # that a rank asks for
    tokens: float  # of a rank
    edge_rows: float  # sent with the first part, and gradients sent with the last one
    buffer_rows: float = 0.0  # that an owner holds for a batch
    samples: float = 0.0  # of a rank
    num_measurements: int = 1  # so far
    measurements: tuple[_Times, ...] = ()  # the last of them, if there were several
    num_steps: int = 0  # since the look before, whatever that was at
    idle_steps: int = 0  # with other settings, since the last look

    def after(self, before: Measurement) -> Measurement:
        """Together with what was observed before of the same parts; lookup, for depth, is of now."""
        weight = min(before.num_measurements, _MEMORY - 1)
        means = {
            name: (weight * getattr(before, name) + getattr(self, name)) / (weight + 1)
            for name in ("rows", "tokens", "edge_rows")
        }
        return replace(self, **means).lasting((*before.recent, *self.recent)[-_MEMORY:], before.num_measurements + 1)

    @property
    def recent(self) -> tuple[_Times, ...]:
        return self.measurements or ((self.step_s, self.busy_s, self.comm_s),)

    def lasting(self, looks: tuple[_Times, ...], num_looks: int) -> Measurement:
        """With the times of the middle look, or of the two in the middle; of two the shorter one, as noise makes steps longer."""
        middle = sorted(looks)[(len(looks) - 1) // 2 : len(looks) // 2 + (len(looks) != 2)]
        step_s, busy_s, comm_s = map(fmean, zip(*middle, strict=True))
        return replace(
            self, step_s=step_s, busy_s=busy_s, comm_s=comm_s, num_measurements=num_looks, measurements=looks
        )

    @property
    def is_changed(self) -> bool:
        """Whether steps have become slower or faster for good, with the same parts and rows: another job on the machine."""
        times = [step_s for step_s, *_ in self.recent]
        before, late = times[:-_ENOUGH], times[-_ENOUGH:]
        if len(before) < 2:
            return False
        usual, share = median_low(before), 1 + _OTHER_TIMES
        return min(late) > usual * share or max(late) * share < usual

    @property
    def patience(self) -> int:
        """Periods until it is worth looking again: ever more while it takes what it took, none before that is known."""
        if self.num_measurements < _ENOUGH:
            return 0
        last_s, usual_s = self.recent[-1][0], self.step_s
        if max(last_s, usual_s) > (1 + _OTHER_TIMES) * min(last_s, usual_s):
            return 1
        return int(min(2 ** (self.num_measurements - _ENOUGH), _MOST_PATIENCE))

    @property
    def numbers(self) -> list[float]:
        """What a rank saw, in the order of NUMBERS."""
        return [getattr(self, name) for name in NUMBERS]

    def of_ranks(self, numbers: Sequence[Mapping[str, float]]) -> Measurement:
        """This one with the numbers of all ranks: as slow as the slowest, the mean of the rest, the fullest pool."""
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
        """Least squares; with one x alone the given slope, as far as the points leave room for it."""
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
    """What a step takes, as far as observations of one workload tell."""

    compute: LinearCost  # by number of parts
    fewer: LinearCost  # the same for fewer parts than were tried
    fewest: int  # parts that were tried
    messages: LinearCost  # by rows of the first and the last part
    knows_link: bool  # two numbers of such rows have been tried, so the slope is what a row takes, and no guess
    exponent: float
    rows: float
    samples: int
    rest_s: float

    @staticmethod
    def of(found: Sequence[Measurement]) -> StepCostModel:
        last = found[-1]
        exponents = [
            math.log(one.edge_rows / (2 * one.rows)) / math.log(share)
            for one in found
            if (share := edge_share(one.choice, round(one.samples))) < 1 and 0 < one.edge_rows < 2 * one.rows
        ]
        by_micro_batches = [(one.choice.micro_batches, one.busy_s) for one in found]
        of_part = last.busy_s / last.choice.micro_batches
        return StepCostModel(
            compute=LinearCost.through(by_micro_batches, slope=_LITTLE * of_part),
            fewer=LinearCost.through(by_micro_batches, slope=_MUCH * of_part),
            fewest=min(micro_batches for micro_batches, _ in by_micro_batches),
            messages=LinearCost.through([(one.edge_rows, one.comm_s) for one in found], slope=math.inf),
            knows_link=len({one.choice.cut for one in found}) > 1,
            exponent=fmean(exponents) if exponents else _EXPONENT,
            rows=last.rows,
            samples=round(last.samples),
            rest_s=fmean(max(one.step_s - one.busy_s - one.comm_s, 0.0) for one in found),
        )

    def edge_rows(self, choice: PipelineChoice) -> float:
        """Rows of the first and gradients of the last part."""
        share = edge_share(choice, self.samples)
        return float(2 * self.rows * share**self.exponent)

    def busy_s(self, choice: PipelineChoice) -> float:
        """Compute."""
        return (self.fewer if choice.micro_batches < self.fewest else self.compute).at(choice.micro_batches)

    def step_s(self, choice: PipelineChoice) -> float:
        """Compute, exposed messages, and messages between that compute is too short for."""
        edge, busy = self.edge_rows(choice), self.busy_s(choice)
        between = self.messages.slope * max(2 * self.rows - edge, 0.0) - busy
        return busy + self.messages.at(edge) + (max(between, 0.0) if self.knows_link else 0.0) + self.rest_s


@lru_cache(4096)
def edge_share(choice: PipelineChoice, num_samples: int) -> float:
    """The share of samples in the first and the last part, on average."""
    if choice.micro_batches == 1 or not num_samples:
        return 1.0
    sizes = micro_batch_sizes(num_samples, choice.micro_batches, choice.ramp)
    return max(sizes[0] + sizes[-1], 1) / 2 / num_samples


class TuningDecision(NamedTuple):
    """How to go on, and why."""

    choice: PipelineChoice
    why: str
    patience: int = 1  # periods until it is worth looking again; 0 if a few steps are enough to tell


def same_workload(found: Iterable[Measurement], now: Measurement) -> list[Measurement]:
    """Those with as many rows per step as now, one for each choice; the present one stands last, together with its own before."""
    alike = {
        one.choice.cut: replace(one, idle_steps=one.idle_steps + now.num_steps) for one in found if _is_alike(one, now)
    }
    before = alike.pop(now.choice.cut, None)
    both = now.after(before) if before else now
    if both.is_changed:  # what others took before says nothing any more
        return [both.lasting(both.recent[-_ENOUGH:], 1)]
    return [*alike.values(), both]


def _is_alike(one: Measurement, now: Measurement) -> bool:
    return all(
        abs(before - after) <= SAME_SIZE * after for before, after in ((one.rows, now.rows), (one.tokens, now.tokens))
    )


def is_new(found: Sequence[Measurement], now: Measurement) -> bool:
    """Whether the workload has just begun: then many rows were met for the first time, and times say little."""
    return not any(_is_alike(one, now) for one in found)


def after_measurement(
    found: Sequence[Measurement],
    now: Measurement,
    *,
    max_micro_batches: int = MAX_MICRO_BATCHES,
    max_depth: int = MAX_DEPTH,
) -> tuple[list[Measurement], TuningDecision]:
    """What is known after one more look, and how to go on."""
    known = same_workload(found, now)
    if is_new(found, now):
        why = f"{now.rows:,.0f} rows of {now.tokens:,.0f} tokens per step are new: looked at once more before anything else"
        return known, TuningDecision(now.choice, why, patience=0)
    return known, choose(known, max_micro_batches=max_micro_batches, max_depth=max_depth, explore=True)


def choose(
    found: Sequence[Measurement],
    *,
    max_micro_batches: int = MAX_MICRO_BATCHES,
    max_depth: int = MAX_DEPTH,
    explore: bool = False,
) -> TuningDecision:
    """The best choice after these observations of one workload, the present one last."""
    now, model = found[-1], StepCostModel.of(found)
    tried = {one.choice.cut: one.step_s for one in found}
    low, high = min(cut[0] for cut in tried) / 2, max(cut[0] for cut in tried) * 2  # further away the model is a guess
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
    promises = times[best] < now.step_s * (1 - _MARGIN)
    if not promises:
        best = own
    trial = _trial(found, model, max_micro_batches) if explore and (len(found) == 1 or not promises) else None
    best = trial or best
    depth, why_depth = _depth(now, max_depth)
    pool_rows = now.choice.buffer_rows
    if pool_rows < now.buffer_rows * (depth + 2):
        pool_rows = math.ceil(_POOL_ROOM * now.buffer_rows * (depth + 2))
    on_trial = explore and best.cut != now.choice.cut and (trial is not None or best.cut not in tried)
    reasons = [("on trial, " if on_trial else "") + _why(now, best, model, tried), why_depth]
    if pool_rows:
        reasons.append(f"pool of {pool_rows:,} rows: {depth + 2} batches of {now.buffer_rows:,.0f}, and a quarter")
    new = on_trial or depth != now.choice.depth
    patience = 0 if new else next((_patience(one, found) for one in found if one.choice.cut == best.cut), 0)
    return TuningDecision(replace(best, depth=depth, buffer_rows=pool_rows), "; ".join(reasons), patience)


def _trial(found: Sequence[Measurement], model: StepCostModel, max_micro_batches: int) -> PipelineChoice | None:
    """What should be tried, though it promises nothing; None if enough has been."""
    now, tried = found[-1], {one.choice.cut for one in found}
    beside = [
        PipelineChoice(micro_batches=micro_batches)
        for micro_batches in ((now.choice.micro_batches + 1) // 2, now.choice.micro_batches * 2)
        if micro_batches <= max_micro_batches
    ]
    untried = [one for one in beside if one.cut not in tried]
    if len(found) == 1 and untried:
        return untried[0]
    if near := [one for one in untried if model.step_s(one) <= _FAR_LONGER * now.step_s]:
        return min(near, key=model.step_s)
    doubtful = [one for one in found[:-1] if _is_doubtful(one, now) and one.choice.micro_batches <= max_micro_batches]
    return min(doubtful, key=lambda one: one.num_measurements).choice if doubtful else None


def _is_doubtful(one: Measurement, now: Measurement) -> bool:
    """Whether something should be tried again: it has had few looks, or the last was long ago, and it is not far slower."""
    if one.step_s > _FAR_LONGER * now.step_s:
        return one.num_measurements < _TWICE
    near = one.step_s <= _NEARLY * now.step_s
    return one.num_measurements < (_ENOUGH if near else _TWICE) or one.idle_steps >= (_SOON if near else _LATER)


def _patience(one: Measurement, found: Sequence[Measurement]) -> int:
    """That of settings to stay with: what takes the place of something better known is watched closely."""
    newcomer = one.num_measurements < min(max(other.num_measurements for other in found), _MEMORY)
    return min(one.patience, 1) if newcomer else one.patience


def _depth(now: Measurement, most: int) -> tuple[int, str]:
    share, depth = now.lookup_s / now.step_s, now.choice.depth
    more = share > _EXPOSED_LOOKUP and depth < most
    return depth + more, f"depth {depth + more}: {share:.1%} of a step waited for lookup at depth {depth}"


def _why(now: Measurement, best: PipelineChoice, model: StepCostModel, tried: dict[tuple[int, float], float]) -> str:
    text = f"{best}: {_ms(tried.get(best.cut, model.step_s(best)))} {'measured' if best.cut in tried else 'expected'}"
    if best.cut == now.choice.cut:
        return f"{text}, {_ms(now.comm_s)} of it exposed messages; nothing else promises more"
    edge = model.messages.at(model.edge_rows(best))
    return (
        f"{text} against {_ms(now.step_s)} with {now.choice}: exposed messages {_ms(now.comm_s)} -> {_ms(edge)}, "
        f"compute {_ms(now.busy_s)} -> {_ms(model.busy_s(best))}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
