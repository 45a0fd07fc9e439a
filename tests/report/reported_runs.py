"""Runs to report on, small and real."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

from nestpipe.cli import main
from nestpipe.data.synthetic_clicks import ClicksConfig, ingest_clicks
from nestpipe.training.loop import train_to_end
from tests.eval.ranking_ranks import ranking_config
from tests.profiling.made_up_traces import ranks
from tests.small_runs import small_config, small_log


def retrieval_run(folder: Path) -> Path:
    """A nested run with validation, a trace, checkpoints and an evaluation."""
    log = small_log(folder / "log")
    config = small_config(log.path, pipeline={"mode": "nested", "micro_batches": 2, "trace_steps": 5})
    config = replace(config, data=replace(config.data, validation=True))
    train_to_end(config, folder / "run", quiet=True, recipe="tiny")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["eval", str(folder / "run")]) == 0
    return folder / "run"


def ranking_run(folder: Path) -> Path:
    """A run that ranks by labels, evaluated."""
    log = ingest_clicks(folder / "clicks", ClicksConfig(num_users=40, num_items=25, num_events=900))
    train_to_end(ranking_config(log.path, "dcn"), folder / "ranking", quiet=True)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["eval", str(folder / "ranking")]) == 0
    return folder / "ranking"


def on_two_ranks(run: Path, out: Path) -> Path:
    """A copy of a run that says it was trained on two ranks, with a made-up trace of them."""
    shutil.copytree(run, out)
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**about, "num_ranks": 2}))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    last["summary"]["ranks"] = [
        {"num_tokens": 3000, "memory_bytes": 2 * 10**9},
        {"num_tokens": 1000, "memory_bytes": 10**9},
    ]
    (out / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    for one in ranks(2, num_steps=6, compute_ms=30):
        one.save(out)
    return out
