"""Synthetic click log with planted feature interactions and a known best AUC.

    logit(click) = offset + item[i] + segment x category + device x tags (mean) + 0.6 · price · hour

The tables of each term are drawn once. No interaction shows in a single feature, so a model must learn feature crosses.
No model can rank better than this logit, so its AUC on the drawn clicks is the known optimum. The dwell time is observed
after a click only, and depends on segment x category too.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.array_files import check_place
from nestpipe.data.config import CLICKS_DAYS, CLICKS_SPLIT_TIME, CLICKS_START, ClicksConfig
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUM_SEGMENTS, _NUM_CATEGORIES, _NUM_DEVICES, _NUM_TAGS = 8, 12, 4, 12

SCHEMA = Schema(
    features=(
        Feature(name="click", kind="number"),
        Feature(name="dwell", kind="number"),
        Feature(name="device", kind="id", encoding="dictionary"),
        Feature(name="hour", kind="number", transform="standardise"),
        Feature(name="category", kind="id", scope="item"),
        Feature(name="tags", kind="ids", scope="item"),
        Feature(name="price", kind="number", scope="item", missing="mean", transform="standardise"),
        Feature(name="segment", kind="id", scope="user"),
    ),
    labels=(
        Label(name="clicked", kind="binary", feature="click"),
        Label(name="dwelled", kind="regression", feature="dwell", log=True, observed="click", weight=0.1),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickTruth:
    """Metrics of ranking by the true probability on the events since the split time, as drawn and in expectation."""

    num_test: int
    split_time: int
    auc: float
    expected_auc: float
    log_loss: float

    @staticmethod
    def read(folder: Path) -> ClickTruth:
        return ClickTruth(**json.loads((folder / "truth.json").read_text()))


def ingest_clicks(out: str | Path, config: ClicksConfig, *, overwrite: bool = False) -> Sequences:
    """Draws the log and writes it as a sequence folder with truth.json; raises ConfigError."""
    if found := list(config.problems()):
        raise ConfigError("the click log has problems:\n" + "\n".join(f"  - {problem}" for problem in found))
    check_place(Path(out), overwrite=overwrite)
    rng = np.random.default_rng([config.seed, 7])
    items, users = _items(config, rng), _users(config, rng)
    log, chance = _log(config, rng, items, users)
    tested = log["time"].to_numpy() >= CLICKS_SPLIT_TIME
    truth = known_best(chance[tested], log["click"].to_numpy()[tested])
    return write_sequences(
        out,
        schema=SCHEMA,
        log=log,
        items=SideTable(source=items, key="item"),
        users=SideTable(source=users, key="user"),
        options=BuildOptions(
            overwrite=overwrite,
            extra={"clicks": dataclasses.asdict(config)},
            documents={"truth": dataclasses.asdict(truth)},
        ),
    )


def known_best(chance: Floats, clicks: Ints) -> ClickTruth:
    """The metrics of the true probabilities [n]: on the drawn clicks [n], and the AUC in expectation."""
    order = np.argsort(chance, kind="stable")
    chance, clicks = chance[order], clicks[order]
    pairs = []
    for hit in (clicks.astype(np.float64), chance):
        missed_before = np.cumsum(1 - hit) - (1 - hit)  # ties are too rare to count
        pairs.append(float((hit * missed_before).sum() / (hit.sum() * (1 - hit).sum() - (hit * (1 - hit)).sum())))
    losses = -np.where(clicks > 0, np.log(chance), np.log1p(-chance))
    return ClickTruth(
        num_test=len(chance),
        split_time=CLICKS_SPLIT_TIME,
        auc=pairs[0],
        expected_auc=pairs[1],
        log_loss=float(losses.mean()),
    )


def _items(config: ClicksConfig, rng: np.random.Generator) -> pl.DataFrame:
    tags = [
        "|".join(map(str, sorted(rng.choice(_NUM_TAGS, rng.integers(0, 4), replace=False))))
        for _ in range(config.num_items)
    ]
    prices = rng.lognormal(2.5, 0.5, config.num_items).round(2)
    return pl.DataFrame(
        {
            "item": np.arange(config.num_items),
            "category": rng.integers(0, _NUM_CATEGORIES, config.num_items),
            "tags": tags,
            "price": pl.Series(prices).set(pl.Series(rng.random(config.num_items) < 0.1), None),
        }
    )


def _users(config: ClicksConfig, rng: np.random.Generator) -> pl.DataFrame:
    return pl.DataFrame(
        {"user": np.arange(config.num_users), "segment": rng.integers(0, _NUM_SEGMENTS, config.num_users)}
    )


def _log(
    config: ClicksConfig, rng: np.random.Generator, items: pl.DataFrame, users: pl.DataFrame
) -> tuple[pl.DataFrame, Floats]:
    """The log, and the click probability of each of its rows."""
    num = config.num_events
    user, item = rng.integers(0, config.num_users, num), rng.integers(0, config.num_items, num)
    device, time = (
        rng.integers(0, _NUM_DEVICES, num),
        np.sort(CLICKS_START + rng.integers(0, CLICKS_DAYS * 86_400, num)),
    )
    hour = (time % 86_400) / 3600
    taste = rng.normal(0, config.strength, (_NUM_SEGMENTS, _NUM_CATEGORIES))
    fits = rng.normal(0, config.strength, (_NUM_DEVICES, _NUM_TAGS))
    category, segment = items["category"].to_numpy()[item], users["segment"].to_numpy()[user]
    liking = taste[segment, category]
    logit = -1.0 + rng.normal(0, 0.3, config.num_items)[item] + liking + _tag_fit(items, fits)[device, item]
    logit += (
        0.6 * config.strength * _standard(items["price"].fill_null(strategy="mean").to_numpy())[item] * _standard(hour)
    )
    chance = 1 / (1 + np.exp(-logit))
    click = (rng.random(num) < chance).astype(np.int64)
    dwell = np.exp(2.0 + liking + rng.normal(0, 0.5, num)).round(1)
    log = pl.DataFrame(
        {
            "user": user,
            "item": item,
            "time": time,
            "device": pl.Series(["phone", "tablet", "laptop", "tv"])[device],
            "hour": hour,
            "click": click,
            "dwell": pl.Series(dwell).set(pl.Series(click == 0), None),
        }
    )
    return log, chance


def _tag_fit(items: pl.DataFrame, fits: Floats) -> Floats:
    """How well each device suits each item [devices, items]: the mean over its tags, 0 without any."""
    found = np.zeros((len(fits), len(items)))
    for place, text in enumerate(items["tags"].to_list()):
        if text:
            found[:, place] = fits[:, [int(tag) for tag in text.split("|")]].mean(axis=1)
    return found


def _standard(values: Floats) -> Floats:
    return np.asarray((values - values.mean()) / (values.std() or 1.0))
