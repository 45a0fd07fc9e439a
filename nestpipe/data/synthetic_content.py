"""Synthetic log whose items have content with signal, and of which some items have no training event.

    next item   of the last item's series (stay), of the series that follows it (move), or any by popularity (Zipf)
    new items   a share of each series; they occur as last events only, so with split 'last' no training event has them

The content of an item tells its series: brand (id), category (id of ten series), tags (several ids, most of them of the series),
price (number), look (vector, noisy) and a title. Which series follows which is in the events alone: a model that learns it from
old items can recommend new ones of the following series, content neighbours cannot. No item repeats in a history.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nestpipe.data.array_files import check_place
from nestpipe.data.config import ContentLogConfig
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences

Ints = NDArray[np.int64]

_LOOK_DIM, _NUM_TAGS, _SERIES_TAGS, _NUM_WORDS = 8, 60, 3, 400
_START, _SECONDS = 1_700_000_000, 3600  # of the first event, and at most between two
_TRIES = 50  # for an item that a history does not have yet

SCHEMA = Schema(
    features=(
        Feature(name="brand", kind="id", scope="item"),
        Feature(name="category", kind="id", scope="item"),
        Feature(name="tags", kind="ids", scope="item"),
        Feature(name="price", kind="number", scope="item", missing="mean", transform="log_standardise"),
        Feature(name="look", kind="vector", scope="item", dim=_LOOK_DIM),
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class ContentWorld:
    """Series of each item [I], the series that follows each [S], which items are new [I], and popularity of items [I]."""

    series: Ints
    following: Ints
    is_new: NDArray[np.bool_]
    popularity: NDArray[np.float64]

    @staticmethod
    def of(config: ContentLogConfig) -> ContentWorld:
        rng = np.random.default_rng([config.seed, 1])
        series = np.repeat(np.arange(config.num_series), config.series_items)
        place = np.tile(np.arange(config.series_items), config.num_series)
        is_new = place >= config.series_items - config.new_items
        weights = (1.0 + rng.permutation(len(series))) ** -config.zipf
        weights[is_new] = 0
        # A cycle through all series in random order.
        order = rng.permutation(config.num_series)
        following = np.empty_like(order)
        following[order] = np.roll(order, -1)
        return ContentWorld(series, following, is_new, weights / weights.sum())


def ingest_content(out: str | Path, config: ContentLogConfig, *, overwrite: bool = False) -> Sequences:
    """Draws the log and writes it as a sequence folder with item table and texts; raises ConfigError."""
    config.check()
    check_place(Path(out), overwrite=overwrite)
    world = ContentWorld.of(config)
    items = item_table(config, world)
    return write_sequences(
        out,
        schema=SCHEMA,
        log=draw_log(config, world),
        items=SideTable(source=items.drop("title"), key="item"),
        texts=SideTable(source=items.select("item", "title"), key="item"),
        options=BuildOptions(overwrite=overwrite, extra={"content": dataclasses.asdict(config)}),
    )


def draw_log(config: ContentLogConfig, world: ContentWorld) -> pl.DataFrame:
    """Columns user, item, time; events of a user in time order."""
    rng = np.random.default_rng([config.seed, 2])
    lengths = rng.integers(config.min_len, config.max_len + 1, config.num_users)
    items = np.full((config.num_users, config.max_len), -1, dtype=np.int64)
    for position in range(config.max_len):
        users = np.flatnonzero(lengths > position)
        is_last = lengths[users] == position + 1
        items[users, position] = _draw_next(config, world, rng, items[users, :position], is_last)
    users, places = np.nonzero(items >= 0)
    times = _START + rng.integers(1, _SECONDS, items.shape).cumsum(axis=1)
    return pl.DataFrame({"user": users, "item": items[users, places], "time": times[users, places]})


def _draw_next(
    config: ContentLogConfig, world: ContentWorld, rng: np.random.Generator, seen: Ints, is_last: NDArray[np.bool_]
) -> Ints:
    """The next item for histories [n, t]; after some tries any old item, which may repeat."""
    found = np.full(len(seen), -1, dtype=np.int64)
    left, num_old = np.arange(len(seen)), config.series_items - config.new_items
    for _ in range(_TRIES):
        if not len(left):
            break
        drawn = rng.choice(len(world.series), len(left), p=world.popularity)
        if seen.shape[1]:
            kind = rng.random(len(left))
            last = world.series[seen[left, -1]]
            chosen = np.where(kind < config.stay, last, world.following[last])
            is_new = is_last[left] & (rng.random(len(left)) < config.new_share) & (config.new_items > 0)
            old = rng.integers(0, num_old, len(left))
            new = num_old + rng.integers(0, max(config.new_items, 1), len(left))
            own = chosen * config.series_items + np.where(is_new, new, old)
            drawn = np.where(kind < config.stay + config.move, own, drawn)
        fresh = ~(seen[left] == drawn[:, None]).any(axis=1)
        found[left[fresh]] = drawn[fresh]
        left = left[~fresh]
    found[left] = rng.choice(len(world.series), len(left), p=world.popularity)
    return found


def item_table(config: ContentLogConfig, world: ContentWorld) -> pl.DataFrame:
    """Columns item, brand, category, tags, price, look and title."""
    rng = np.random.default_rng([config.seed, 3])
    num = len(world.series)
    tags_of = np.stack([rng.choice(_NUM_TAGS, _SERIES_TAGS, replace=False) for _ in range(config.num_series)])
    noise = rng.integers(0, _NUM_TAGS, num)
    tags = [
        "|".join(map(str, sorted({*tags_of[series].tolist(), other})))
        for series, other in zip(world.series, noise, strict=True)
    ]
    centre = rng.normal(0, 1, (config.num_series, _LOOK_DIM))
    look = (centre[world.series] + rng.normal(0, 0.5, (num, _LOOK_DIM))).round(3)
    price = np.exp(rng.normal(2.5, 0.6, config.num_series)[world.series] + rng.normal(0, 0.2, num)).round(2)
    words = rng.integers(0, _NUM_WORDS, (config.num_series, 2))[world.series]
    titles = [f"word{a} word{b} no {place}" for (a, b), place in zip(words.tolist(), range(num), strict=True)]
    return pl.DataFrame(
        {
            "item": np.arange(num),
            "brand": world.series,
            "category": world.series // 10,
            "tags": tags,
            "price": pl.Series(price).set(pl.Series(rng.random(num) < 0.1), None),
            "look": ["|".join(map(str, row)) for row in look.tolist()],
            "title": titles,
        }
    )
