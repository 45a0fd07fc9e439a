"""What instructions are worth, on a log whose searches name the half of the catalogue that the next item is from."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from nestpipe.cli import main
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import StoredFeature
from nestpipe.errors import ConfigError
from nestpipe.eval.instruction_eval import InstructedLog, instruction_metrics, ratio_interval
from nestpipe.eval.scenario_eval import target_events
from nestpipe.generative.training_instructions import open_store
from nestpipe.training.instructed_logs import instructed_logs
from nestpipe.training.loop import train_to_end
from tests.generative.test_training import make_ids
from tests.generative.test_training_instructions import config_of, write_store
from tests.rank_pool import run_ranks
from tests.training.evaluating_ranks import instructions_of

NUM_USERS, NUM_EVENTS = 120, 13
WISHES = ("fern", "net")  # words that the narrow vectors of the test store tell apart


def write_wishes(folder):
    """A search names the half of its event's item, at nine events of ten; the template writes the others. Two pages."""
    rng = np.random.default_rng(5)
    size = NUM_USERS * NUM_EVENTS
    half = rng.integers(0, 2, size)
    wishes = [WISHES[one] if has else None for one, has in zip(half, rng.random(size) < 0.9, strict=True)]
    log = pl.DataFrame(
        {
            "user": np.arange(NUM_USERS).repeat(NUM_EVENTS),
            "item": 15 * half + rng.integers(0, 15, size),
            "time": 1_000_000 + 60 * np.arange(size),
            "wish": wishes,
            "scenario": np.where(rng.random(size) < 0.5, "home", "cart"),
        }
    )
    names = ("wish", "scenario")
    schema = Schema(features=tuple(Feature(name=one, kind="id", encoding="dictionary") for one in names))
    return write_sequences(folder, schema=schema, log=log)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wishes")
    make_ids(folder / "ids")
    log = write_wishes(folder / "log")
    write_store(log, folder / "wishes.sqlite", column="wish")
    write_store(log, folder / "template.sqlite")
    config = config_of(folder, folder / "log", folder / "wishes.sqlite", epochs=6)
    model = replace(config.model, num_scenarios=2, dropout=0.0, dim=16, user_rows=False)
    rates = {"dense": replace(config.dense, lr=0.01), "eval": replace(config.eval, seen="none")}
    return train_to_end(replace(config, model=model, **rates), folder / "run", quiet=True).run


def test_the_effect_is_shown_by_scenario_and_source_and_a_shuffled_instruction_loses_it(run, capsys):
    other = run.folder.parent / "template.sqlite"
    assert main(["eval", str(run.folder), "--instructions", str(other), "--json", "--baselines", "popularity"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = shown["instructions"]
    assert json.loads((run.folder / "eval" / "test" / "instructions.json").read_text()) == found
    assert set(found["effects"]) == {"all", "home", "cart"}
    assert set(found["effects"]["all"]) == {"wish", "template/1", "template: template/1"}
    counts = found["num_users"]
    assert counts["all"]["wish"] == counts["home"]["wish"] + counts["cart"]["wish"]
    assert counts["all"]["wish"] + counts["all"]["template/1"] == counts["all"]["template: template/1"] == NUM_USERS
    wish = found["effects"]["all"]["wish"]["hr@10"]
    # Ten of fifteen items of a known half are in the list (0.67); without a half one of three (0.33).
    assert wish["own"] > 0.6
    assert wish["effect"]["low"] > 0.1
    assert wish["lost"]["low"] >= 0.8
    # The template knows the past alone, which says nothing here.
    template = found["effects"]["all"]["template: template/1"]["hr@10"]
    assert template["effect"]["low"] < 0.1
    assert template["without"] == pytest.approx(shown["metrics"]["hr@10"]["mean"], abs=0.4)
    assert main(["eval", str(run.folder), "--baselines", "popularity"]) == 0
    table = capsys.readouterr().out
    assert "instructions: ndcg@10 without one, with the own, with another request's" in table
    (line,) = [one for one in table.splitlines() if one.startswith("all, wish")]
    assert re.fullmatch(r"all, wish +\d+ +0\.\d+ +\+0\.\d+ \[\+0\.\d+, \+0\.\d+\] +\d+% \[\d+%, \d+%\] *", line)


def test_every_rank_has_the_effects_of_one_process(run):
    assert run_ranks(3, instructions_of, run.folder) == [instructions_of(None, run.folder)] * 3


def test_the_control_keeps_an_effect_that_any_instruction_has(run):
    """An instruction that is the same for everybody helps or not; another request's does just the same."""
    predictor, split = run.predictor(), run.split
    report = predictor.evaluate(progress=False)
    (log,) = instructed_logs(run, report, "test", [])
    stored = log.sequences.event_features["reasoning"]
    events = target_events(report, run.sequences, split, "test")
    wished = next(one for one in events.tolist() if log.sources[one] == "wish")
    same = np.broadcast_to(stored.values[np.array([wished])], (len(run.sequences.items), 24))
    features = {**log.sequences.event_features, "reasoning": StoredFeature(np.array(same))}
    equal = InstructedLog(sequences=replace(log.sequences, event_features=features), sources={})
    report = predictor.on_log(equal.sequences).evaluate(progress=False)
    found = instruction_metrics(predictor, report, [equal], split, "test", seed=0, num_bootstrap=100)
    own = found.effects["all"]["log"]["hr@10"]
    assert own.own == own.shuffled == pytest.approx(report.metrics["hr@10"].mean)
    # And the requests without an instruction are those that the model answers with its default.
    (log,) = instructed_logs(run, report, "test", [])
    report = run.predictor().evaluate(progress=False)
    found = instruction_metrics(predictor, report, [log], split, "test", seed=0, num_bootstrap=100)
    wish, rest = found.effects["all"]["wish"]["hr@10"], found.effects["all"]["template/1"]["hr@10"]
    shares = [found.num_users["all"][name] / NUM_USERS for name in ("wish", "template/1")]
    assert shares[0] * wish.own + shares[1] * rest.own == pytest.approx(report.metrics["hr@10"].mean)


def test_the_share_that_is_lost_is_a_ratio_of_means():
    rng = np.random.default_rng(0)
    gains = rng.normal(1.0, 1.0, 400)
    found = ratio_interval(0.9 * gains + rng.normal(0, 0.1, 400), gains, seed=0, num=300)
    assert found.low < 0.9 < found.high
    assert found.high - found.low < 0.06  # paired: the noise of the gains themselves cancels


def test_a_store_that_does_not_fit_is_refused(run, tmp_path):
    report = run.predictor().evaluate(progress=False)
    log = run.sequences
    other = write_store(log, tmp_path / "other.sqlite", version="other")
    with pytest.raises(ConfigError, match=r"vectors of other .*was trained on those of words"):
        instructed_logs(run, report, "test", [other])
    plain = replace(run, config=replace(run.config, model=replace(run.config.model, instructions="", reasoning_dim=0)))
    assert instructed_logs(plain, report, "test", []) == []
    with pytest.raises(ConfigError, match="was trained without instructions"):
        instructed_logs(plain, report, "test", [other])
    assert open_store(run.config.model.instructions).authors([0]) == {}
