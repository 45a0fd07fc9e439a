"""Evaluation shared by ranks: the same rank for every user at every world size, equal to a full sort, ties included."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe.data.synthetic_clicks import ClicksConfig, ingest_clicks
from nestpipe.eval.predictor import EvalBatches, RetrievalPredictor
from nestpipe.eval.user_sample import sampled_users
from nestpipe.jagged import Batch
from nestpipe.ops.catalogue_scan import CataloguePart, scores_at
from nestpipe.training.loop import train
from nestpipe.training.run_folder import Run
from tests.eval.ranking_ranks import ranking_config
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log
from tests.training import evaluating_ranks

SIZES = (1, 2, 3, 4)


def tied_problems(seed: int, num_items: int) -> list[dict[str, Any]]:
    """Seven batches of unequal size; vectors of small integers, so that products are exact and most scores are tied."""
    random = np.random.default_rng(seed)
    return [
        {
            "queries": torch.from_numpy(random.integers(-1, 2, (size, 3))).float(),
            "targets": torch.from_numpy(random.integers(num_items, size=size)),
            "seen": [np.flatnonzero(random.random(num_items) < 0.2).repeat(2).tolist() for _ in range(size)],
            "k": 12,
        }
        for size in (9, 9, 9, 1, 9, 9, 4)
    ]


def sorted_catalogue(problem: dict[str, Any], items: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """The oracle: a sort of all unseen items by (score, position) in exact integers."""
    ranks, tops = [], []
    vectors, k = items.long().tolist(), problem["k"]
    for query, target, seen in zip(
        problem["queries"].long().tolist(), problem["targets"].tolist(), problem["seen"], strict=True
    ):
        scores = [sum(q * x for q, x in zip(query, item, strict=True)) for item in vectors]
        gone = set(seen)
        order = sorted((item for item in range(len(items)) if item not in gone), key=lambda item: (-scores[item], item))
        ranks.append(order.index(target) + 1 if target not in gone else len(items) + 1)
        tops.append((order + [-1] * k)[:k])
    return ranks, tops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the native scan, and torch
def test_ranks_share_the_catalogue_and_agree_with_a_full_sort(dtype: torch.dtype) -> None:
    items = torch.from_numpy(np.random.default_rng(1).integers(-1, 2, (150, 3))).to(dtype)
    problems = [{**one, "queries": one["queries"].to(dtype)} for one in tied_problems(2, 150)]
    wanted = [sorted_catalogue(one, items) for one in problems]
    for size in SIZES:
        found = run_ranks(size, evaluating_ranks.shared_ranking, problems, items, 20_000)  # blocks of 31 items
        batches = {one["number"]: one for of_rank in found for one in of_rank}
        assert [(batches[number]["ranks"], batches[number]["top"]) for number in range(len(problems))] == wanted


def test_every_rank_names_the_item_that_cannot_be_ranked() -> None:
    items = torch.ones(8, 2)
    items[7, 1] = torch.nan
    said = run_ranks(3, evaluating_ranks.refused, items)
    assert len(set(said)) == 1
    assert said[0].startswith("TrainError: score of sample 0 for the item at catalogue position 7 is nan")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run whose last batch of users is small, on a catalogue of several blocks."""
    folder = tmp_path_factory.mktemp("run")
    log = small_log(folder / "log", num_users=73, num_items=250)
    config = small_config(log.path, "sasrec", epochs=2)
    config = replace(config, eval=replace(config.eval, batch_size=16, max_bytes=2**16))
    return train(config, folder / "run", quiet=True).folder


def test_a_run_has_one_report_at_every_world_size_that_of_a_full_sort(trained: Path) -> None:
    reports = {size: run_ranks(size, evaluating_ranks.evaluated, trained, {}) for size in SIZES}
    alone = reports[1][0]
    for of_ranks in reports.values():
        assert all(one == alone for one in of_ranks)
    run = Run.open(trained)
    predictor = run.predictor()
    assert isinstance(predictor, RetrievalPredictor)
    whole, positions = CataloguePart.whole(predictor.item_vectors), torch.arange(250)
    wanted = []
    batches = EvalBatches(run.sequences, run.split, run.config, "test")
    assert len(batches[len(batches) - 1].users) < 12  # so small that a matrix product may round otherwise
    for batch in batches:
        queries = predictor.encode(padded(batch.batch))
        for row in range(len(batch.users)):
            query = queries[row].expand(250, -1)
            scores = scores_at(query, whole, positions, max_bytes=2**16).tolist()
            seen = set(batch.seen.slice(row, row + 1).values.tolist())
            order = sorted(set(range(250)) - seen, key=lambda item: (-scores[item], item))
            target = int(batch.target_positions[row])
            wanted.append(251 if target in seen else order.index(target) + 1)
    assert alone["rank"] == wanted
    assert len(set(wanted)) > 20


def padded(batch: Batch) -> Batch:
    """At least 16 users, the last one repeated."""
    return batch.select(torch.arange(max(16, batch.num_samples)).clamp(max=batch.num_samples - 1))


