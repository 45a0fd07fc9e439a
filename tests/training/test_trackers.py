"""Trackers: what is written can be read back, also after a kill; TensorBoard events are read by TensorBoard."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.atomic_files import read_jsonl
from nestpipe.errors import ConfigError, DataError, TrainError
from nestpipe.training.trackers import JsonlTracker, Progress, TensorBoardTracker, Tracker, Trackers


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not legal JSON")


def test_lines_are_legal_json_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 0.5, "tokens": 7})
    tracker.log(2, {"loss": math.nan, "up": math.inf, "down": -math.inf})
    tracker.log(3, {"loss": torch.tensor(0.25), "norm": np.float32(1.5)})  # type: ignore[dict-item]
    tracker.summary({"run": tmp_path, "best": {"hr@10": math.nan}, "ks": (1, 10), "done": True, "note": None})
    tracker.close()
    lines = [json.loads(line, parse_constant=refuse_constant) for line in path.read_text().splitlines()]
    assert lines[1] == {"step": 2, "loss": "nan", "up": "inf", "down": "-inf"}
    assert lines[3]["summary"] == {
        "run": str(tmp_path),
        "best": {"hr@10": "nan"},
        "ks": [1, 10],
        "done": True,
        "note": None,
    }
    first, second, third, _ = read_jsonl(path)
    assert first == {"step": 1, "loss": 0.5, "tokens": 7}
    assert math.isnan(second["loss"])
    assert (second["up"], second["down"]) == (math.inf, -math.inf)
    assert third == {"step": 3, "loss": 0.25, "norm": 1.5}


def test_reserved_names_and_files_in_use_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    with pytest.raises(ValueError, match="reserved name"):
        tracker.log(1, {"step": 2.0})
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    with pytest.raises(TrainError, match="already holds the metrics of another run"):
        JsonlTracker(path)
    assert read_jsonl(path) == [{"step": 1, "loss": 1.0}]


@given(num_steps=st.integers(0, 12), resume_step=st.integers(0, 14), cut=st.integers(0, 400))
def test_resume_after_a_cut_anywhere_continues_the_file(
    tmp_path_factory: pytest.TempPathFactory, num_steps: int, resume_step: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("resume") / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(1, num_steps + 1):
        tracker.log(step, {"loss": math.nan if step == 3 else step / 7})
    tracker.summary({"done": True})
    tracker.close()
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    kept = [record for record in read_jsonl(path) if record.get("step", math.inf) <= resume_step]

    tracker = JsonlTracker.resume(path, resume_step)
    tracker.log(resume_step + 1, {"loss": 0.125})
    tracker.close()
    assert len(kept) == min(content[: content.rfind(b"\n") + 1].count(b'"step"'), resume_step)
    assert repr(read_jsonl(path)) == repr([*kept, {"step": resume_step + 1, "loss": 0.125}])
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    tracker = JsonlTracker.resume(tmp_path / "metrics.jsonl", 0)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_a_kill_loses_no_finished_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom nestpipe.training.trackers import JsonlTracker\n"
        "tracker = JsonlTracker(Path(sys.argv[1]))\n"
        "for step in range(1, 51): tracker.log(step, {'loss': step / 2})\n"
        "print('written', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [record["step"] for record in read_jsonl(path)] == list(range(1, 51))


@pytest.mark.parametrize("line", ["{broken", "[1, 2]", ""])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is not"):
        read_jsonl(path)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_our_events(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"loss": step / 2, "eval/hr@10": step / 8})
    tracker.summary({"best": 0.5})
    tracker.close()
    seen = events(tmp_path)
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [(step, step / 2) for step in range(1, 6)]
    assert sorted(seen.Tags()["scalars"]) == ["eval/hr@10", "loss"]
    assert b'"best": 0.5' in seen.Tensors("summary/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_resume_hides_later_steps(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in range(1, 6):
        first.log(step, {"loss": 1.0})
    first.close()
    # Event files are read in the order of their names, which start with the second they were made in.
    for file in tmp_path.iterdir():
        file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    second = TensorBoardTracker(tmp_path, resume_step=3)
    second.log(4, {"loss": 2.0})
    second.close()
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
    ]


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'nestpipe\[tensorboard\]'"):
        TensorBoardTracker(tmp_path)


class FakeTracker:
    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))

    def summary(self, values: Mapping[str, Any]) -> None:
        self.calls.append((dict(values),))

    def close(self) -> None:
        self.calls.append(())
        if self.fails:
            raise OSError("disk full")


def test_fan_out_reaches_all_and_closes_all() -> None:
    trackers = [FakeTracker(), FakeTracker(fails=True), FakeTracker()]
    tracker: Tracker = Trackers(trackers)
    tracker.log(1, {"loss": 2.0})
    tracker.summary({"best": 1})
    with pytest.raises(OSError, match="disk full"):
        tracker.close()
    assert [one.calls for one in trackers] == [[(1, {"loss": 2.0}), ({"best": 1},), ()]] * 3


def test_progress_prints_a_line_every_15_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    progress = Progress(10, 0, done=2, quiet=False, clock=lambda: now)
    for _ in range(4):
        now += 10.0
        progress.advance(num_tokens=50, epoch=1, loss=0.5, spent_s=now - 100)
    progress.close()
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "step 4 of 10 · epoch 1 · loss 0.5000 · 5 tokens/s · 0:01:00 left",
        "step 6 of 10 · epoch 1 · loss 0.5000 · 5 tokens/s · 0:00:40 left",
    ]


def test_progress_counts_down_to_the_first_limit(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = Progress(None, 90.0, done=0, quiet=False, clock=lambda: now)
    now = 16.0
    progress.advance(num_tokens=32, epoch=0, loss=None, spent_s=60.0)
    assert capfd.readouterr().err == "step 1 · epoch 0 · 2 tokens/s · 0:00:30 left\n"
    quiet = Progress(None, 90.0, done=0, quiet=True, clock=lambda: now)
    quiet.say("nothing")
    assert capfd.readouterr().err == ""
