"""`nestpipe eval`: tables, JSON, comparison, and what cannot be evaluated."""

import json
import shutil

import pytest


def test_eval_prints_a_table_beside_the_floor_and_keeps_the_report(run, folder):
    code, out, _ = run("eval", str(folder / "a"))
    assert code == 0
    assert "hr@10" in out
    assert "popularity baseline" in out
    assert (folder / "a" / "eval" / "test" / "report.json").exists()


def test_eval_json_and_comparison(run, folder):
    code, out, _ = run("eval", str(folder / "a"), "--json")
    assert code == 0
    alone = json.loads(out)["metrics"]["ndcg@10"]["mean"]
    code, out, _ = run("eval", str(folder / "a"), "--compare", str(folder / "b"), "--json")
    compared = json.loads(out)["metrics"]["ndcg@10"]
    assert compared["a"] == alone
    assert compared["interval"]["mean"] == pytest.approx(compared["b"] - compared["a"])
    assert compared["verdict"] in {"better", "worse", "no difference shown"}


def test_runs_on_two_orders_of_equal_times_are_not_compared(run, folder, tmp_path):
    """The same run on a folder that only says it has another order."""
    shutil.copytree(folder / "a", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    shutil.copytree(config["data"]["path"], tmp_path / "log")
    meta = json.loads((tmp_path / "log" / "meta.json").read_text())
    (tmp_path / "log" / "meta.json").write_text(json.dumps({**meta, "ties": "meta"}))
    config["data"]["path"] = str(tmp_path / "log")
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    code, out, err = run("eval", str(folder / "a"), "--compare", str(tmp_path / "c"))
    assert code == 2
    assert "ties: file in a, meta in b" in err
    assert "hr@10" not in out
    assert json.loads((folder / "a" / "run.json").read_text())["protocol"]["ties"] == "file"
    code, out, _ = run("eval", str(tmp_path / "c"))
    assert "ties meta; seen all" in " ".join(out.split())


def test_validation_targets_are_missed_with_their_reason(run, folder):
    code, _, err = run("eval", str(folder / "a"), "--target", "validation")
    assert code == 2
    assert "It was trained without --data.validation" in err


def test_flags_replace_the_settings_of_the_run(run, folder):
    code, out, _ = run("eval", str(folder / "a"), "--max-users", "7", "--ks", "3", "5", "--seen", "none", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["num_users"], report["ks"], report["seen"]) == (7, [3, 5], "none")
    code, out, _ = run("eval", str(folder / "a"), "--compare", str(folder / "b"), "--max-users", "7", "--json")
    assert json.loads(out)["num_users"] == 7  # the same users, whatever the seeds of the runs
    code, _, err = run("eval", str(folder / "a"), "--ks", "5", "3")
    assert code == 2
    assert "eval.ks is (5, 3)" in err
