"""One instance of each kind of run, over HTTP, for tests of what all of them answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from nestpipe import train
from nestpipe.config import Config
from nestpipe.serve.api import Instance
from nestpipe.serve.config import EngineConfig, Limits, Stages, TriggerConfig
from nestpipe.serve.generation_api import GenerativeInstance
from nestpipe.serve.next_item_api import NextItemInstance
from nestpipe.serve.open_service import (
    open_generator,
    open_next_item_engine,
    open_pointwise_engine,
    open_search,
)
from nestpipe.serve.pointwise_api import PointwiseInstance
from nestpipe.serve.recommending import RecommendingInstance
from nestpipe.serve.worker_thread import WorkerThread
from nestpipe.training.run_folder import Run
from tests.eval.ranking_ranks import ranking_config
from tests.gateway.fake_instances import Served
from tests.serve import small_generative
from tests.serve.small_rankers import make_engine
from tests.small_runs import small_config

NOW = 2_000_000_000  # seconds; after every event
SLOW_MS = 60_000.0  # the machine may be busy
KINDS = ("next item", "ranker", "ranker with retrieval", "dcn", "generative")


@dataclass(eq=False)
class SmallService:
    """A service of a kind; `retrieval` is the other run of a ranker, if it has one."""

    kind: str
    run: Run
    retrieval: Run | None
    worker: WorkerThread
    instance: RecommendingInstance
    http: httpx.Client

    def recommend(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/recommend", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def make_runs(log: Path, ranker: Run, folder: Path) -> Callable[[str], Run]:
    """The runs of all kinds on one click log, but the generative one, which has its own; trained when asked for."""
    found = {"ranker": ranker}

    def of(kind: str) -> Run:
        if kind not in found:
            found[kind] = (
                small_generative.make_run(folder)
                if kind == "generative"
                else train(_config(log, kind), folder / kind, quiet=True)
            )
        return found[kind]

    return of


def _config(log: Path, kind: str) -> Config:
    clicks = ranking_config(log, "dcn")
    if kind == "dcn":
        return clicks
    data = replace(clicks.data, windows="last", max_len=16)
    return replace(small_config(log, "sasrec", epochs=1), data=data)


@contextmanager
def serving(
    kind: str, runs: Callable[[str], Run], folder: Path, *, stages: Stages | None = None, limits: Limits | None = None
) -> Iterator[SmallService]:
    """A service of a kind, with an event log of its own."""
    retrieval = runs("next item") if kind == "ranker with retrieval" else None
    run = runs("ranker" if retrieval else kind)
    worker, instance = _instance(run, retrieval, folder / "events.log", stages, limits or Limits())
    worker.start()
    server = Served(instance.app())
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield SmallService(kind, run, retrieval, worker, instance, http)
    server.stop()
    worker.stop()


def _instance(
    run: Run, retrieval: Run | None, log: Path, stages: Stages | None, limits: Limits
) -> tuple[WorkerThread, RecommendingInstance]:
    common: dict[str, Any] = {"name": "a", "limits": limits}
    config, kind = EngineConfig(), type(run.config.model).__name__
    if kind == "EncDecConfig":
        generator = open_generator(run, log, config=config)
        return generator, GenerativeInstance(generator, budget_ms=SLOW_MS, **common)
    common["wall_clock"] = lambda: NOW
    if kind == "DCNConfig":
        scorer = open_pointwise_engine(run, log, config=config)
        return scorer, PointwiseInstance(scorer, budget_ms=SLOW_MS, stages=stages, **common)
    if kind != "RankingConfig":
        engine = open_next_item_engine(run, log, config=config)
        return engine, NextItemInstance(engine, budget_ms=SLOW_MS, **common)
    ranker = make_engine(run, log.parent, trigger=TriggerConfig(budget_ms=SLOW_MS))
    search = None if retrieval is None else open_search(retrieval.folder, run)
    return ranker, Instance(ranker, secret=b"s" * 32, search=search, stages=stages, **common)
