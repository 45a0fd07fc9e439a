"""The report of runs of every kind, whole and damaged, read as a parser reads it."""

from __future__ import annotations

import fcntl
import json
import shutil
from html.parser import HTMLParser

import pytest

from nestpipe.cli import main
from nestpipe.cli.report import write_report
from nestpipe.config import Config, flat
from nestpipe.recipes import RECIPES
from nestpipe.report.inputs import read_facts
from nestpipe.report.page import SECTIONS, page
from tests.report.reported_runs import on_two_ranks

VOID = {"meta", "link"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects texts by the elements around them."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, list[str]] = {"": []}
        self.notes: dict[str, list[str]] = {}
        self.marked: list[str] = []
        self.drawings: list[dict[str, str | None]] = []
        self._section, self._is_note, self._setting = "", False, ""
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert tag not in {"script", "iframe", "object", "embed", "img", "base", "form"}
        assert not [name for name, _ in attrs if name.startswith("on") or name == "src"], attrs
        own = dict(attrs)
        if tag == "section":
            self._section = own["id"]
            self.sections[self._section] = []
        if tag == "svg":
            self.drawings.append(own)
        self._is_note = tag == "p" and own.get("class") == "note"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.sections[self._section].append(data)
        if self._is_note:
            self.notes.setdefault(self._section, []).append(data)
        if self.open and self.open[-1] == "dt":
            self._setting = data
        if data == "● ":
            self.marked.append(self._setting)

    def text(self, section: str) -> str:
        return " ".join(self.sections[section])


def report(run) -> Page:
    found = Page(page(read_facts(run)))
    assert list(found.sections)[1:] == list(SECTIONS)
    return found


@pytest.fixture
def copy(runs, tmp_path):
    return shutil.copytree(runs["retrieval"], tmp_path / "copy")


def test_a_whole_run_shows_what_its_files_hold(runs):
    run = runs["retrieval"]
    found = report(run)
    assert not found.notes, found.notes
    content = json.loads((run / "eval" / "test" / "report.json").read_text())
    context = json.loads((run / "eval" / "test" / "context.json").read_text())
    for name, one in content["metrics"].items():
        assert f"{name} {one['mean']:.4f} [{one['low']:.4f}, {one['high']:.4f}]" in found.text("quality")
        assert f"{context['baselines']['popularity baseline'][name]['mean']:.4f}" in found.text("quality")
    assert f"checkpoint of step {context['step']}" in found.text("quality")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert f"From {losses[0]:.4g} at step 1 to {losses[-1]:.4g} at step 12" in found.text("curves")
    for title in ("Training loss", "Validation hr", "Steps per second", "Learning rates", "Memory"):
        assert title in found.text("curves")
    assert "Finished: 3 epochs done." in found.text("")
    assert "nested" in found.text("")
    assert "Timeline" in found.text("steps")
    assert {"cpu", "native library", "torch"} <= set(found.sections["environment"])


def test_every_drawing_has_a_title_a_description_and_named_axes(runs):
    for run in runs.values():
        html = page(read_facts(run))
        drawings = [one for one in Page(html).drawings if one.get("class") != "timeline"]
        assert len(drawings) >= 5
        assert all(one["role"] == "img" and len(one["aria-label"]) > 30 for one in drawings)
        assert html.count("<desc>") == len(drawings)
        assert html.count('class="axis"') >= len(drawings)


def test_settings_that_differ_from_the_recipe_are_marked(runs):
    run = runs["retrieval"]
    own, usual = flat(Config.load(run / "config.json")), flat(RECIPES["tiny"]())
    expected = [key for key in own if own[key] != usual.get(key, "absent")]
    found = report(run)
    assert sorted(found.marked) == sorted([*(key.rpartition(".")[2] for key in expected), "kind"])
    assert f"{len(expected) + 1} differ from the recipe tiny" in found.text("settings")
    assert all(key.rpartition(".")[2] in found.sections["settings"] for key in own)


def test_a_run_without_a_recorded_recipe_is_compared_with_the_nearest(runs):
    found = report(runs["ranking"])
    assert "differ from clicks_dcn, the nearest recipe" in found.text("settings")


def test_a_ranking_run_has_its_labels_and_baselines(runs):
    found = report(runs["ranking"])
    content = json.loads((runs["ranking"] / "eval" / "test" / "report.json").read_text())
    one = content["tasks"]["clicked"]["intervals"]["gauc"]
    assert f"{one['mean']:.4f} [{one['low']:.4f}, {one['high']:.4f}]" in found.text("quality")
    assert "item mean" in found.text("quality")
    assert "loss/clicked" in found.text("curves")
    assert "has no trace" in found.notes["steps"][0]
    assert "--pipeline.advanced.trace-steps" in found.notes["steps"][0]


def test_two_ranks_are_compared(runs, tmp_path):
    found = report(on_two_ranks(runs["retrieval"], tmp_path / "two"))
    assert not found.notes
    assert "3,000 2 GB" in found.text("balance")
    assert "1,000 1 GB" in found.text("balance")
    assert "tokens 1.5" in found.text("balance")
    assert "Streams of 2 ranks over 3 steps" in found.text("steps")
    assert "dense sum" in found.text("steps")


MISSING = {
    "metrics.jsonl": ("curves", "There is no file for the metrics"),
    "run.json": ("environment", "There is no run.json"),
    "config.json": ("settings", "There is no file for the configuration"),
    "checkpoints": ("balance", "no complete checkpoint"),
    "trace": ("steps", "has no trace"),
    "eval": ("quality", "was not evaluated"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_file_is_one_line(copy, name):
    path = copy / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    section, said = MISSING[name]
    found = report(copy)
    assert any(said in line for line in found.notes[section]), found.notes


def test_damage_is_one_line_wherever_it_is(copy):
    latest = sorted((copy / "checkpoints").iterdir())[-1]
    names = ("config.json", "run.json", "metrics.jsonl", "eval/test/report.json", "eval/test/context.json")
    files = [copy / name for name in names] + [copy / "trace" / "rank-000.jsonl"]
    for path in (*files, latest / "manifest.json", next(latest.glob("part-*.pack"))):
        whole = path.read_bytes()
        for damage in (
            b"",
            b"[1]\n",
            b'{"step": 1, "loss": "<b>", "tasks": 3}\n',
            whole[: len(whole) // 2] + b"\xff\n",
        ):
            path.write_bytes(damage)
            report(copy)
        path.write_bytes(whole)
    assert not report(copy).notes


def test_the_state_of_a_run_is_told(copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    assert "Finished" in report(copy).text("")
    interrupted = json.loads(lines[-1])
    interrupted["summary"]["stopped"] = "interrupted"
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(interrupted)]) + "\n")
    assert "Interrupted by a signal" in report(copy).text("")
    (copy / "metrics.jsonl").write_text("\n".join(lines[:5]) + '\n{"step": 6, "lo')
    assert "Ended without a summary after step" in report(copy).text("")
    with (copy / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "Still training" in report(copy).text("")
    (copy / "metrics.jsonl").write_text("")
    assert "Nothing has been logged yet" in report(copy).text("curves")


def test_values_that_are_not_finite_are_named_and_left_out(copy):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines[3:5]:
        line["loss"] = "nan"
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = report(copy)
    assert found.notes["curves"] == [
        f"loss: 2 values are not finite and left out, the first at step {lines[3]['step']}."
    ]
    assert "nan" not in page(read_facts(copy)).replace("nanosecond", "")


def test_text_from_data_cannot_become_markup(copy, tmp_path):
    evil = '"><script>alert(1)</script><b onclick=alert(2)>&amp;'
    named = copy.rename(tmp_path / evil.replace("/", "⁄"))
    config = json.loads((named / "config.json").read_text())
    config["data"]["path"] = config["model"][evil] = evil
    (named / "config.json").write_text(json.dumps(config))
    about = json.loads((named / "run.json").read_text())
    about["versions"][evil] = about["environment"][evil] = about["data_digest"] = evil + "\ud800"
    (named / "run.json").write_text(json.dumps(about))
    lines = [json.loads(line) for line in (named / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "step" in line:
            line.update({evil: 1.0, f"validation/{evil}": 2.0})
    lines[-1]["summary"]["stopped"] = evil
    (named / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    quality = (named / "eval" / "test" / "report.json").read_text().replace("hr@10", evil.replace('"', '\\"'))
    (named / "eval" / "test" / "report.json").write_text(quality)
    found = Page(write_report(named).read_text())  # refuses scripts and handlers
    assert named.name in found.sections[""]
    for section in ("quality", "curves", "settings", "environment"):
        assert evil in found.text(section), section


def test_the_command(capsys, runs, tmp_path):
    out = tmp_path / "new" / "here.html"
    assert main(["report", str(runs["retrieval"]), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", str(runs["ranking"])]) == 0
    assert (runs["ranking"] / "report.html").exists()
    for arguments, said in (
        ([str(tmp_path / "nothing")], "there is no such folder"),
        ([str(tmp_path)], "neither config.json nor metrics.jsonl"),
        ([str(runs["ranking"]), "--out", str(tmp_path)], "name a file"),
    ):
        assert main(["report", *arguments]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "xample: nestpipe report" in " ".join(capsys.readouterr().out.split())
