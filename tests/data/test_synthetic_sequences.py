"""The synthetic log: its known optimum is right, nothing simple reaches it, and the files are what they promise."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from nestpipe.data.synthetic_sequences import (
    SequenceTruth,
    SyntheticConfig,
    SyntheticHistories,
    bayes_scores,
    draw_histories,
    ingest_synthetic,
    known_best,
    write_logs,
)
from nestpipe.errors import ConfigError, DataError

CONFIG = SyntheticConfig()
SMALL = SyntheticConfig(num_users=300, num_items=120, max_len=40)


@pytest.fixture(scope="module")
def histories() -> SyntheticHistories:
    return draw_histories(CONFIG)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    write_logs(folder, CONFIG)
    return folder


def hit_rate(histories: SyntheticHistories, scores: np.ndarray) -> float:
    """HR@10 of scores [U, I] on the last events, seen items removed; written apart from the generator's own."""
    hits = 0
    for user, length in enumerate(histories.lengths):
        *seen, target = histories.items[user, :length]
        better = set(np.flatnonzero(scores[user] > scores[user, target]))
        hits += len(better - set(seen)) < 10
    return hits / len(histories.lengths)


def last_items(histories: SyntheticHistories) -> np.ndarray:
    return histories.items[np.arange(len(histories.lengths)), histories.lengths - 2]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_optimum_agrees_with_its_expectation(seed: int) -> None:
    config = replace(CONFIG, seed=seed)
    truth = known_best(config, draw_histories(config))
    # Four deviations: a right generator fails once in 16,000 seeds, and these seeds are fixed.
    assert abs(truth.hr10 - truth.expected_hr10) < 4 * truth.hr10_error
    assert 0.005 < truth.hr10_error < 0.01
    # A target's discount lies in 0 .. 1, so its deviation is at most 1 / 2.
    assert abs(truth.ndcg10 - truth.expected_ndcg10) < 4 * 0.5 / truth.num_users**0.5


def test_the_optimum_is_that_of_an_independent_ranking(histories: SyntheticHistories) -> None:
    scores = bayes_scores(CONFIG, last_items(histories))
    assert hit_rate(histories, scores) == pytest.approx(known_best(CONFIG, histories, chunk=333).hr10, abs=1e-12)


def test_no_simple_ranking_reaches_the_optimum(histories: SyntheticHistories) -> None:
    best = known_best(CONFIG, histories).hr10
    last = last_items(histories)
    counts = np.bincount(histories.items[histories.items >= 0], minlength=CONFIG.num_items).astype(np.float64)
    popularity = np.tile(counts, (CONFIG.num_users, 1))
    shuffled = bayes_scores(CONFIG, np.random.default_rng(0).permutation(last))
    assert hit_rate(histories, popularity) < best / 4
    assert hit_rate(histories, shuffled) < best / 4
    assert hit_rate(histories, bayes_scores(replace(CONFIG, seed=1), last)) < best / 4
    assert hit_rate(histories, -popularity) < 0.05


def test_scores_are_probabilities_and_follow_the_draws() -> None:
    """Next items after one item, drawn through the log, against P renormalised over the others."""
    config = SyntheticConfig(num_users=40_000, num_items=20, num_successors=3, min_len=2, max_len=2)
    scores = bayes_scores(config, np.arange(config.num_items))
    assert scores.sum(axis=1) == pytest.approx(np.ones(config.num_items))
    drawn = draw_histories(config).items
    start = int(np.bincount(drawn[:, 0]).argmax())
    seen = np.bincount(drawn[drawn[:, 0] == start, 1], minlength=config.num_items)
    scores[start, start] = 0
    chances = scores[start] / scores[start].sum()
    deviations = np.sqrt(seen.sum() * chances * (1 - chances)) + 1e-9
    # Twenty cells within four and a half deviations each.
    assert (np.abs(seen - seen.sum() * chances) <= 4.5 * deviations).all()


