"""`nestpipe recommend` and `nestpipe similar` say what the run's predictor says, in own ids."""

from __future__ import annotations

import json

import polars as pl
import pytest

from nestpipe import train
from nestpipe.cli import main
from tests.eval.test_catalogue_predictor import named_log
from tests.serve import small_generative
from tests.small_runs import small_config, write_log


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recommend")
    return train(small_config(named_log(folder / "log").path, "sasrec", epochs=1), folder / "run", quiet=True)


def test_users_are_named_as_in_the_log(run, capsys):
    assert main(["recommend", str(run.folder), "--user", "Zoë 7", "nobody", "--k", "3", "--json"]) == 0
    known, unknown = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    wanted = run.predictor().recommend("Zoë 7", 3)
    assert known == {"user": "Zoë 7", "items": wanted.items, "scores": wanted.scores, "path": "model"}
    assert (unknown["user"], unknown["path"], len(unknown["items"])) == ("nobody", "popular", 3)
    assert main(["recommend", str(run.folder), "--user", "nobody", "--k", "2"]) == 0
    shown = capsys.readouterr().out
    assert "user nobody   (no history: the most popular items)" in shown
    assert unknown["items"][0] in shown


def test_all_users_go_to_one_file(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nestpipe.cli.recommend._ROWS", 12)  # four users at a time
    out = tmp_path / "new" / "recommendations.parquet"
    assert main(["recommend", str(run.folder), "--all", "--k", "3", "--out", str(out)]) == 0
    assert "120 rows for 40 users" in capsys.readouterr().out
    found, predictor = pl.read_parquet(out), run.predictor()
    assert found.columns == ["user", "rank", "item", "score", "path"]
    for user, lines in found.group_by("user", maintain_order=True):
        assert lines["item"].to_list() == predictor.recommend(user[0], 3).items
        assert lines["rank"].to_list() == [1, 2, 3]
    assert found["user"].n_unique() == 40
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("sated", [(0, 1), tuple(range(6))])
def test_users_for_whom_nothing_is_left_have_no_rows(tmp_path, capsys, monkeypatch, sated):
    """Of the whole catalogue they have had everything, so their batches have no rows: at the start, or all of them."""
    monkeypatch.setattr("nestpipe.cli.recommend._ROWS", 2)  # one user at a time
    log = write_log(tmp_path / "log", {user: [0, 1, 2, 3][: 4 if user in sated else 3] for user in range(6)})
    run = train(small_config(log.path, "sasrec", epochs=1), tmp_path / "run", quiet=True)
    out = tmp_path / "recommendations.parquet"
    assert main(["recommend", str(run.folder), "--all", "--k", "2", "--out", str(out)]) == 0
    left = 6 - len(sated)
    assert f"{left} rows for 6 users" in capsys.readouterr().out
    found = pl.read_parquet(out)
    assert found.columns == ["user", "rank", "item", "score", "path"]
    assert found["user"].to_list() == [user for user in range(6) if user not in sated]
    assert found["item"].to_list() == [3] * left


def test_similar_items(run, capsys):
    assert main(["similar", str(run.folder), "--item", "p7", "--k", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["items"] == run.predictor().similar("p7", 2).items
    assert main(["similar", str(run.folder), "--item", "lamp"]) == 2
    assert "no item 'lamp'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def shelved(tmp_path_factory):
    """Items with a kind and a shelf."""
    folder = tmp_path_factory.mktemp("rules")
    return train(small_config(small_generative.make_data(folder).path, "sasrec", epochs=1), folder / "run", quiet=True)


def test_rules_are_those_of_the_predictor(shelved, tmp_path, capsys):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"few": {"max_per": {"kind": 1}, "exclude": [2]}, "pins": {"pin": [4]}}))
    command = ["recommend", str(shelved.folder), "--user", "7", "--k", "6", "--json"]
    filters = ["--filter", "kind=oak chair,red lamp", "shelf=1..4"]
    wanted = {"filter": {"kind": ["oak chair", "red lamp"], "shelf": {"gte": 1, "lte": 4}}}
    named = ["--rules", str(path), "--rule-set", "few"]
    for flags, rules in [
        (filters, wanted),
        ([*filters, *named], {**wanted, "max_per": {"kind": 1}, "exclude": [2]}),
        (["--filter", "shelf=..3"], {"filter": {"shelf": {"lte": 3}}}),
    ]:
        assert main([*command, *flags]) == 0
        found, offline = json.loads(capsys.readouterr().out), shelved.predictor().recommend(7, 6, rules=rules)
        assert (found["items"], found["allowed"]) == (offline.items, offline.allowed)
    assert main(["recommend", str(shelved.folder), "--user", "7", "--filter", "kind=oak chair"]) == 0
    assert "(the rules left 4 items)" in capsys.readouterr().out
    assert main(["similar", str(shelved.folder), "--item", "5", "--k", "3", "--json", *filters]) == 0
    alike = shelved.predictor().similar(5, 3, rules=wanted)
    assert json.loads(capsys.readouterr().out)["items"] == alike.items
    out = tmp_path / "all.parquet"
    assert main(["recommend", str(shelved.folder), "--all", "--out", str(out), "--k", "2", *named]) == 0
    lines = pl.read_parquet(out).filter(pl.col("user") == 7)
    assert (
        lines["item"].to_list()
        == shelved.predictor().recommend(7, 2, rules={"max_per": {"kind": 1}, "exclude": [2]}).items
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--filter", "kind"], "'kind' is no filter; write FIELD=VALUE"),
        (["--filter", "shelf=low"], "'low' is no number"),
        (["--filter", "colour=red"], "filter.colour is no field of items; there are: kind, shelf."),
        (["--filter", "kind=lamp"], "is not among the 5 values of the log: oak chair"),
        (["--rule-set", "a"], "name it with --rules FILE"),
        (["--rules", "none.json"], "does not exist"),
    ],
)
def test_rules_that_do_not_exist_are_refused(shelved, flags, message, capsys):
    assert main(["recommend", str(shelved.folder), "--user", "7", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name users with --user, or take every user of the log with --all"),
        (["--all", "--user", "Zoë 7"], "one of the two"),
        (["--all"], "--all needs a file: --out recommendations.parquet"),
    ],
)
def test_what_is_missing_is_said(run, arguments, message, capsys):
    assert main(["recommend", str(run.folder), *arguments]) == 2
    assert message in capsys.readouterr().err
