"""Figures of the operator's page: the metrics of some processes, and how they changed over a time window.

Rates, shares and percentiles are those of the window. Percentiles are interpolated in the buckets of histograms.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from nestpipe.serve.requests import HITS

_WINDOW_S, _EVERY_S = 30.0, 1.0
_DEGRADED = frozenset({"shorter", "fallback", "narrow"})
_STAGES = {
    "gateway_stage_seconds_bucket": "",  # its label names the stage
    "recommend_seconds_bucket": "recommend",
    "rank_seconds_bucket": "rank",
    "generate_seconds_bucket": "generate",
}
_PATHS = ("path_total", "generated_total", "recommended_total")  # the first that counts
_ANSWERS = ("gateway_answers_total", "answers_total")


class Sample(NamedTuple):
    """One series of a metric, whose name is without 'nestpipe_'."""

    name: str
    labels: tuple[tuple[str, str], ...]


Samples = Mapping[Sample, float]


def samples_of(texts: Iterable[str]) -> Samples:
    """The metrics of several processes, added up."""
    found: defaultdict[Sample, float] = defaultdict(float)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                found[Sample(one.name.removeprefix("nestpipe_"), tuple(sorted(one.labels.items())))] += one.value
    return found


class RecentSamples:
    """Samples of the last half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kept: deque[tuple[float, Samples]] = deque()

    def add(self, now: Samples) -> dict[str, Any]:
        """The figures of now against the oldest samples of the window; against nothing for the first."""
        at = self._clock()
        while self._kept and at - self._kept[0][0] > _WINDOW_S:
            self._kept.popleft()
        since, before = self._kept[0] if self._kept else (at - _EVERY_S, {})
        if not self._kept or at - self._kept[-1][0] >= _EVERY_S:
            self._kept.append((at, now))
        return figures(before, now, seconds=max(at - since, 1e-3), is_first=not before)


def figures(before: Samples, now: Samples, *, seconds: float, is_first: bool = False) -> dict[str, Any]:
    """What the page shows; the rates of the first samples are unknown, so they are 0."""
    changed = {sample: value - before.get(sample, 0.0) for sample, value in now.items()}
    per_s = 0.0 if is_first else 1 / seconds
    answers = next((found for name in _ANSWERS if (found := _by(changed, name, "status"))), {})
    paths = next((found for name in _PATHS if sum((found := _by(changed, name, "path")).values())), {})
    num_paths = sum(paths.values())
    models = _by(changed, "ranked_total", "model") or _by(changed, "recommended_total", "model")
    models = {name: count for name, count in models.items() if count}
    return {
        "requests_per_s": round(sum(answers.values()) * per_s, 2),
        "refused_per_s": round(answers.get("429", 0.0) * per_s, 2),
        "failed_per_s": round(sum(n for status, n in answers.items() if status.startswith("5")) * per_s, 2),
        "events_per_s": round(sum(_by(changed, "events_total", "").values()) * per_s, 2),
        "stages": _stages(changed),
        "paths": {path: count / num_paths for path, count in sorted(paths.items()) if count},
        "degraded": _share(paths, _DEGRADED),
        "cache_hits": _share(paths, HITS) if any(name.name == "path_total" for name in now) else None,
        "cache_bytes": _by(now, "cache_used_bytes", "tier"),
        "models": {name: count / sum(models.values()) for name, count in sorted(models.items())},
    }


def _by(samples: Samples, name: str, label: str) -> dict[str, float]:
    """The values of a metric by one of its labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for sample, value in samples.items():
        if sample.name == name:
            found[dict(sample.labels).get(label, "")] += value
    return dict(found)


def _share(counts: Mapping[str, float], names: frozenset[str]) -> float | None:
    total = sum(counts.values())
    return sum(counts.get(name, 0.0) for name in names) / total if total else None


def _stages(changed: Samples) -> dict[str, dict[str, float]]:
    """P50 and P99 in milliseconds, and the number of requests, by stage."""
    buckets: dict[str, defaultdict[float, float]] = {}
    for sample, count in changed.items():
        if (stage := _STAGES.get(sample.name)) is not None:
            labels = dict(sample.labels)
            buckets.setdefault(stage or labels["stage"], defaultdict(float))[float(labels["le"])] += count
    return {
        stage: {"p50_ms": quantile(own, 0.5), "p99_ms": quantile(own, 0.99), "count": max(own.values())}
        for stage, own in buckets.items()
        if max(own.values())
    }


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """A quantile in milliseconds of cumulative counts by upper bound in seconds; of the last bucket its lower bound."""
    wanted, below, low = share * max(buckets.values()), 0.0, 0.0
    for bound in sorted(buckets):
        if buckets[bound] >= wanted and buckets[bound] > below:
            if bound == float("inf"):
                break
            return round(1e3 * (low + (bound - low) * (wanted - below) / (buckets[bound] - below)), 2)
        low, below = bound, buckets[bound]
    return round(1e3 * low, 2)
