"""The first lines of a report: what became of the run, and the figures that one would say aloud."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nestpipe.report.balance import of_ranks
from nestpipe.report.curves import series_of
from nestpipe.report.inputs import Evaluation, Missing, RunFacts, SavedCheckpoint, TracedSteps
from nestpipe.report.number_format import count, duration, metric, num_bytes, share, significant
from nestpipe.report.svg import Markup, element


class Figure(NamedTuple):
    """A number, what it is, and what to know about it."""

    label: str
    value: str
    about: str = ""


def headline(facts: RunFacts) -> Markup:
    """The tiles."""
    tiles = [
        element("div", element("dt", one.label), element("dd", one.value), element("dd", one.about, class_="soft"))
        for one in figures(facts)
    ]
    return element("dl", *tiles, class_="tiles")


def figures(facts: RunFacts) -> Iterator[Figure]:
    """Whatever of it is known."""
    yield from _quality(facts)
    yield from _training(facts)
    yield from _machine(facts)


def _quality(facts: RunFacts) -> Iterator[Figure]:
    for target, found in facts.evaluations.items():
        if isinstance(found, Evaluation) and (line := found.headline):
            low, high = line.overall.low, line.overall.high
            details = [f"95 % in {metric(low)} – {metric(high)}"] if low is not None and high is not None else []
            details += [f"{found.floor} {metric(line.floors[found.floor].mean)}"] if found.floor else []
            yield Figure(f"{line.name}, {target}", metric(line.overall.mean), "; ".join(details))
    best = facts.summary.get("best")
    if isinstance(best, dict):
        name = "ndcg@10" if isinstance(facts.settings, Missing) else str(facts.settings.get("train.metric"))
        yield Figure(f"best validation {name}", metric(best["value"]), f"at step {best['step']:,}")


def _training(facts: RunFacts) -> Iterator[Figure]:
    found = series_of(facts.records)
    if losses := found.get("loss"):
        yield Figure("training loss", significant(losses[-1][1]), f"from {significant(losses[0][1])}")
    epoch = facts.summary.get("epoch", max((record.get("epoch", 0) for record in facts.records), default=0))
    if facts.num_steps is not None:
        yield Figure("steps", count(facts.num_steps), f"{count(epoch)} epochs done" if epoch else "in the first epoch")
    if facts.seconds:
        rate = f"{significant(facts.num_steps / facts.seconds)} steps/s" if facts.num_steps else ""
        yield Figure("training time", duration(facts.seconds), rate)
    if tokens := found.get("tokens_per_s"):
        yield Figure("tokens per second", count(tokens[-1][1]), "rank 0, mean since its start")


def _machine(facts: RunFacts) -> Iterator[Figure]:
    number = facts.num_ranks
    if number is not None:
        mode = "" if isinstance(facts.settings, Missing) else str(facts.settings.get("pipeline.mode", ""))
        yield Figure("ranks", count(number), mode)
    if isinstance(facts.traced, TracedSteps):
        found = facts.traced.report
        about = f"slowest rank; step {significant(found.slowest.step_ms.median)} ms"
        yield Figure("busy", share(found.busy_share), about)
    if number is not None and (own := of_ranks(facts, number)):
        most = max(one["memory_bytes"] for one in own)
        yield Figure("peak memory", num_bytes(most), "fullest rank" if number > 1 else "")
    if isinstance(facts.saved, SavedCheckpoint):
        rows = sum(sum(one.rows_per_bucket) for one in facts.saved.tables)
        yield Figure("embedding rows", count(rows), f"{count(facts.saved.num_dense)} dense weights")
