"""Synthetic sequences with planted transitions and known best metrics.

    P(next = j | last = i)  =  signal * successors(i)[j]  +  (1 - signal) * zipf[j]      over items not yet in the history

`successors(i)` are a few items with decreasing weights, a function of (seed, i). No item repeats in a history, so with
seen items removed no model can rank better than P, and the metrics of P on the drawn test targets are the known optimum.
Side features carry no further signal about the next item.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from nestpipe.data.array_files import check_place
from nestpipe.data.config import SYNTHETIC_TOP, SyntheticConfig
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.rng import Rng, integers

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NUM_TAGS = 12
_START = 1_700_000_000  # seconds since 1970

SCHEMA = Schema(
    features=(
        Feature(name="action", kind="id"),
        Feature(name="watch", kind="number", transform="log_standardise"),
        Feature(name="category", kind="id", scope="item"),
        Feature(name="tags", kind="ids", scope="item"),
        Feature(name="price", kind="number", scope="item", missing="mean", transform="standardise"),
        Feature(name="age", kind="id", scope="user"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTruth:
    """Metrics of the best ranking on each user's last event: on the drawn targets, and in expectation."""

    num_users: int
    num_events: int
    hr10: float
    ndcg10: float
    expected_hr10: float
    expected_ndcg10: float
    hr10_error: float  # standard deviation of hr10 around its expectation

    @staticmethod
    def read(folder: Path) -> SequenceTruth:
        return SequenceTruth(**json.loads((folder / "truth.json").read_text()))


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticHistories:
    """Items [U, max_len] of each user, -1 after the end; `planted` marks events that followed the signal."""

    items: Ints
    planted: Bools
    lengths: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Process:
    """The tables of the process: successors [I, K] with weights [K], and popularity [I]."""

    successors: Ints
    weights: Floats
    popularity: Floats


@lru_cache(maxsize=4)
def _process(config: SyntheticConfig) -> _Process:
    items = torch.arange(config.num_items)
    # One successor from each of K equal ranges after the item: distinct, and never the item itself.
    stretch = (config.num_items - 1) // config.num_successors
    inside = integers(Rng(config.seed, 0).keys("successors", items), width=config.num_successors, high=stretch).numpy()
    successors = (items.numpy()[:, None] + 1 + np.arange(config.num_successors) * stretch + inside) % config.num_items
    weights = 1.0 / np.arange(1, config.num_successors + 1)
    ranks = np.random.default_rng([config.seed, 1]).permutation(config.num_items)
    popularity = (1.0 + ranks) ** -config.zipf
    return _Process(successors, weights / weights.sum(), popularity / popularity.sum())


def bayes_scores(config: SyntheticConfig, last_items: Ints) -> Floats:
    """P(next | last) [n, I] for last items [n], before seen items are removed."""
    process = _process(config)
    scores = np.tile((1 - config.signal) * process.popularity, (len(last_items), 1))
    rows = np.arange(len(last_items))[:, None]
    scores[rows, process.successors[last_items]] += config.signal * process.weights
    return scores


def draw_histories(config: SyntheticConfig) -> SyntheticHistories:
    """Every user's items, drawn position by position."""
    rng = np.random.default_rng([config.seed, 2])
    location = np.log(config.mean_len) - config.spread_len**2 / 2
    drawn = rng.lognormal(location, config.spread_len, config.num_users)
    lengths = drawn.round().clip(config.min_len, config.max_len).astype(np.int64)
    items = np.full((config.num_users, config.max_len), -1, dtype=np.int64)
    planted = np.zeros(items.shape, dtype=np.bool_)
    for position in range(int(lengths.max())):
        users = np.flatnonzero(lengths > position)
        items[users, position], planted[users, position] = _draw_next(config, rng, items[users, :position])
    return SyntheticHistories(items, planted, lengths)


def _draw_next(config: SyntheticConfig, rng: np.random.Generator, seen: Ints) -> tuple[Ints, Bools]:
    """The next item for histories [n, t]; rejection sampling of repeated items renormalises P exactly."""
    process = _process(config)
    items = np.full(len(seen), -1, dtype=np.int64)
    planted = np.zeros(len(seen), dtype=np.bool_)
    left = np.arange(len(seen))
    while len(left):
        follows = rng.random(len(left)) < (config.signal if seen.shape[1] else 0.0)
        picks = rng.choice(config.num_items, len(left), p=process.popularity)
        ranks = rng.choice(config.num_successors, len(left), p=process.weights)
        if seen.shape[1]:
            picks = np.where(follows, process.successors[seen[left, -1], ranks], picks)
        fresh = ~(seen[left] == picks[:, None]).any(axis=1)
        items[left[fresh]], planted[left[fresh]] = picks[fresh], follows[fresh]
        left = left[~fresh]
    return items, planted


def _best(scores: Floats) -> Ints:
    """The columns of the best scores of each row [n, 10], best first."""
    some = np.argpartition(scores, -SYNTHETIC_TOP, axis=1)[:, -SYNTHETIC_TOP:]
    order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1)
    return np.take_along_axis(some, order, axis=1)