def test_small_batches_are_padded(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Run.open(trained).predictor()
    assert isinstance(predictor, RetrievalPredictor)
    encode, sizes = predictor.encode, []

    def counted(batch: Batch) -> torch.Tensor:
        sizes.append(batch.num_samples)
        return encode(batch)

    monkeypatch.setattr(predictor, "encode", counted)
    assert predictor.evaluate(progress=False).num_users == 73
    assert sizes == [16] * 5


def test_a_sample_is_the_same_at_every_world_size_and_part_of_a_larger_one(trained: Path) -> None:
    everyone = run_ranks(1, evaluating_ranks.evaluated, trained, {})[0]
    rank_of = dict(zip(everyone["user"], everyone["rank"], strict=True))
    found = {}
    for num in (20, 30):
        alone, *_ = run_ranks(1, evaluating_ranks.evaluated, trained, {"max_users": num})
        assert all(one == alone for one in run_ranks(3, evaluating_ranks.evaluated, trained, {"max_users": num}))
        found[num] = alone["user"]
        assert alone["report"]["num_users"] == len(found[num]) == num
        assert [rank_of[user] for user in found[num]] == alone["rank"]
        assert found[num] == sorted(found[num])
    assert set(found[20]) < set(found[30])
    assert found[20] != everyone["user"][:20]


def test_a_sample_does_not_prefer_any_users() -> None:
    users = np.arange(5_000) * 3
    taken = np.concatenate([sampled_users(users[part::2], 500) * 2 + part for part in (0, 1)])
    thirds = np.bincount(taken * 3 // 5_000, minlength=3)
    assert np.abs(thirds - 1000 / 3).max() < 60  # four deviations of a binomial distribution
    assert sampled_users(users, 0).tolist() == sampled_users(users, 5_000).tolist() == list(range(5_000))


@pytest.mark.parametrize(
    ("size", "pipeline"),
    [(3, {"mode": "sequential"}), (4, {"mode": "nested", "micro_batches": 2, "groups": 2})],
    ids=["sequential", "nested in groups"],
)
def test_validation_in_training_is_that_of_one_process(tmp_path: Path, size: int, pipeline: dict[str, object]) -> None:
    log = small_log(tmp_path / "log")
    config = small_config(log.path, patience=1, epochs=2, metric="hr@10", pipeline=pipeline)
    config = replace(config, data=replace(config.data, validation=True), eval=replace(config.eval, batch_size=7))
    run_ranks(size, evaluating_ranks.train_run, config, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    best = run.checkpoint()[1].progress["best"]
    found = run.predictor(best["step"]).evaluate("validation", progress=False).scalars()["hr@10"]
    assert found == best["value"] > 0
    alone, *_ = run_ranks(1, evaluating_ranks.evaluated, run.folder, {})
    assert run_ranks(2, evaluating_ranks.evaluated, run.folder, {}) == [alone] * 2


def test_evaluation_settings_may_change_on_resume_and_the_best_value_of_others_is_forgotten(tmp_path: Path) -> None:
    log = small_log(tmp_path / "log")
    config = small_config(log.path, patience=9, epochs=1, metric="hr@10")
    config = replace(config, data=replace(config.data, validation=True))
    train(config, tmp_path / "run", quiet=True)
    before = Run.open(tmp_path / "run").checkpoint()[1].progress["best"]
    same = replace(config, eval=replace(config.eval, batch_size=3, ks=(5, 10)), train=replace(config.train, epochs=2))
    train(same, tmp_path / "run", resume=True, quiet=True)
    kept = Run.open(tmp_path / "run").checkpoint()[1].progress["best"]
    assert kept["step"] >= before["step"]
    assert kept["value"] >= before["value"]
    easier = replace(same, eval=replace(same.eval, max_users=5), train=replace(config.train, epochs=3))
    run = train(easier, tmp_path / "run", resume=True, quiet=True)
    last = run.checkpoint()[1].progress["best"]
    assert last["step"] > kept["step"]
    assert last["value"] == run.predictor(last["step"]).evaluate("validation", progress=False).scalars()["hr@10"]


@pytest.mark.parametrize("model", ["hstu", "dcn"])
def test_ranking_runs_are_predicted_by_shares(tmp_path: Path, model: str) -> None:
    ingest_clicks(tmp_path / "log", ClicksConfig(num_users=40, num_items=25, num_events=900))
    config = ranking_config(tmp_path / "log", model)
    config = replace(config, train=replace(config.train, epochs=1), eval=replace(config.eval, batch_size=5))
    run = train(config, tmp_path / "run", quiet=True)
    alone = run_ranks(1, evaluating_ranks.evaluated, run.folder, {"max_users": 11})[0]
    assert json.loads(alone["report"])["num_users"] == 11
    for size in (2, 3):
        assert all(one == alone for one in run_ranks(size, evaluating_ranks.evaluated, run.folder, {"max_users": 11}))


def test_ranks_write_one_file_of_recommendations(trained: Path, tmp_path: Path) -> None:
    for num_users, num_rows in ((73, 219), (0, 0)):
        assert run_ranks(1, evaluating_ranks.recommended, trained, tmp_path / "one", num_users) == [num_rows]
        assert run_ranks(3, evaluating_ranks.recommended, trained, tmp_path / "three", num_users) == [num_rows] * 3
        assert pl.read_parquet(tmp_path / "three").equals(pl.read_parquet(tmp_path / "one"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three"]
