"""What /metrics of an instance says. Users are never labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nestpipe.serve.config import BUCKETS_S
from nestpipe.serve.engine import Engine


class EngineMetrics(Collector):
    """Counts what the handlers see, and asks the engine for the rest when somebody looks."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        own = self._registry
        self.answers = Counter("nestpipe_answers", "Answers by call and status", ["call", "status"], registry=own)
        self.rank_seconds = Histogram(
            "nestpipe_rank_seconds", "Time of a rank in the engine", ["model"], buckets=BUCKETS_S, registry=own
        )
        self.tickets = Counter("nestpipe_tickets_refused", "Tickets that were not taken", registry=own)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        for kind, title in (("path", "Ranks by path"), ("reason", "Signals by what the trigger said")):
            family = CounterMetricFamily(f"nestpipe_{kind}", title, labels=[kind])
            for (what, which), count in sorted(engine.counts.items()):
                if what == kind:
                    family.add_metric([which], count)
            yield family
        ranked = CounterMetricFamily("nestpipe_ranked", "Ranks by model and path", labels=["model", "path"])
        for served in list(engine.models):
            for path, count in sorted(served.counts.items()):
                ranked.add_metric([served.name, path], count)
        yield ranked
        tiers = {"device": engine.cache.device, "host": engine.cache.host}
        gauges = {"used": "Bytes of prefixes", "reserved": "Bytes of prefixes in work", "cap": "Bytes there may be"}
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
        yield GaugeMetricFamily("nestpipe_waiting", "Requests that wait", value=engine.num_waiting)
        p99_s = engine.rank_p99_ms() / 1e3
        yield GaugeMetricFamily("nestpipe_rank_p99_seconds", "99th percentile of late", value=p99_s)
