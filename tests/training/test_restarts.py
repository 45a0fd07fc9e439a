"""`nestpipe launch train`: a killed rank costs the steps since the last checkpoint, and not one bit."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe import recipes
from nestpipe.atomic_files import read_jsonl
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.cli.demo import differing_tensors
from nestpipe.training.loop import train_to_end
from tests.rank_pool import run_ranks
from tests.small_runs import small_log

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE, SAVE_STEPS, MAX_STEPS_PER_LIFE = 3, 3, 6


def launch(plan, *command, cwd, max_restarts, timeout_s=120):
    """The stderr of all ranks; the launcher must exit with 0."""
    options = ["-n", str(WORLD_SIZE), "--max-restarts", str(max_restarts)]
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.launch_dying", json.dumps(plan), *options, *command],
        cwd=cwd,
        env={**known, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stderr


def calm_run(world, config, folder):
    return train_to_end(config, folder, quiet=True, world=world).stopped


def deaths(num_deaths, seed):
    """A plan for dying_rank: who dies in each life, and at which call of what; rank 0 also publishes and prunes."""
    random_ = random.Random(seed)
    plan = []
    for number in range(num_deaths):
        rank = random_.randrange(WORLD_SIZE)
        at_step = ("_after_step", random_.randint(2, MAX_STEPS_PER_LIFE))
        in_save = ("flush", random_.randint(1, 4 if rank == 0 else 1))
        others = (
            [("check_finite", 1), ("prune_checkpoints", 1), ("_publish", 1)] if rank == 0 else [("check_finite", 1)]
        )
        plan.append((rank, *(at_step, in_save, random_.choice(others))[number % 3]))
    return plan


@pytest.mark.timeout(1800)
def test_ranks_killed_in_steps_and_saves_end_bitwise_identical_to_an_undisturbed_run(tmp_path, scale):
    num_deaths = scale(2, 20)
    plan, steps = deaths(num_deaths, seed=num_deaths), (num_deaths + 1) * MAX_STEPS_PER_LIFE
    small_log(tmp_path / "log")
    tiny = recipes.tiny()
    config = replace(
        tiny,
        data=replace(tiny.data, path=str(tmp_path / "log"), batch_size=16),
        embedding=replace(tiny.embedding, num_buckets=4),
        pipeline=replace(tiny.pipeline, mode="sequential", micro_batches=2),
        train=replace(
            tiny.train, epochs=0, steps=steps, save_steps=SAVE_STEPS, log_steps=1, keep_last=2, num_threads=1
        ),
    )
    run_ranks(WORLD_SIZE, calm_run, config, tmp_path / "calm", deadline_s=scale(60, 600))
    settings = f"--train.epochs 0 --train.steps {steps} --train.save-steps {SAVE_STEPS} --train.log-steps 1"
    sizes = "--data.path log --data.batch-size 16 --embedding.num-buckets 4 --train.num-threads 1"
    sizes += " --pipeline.micro-batches 2"  # auto: nested, and the calm run is sequential
    said = launch(
        plan,
        *("train", "tiny", "--run", "run", "--resume", *settings.split(), *sizes.split()),
        cwd=tmp_path,
        max_restarts=num_deaths,
        timeout_s=1700,
    )
    assert not differing_tensors(tmp_path / "calm", tmp_path / "run")
    assert re.findall(r"rank (\d) dies", said) == [str(rank) for rank, *_ in plan]
    assert said.count("stopped at step") == 1
    assert "pipeline auto: nested" in said
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "step" in r] == list(
        range(1, steps + 1)
    )
    assert checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints") == [steps - SAVE_STEPS, steps]
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp*"))
    assert "Traceback" not in said
