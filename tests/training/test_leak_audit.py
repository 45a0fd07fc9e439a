"""The audit finds planted leaks, and nothing but the declared inputs in runs without one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from nestpipe import recipes
from nestpipe.cli import main
from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.ingest import SideTable, write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.data.synthetic_clicks import ClicksConfig, ingest_clicks
from nestpipe.eval.feature_leaks import find_feature_leaks
from nestpipe.models import build_model as model_building
from nestpipe.models.config import DCNConfig
from nestpipe.training.leak_audit import LeakAudit, audit_run
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from tests.eval.ranking_ranks import ranking_config
from tests.serve import small_generative
from tests.small_runs import small_config, small_log

NUM_USERS, NUM_ITEMS = 40, 30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """HSTU, which reads the time of the request, with in-batch negatives, which are weighed by counts of training events."""
    folder = tmp_path_factory.mktemp("audit")
    config = small_config(small_log(folder / "log").path, loss="in batch", epochs=1)
    config = replace(config, data=replace(config.data, validation=True, batch_size=12, group_size=4))
    return train_to_end(config, folder / "run", quiet=True).run


def leaks(found: LeakAudit) -> list[str]:
    return [one.name for one in found.leaks]


def one_event_later(history: Any) -> Any:
    """Histories with the target in them."""

    def longer(self: BatchBuilder, samples: Any, start: Any, end: Any, *, request_ms: Any) -> Any:
        return history(self, samples, start + 1, end + 1, request_ms=request_ms)

    return longer


def test_a_run_without_leaks_reads_its_declared_inputs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for target in ("test", "validation"):
        code = main(["eval", str(run.folder), "--audit", "--json", "--target", target])
        found = json.loads(capsys.readouterr().out)
        assert code == 0
        assert len(found["checks"]) == 5
        assert not any(one["is_leak"] for one in found["checks"])
        assert found["declared"][0] == "time of the request: read by the model"
        assert found["declared"][1].startswith("catalogue: 30 items")
        assert json.loads((run.folder / "eval" / target / "audit.json").read_text()) == found
    main(["eval", str(run.folder), "--audit"])
    assert "audit: no leaks" in capsys.readouterr().out


def test_the_target_in_the_history_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BatchBuilder, "history", one_event_later(BatchBuilder.history))
    assert main(["eval", str(run.folder), "--audit"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "audit: 1 leaks" in out
    assert leaks(audit_run(Run.open(run.folder))) == ["evaluation reads held-out events"]


RECIPES = ("sasrec", "beauty_esasrec", "ml1m_hstu_meta", "ml1m_fuxi_alpha")


def run_of(recipe: str, folder: Path) -> Run:
    """A recipe with its blocks, loss and protocol, in a small size."""
    if recipe == "generative":
        return small_generative.make_run(folder)
    config = recipes.RECIPES[recipe]()
    size: dict[str, Any] = {"dim": 8} | ({"qk_dim": 4, "v_dim": 4} if hasattr(config.model, "qk_dim") else {})
    config = replace(
        config,
        data=replace(config.data, path=str(small_log(folder / "log").path), max_len=8, batch_size=11),
        model=replace(config.model, **size),
        train=replace(config.train, epochs=1, patience=0, num_threads=1),
    )
    return train_to_end(config, folder / "run", quiet=True).run


@pytest.mark.parametrize("recipe", [*RECIPES, "generative"])
def test_recipes_read_their_declared_inputs_only(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(recipe, tmp_path)
    found = audit_run(run)
    assert not found.leaks
    time = [one for one in found.declared if one.startswith("time of the request")]
    reads = {"ml1m_hstu_meta", "ml1m_fuxi_alpha"}
    assert time == [f"time of the request: {'read' if recipe in reads else 'not read'} by the model"]
    monkeypatch.setattr(BatchBuilder, "history", one_event_later(BatchBuilder.history))
    assert "evaluation reads held-out events" in leaks(audit_run(Run.open(run.folder)))


def test_validation_events_in_vocabulary_statistics_are_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_building, "train_mask", lambda sequences, split: np.ones(len(sequences.items), bool))
    assert leaks(audit_run(Run.open(run.folder))) == ["training reads held-out events"]


def timed_log(out: Path, *, feature: str) -> Sequences:
    """A log whose item table was computed from events: of all of them, or of all but the last one of each user."""
    random = np.random.default_rng(0)
    rows = [
        (user, int(item), 1_600_000_000 + 86_400 * place + user * 977, int(random.random() < 0.4))
        for user in range(NUM_USERS)
        for place, item in enumerate(random.permutation(NUM_ITEMS)[: 4 + user % 9])
    ]
    log = pl.DataFrame(rows, schema=["user", "item", "time", "click"], orient="row")
    known = log if feature.startswith("all") else log.filter(pl.col("time") < pl.col("time").max().over("user"))
    values = known.group_by("item").agg(
        last=pl.col("time").max() / 86_400, number=pl.len().log1p(), rate=pl.col("click").mean()
    )
    schema = Schema(
        features=(
            Feature(name="click", kind="number"),
            Feature(name="known", kind="number", scope="item", missing="mean"),
        ),
        labels=(Label(name="clicked", kind="binary", feature="click", threshold=1),),
    )
    table = values.select("item", known=pl.col(feature.split()[1]))
    return write_sequences(out, schema=schema, log=log, items=SideTable(source=table, key="item"))


@pytest.mark.parametrize("statistic", ["last", "number", "rate"])
def test_item_features_of_held_out_events_are_found(tmp_path: Path, statistic: str) -> None:
    config = small_config(tmp_path)
    names = {"last": "last time", "number": "logarithm of the number", "rate": "mean click"}
    leaking, honest = (timed_log(tmp_path / part, feature=f"{part} {statistic}") for part in ("all", "training"))
    (found,) = find_feature_leaks(leaking, make_split(leaking, config.data))
    assert (found.feature, found.statistic) == ("known", f"{names[statistic]} of all events")
    assert not find_feature_leaks(honest, make_split(honest, config.data))


def test_the_time_of_the_target_as_a_feature_of_the_item_is_found(tmp_path: Path) -> None:
    log = timed_log(tmp_path / "log", feature="all last")
    config = ranking_config(log.path, "dcn")
    config = replace(
        config,
        data=replace(config.data, split="last", split_time=None, validation=False),
        model=DCNConfig(dim=4, hidden=(8,), features=("user", "item", "known")),
    )
    run = train_to_end(replace(config, train=replace(config.train, epochs=1)), tmp_path / "run", quiet=True).run
    found = audit_run(run)
    assert leaks(found) == ["features computed from held-out events"]
    assert "item feature 'known' is the last time of all events" in found.leaks[0].seen
    stored = json.loads((run.folder / "run.json").read_text())
    stored["statistics"]["known"]["mean"] += 1
    (run.folder / "run.json").write_text(json.dumps(stored))
    assert "statistics of other than training events" in leaks(audit_run(Run.open(run.folder)))


@pytest.mark.parametrize("model", ["hstu", "dcn"])
def test_rankers_read_their_declared_inputs_only(tmp_path: Path, model: str) -> None:
    log = ingest_clicks(tmp_path / "clicks", ClicksConfig(num_users=30, num_items=25, num_events=700))
    config = ranking_config(log.path, model)
    run = train_to_end(replace(config, train=replace(config.train, epochs=1)), tmp_path / "run", quiet=True).run
    found = audit_run(run)
    assert not found.leaks
    assert "the item of the event that is scored" in found.declared
