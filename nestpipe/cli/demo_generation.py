"""Demo step: a generative model, steered by scenario and trigger item, with instructions written near-line.

The log is a small shop. After a look at an item (scenario 1) the next item is of the same topic; after it was put into the
cart (scenario 2), of the complementary topic. Only the instruction distinguishes the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from nestpipe.cli.demo_stage import DemoStage, check
from nestpipe.data.sequences import Sequences
from nestpipe.data.synthetic_scenarios import SCENARIOS, ScenarioLog, ScenarioLogConfig
from nestpipe.generative.text_encoder import hashed_words

if TYPE_CHECKING:
    from nestpipe.client import GeneratedItems  # it needs an optional package

_START, _HOUR = 1_700_000_000, 3600  # seconds
_NUM_USERS, _K, _MIN_SHARE = 20, 5, 0.9
_FEATURES = ("scenario:id:event", "trigger:id:event", "reasoning:vector:event:dim=512")


def generate(demo: DemoStage) -> str:
    """Builds semantic ids, trains with instructions, writes instructions, and checks that answers follow them."""
    shop = _shop(quick=demo.quick)
    folder, run = demo.out / "shop", demo.out / "generative"
    _write(shop, folder, demo)
    data, ids = str(folder / "data"), str(folder / "ids")
    features = [word for one in _FEATURES for word in ("--feature", one)]
    texts = ["--texts", str(folder / "items.parquet")]
    demo.command("data", "ingest", str(folder / "log.parquet"), *features, *texts, "--out", data)
    demo.command("sid", "build", data, "--out", ids, "--encoder", "words", "--sid.levels", "2", "--sid.codes", "16")
    epochs = ["--train.epochs", "1"] if demo.quick else []
    demo.command("train", "scenarios", "--run", str(run), "--data.path", data, "--model.ids", ids, *epochs)
    demo.command("think", str(run))
    demo.serve("generator", str(run), says="serving")
    return _ask(demo, shop)


def _shop(*, quick: bool) -> ScenarioLog:
    size = {"num_users": 60, "num_events": 12} if quick else {"num_users": 300, "num_events": 24}
    return ScenarioLog.make(ScenarioLogConfig(num_topics=8, num_styles=2, per_style=8, anchored=1.0, noise=0.0, **size))


def _write(shop: ScenarioLog, folder: Path, demo: DemoStage) -> None:
    """Writes the shop's log and item titles as Parquet files."""
    users, events = np.indices(shop.items.shape)
    triggers, items = shop.triggers.ravel(), shop.items.ravel()
    reasoning = hashed_words(shop.instructions()).numpy()[shop.named_topics.ravel()]
    log = pl.DataFrame(
        {
            "user": users.ravel(),
            "item": items,
            "time": _START + _HOUR * events.ravel(),
            "scenario": shop.scenarios.ravel(),
            "trigger": pl.Series(triggers).set(pl.Series(~np.isin(triggers, items)), None),  # -1, or never sold
            "reasoning": pl.Series(reasoning, dtype=pl.Array(pl.Float32, reasoning.shape[1])).arr.to_list(),
        }
    )
    folder.mkdir()
    log.write_parquet(folder / "log.parquet")
    titles = shop.texts()
    pl.DataFrame({"item_id": range(len(titles)), "title": titles}).write_parquet(folder / "items.parquet")
    demo.say(f"a shop: {len(log):,} events in {', '.join(SCENARIOS)}; {len(titles)} items, such as '{titles[0]}'")


@dataclass(slots=True)
class _Followed:
    """Items answered in one scenario, and how many were of the requested topic."""

    num_items: int = 0
    num_right: int = 0

    def count(self, items: list[int | str], right: range) -> None:
        self.num_items += len(items)
        self.num_right += sum(item in right for item in items)

    @property
    def share(self) -> float:
        return self.num_right / self.num_items


def _ask(demo: DemoStage, shop: ScenarioLog) -> str:
    """Requests items for the same users and trigger items in two scenarios."""
    from nestpipe.client import Client

    log, url = Sequences.open(demo.out / "shop" / "data"), demo.services["generator"].url
    per_topic = shop.config.num_items // shop.config.num_topics
    looked, bought = _Followed(), _Followed()
    demo.say(f'POST {url}/v1/generate {{"user", "trigger", "scenario": "1" and "2", "k": {_K}}} for {_NUM_USERS} users')
    with Client(url, timeout_s=30.0) as client:
        for user in range(_NUM_USERS):
            had = log.items[log.offsets[user] : log.offsets[user + 1]].tolist()
            topic = had[-1] // per_topic
            for scenario, obeyed, wanted in (("1", looked, topic), ("2", bought, int(shop.complements[topic]))):
                found = client.generate(user, _K, scenario=scenario, trigger=had[-1], deadline_ms=30_000)
                _check_answer(found, had, set(log.catalogue.tolist()))
                obeyed.count(found.items, range(wanted * per_topic, (wanted + 1) * per_topic))
    seen = f"detail: {looked.share:.0%} of the trigger's topic, cart: {bought.share:.0%} of the one that goes with it"
    check(demo.quick or min(looked.share, bought.share) >= _MIN_SHARE, f"the instruction was not followed; {seen}")
    return f"{seen}; instructions by {found.instruction.written_by}"


def _check_answer(found: GeneratedItems, had: list[int], catalogue: set[int]) -> None:
    items = found.items
    check(len(set(items)) == len(items) == _K, f"{items} are not {_K} items")
    check(set(items) <= catalogue and not set(items) & set(had), f"{items} are not all new items of the catalogue")
    steered_by = found.instruction
    is_known = steered_by.source == "any" and steered_by.written_by and steered_by.written_s
    check(bool(is_known), f"the answer does not say which instruction steered it: {steered_by}")
