"""A small shop with two scenarios and a logged margin, a generative run on it, and its alignment on one rank."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from nestpipe import recipes
from nestpipe.checkpoint.origin import InitFrom
from nestpipe.cli.align import aligned_config
from nestpipe.cli.align_arguments import AlignArguments
from nestpipe.data.ingest import SideTable, write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.generative.scenarios import Scenario, Scenarios
from nestpipe.training import loop
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from tests.small_runs import small_config

NUM_ITEMS = 30


def write_shop(folder: Path, *, num_users: int = 40, num_events: int = 9) -> Sequences:
    """Items follow a rule; the margin of an item is its number, plus noise; even items are in stock."""
    rng = np.random.default_rng(3)
    users = np.arange(num_users).repeat(num_events)
    places = np.tile(np.arange(num_events), num_users)
    items = (users + 7 * places + rng.integers(0, 3, len(users))) % NUM_ITEMS
    log = pl.DataFrame(
        {
            "user": users,
            "item": items,
            "time": 1_000_000 + 60 * places,
            "scenario": np.where(rng.random(len(users)) < 0.5, "home", "cart"),
            "margin": items / NUM_ITEMS + 0.05 * rng.normal(size=len(users)),
        }
    )
    features = (
        Feature(name="scenario", kind="id", encoding="dictionary"),
        Feature(name="margin", kind="number"),
        Feature(name="stock", kind="number", scope="item"),
    )
    stock = pl.DataFrame({"item": np.arange(NUM_ITEMS), "stock": (np.arange(NUM_ITEMS) % 2 == 0).astype(float)})
    schema = Schema(features=features, labels=(Label(name="dear", kind="binary", feature="margin", threshold=0.5),))
    return write_sequences(folder / "log", schema=schema, log=log, items=SideTable(source=stock, key="item"))


def write_scenarios(folder: Path, **cart: object) -> Path:
    home = Scenario(name="home", reward_weights={"margin": 1.0, "diversity": 0.2})
    path = folder / "scenarios.json"
    path.write_text(Scenarios([home, Scenario(name="cart", **{"reward_weights": {"margin": 1.0}, **cart})]).to_json())
    return path


def start_config(folder: Path, **model: object):
    config = small_config(folder / "log", pipeline={"mode": "sequential", "micro_batches": 2}, epochs=2)
    small = {"ids": str(folder / "ids"), "dim": 8, "num_encoder": 1, "num_decoder": 1, "num_heads": 2, "hidden_dim": 16}
    own = replace(
        recipes.beauty_sid().model, **{**small, "placement": "after", "num_scenarios": 2, "beam": 16, **model}
    )
    return replace(config, model=own)


def align(world, start: Path, folder: Path, kill_at: int = 0, **flags: object) -> str:
    """`nestpipe align` on one rank of a world; rank 0 kills itself after a step."""
    settings = {"passes": 3, "batch_size": 16, "group_size": 4, "save_steps": 2, "resume": True, **flags}
    config = aligned_config(Run.open(start), AlignArguments(start=start, **settings))
    plain = loop._Loop._after_step

    def after_step(self, *arguments):
        plain(self, *arguments)
        if self._state.num_steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    loop._Loop._after_step = after_step
    try:
        init = InitFrom(start, ("model", "optimizer"))
        return train_to_end(config, folder, resume=True, init_from=init, quiet=True, world=world).stopped
    finally:
        loop._Loop._after_step = plain
