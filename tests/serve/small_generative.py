"""A small trained generative run with item texts, ids from words, and a generator around it."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from nestpipe import recipes
from nestpipe.cli.think import text_encoder
from nestpipe.cli.think_training import write_for_training
from nestpipe.data.ingest import SideTable, write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.generative.instruction_store import Instructions, SqliteStore
from nestpipe.generative.item_vectors import text_vectors
from nestpipe.generative.llm_provider import TemplateProvider
from nestpipe.generative.semantic_ids import Registry, SidConfig
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.generation_engine import GenerationRequest, Generator
from nestpipe.serve.generation_model import open_generative
from nestpipe.serve.latency_model import GenerationCosts
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from nestpipe.training.loop import train
from tests.small_runs import small_config

NUM_ITEMS, NUM_USERS, MAX_LEN = 30, 40, 8
KINDS = ("red lamp", "oak chair", "round table", "wool carpet", "tall shelf")
FREE = GenerationCosts(encode_ms=0.0, encode_event_ms=0.0, decode_ms=0.0, decode_beam_ms=0.0)


def make_data(folder):
    """Users of 3 to 15 events, a minute apart; the last user has none that the model could not read."""
    rows = [
        (user, (user + 7 * step) % NUM_ITEMS, 1_000_000 + 60 * step)
        for user in range(NUM_USERS)
        for step in range(3 + user % 13)
    ]
    log = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    items = list(range(NUM_ITEMS))
    texts = pl.DataFrame({"item": items, "title": [f"{KINDS[item % 5]} number{item}" for item in items]})
    about = pl.DataFrame({"item": items, "kind": [KINDS[item % 5] for item in items], "shelf": [i % 7 for i in items]})
    features = (
        Feature(name="kind", kind="id", scope="item", encoding="dictionary"),
        Feature(name="shelf", kind="number", scope="item"),
    )
    return write_sequences(
        folder / "log",
        schema=Schema(features=features),
        log=log,
        items=SideTable(source=about, key="item"),
        texts=SideTable(source=texts, key="item"),
    )


def make_ids(sequences, folder, *, seed=0):
    items, vectors, encoder = text_vectors(sequences, encoder="words")
    registry = Registry.build(items, vectors, SidConfig(levels=2, codes=4, seed=seed), encoder=f"{encoder}/title")
    registry.save(folder)
    return registry


def make_run(folder, *, name="run", **settings):
    """The same data and ids for all runs in a folder."""
    sequences = Sequences.open(folder / "log") if (folder / "log").exists() else make_data(folder)
    if not (folder / "ids").exists():
        make_ids(sequences, folder / "ids")
    if not (store := folder / "instructions-for-training.sqlite").exists():
        write_for_training(
            sequences,
            provider=TemplateProvider(),
            encoder=text_encoder(Registry.load(folder / "ids")),
            store=store,
            quiet=True,
        )
    config = small_config(sequences.path, epochs=1)
    model = replace(
        recipes.beauty_sid().model,
        ids=str(folder / "ids"),
        dim=8,
        num_encoder=1,
        num_decoder=1,
        num_heads=2,
        hidden_dim=16,
        placement="after",
        num_scenarios=2,
        reasoning_dim=512,
        instructions=str(store),
        user_rows=True,
        beam=16,
    )
    model = replace(model, **settings)
    data = replace(config.data, max_len=MAX_LEN, truncate_block=2)
    return train(replace(config, model=model, data=data), folder / name, quiet=True)


def make_generator(run, folder, *, served=None, clock=None, wall=lambda: 2000.0, estimates=FREE, **config):
    """A generator that is stepped by hand, with a store of its own."""
    served = served or open_generative(run, folder=folder / "tables")
    store = SqliteStore(folder / "instructions.sqlite", read_only=True, timeout_s=0.05)
    return Generator(
        served,
        UserHistories(run.sequences, FileState(folder / "events.log")),
        Instructions(store, version=served.instruction_version, dim=512, clock=wall),
        replace(estimates),
        config=EngineConfig(**config),
        scenarios={"home": 0, "cart": 1},
        **({"clock": clock} if clock else {}),
    )


def submit(generator, user, *, k=5, slack_s=100.0, **fields):
    job = GenerationRequest(user=user, k=k, deadline=generator.clock() + slack_s, **fields)
    generator.submit(job)
    return job


def answer(generator, user, **fields):
    job = submit(generator, user, **fields)
    while not job.reply.done():
        generator.step()
        generator.cache.check()
    return job.reply.result()
