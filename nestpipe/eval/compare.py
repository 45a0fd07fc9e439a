"""Compares two evaluations of the same users by paired bootstrap: top-k metrics, or GAUC of labels."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from rich.table import Table

from nestpipe.errors import DataError
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.label_metrics import ratio_difference
from nestpipe.eval.label_report import LabelReport
from nestpipe.eval.protocol import require_same
from nestpipe.eval.topk_metrics import Counts, Interval, bootstrap_all

_GAINS = ("hr", "ndcg", "mrr")


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of two runs on the same users: means, and the interval of b - a."""

    a: float
    b: float
    interval: Interval
    is_gain: bool = True  # whether higher is better; what lists are like is higher or lower

    @property
    def verdict(self) -> Literal["better", "worse", "higher", "lower", "no difference shown"]:
        """What b is if the interval of b - a excludes 0."""
        if self.interval.low > 0:
            return "better" if self.is_gain else "higher"
        if self.interval.high < 0:
            return "worse" if self.is_gain else "lower"
        return "no difference shown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run b against run a, metric by metric."""

    num_users: int
    differences: dict[str, Difference]

    def to_json(self) -> str:
        """The differences with their verdicts."""
        metrics = {name: asdict(one) | {"verdict": one.verdict} for name, one in self.differences.items()}
        return json.dumps({"num_users": self.num_users, "metrics": metrics}, indent=2)

    def __rich__(self) -> Table:
        """A table for `rich.print`."""
        table = Table(title=f"paired over {self.num_users:,} users", pad_edge=False)
        for header in ("metric", "a", "b", "b - a [95 %]", "b is"):
            table.add_column(header, no_wrap=True)
        for name, one in self.differences.items():
            table.add_row(name, f"{one.a:.4f}", f"{one.b:.4f}", signed(one.interval), one.verdict)
        return table


def signed(interval: Interval) -> str:
    """An interval of a difference, with signs."""
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def compare(report_a: EvalReport, report_b: EvalReport, seed: int, *, num_bootstrap: int = 1000) -> Comparison:
    """Paired bootstrap of each metric that both reports have; raises DataError unless they have the same targets."""
    require_same((report_a.protocol, report_b.protocol), ("a", "b"))
    order_a, order_b = (np.lexsort((report.target, report.user)) for report in (report_a, report_b))
    _check_comparable(report_a, report_b, order_a, order_b)
    ks = tuple(k for k in report_a.ks if k in report_b.ks)
    a = {name: values[order_a] for name, values in report_a.user_metrics(ks).items()}
    b = {name: values[order_b] for name, values in report_b.user_metrics(ks).items()}
    shared = [name for name in a if name in b]
    intervals = bootstrap_all({name: b[name] - a[name] for name in shared}, seed=seed, num=num_bootstrap)
    differences = {
        name: Difference(float(a[name].mean()), float(b[name].mean()), intervals[name], name.startswith(_GAINS))
        for name in shared
    }
    return Comparison(report_a.num_users, differences)


def _check_comparable(a: EvalReport, b: EvalReport, order_a: Counts, order_b: Counts) -> None:
    problem = None
    if a.num_users != b.num_users:
        problem = f"{a.num_users:,} users in a but {b.num_users:,} in b"
    elif (a.num_items, a.seen) != (b.num_items, b.seen):
        problem = f"a ranks {a.num_items:,} items (eval.seen {a.seen}), b {b.num_items:,} (eval.seen {b.seen})"
    else:
        pairs_a = np.stack([a.user, a.target])[:, order_a]
        pairs_b = np.stack([b.user, b.target])[:, order_b]
        differ = np.flatnonzero((pairs_a != pairs_b).any(axis=0))
        if differ.size:
            (user_a, target_a), (user_b, target_b) = pairs_a[:, differ[0]], pairs_b[:, differ[0]]
            problem = f"user {user_a} with target {target_a} in a, but user {user_b} with target {target_b} in b"
    if problem:
        raise DataError(
            f"the two reports cannot be compared user by user: {problem}. "
            "Evaluate both runs on the same data with the same eval settings."
        )


@dataclass(frozen=True, slots=True)
class LabelComparison:
    """GAUC of two evaluations of the same users by label: a, b, and the interval of b - a."""

    differences: dict[str, tuple[float, float, Interval]]

    def to_json(self) -> str:
        return json.dumps(
            {name: {"a": a, "b": b, "b_minus_a": asdict(one)} for name, (a, b, one) in self.differences.items()}
        )

    def __rich__(self) -> Table:
        table = Table(title="gauc, paired over users")
        for header in ("label", "a", "b", "b - a [95 %]"):
            table.add_column(header, no_wrap=True)
        for name, (a, b, one) in self.differences.items():
            table.add_row(name, f"{a:.4f}", f"{b:.4f}", signed(one))
        return table


def compare_labels(a: LabelReport, b: LabelReport, seed: int, *, num_bootstrap: int = 1000) -> LabelComparison:
    """Paired bootstrap of GAUC for the labels that both reports have; raises DataError unless the events are the same."""
    require_same((a.protocol, b.protocol), ("a", "b"))
    labels = [label for label in a.tasks if label in b.tasks and f"{label}.gauc" in a.per_user]
    same = len(a.user) == len(b.user) and bool((a.user == b.user).all())
    if not same or any((a.gauc(label).bottom != b.gauc(label).bottom).any() for label in labels):
        raise DataError(
            "the two reports are not about the same events of the same users, so they cannot be paired. Evaluate both runs on the same data and split."
        )
    pairs = {label: (a.gauc(label), b.gauc(label)) for label in labels}
    return LabelComparison(
        {
            label: (one.value, other.value, ratio_difference(one, other, seed=seed, num=num_bootstrap))
            for label, (one, other) in pairs.items()
        }
    )
