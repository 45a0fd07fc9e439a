"""What instructions are worth: the same requests answered without one, with their own, and with that of another request.

    effect = metric with the own instruction - metric without one           paired over users
    lost   = (metric with own - metric with another's) / effect             the control: 1 if only the own instruction helps

Rows are scenarios of the target and sources, the authors of the texts: the template, a language model, a column of the log.
The control moves every instruction to another request; equal texts of different requests stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from nestpipe.atomic_files import replace_file
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.data.splits import Split
from nestpipe.eval.compare import signed
from nestpipe.eval.eval_ranks import EvalRanks
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.predictor import GenerativePredictor
from nestpipe.eval.protocol import Target
from nestpipe.eval.scenario_eval import scenario_masks, target_events
from nestpipe.eval.topk_metrics import Array, Counts, Interval, bootstrap_all, list_length, resamples
from nestpipe.generative.training_instructions import REASONING, IndexedVectors

FILE = "instructions.json"
ALL = "all"
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class InstructionEffect:
    """A metric of some requests without instructions, with their own and with others', and the effect with its control."""

    without: float
    own: float
    shuffled: float
    effect: Interval
    lost: Interval | None  # None where no effect is shown


@dataclass(frozen=True, slots=True)
class InstructionMetrics:
    """Users and effects by scenario, source and metric."""

    num_users: dict[str, dict[str, int]]
    effects: dict[str, dict[str, dict[str, InstructionEffect]]]
    shown: str  # the metric of the table

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def save(self, folder: Path) -> None:
        replace_file(folder / FILE, self.to_json().encode())

    def __rich__(self) -> Table:
        title = f"instructions: {self.shown} without one, with the own, with another request's"
        table = Table(title=title, box=None, pad_edge=False)  # fits into 80 columns
        table.add_column("scenario, source")
        for header in ("users", "none", "own - none [95 %]", "another's loses"):
            table.add_column(header, no_wrap=True)
        for scenario, sources in self.effects.items():
            for source, metrics in sources.items():
                one, lost = metrics[self.shown], metrics[self.shown].lost
                share = "" if lost is None else f"{lost.mean:.0%} [{lost.low:.0%}, {lost.high:.0%}]"
                users = f"{self.num_users[scenario][source]:,}"
                table.add_row(f"{scenario}, {source}", users, f"{one.without:.4f}", signed(one.effect), share)
        return table


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InstructedLog:
    """A log with instructions, and who wrote those of some events."""

    sequences: Sequences
    sources: Mapping[int, str]
    """By event; events without an instruction may be left out."""


def instruction_metrics(
    predictor: GenerativePredictor,
    report: EvalReport,
    logs: Sequence[InstructedLog],
    split: Split,
    target: Target,
    *,
    seed: int,
    num_bootstrap: int,
    ranks: EvalRanks | None = None,
) -> InstructionMetrics | None:
    """Answers the requests of a report again; None if no request has an instruction. Collective.

    The first log is that of the report; the others have other instructions for the same requests.
    """
    events = target_events(report, logs[0].sequences, split, target)
    masks = {ALL: np.ones(len(events), bool), **scenario_masks(logs[0].sequences, events)}
    effects: dict[str, dict[str, dict[str, InstructionEffect]]] = {name: {} for name in masks}
    counts: dict[str, dict[str, int]] = {name: {} for name in masks}
    shown = f"ndcg@{list_length(report.ks)}"

    def answered(sequences: Sequences) -> dict[str, Array]:
        found = predictor.on_log(sequences).evaluate(target, ranks=ranks, progress=False)
        assert np.array_equal(found.user, report.user)
        return found.user_metrics(report.ks)

    without = answered(_with_vectors(logs[0].sequences, events, None))
    for number, log in enumerate(logs):
        vectors = np.asarray(log.sequences.event_features[REASONING].values[events])
        has = ~np.isnan(vectors).any(1)
        if not has.any():
            continue
        own = report.user_metrics(report.ks) if number == 0 else answered(log.sequences)
        shuffled = answered(_with_vectors(log.sequences, events, _shuffled(vectors, has, seed)))
        named = np.array([log.sources.get(int(event), "log") for event in events], dtype=object)
        for source in dict.fromkeys(named[has].tolist()):
            for scenario, mask in masks.items():
                rows = mask & has & (named == source)
                if rows.any() and source not in effects[scenario]:
                    arms = [{name: values[rows] for name, values in one.items()} for one in (without, own, shuffled)]
                    effects[scenario][source] = _effects(*arms, seed=seed, num=num_bootstrap)
                    counts[scenario][source] = int(rows.sum())
    kept = {scenario: sources for scenario, sources in effects.items() if sources}
    return InstructionMetrics({name: counts[name] for name in kept}, kept, shown) if kept else None


def _effects(
    without: Mapping[str, Array], own: Mapping[str, Array], shuffled: Mapping[str, Array], *, seed: int, num: int
) -> dict[str, InstructionEffect]:
    names = [name for name in own if name in without]
    gains = {name: own[name] - without[name] for name in names}
    intervals = bootstrap_all(gains, seed=seed, num=num)
    found = {}
    for name in names:
        has_effect = intervals[name].low > 0 and len(gains[name]) > 1
        losses = own[name] - shuffled[name]
        lost = ratio_interval(losses, gains[name], seed=seed, num=num) if has_effect else None
        means = [float(one[name].mean()) for one in (without, own, shuffled)]
        found[name] = InstructionEffect(means[0], means[1], means[2], intervals[name], lost)
    return found


def ratio_interval(top: Array, bottom: Array, *, seed: int, num: int) -> Interval:
    """The 95 % percentile interval of mean(top) / mean(bottom), from resamples of users.

    Resamples in which the bottom is not above 0 are left out; where an effect is shown they are fewer than one in forty.
    """
    sums = np.array([(counts @ top, counts @ bottom) for counts in resamples(len(top), seed=seed, num=num)])
    ratios = sums[sums[:, 1] > 0, 0] / sums[sums[:, 1] > 0, 1]
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist()
    return Interval(float(top.mean() / bottom.mean()), low, high)


def _shuffled(vectors: NDArray[np.float32], has: Mask, seed: int) -> NDArray[np.float32]:
    """Vectors [n, D] in which every instruction is that of another request: a cycle through all of them."""
    order = np.random.default_rng(seed).permutation(np.flatnonzero(has))
    moved = vectors.copy()
    moved[order] = vectors[np.roll(order, 1)]
    return moved


def _with_vectors(sequences: Sequences, events: Counts, vectors: NDArray[np.float32] | None) -> Sequences:
    """The log with other instructions [n, D] for some events and none for the rest; None: none at all."""
    (feature,) = [one for one in sequences.schema.features if one.name == REASONING]
    index = np.full(len(sequences.items), -1, np.int64)
    if vectors is None:
        vectors = np.empty((0, feature.dim), np.float32)
    else:
        index[events] = np.arange(len(events))
    stored = StoredFeature(IndexedVectors(vectors, index))  # type: ignore[arg-type]
    return replace(sequences, event_features={**sequences.event_features, REASONING: stored})
