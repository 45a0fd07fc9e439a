"""Instructions for training: no leak of the future, resumable, read in every mode, and refused where they would mean nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe import recipes
from nestpipe.cli.demo import differing_tensors
from nestpipe.cli.think_training import check_trained, write_for_training
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.generative.instruction_store import connect
from nestpipe.generative.llm_provider import TemplateProvider
from nestpipe.generative.text_encoder import hashed_words
from nestpipe.generative.training_instructions import TrainingInstructions, open_store
from nestpipe.generative.work_shard import WorkShard
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.generative.test_training import make_ids
from tests.small_runs import small_config

NUM_USERS, NUM_EVENTS = 70, 6


def write_searches(folder, *, last=None):
    """Users that search now and then; `last` replaces the item of user 0's last event, the latest of the log."""
    users = np.arange(NUM_USERS).repeat(NUM_EVENTS)
    places = np.tile(np.arange(NUM_EVENTS), NUM_USERS)
    items = (users + (7 + users // 30) * places) % 30
    times = 1_000_000 + 60 * (places * NUM_USERS + users)
    times[NUM_EVENTS - 1] = times.max() + 60
    if last is not None:
        items[NUM_EVENTS - 1] = last
    queries = [f"lamp {item % 3}" if item % 4 == 0 else None for item in items]
    log = pl.DataFrame({"user": users, "item": items, "time": times, "query": queries})
    schema = Schema(features=(Feature(name="query", kind="id", encoding="dictionary"),))
    return write_sequences(folder, schema=schema, log=log)


def write_store(sequences, path, **settings):
    write_for_training(
        sequences,
        provider=settings.pop("provider", TemplateProvider()),
        encoder=(partial(narrow), settings.pop("version", "words")),
        store=path,
        quiet=True,
        **settings,
    )
    return path


def narrow(texts):
    return hashed_words(texts)[:, :24].contiguous()


def texts_of(path):
    joined = "SELECT event, text FROM targets JOIN texts USING (digest)"
    return dict(connect(path, read_only=True).execute(joined))


def config_of(folder, log, store, mode="sequential", **train):
    config = small_config(log, pipeline={"mode": mode, "micro_batches": 2}, **{"epochs": 2, **train})
    small = {"dim": 8, "num_encoder": 1, "num_decoder": 1, "num_heads": 2, "hidden_dim": 16, "beam": 16}
    model = replace(recipes.beauty_sid().model, ids=str(folder / "ids"), placement="after", **small)
    return replace(config, model=replace(model, instructions=str(store)))


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instructed")
    make_ids(folder / "ids")
    write_store(write_searches(folder / "log"), folder / "store.sqlite")
    return folder


def test_a_poisoned_future_event_changes_no_request_no_row_and_no_weight(shop, tmp_path):
    """The last event of user 0 is the latest of the log and a test target: training may know nothing of it."""
    poisoned = write_searches(tmp_path / "log", last=29)
    store = write_store(poisoned, tmp_path / "store.sqlite")
    assert texts_of(store) == texts_of(shop / "store.sqlite")
    runs = [
        train_to_end(config_of(shop, log, path), tmp_path / name, quiet=True).run
        for name, log, path in (("calm", shop / "log", shop / "store.sqlite"), ("run", tmp_path / "log", store))
    ]
    assert runs[0].config.model.reasoning_dim == 24
    assert not differing_tensors(*(one.folder for one in runs))
    earlier = write_searches(tmp_path / "earlier")
    items = earlier.items.copy()
    items[2] = 29  # an event in the middle: what follows may know, what precedes may not
    moved = texts_of(write_store(replace(earlier, items=items), tmp_path / "earlier.sqlite"))
    changed = [event for event, text in texts_of(store).items() if moved[event] != text]
    assert 3 in changed
    assert all(event > 2 for event in changed)


def test_instructions_reach_every_mode_and_resume_bitwise(shop, tmp_path):
    store = shop / "store.sqlite"
    calm = train_to_end(config_of(shop, shop / "log", store), tmp_path / "calm", quiet=True).run
    train_to_end(config_of(shop, shop / "log", store, "nested", steps=5), tmp_path / "run", quiet=True)
    nested = config_of(shop, shop / "log", store, "nested")
    train_to_end(nested, tmp_path / "run", resume=True, quiet=True)
    assert not differing_tensors(calm.folder, tmp_path / "run")
    learned = load_state(calm)[0].model.instruction.reasoning.weight
    plain = config_of(shop, shop / "log", "")
    untrained = train_to_end(
        replace(plain, model=replace(plain.model, reasoning_dim=24)), tmp_path / "none", quiet=True
    )
    assert not torch.equal(learned, load_state(untrained.run)[0].model.instruction.reasoning.weight)
    assert calm.predictor().evaluate(progress=False).num_users == NUM_USERS
    check_trained(calm)
    with pytest.raises(
        ConfigError, match=r"never saw an instruction(.|\n)*think .* --for-training(.|\n)*--instructions"
    ):
        check_trained(untrained.run)
    other = write_store(write_searches(tmp_path / "log"), tmp_path / "other.sqlite", column="query")
    with pytest.raises(CheckpointError, match="instructions: "):
        train_to_end(config_of(shop, shop / "log", other, "nested"), tmp_path / "run", resume=True, quiet=True)


class Killed(TemplateProvider):
    """Dies at its second call."""

    num_calls = 0

    def generate(self, requests):
        self.num_calls += 1
        if self.num_calls == 2:
            raise KeyboardInterrupt
        return super().generate(requests)


def test_an_interrupted_job_goes_on_where_it_stopped(shop, tmp_path):
    log = write_searches(tmp_path / "log")
    with pytest.raises(KeyboardInterrupt):
        write_store(log, tmp_path / "store.sqlite", provider=Killed())
    with pytest.raises(ConfigError, match="8 of 70 users; the job was interrupted"):
        open_store(tmp_path / "store.sqlite").attach(log)
    write_store(log, tmp_path / "store.sqlite")
    assert texts_of(tmp_path / "store.sqlite") == texts_of(shop / "store.sqlite")
    with pytest.raises(ConfigError, match="was written for another column"):
        write_store(log, tmp_path / "store.sqlite", column="query")
    with pytest.raises(ConfigError, match="written for other data"):
        open_store(shop / "store.sqlite").attach(write_searches(tmp_path / "other", last=29))


def test_shards_write_one_store_together(shop, tmp_path):
    log, store = write_searches(tmp_path / "log"), tmp_path / "store.sqlite"
    for number in (1, 3):
        write_store(log, store, shard=WorkShard(number, 3))
    with pytest.raises(ConfigError, match=r"shard 2/3 of .* has instructions for 0 of 70 users"):
        open_store(store).attach(log)
    with pytest.raises(ConfigError, match=r"was written for another shards \(3; now 2\)"):
        write_store(log, store, shard=WorkShard(2, 2))
    write_store(log, store, shard=WorkShard(2, 3))
    assert texts_of(store) == texts_of(shop / "store.sqlite")
    assert len(open_store(store).attach(log).event_features["reasoning"].values) == len(log.items)


def test_a_query_is_the_instruction_of_its_event(shop, tmp_path):
    log = write_searches(tmp_path / "log")
    found = texts_of(write_store(log, tmp_path / "store.sqlite", column="query"))
    plain = texts_of(shop / "store.sqlite")
    for event, text in found.items():
        item = int(log.items[event])
        assert text == (f"lamp {item % 3}" if item % 4 == 0 else plain[event])
    attached = TrainingInstructions(tmp_path / "store.sqlite").attach(log)
    vectors = attached.event_features["reasoning"].values[np.array([0, 1])]
    assert np.isnan(vectors[0]).all()  # the first event of a user is no target
    np.testing.assert_array_equal(vectors[1], narrow([found[1]])[0])
    with pytest.raises(ConfigError, match=r"--column words is no text of events.*there are: query"):
        write_store(log, tmp_path / "none.sqlite", column="words")


def test_a_store_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist\. Write it with 'nestpipe think DATA --for-training"):
        Run(tmp_path, config_of(tmp_path, tmp_path, tmp_path / "none.sqlite"))._instructions_digest(
            str(tmp_path / "none.sqlite")
        )
