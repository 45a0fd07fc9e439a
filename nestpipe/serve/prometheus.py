"""Metrics of the instances. Users are never labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nestpipe.serve.config import BUCKETS_S
from nestpipe.serve.engine import Engine
from nestpipe.serve.generation_engine import Generator
from nestpipe.serve.nearline_prefill import NearlinePrefill
from nestpipe.serve.prefix_store import PrefixStore
from nestpipe.serve.worker_thread import WorkerThread


def status_counter(answers: Counter, call: str) -> Callable[[int], None]:
    """Counts the answers of a call by status; the series are looked up once."""
    series: dict[int, Counter] = {}

    def count(status: int) -> None:
        if (own := series.get(status)) is None:
            own = series[status] = answers.labels(call, str(status))
        own.inc()

    return count


class InstanceMetrics(Collector):
    """Counters of the handlers; the worker's own figures are read when /metrics is scraped."""

    def __init__(self, worker: WorkerThread):
        self._worker = worker
        own = self._registry = CollectorRegistry()
        own.register(self)
        self.answers = Counter("nestpipe_answers", "Answers by call and status", ["call", "status"], registry=own)
        self.events = Counter("nestpipe_events", "Events that were stored", registry=own)
        self.recommended = Counter(
            "nestpipe_recommended", "Recommendations by model and path", ["model", "path"], registry=own
        )
        self.recommend_seconds = Histogram(
            "nestpipe_recommend_seconds", "Time of a recommendation", buckets=BUCKETS_S, registry=own
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("nestpipe_waiting", "Requests that wait", value=self._worker.num_waiting)


class RankingMetrics(InstanceMetrics):
    """Of an instance that ranks."""

    def __init__(self, worker: WorkerThread):
        super().__init__(worker)
        self.rank_seconds = Histogram(
            "nestpipe_rank_seconds",
            "Time of a ranking request in the engine",
            ["model"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._of_model: dict[str, Histogram] = {}  # the series, which are looked up once

    def observe_rank(self, model: str, seconds: float) -> None:
        if (own := self._of_model.get(model)) is None:
            own = self._of_model[model] = self.rank_seconds.labels(model)
        own.observe(seconds)


class EngineMetrics(RankingMetrics):
    """Of an instance that ranks with KV prefixes."""

    def __init__(self, engine: Engine):
        self._engine = engine
        super().__init__(engine)
        self.tickets = Counter("nestpipe_tickets_refused", "Tickets that were refused", registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        engine = self._engine
        for kind, title in (("path", "Ranking requests by path"), ("reason", "Prefill hints by decision")):
            family = CounterMetricFamily(f"nestpipe_{kind}", title, labels=[kind])
            for (what, which), count in sorted(engine.counts.items()):
                if what == kind:
                    family.add_metric([which], count)
            yield family
        ranked = CounterMetricFamily("nestpipe_ranked", "Ranking requests by model and path", labels=["model", "path"])
        for served in list(engine.models):
            for path, count in sorted(served.counts.items()):
                ranked.add_metric([served.name, path], count)
        yield ranked
        tiers = {"device": engine.cache.device, "host": engine.cache.host}
        gauges = {"used": "Bytes of KV prefixes", "reserved": "Bytes of prefixes in work", "cap": "Capacity in bytes"}
        for name, title in gauges.items():
            gauge = GaugeMetricFamily(f"nestpipe_cache_{name}_bytes", title, labels=["tier"])
            for label, tier in tiers.items():
                gauge.add_metric([label], getattr(tier, name))
            yield gauge
        copies = CounterMetricFamily("nestpipe_cache_copies", "Prefixes copied into a tier", labels=["tier"])
        for label, tier in tiers.items():
            copies.add_metric([label], tier.copies)
        yield copies
        yield CounterMetricFamily("nestpipe_cache_evicted", "Prefixes evicted", value=engine.cache.num_evicted)
        if engine.tiers.stored is not None and engine.nearline is not None:
            yield from _store_metrics(engine.tiers.stored.store, engine.nearline)
        p99_s = engine.latencies.p99() / 1e3
        yield GaugeMetricFamily("nestpipe_rank_p99_seconds", "P99 ranking latency over the last 5 s", value=p99_s)


def _store_metrics(store: PrefixStore, nearline: NearlinePrefill) -> Iterator[Metric]:
    """Of KV prefixes on disk. Hits are among the paths, as `hit_store`; what was read ahead is `hit_device` or `join`."""
    gauges = {"used_bytes": store.used, "cap_bytes": store.cap, "entries": len(store)}
    for name, value in gauges.items():
        yield GaugeMetricFamily(f"nestpipe_store_{name}", f"Prefix store: {name.replace('_', ' ')}", value=value)
    counts = ("reads", "read_bytes", "writes", "written_bytes", "corrupt", "evicted", "failed")
    for name in counts:
        title = f"Prefix store: {name.replace('_', ' ')}"
        yield CounterMetricFamily(f"nestpipe_store_{name}", title, value=store.counts[name])
    yield GaugeMetricFamily("nestpipe_nearline_waiting", "Users whose stored prefix is to be made", value=len(nearline))
    done = CounterMetricFamily("nestpipe_nearline", "Near-line prefills by result", labels=["result"])
    for name in ("stored", "passed_over", "failed"):
        done.add_metric([name], nearline.counts[name])
    yield done


class GenerationMetrics(InstanceMetrics):
    """Of an instance that generates."""

    def __init__(self, generator: Generator):
        self._generator = generator
        super().__init__(generator)
        self.generate_seconds = Histogram(
            "nestpipe_generate_seconds",
            "Time of a request in the generator",
            buckets=BUCKETS_S,
            registry=self._registry,
        )

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        generator = self._generator
        paths = CounterMetricFamily("nestpipe_generated", "Answers by path", labels=["path"])
        instructions = CounterMetricFamily(
            "nestpipe_instructions", "Answers by the instruction found", labels=["found"]
        )
        for (what, which), count in sorted(generator.counts.items()):
            (paths if what == "path" else instructions).add_metric([which], count)
        yield paths
        yield instructions
        used = GaugeMetricFamily("nestpipe_cache_used_bytes", "Bytes of encoder memories", labels=["tier"])
        used.add_metric(["device"], generator.cache.device.used)
        used.add_metric(["host"], generator.cache.host.used)
        yield used
