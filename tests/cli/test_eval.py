"""`nestpipe eval`: tables, JSON, comparison, and what cannot be evaluated."""

import json
import shutil

import pytest


def test_eval_prints_a_table_beside_the_floor_and_keeps_the_report(run, folder):
    code, out, _ = run("eval", str(folder / "a"))
    assert code == 0
    assert "hr@10" in out
    assert "protocol: split last event" in out
    for shown in ("popularity baseline", "last-item transitions", "item kNN", "ild@10", "gini@10", "hr@10/ips"):
        assert shown in out
    context = json.loads((folder / "a" / "eval" / "test" / "context.json").read_text())
    assert context["baselines"]["transitions of 5 items"]["ndcg@10"]["low"] <= 1
    code, out, _ = run("eval", str(folder / "a"), "--baselines", "item_knn")
    assert "item kNN" in out
    assert "popularity baseline" not in out


def test_the_trained_baseline_is_trained_once_and_then_evaluated_in_any_protocol(run, folder, monkeypatch):
    monkeypatch.setattr("nestpipe.training.fit._STEPS", 10)
    code, out, _ = run("eval", str(folder / "b"), "--baselines", "sasrec")
    assert code == 0
    assert "training the SASRec baseline" in out
    assert "SASRec, cross-entropy" in out
    trained = folder / "b" / "baseline-sasrec"
    made = {one: one.stat().st_mtime_ns for one in trained.glob("checkpoints/**/*") if one.is_file()}
    code, out, _ = run("eval", str(folder / "b"), "--baselines", "sasrec", "--seen", "none", "--ks", "3")
    assert code == 0
    assert "training the SASRec baseline" not in out
    assert made == {one: one.stat().st_mtime_ns for one in trained.glob("checkpoints/**/*") if one.is_file()}
    assert set(json.loads((folder / "b" / "eval" / "test" / "context.json").read_text())["baselines"]) == {
        "SASRec, cross-entropy"
    }


def test_several_seeds_are_one_result(run, folder, tmp_path):
    for seed in ("1", "2"):
        common = ["--data.path", str(folder / "log"), "--train.num-threads", "1", "--data.batch-size", "16"]
        code, *_ = run("train", "tiny", "--run", str(tmp_path / seed), "--seed", seed, "--train.epochs", "1", *common)
        assert code == 0
    code, out, _ = run("eval", str(folder / "a"), "--seeds", str(tmp_path / "1"), str(tmp_path / "2"), "--json")
    found = json.loads(out)["metrics"]["hr@10"]
    assert code == 0
    assert found["mean"] == pytest.approx(sum(found["values"]) / 3)
    assert found["low"] <= found["mean"] <= found["high"]
    assert json.loads((folder / "a" / "eval" / "test" / "seeds.json").read_text())["runs"][1] == str(tmp_path / "1")
    code, out, _ = run("eval", str(folder / "a"), "--seeds", str(tmp_path / "1"))
    assert "± " in out
    code, _, err = run("eval", str(folder / "a"), "--seeds", str(folder / "a"))
    assert code == 2
    assert "that is one result, not two" in err
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    config["model"]["dropout"] = 0.3
    (tmp_path / "1" / "config.json").write_text(json.dumps(config))
    code, _, err = run("eval", str(folder / "a"), "--seeds", str(tmp_path / "1"))
    assert code == 2
    assert "model.dropout: 0.1 and 0.3" in err
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
