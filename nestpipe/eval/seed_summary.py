"""Several runs that differ in their seed as one result: mean, deviation over seeds and the 95 % interval of the mean."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from nestpipe.errors import DataError
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.label_report import LabelReport
from nestpipe.eval.protocol import Protocol, require_same

SEEDS = "seeds.json"  # beside the report of the first run


@dataclass(frozen=True, slots=True)
class SeedValue:
    """A metric over seeds; the interval is Student's, of the mean over all seeds of such runs on the same users."""

    mean: float
    deviation: float
    low: float
    high: float
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> SeedValue:
        """Raises DataError for fewer than two values: one seed has no deviation."""
        if len(values) < 2:
            raise DataError("a result over seeds needs at least two runs; one seed has no deviation. Train another.")
        mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
        half = student_quantile(len(values) - 1) * deviation / math.sqrt(len(values))
        return SeedValue(mean, deviation, mean - half, mean + half, tuple(map(float, values)))


@dataclass(frozen=True, slots=True)
class SeedSummary:
    """One result of several seeds, in one protocol."""

    runs: tuple[str, ...]
    protocol: Protocol | None
    metrics: dict[str, SeedValue]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Table:
        table = Table(title=f"{len(self.runs)} seeds", caption="± standard deviation over seeds; interval of the mean")
        for header in ("metric", "mean ± deviation", "mean [95 %]", "seeds"):
            table.add_column(header, no_wrap=True)
        for name, one in self.metrics.items():
            shown = f"{one.mean:.4f} [{one.low:.4f}, {one.high:.4f}]"
            table.add_row(
                name, f"{one.mean:.4f} ± {one.deviation:.4f}", shown, " ".join(f"{v:.4f}" for v in one.values)
            )
        return table


def summarise(reports: Mapping[str, EvalReport | LabelReport]) -> SeedSummary:
    """The metrics that all reports have; raises DataError unless they are of one protocol and two runs or more."""
    names, found = list(reports), list(reports.values())
    require_same([one.protocol for one in found], names)
    scalars = [one.scalars() for one in found]
    shared = [metric for metric in scalars[0] if all(metric in one for one in scalars)]
    metrics = {metric: SeedValue.of([one[metric] for one in scalars]) for metric in shared}
    return SeedSummary(tuple(names), found[0].protocol, metrics)


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution, by bisection of its distribution function."""
    low, high = 0.0, 13.0  # 12.706 with one degree of freedom, less with more
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _central_share(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _central_share(t: float, freedom: int) -> float:
    """P(|T| < t), the finite series for a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for step in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (step - 1) / step
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
