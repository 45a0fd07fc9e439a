"""Small trained rankers, an engine around them, and a clock that tests move."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import replace

import torch

from nestpipe import train
from nestpipe.data.synthetic_clicks import ClicksConfig, ingest_clicks
from nestpipe.embedding.row_reader import read_rows
from nestpipe.eval.ranking_eval import RankingPredictor
from nestpipe.models.ranking import Ranking
from nestpipe.serve.config import EngineConfig, TriggerConfig
from nestpipe.serve.engine import Engine
from nestpipe.serve.latency_model import LatencySample, fit
from nestpipe.serve.model import open_served
from nestpipe.serve.requests import PrefillHint, RankingRequest
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from tests.eval.ranking_ranks import MODELS, ranking_config

MAX_LEN, BLOCK, NUM_USERS, NUM_ITEMS = 32, 8, 100, 24
BEHIND = 4  # events of a KV prefix that are worth storing
ON = TriggerConfig(budget_ms=1e6, burst_ms=1e9)  # keeps what full inference computes


def make_log(folder):
    return ingest_clicks(folder / "log", ClicksConfig(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=3600))


def make_run(log, folder, backbone):
    """A ranker after some steps: its rows and biases are no longer those of a new model."""
    config = ranking_config(log.path, backbone)
    model = replace(MODELS[backbone], features=("device", "category", "tags", "price", "segment"))
    data = replace(config.data, max_len=MAX_LEN, truncate_block=BLOCK)
    rates = {"embedding": replace(config.embedding, lr=0.05), "dense": replace(config.dense, lr=0.02)}
    settings = replace(config.train, epochs=3, save_steps=10_000)
    return train(replace(config, data=data, model=model, train=settings, **rates), folder, quiet=True)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def costs(*, full=10.0, hit=1.0, pre=8.0, per_byte=0.0):
    """Costs that do not depend on sizes."""
    found = [
        LatencySample(kind, n, n, ms) for n in (1, 2, 3) for kind, ms in (("full", full), ("hit", hit), ("pre", pre))
    ]
    return fit(found, copy_ms_per_byte=per_byte)


def histories_of(run, folder):
    return UserHistories(run.sequences, FileState(folder / "events.log"))


def make_engine(run, folder, *, clock=None, known=None, trigger=None, served=None, stored=None, **config):
    """An engine that is stepped by hand."""
    own = copy(served) if served else open_served(run, folder=folder / "tables")  # its costs are its own
    own.costs, own.counts = known or costs(), Counter()
    return Engine(
        own,
        histories_of(run, folder),
        config=EngineConfig(**{"chunk": 8, **config}),
        trigger=trigger or TriggerConfig(mode="always", burst_ms=1e9),
        stored=stored,
        **({"clock": clock} if clock else {}),
    )


ASKED = 1_702_600_000  # seconds; after every event of the log


def rank(engine, user, items=tuple(range(12)), *, slack_s=100.0, query_time=ASKED, **fields):
    job = RankingRequest(user=user, items=items, query_time=query_time, deadline=engine.clock() + slack_s, **fields)
    engine.submit(job)
    return job


def hint(engine, user, request="r", *, ttl_s=5.0, candidates=12, query_time=ASKED, **fields):
    job = PrefillHint(
        user=user,
        num_candidates=candidates,
        query_time=query_time,
        request=request,
        until=engine.clock() + ttl_s,
        **fields,
    )
    engine.submit(job)
    return job


def settle(engine):
    """Steps until nothing is left to do."""
    while engine.step():
        engine.cache.check()


def evaluated(scorer, history):
    """Predictions for every item after a history, by the code of `nestpipe eval`, which computes sequence by sequence."""
    assert isinstance(scorer, RankingPredictor)
    assert isinstance(scorer._model, Ranking)
    one = history.select(torch.zeros(NUM_ITEMS, dtype=torch.int64))
    ends = one.items.offsets[1:] - 1
    targets = one.items.values.index_copy(0, ends, torch.arange(NUM_ITEMS))
    batch = replace(
        one, targets=one.items.with_values(targets), target_features=scorer.builder.item_features(targets.numpy())
    )
    rows = read_rows(scorer._rows, scorer._model.target_lookups(batch))
    with torch.no_grad():
        return scorer._model.tasks.predict(scorer._model.target_scores(rows, batch, None))[ends, 0].numpy()
