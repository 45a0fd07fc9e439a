"""Evaluation from batches to a report, against ranks worked out one user at a time."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console
from torch import Tensor

from nestpipe.errors import DataError, NestPipeError, TrainError
from nestpipe.eval.compare import compare
from nestpipe.eval.config import EvalConfig
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.retrieval_eval import EvalBatch, evaluate, popularity_report
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.ops.catalogue_scan import CataloguePart

NUM_USERS, NUM_ITEMS, DIM = 90, 60, 8
CONFIG = EvalConfig(ks=(1, 10, 100), num_bootstrap=200)
QUERIES = torch.randn(NUM_USERS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ITEMS = torch.randn(NUM_ITEMS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WHOLE = CataloguePart.whole(ITEMS)
HISTORIES = [[(user * 7 + event * 11) % NUM_ITEMS for event in range(1 + user // 3)] for user in range(NUM_USERS)]
TARGETS = [(user * 13 + 5) % NUM_ITEMS for user in range(NUM_USERS)]


def encode(batch: Batch) -> Tensor:
    return QUERIES[batch.sample_ids]


def samples(batch_size: int = 32) -> list[EvalBatch]:
    return [
        EvalBatch(
            batch=Batch(
                cursor=Cursor(0, start // batch_size),
                sample_ids=torch.arange(start, min(start + batch_size, NUM_USERS)),
                items=Jagged.from_rows(HISTORIES[start : start + batch_size]),
            ),
            target_positions=torch.tensor(TARGETS[start : start + batch_size]),
            seen=Jagged.from_rows(HISTORIES[start : start + batch_size]),
            users=torch.arange(start, min(start + batch_size, NUM_USERS)) + 1000,
        )
        for start in range(0, NUM_USERS, batch_size)
    ]


def oracle_ranks(queries: Tensor, items: Tensor) -> list[int]:
    ranks = []
    for user, (query, target) in enumerate(zip(queries, TARGETS, strict=True)):
        scores = items @ query
        before = [
            item
            for item in range(len(items))
            if item not in HISTORIES[user] and (-scores[item], item) < (-scores[target], target)
        ]
        ranks.append(len(items) + 1 if target in HISTORIES[user] else len(before) + 1)
    return ranks


@pytest.fixture(scope="module")
def report() -> EvalReport:
    return evaluate(encode, WHOLE, samples(), CONFIG, seed=3)


def test_report_holds_what_the_oracle_says(report: EvalReport) -> None:
    ranks = np.array(oracle_ranks(QUERIES, ITEMS))
    found = ranks <= NUM_ITEMS
    assert report.rank.tolist() == ranks.tolist()
    assert report.user.tolist() == list(range(1000, 1000 + NUM_USERS))
    assert report.target.tolist() == TARGETS
    assert report.length.tolist() == [len(history) for history in HISTORIES]
    assert 0 < report.targets_seen == (~found).sum()
    assert report.metrics["hr@10"].mean == pytest.approx((ranks <= 10).mean())
    assert report.metrics["hr@100"].mean == pytest.approx(found.mean())  # a removed target misses even a longer list
    assert report.metrics["mrr"].mean == pytest.approx((found / ranks).mean())
    assert list(report.metrics) == ["hr@1", "hr@10", "hr@100", "ndcg@1", "ndcg@10", "ndcg@100", "mrr"]
    for interval in report.metrics.values():
        assert interval.low <= interval.mean <= interval.high
    assert 0 < report.coverage["coverage@1"] < report.coverage["coverage@10"] <= report.coverage["coverage@100"] == 1.0
    assert report.scalars()["hr@10"] == report.metrics["hr@10"].mean
    assert report.scalars()["coverage@1"] == report.coverage["coverage@1"]


def test_slices_split_the_users(report: EvalReport) -> None:
    assert [(part.name, part.low, part.high, part.num_users) for part in report.slices] == [
        ("short", 1, 10, 30),
        ("medium", 11, 20, 30),
        ("long", 21, 30, 30),
    ]
    weighted = sum(part.metrics["mrr"].mean * part.num_users for part in report.slices) / NUM_USERS
    assert weighted == pytest.approx(report.metrics["mrr"].mean)


def test_batches_and_blocks_do_not_change_the_report(report: EvalReport) -> None:
    small = EvalConfig(ks=CONFIG.ks, num_bootstrap=200, max_bytes=2**16)
    assert evaluate(encode, WHOLE, samples(7), small, seed=3).to_json() == report.to_json()


def test_seen_items_are_kept_on_request() -> None:
    kept = evaluate(encode, WHOLE, samples(), EvalConfig(ks=(1,), num_bootstrap=100, seen="none"), seed=0)
    scores = QUERIES @ ITEMS.T
    target_scores = scores.gather(1, torch.tensor(TARGETS).unsqueeze(1))
    assert kept.rank.tolist() == ((scores > target_scores).sum(1) + 1).tolist()
    assert kept.targets_seen == 0


def test_popularity_is_ranked_by_the_same_rule() -> None:
    counts = torch.arange(NUM_ITEMS) // 4  # four items share each count
    popular = popularity_report(counts, samples(), CONFIG, seed=0)
    ones = torch.ones(NUM_USERS, 1, dtype=torch.float64)
    assert popular.rank.tolist() == oracle_ranks(ones, counts.double().unsqueeze(1))


def test_report_survives_saving(report: EvalReport, tmp_path: Path) -> None:
    report.save(tmp_path / "eval")
    report.save(tmp_path / "eval")
    loaded = EvalReport.load(tmp_path / "eval")
    assert loaded.to_json() == report.to_json()
    assert loaded.ks == report.ks
    assert loaded.slices == report.slices
    assert loaded.metrics == report.metrics
    assert loaded.rank.tolist() == report.rank.tolist()
    assert sorted(file.name for file in (tmp_path / "eval").iterdir()) == ["per_user.parquet", "report.json"]
    assert pl.read_parquet(tmp_path / "eval" / "per_user.parquet").columns == ["user", "target", "rank", "length"]


def test_damaged_or_missing_reports_are_refused(report: EvalReport, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no evaluation: .*report\.json is missing"):
        EvalReport.load(tmp_path)
    report.save(tmp_path)
    pl.DataFrame({"user": [1]}).write_parquet(tmp_path / "per_user.parquet")
    with pytest.raises(DataError, match=r"report\.json and per_user\.parquet are of different"):
        EvalReport.load(tmp_path)


def test_table_shows_metrics_slices_and_boundaries(report: EvalReport) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(report)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in (
        "90 users, 60 items, seen items removed",
        "ndcg@10",
        "medium",
        "11-",
        "30",
        "coverage@1",
    ):
        assert part in text
    assert str(report.metrics["mrr"]) in text
    assert f"{report.targets_seen} targets were seen before" in text


def test_comparison_says_better_worse_or_nothing(report: EvalReport) -> None:
    oracle = evaluate(
        lambda batch: ITEMS[torch.tensor(TARGETS)[batch.sample_ids]] * 10, WHOLE, samples(), CONFIG, seed=3
    )
    assert compare(report, oracle, seed=0).differences["mrr"].verdict == "better"
    assert compare(oracle, report, seed=0).differences["mrr"].verdict == "worse"
    same = compare(report, report, seed=0)
    assert {one.verdict for one in same.differences.values()} == {"no difference shown"}
    gain = compare(report, oracle, seed=0).differences["hr@10"]
    assert gain.interval.mean == pytest.approx(gain.b - gain.a)
    assert (gain.a, gain.b) == (report.metrics["hr@10"].mean, oracle.metrics["hr@10"].mean)
    saved = json.loads(compare(report, oracle, seed=0).to_json())
    assert saved["metrics"]["mrr"]["verdict"] == "better"
    console = Console(width=80, file=io.StringIO())
    console.print(same)
    assert isinstance(console.file, io.StringIO)
    assert "no difference shown" in console.file.getvalue()


def test_comparison_pairs_users_whatever_their_order(report: EvalReport) -> None:
    backwards = evaluate(encode, WHOLE, samples()[::-1], CONFIG, seed=3)
    assert backwards.user.tolist() != report.user.tolist()
    assert all(one.interval.low == one.interval.high == 0 for one in compare(report, backwards, 0).differences.values())


def test_comparison_uses_the_list_lengths_of_both(report: EvalReport) -> None:
    other = evaluate(encode, WHOLE, samples(), EvalConfig(ks=(5, 10), num_bootstrap=100), seed=3)
    assert list(compare(report, other, seed=0).differences) == ["hr@10", "ndcg@10", "mrr"]


def test_comparison_of_different_targets_is_refused(report: EvalReport) -> None:
    def changed(**changes: object) -> EvalReport:
        fields = {name: getattr(report, name) for name in EvalReport.__dataclass_fields__}
        return EvalReport(**{**fields, **changes})

    target = report.target.copy()
    target[4] = 59
    with pytest.raises(NestPipeError, match="user 1004 with target 57 in a, but user 1004 with target 59 in b"):
        compare(report, changed(target=target), seed=0)
    user = report.user.copy()
    user[-1] = 5000
    with pytest.raises(NestPipeError, match="user 1089 with target 22 in a, but user 5000 with target 22 in b"):
        compare(report, changed(user=user), seed=0)
    with pytest.raises(NestPipeError, match="90 users in a but 3 in b"):
        compare(report, changed(num_users=3), seed=0)
    with pytest.raises(NestPipeError, match=r"eval\.seen all"):
        compare(report, changed(seen="none"), seed=0)


def test_a_broken_model_names_the_user() -> None:
    def broken(batch: Batch) -> Tensor:
        return encode(batch).index_fill(0, torch.tensor([2]), torch.nan)

    with pytest.raises(TrainError, match="query vector of user 1002 is not finite"):
        evaluate(broken, WHOLE, samples(), CONFIG, seed=0)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="no users to evaluate"):
        evaluate(encode, WHOLE, [], CONFIG, seed=0)


def test_progress_goes_to_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    config = EvalConfig(ks=(10,), num_bootstrap=100)
    for stream, progress, shown in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        evaluate(encode, WHOLE, samples(), config, seed=0, progress=progress)
        assert ("evaluate" in stream.getvalue()) == shown


def test_config_reports_all_problems() -> None:
    assert list(EvalConfig().problems()) == []
    broken = EvalConfig(ks=(10, 1), max_bytes=1, batch_size=0, num_bootstrap=1, max_users=-1)
    problems = list(broken.problems())
    assert [problem.split(" is ")[0] for problem in problems] == [
        "ks",
        "max_bytes",
        "batch_size",
        "num_bootstrap",
        "max_users",
    ]
    assert list(EvalConfig(ks=()).problems())