def known_best(config: SyntheticConfig, histories: SyntheticHistories, *, chunk: int = 256) -> SequenceTruth:
    """The metrics of ranking by P on the last events, seen items removed."""
    discounts = 1 / np.log2(np.arange(SYNTHETIC_TOP) + 2)
    sums = np.zeros(5)
    for start in range(0, config.num_users, chunk):
        rows = np.arange(start, min(start + chunk, config.num_users))
        lengths = histories.lengths[rows]
        scores = bayes_scores(config, histories.items[rows, lengths - 2])
        sample, place = np.nonzero(np.arange(config.max_len) < lengths[:, None] - 1)
        scores[sample, histories.items[rows[sample], place]] = 0
        top = _best(scores)
        chances = np.take_along_axis(scores, top, axis=1) / scores.sum(axis=1, keepdims=True)
        hits = top == histories.items[rows, lengths - 1][:, None]
        chance = chances.sum(axis=1)
        spread = (chance * (1 - chance)).sum()
        sums += (hits.sum(), (hits @ discounts).sum(), chance.sum(), (chances @ discounts).sum(), spread)
    means = (sums / config.num_users).tolist()
    return SequenceTruth(
        num_users=config.num_users,
        num_events=int(histories.lengths.sum()),
        hr10=means[0],
        ndcg10=means[1],
        expected_hr10=means[2],
        expected_ndcg10=means[3],
        hr10_error=float((means[4] / config.num_users) ** 0.5),
    )


def write_logs(folder: Path, config: SyntheticConfig) -> SequenceTruth:
    """Writes log.csv, items.csv, users.csv and truth.json; raises ConfigError for an impossible config."""
    config.check()
    folder.mkdir(parents=True, exist_ok=True)
    histories = draw_histories(config)
    truth = known_best(config, histories)
    _log(config, histories).write_csv(folder / "log.csv", float_precision=2)
    _items(config).write_csv(folder / "items.csv", float_precision=2)
    _users(config).write_csv(folder / "users.csv")
    (folder / "truth.json").write_text(json.dumps(dataclasses.asdict(truth), indent=2) + "\n")
    return truth


def ingest_synthetic(out: str | Path, config: SyntheticConfig, *, overwrite: bool = False) -> Sequences:
    """Writes the logs to a temporary folder and ingests them like any other log; adds truth.json."""
    config.check()
    check_place(Path(out), overwrite=overwrite)  # before the work
    with tempfile.TemporaryDirectory(prefix="nestpipe-synthetic-") as folder:
        raw = Path(folder)
        truth = write_logs(raw, config)
        return write_sequences(
            out,
            schema=SCHEMA,
            log=LogSource(paths=(str(raw / "log.csv"),)),
            items=SideTable(source=LogSource(paths=(str(raw / "items.csv"),)), key="item"),
            users=SideTable(source=LogSource(paths=(str(raw / "users.csv"),)), key="user"),
            options=BuildOptions(
                overwrite=overwrite,
                extra={"synthetic": dataclasses.asdict(config)},
                documents={"truth": dataclasses.asdict(truth)},
            ),
        )


def _log(config: SyntheticConfig, histories: SyntheticHistories) -> pl.DataFrame:
    """One row per event, in time order over all users; events of one user at one time keep their order."""
    rng = np.random.default_rng([config.seed, 3])
    gaps = np.ceil(rng.lognormal(6.0, 1.5, histories.items.shape)).astype(np.int64)
    gaps[rng.random(gaps.shape) < config.tie_share] = 0
    gaps[:, 0] = rng.integers(0, 30 * 86_400, config.num_users)
    users, places = np.nonzero(histories.items >= 0)
    planted = histories.planted[users, places]
    log = pl.DataFrame(
        {
            "user": users,
            "item": histories.items[users, places],
            "time": _START + gaps.cumsum(axis=1)[users, places],
            "watch": rng.exponential(np.where(planted, 40.0, 10.0)),
            "action": rng.binomial(3, np.where(planted, 0.5, 0.2)),
        }
    )
    return log[np.argsort(log["time"].to_numpy(), kind="stable")]


def _items(config: SyntheticConfig) -> pl.DataFrame:
    rng = np.random.default_rng([config.seed, 4])
    num_tags = rng.integers(0, 4, config.num_items)
    tags = ["|".join(map(str, sorted(rng.choice(_NUM_TAGS, count, replace=False)))) for count in num_tags]
    prices = rng.lognormal(2.5, 0.7, config.num_items)
    missing = rng.random(config.num_items) < 0.1
    return pl.DataFrame(
        {
            "item": np.arange(config.num_items),
            "category": rng.integers(0, 20, config.num_items),
            "tags": tags,
            "price": pl.Series(prices).set(pl.Series(missing), None),
        }
    )


def _users(config: SyntheticConfig) -> pl.DataFrame:
    ages = np.random.default_rng([config.seed, 5]).integers(0, 7, config.num_users)
    return pl.DataFrame({"user": np.arange(config.num_users), "age": ages})
