"""The encoder reads the scenarios of past events: in training, evaluation and service alike, never that of the target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.ingest import SideTable, write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.jagged import Jagged
from nestpipe.models.build_model import inputs_of
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.open_service import open_generator
from tests.serve.small_generative import KINDS, NUM_ITEMS, answer, make_run

USER = 7
EXACT = 1e-5  # of log-probabilities of order one in 32 bits


def write_shop(folder, column, **encoding):
    """The scenario of every fourth event is missing."""
    rows = [
        (user, (user + 7 * step) % NUM_ITEMS, 1_000_000 + 60 * step, column(user + step))
        for user in range(40)
        for step in range(6)
    ]
    log = pl.DataFrame(rows, schema=["user", "item", "time", "scenario"], orient="row")
    titles = pl.DataFrame(
        {"item": range(NUM_ITEMS), "title": [f"{KINDS[item % 5]} {item}" for item in range(NUM_ITEMS)]}
    )
    schema = Schema(features=(Feature(name="scenario", kind="id", **encoding),))
    return write_sequences(folder / "log", schema=schema, log=log, texts=SideTable(source=titles, key="item"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("past")
    write_shop(folder, lambda number: (None, "home", "cart", "home")[number % 4], encoding="dictionary")
    return make_run(folder, past_scenarios=True)


def test_memories_depend_on_past_scenarios_and_rows_keep_their_places(run):
    loaded = run.load_model()
    model, builder = loaded.model, BatchBuilder(run.instructed, run.split, inputs_of(run.config, run.sequences))
    batch = builder.history(torch.tensor([2, 3]), np.array([0, 0]), np.array([5, 6]), request_ms=None)
    stored = batch.event_features["scenario"]
    assert stored.lengths().tolist() == [
        int(number % 4 > 0) for user, end in ((2, 5), (3, 6)) for number in range(user, user + end)
    ]

    def memory(given):
        rows = loaded.rows.read_each(model.encode_lookups(given))
        with torch.no_grad():
            return model.encoded(rows, given)[0]

    plain, flipped = memory(batch), stored.with_values(1 - stored.values)
    last = stored.with_values(torch.cat([stored.values[:-1], 1 - stored.values[-1:]]))

    def unchanged(given):
        other = memory(replace(batch, event_features={"scenario": given}))
        return ((plain - other).abs().amax(1) < 1e-7).nonzero().flatten().tolist()

    assert unchanged(flipped) == [0, 6], "the users' own rows; all events come after a known scenario"
    assert unchanged(last) == list(range(11)), "the last known scenario is that of the second last event"
    untrained = stored.with_values(torch.full_like(stored.values, 99))
    nothing = Jagged(stored.values[:0], torch.zeros_like(stored.offsets), 0)
    torch.testing.assert_close(
        memory(replace(batch, event_features={"scenario": untrained})),
        memory(replace(batch, event_features={"scenario": nothing})),
    )


def test_the_service_reads_what_training_read(run, tmp_path):
    generator = open_generator(run, tmp_path / "events.log", config=EngineConfig())
    scorer = run.predictor()
    for user in (0, USER, 39):
        expected, found = scorer.recommend(user, 5), answer(generator, user)
        assert found.items == expected.items
        assert found.log_probabilities == pytest.approx(expected.scores, abs=EXACT)
    items = [(USER + 7 * step) % NUM_ITEMS for step in range(4)]

    def with_scenario(scenario):
        events = [{"item": item, "time": 60 * place} | scenario for place, item in enumerate(items)]
        return answer(generator, 999, history=generator.histories.given(999, events)).log_probabilities

    home, cart, none = (with_scenario(one) for one in ({"scenario": 0}, {"scenario": 1}, {}))
    assert home != cart != none != home


def test_a_log_that_numbers_scenarios_is_read_too(tmp_path):
    write_shop(tmp_path, lambda number: number % 2, encoding="int64")
    run = make_run(tmp_path, past_scenarios=True)
    generator = open_generator(run, tmp_path / "events.log", config=EngineConfig())
    events = [{"item": 3, "time": 1, "scenario": 77}]  # not trained
    assert answer(generator, 999, history=generator.histories.given(999, events)).items