def test_items_do_not_repeat_and_lengths_are_long_tailed(histories: SyntheticHistories) -> None:
    for items, length in zip(histories.items, histories.lengths, strict=True):
        assert len(set(items[:length])) == length
        assert (items[length:] == -1).all()
    lengths = histories.lengths
    assert lengths.min() == CONFIG.min_len
    assert lengths.max() == CONFIG.max_len
    assert lengths.mean() > 1.2 * np.median(lengths)
    counts = np.sort(np.bincount(histories.items[histories.items >= 0], minlength=CONFIG.num_items))[::-1]
    assert counts[:50].sum() > 2 * counts.sum() * 50 / CONFIG.num_items


def test_files_have_their_columns_ties_and_gaps(logs: Path, histories: SyntheticHistories) -> None:
    log, items, users = (pl.read_csv(logs / f"{name}.csv") for name in ("log", "items", "users"))
    assert log.columns == ["user", "item", "time", "watch", "action"]
    assert items.columns == ["item", "category", "tags", "price"]
    assert users.columns == ["user", "age"]
    assert log.height == histories.lengths.sum() == SequenceTruth.read(logs).num_events
    assert log["time"].is_sorted()
    again = log.group_by("user", maintain_order=True).agg("item", pl.col("time").diff().alias("gap")).sort("user")
    assert again["item"][7].to_list() == histories.items[7, : histories.lengths[7]].tolist()
    gaps = again["gap"].explode().drop_nulls().to_numpy()
    assert 0.03 < (gaps == 0).mean() < 0.07
    assert gaps.mean() > 2 * np.median(gaps)
    assert 0 < items["price"].null_count() < items.height / 4
    assert items["tags"].drop_nulls().str.contains("|", literal=True).any()


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_files_are_a_function_of_the_config(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        write_logs(tmp_path / name, replace(SMALL, seed=seed))
    assert digests(tmp_path / "one") == digests(tmp_path / "again")
    assert not set(digests(tmp_path / "one").values()) & set(digests(tmp_path / "other").values())


def test_ingest_keeps_every_event_in_order(tmp_path: Path) -> None:
    sequences = ingest_synthetic(tmp_path / "tiny", SMALL)
    drawn = draw_histories(SMALL)
    assert sequences.users.tolist() == list(range(SMALL.num_users))
    assert sequences.offsets.tolist() == [0, *np.cumsum(drawn.lengths)]
    assert sequences.items.tolist() == drawn.items[drawn.items >= 0].tolist()
    assert sequences.catalogue.tolist() == list(range(SMALL.num_items))
    assert {*sequences.event_features, *sequences.item_features, *sequences.user_features} == {
        "action", "watch", "category", "tags", "price", "age",
    }  # fmt: skip
    assert SequenceTruth.read(tmp_path / "tiny") == known_best(SMALL, drawn)


def test_nothing_but_the_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "tiny-raw").mkdir()
    (tmp_path / "tiny-raw" / "log.csv").write_text("mine")
    first = ingest_synthetic(tmp_path / "tiny", SMALL)
    assert "truth.json" in first.meta["files"], "a changed truth is found"
    with pytest.raises(DataError, match="exists already"):
        ingest_synthetic(tmp_path / "tiny", replace(SMALL, seed=1))
    assert digests(tmp_path / "tiny") == {
        "meta.json": digests(tmp_path / "tiny")["meta.json"],
        **{name: entry["sha256"] for name, entry in first.meta["files"].items()},
    }
    second = ingest_synthetic(tmp_path / "tiny", replace(SMALL, seed=1), overwrite=True)
    assert second.digest != first.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "tiny-raw"]
    assert (tmp_path / "tiny-raw" / "log.csv").read_text() == "mine"
    (tmp_path / "tiny" / "truth.json").write_text((tmp_path / "tiny" / "truth.json").read_text().replace("0", "1"))
    with pytest.raises(DataError, match=r"truth\.json changed"):
        second.verify()


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    config = SyntheticConfig(num_users=0, num_items=50, signal=1.0)
    with pytest.raises(ConfigError, match=r"(?s)num_users is 0.*num_items is 50.*signal is 1\.0"):
        write_logs(tmp_path, config)
    assert not list(tmp_path.iterdir())
