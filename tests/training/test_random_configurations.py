"""Random configurations, crashes and resumes: the last checkpoint is bitwise that of one undisturbed sequential run.

Every option that may be combined is drawn from a seed. A run is divided into lives: each has a mode of its own, and ends at a
step limit or with a rank that fails in the middle of a step. `QUICK` seeds fit into the time of `make test`; `make soak` draws
`SOAK` configurations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nestpipe.cli.demo import differing_tensors
from nestpipe.config import Config
from nestpipe.embedding import buckets
from nestpipe.errors import ConfigError, NestPipeError
from nestpipe.training import loop
from nestpipe.training.loop import train_to_end
from tests.rank_pool import run_ranks
from tests.small_runs import LOSSES, MODELS, small_config, small_log

QUICK = (1, 2, 65, 98)  # the last two have chunks in replica groups, and crashes
SOAK = 200
STEPS, SAVE_STEPS = 9, 3
OVERLAPPED = ("dual-buffer", "frozen-window", "nested")


class CrashError(Exception):
    """The failure of a rank."""


@dataclass(frozen=True)
class Life:
    """One start of the run: its pipeline, its last step, and which rank fails after which step of this life."""

    pipeline: dict[str, Any]
    steps: int = STEPS
    failing: tuple[int, int] | None = None


@dataclass(frozen=True)
class Drawn:
    """A configuration, the number of ranks, and the lives of the run."""

    config: Config
    num_ranks: int
    lives: tuple[Life, ...]

    def of(self, life: Life) -> Config:
        config = replace(self.config, pipeline=self.config.pipeline.changed(**life.pipeline))
        return replace(config, train=replace(config.train, steps=life.steps))


def train(world, config, folder, failing=None):
    """Trains on this rank; "failed" if it, or another one, was made to fail."""
    plain, count = loop._Loop._after_step, 0

    def after_step(self, *arguments):
        nonlocal count
        plain(self, *arguments)
        count += 1
        if failing == (world.rank, count):
            raise CrashError

    loop._Loop._after_step = after_step
    try:
        with patch.object(buckets, "MIN_ROWS_PER_BUCKET", 12):  # so that four ranks evict rows of a small log
            return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped
    except (CrashError, NestPipeError) as error:
        if failing is None:
            raise
        return f"failed: {error}"
    finally:
        loop._Loop._after_step = plain


def pipeline_of(draw: random.Random, *, staleness: int) -> dict[str, Any]:
    """A way to overlap; it decides no bit."""
    mode = draw.choice(
        ("nested", "nested", "sequential") if staleness else (*OVERLAPPED, "nested", "nested", "sequential")
    )
    return {
        "mode": mode,
        "depth": draw.choice((1, 2, 3)),
        "rows": draw.choice(("auto", "buffer", "table")),
        "chunks": draw.choice((1, "shared", "shared", 2, 3, 5)) if mode == "nested" else 1,
    }


def lives_of(draw: random.Random, num_ranks: int, *, staleness: int) -> tuple[Life, ...]:
    """Up to three lives; the last one trains to the end."""
    lives = []
    for _ in range(draw.randint(0, 2)):
        pipeline = pipeline_of(draw, staleness=staleness)
        if draw.random() < 0.5:
            lives.append(Life(pipeline, steps=draw.randint(2, STEPS - 1)))
        else:
            lives.append(Life(pipeline, failing=(draw.randrange(num_ranks), draw.randint(1, 5))))
    return (*sorted(lives, key=lambda life: life.steps), Life(pipeline_of(draw, staleness=staleness)))


def drawn(seed: int, log: Path, folder: Path) -> Drawn:
    """The configuration of a seed; draws again while a combination is refused."""
    draw = random.Random(seed)
    while True:
        num_ranks = draw.randint(1, 4)
        groups = draw.choice([number for number in (1, 1, 2, 3, 4) if num_ranks % number == 0])
        staleness = draw.choice((0, 0, 0, 1))
        config = small_config(
            log,
            draw.choice(list(MODELS)),
            draw.choice(list(LOSSES)),
            pipeline={
                "micro_batches": draw.choice((1, 2, 3, 4, 6)),
                "ramp": draw.choice((1.0, 0.5, 0.25)),
                "groups": groups,
                "staleness": staleness,
                "sync_steps": draw.choice((0, 2, 4)) if staleness else 0,
            },
            epochs=0,
            save_steps=SAVE_STEPS,
            clip_norm=draw.choice((0.0, 0.0, 0.5)),
            clip=draw.choice(("dense", "all")),
            async_save=draw.random() < 0.7,
        )
        limit = draw.choice((0, 0, 48))
        embedding = replace(
            config.embedding,
            optimizer=draw.choice(("sgd", "adagrad", "rowwise_adagrad", "adam")),
            weight_decay=draw.choice((0.0, 0.01)),
            num_buckets=draw.choice((4, 7, 16)),
            admit_after=draw.choice((1, 1, 2)),
            max_rows=limit,
            evict=draw.choice(("lru", "lfu")),
            protect_steps=6,
            **({"tier": "files", "files_folder": str(folder), "buffer_bytes": 1 << 20} if draw.random() < 0.3 else {}),
        )
        group_size = draw.choice((2, 3)) if config.loss.mixes_groups else 1
        batch_size = draw.choice((4, 9, 11, 16)) if group_size == 1 else 4 * group_size
        data = replace(config.data, batch_size=batch_size, group_size=group_size, balance=draw.random() < 0.3)
        config = replace(config, embedding=embedding, data=data, seed=draw.randrange(1000))
        found = Drawn(config, num_ranks, lives_of(draw, num_ranks, staleness=staleness))
        try:
            for life in found.lives:
                found.of(life).validate()
        except ConfigError:
            continue
        return found


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("random") / "log", num_items=300).path


@pytest.mark.timeout(2400)
def test_every_tensor_is_that_of_an_undisturbed_sequential_run(log, tmp_path, scale):
    for seed in scale(QUICK, range(SOAK)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        one = drawn(seed, log, folder)
        calm = replace(one.config, embedding=replace(one.config.embedding, tier="memory"))
        calm = replace(calm, train=replace(calm.train, steps=STEPS))
        run_ranks(one.num_ranks, train, calm, folder / "calm")
        for life in one.lives:
            run_ranks(one.num_ranks, train, one.of(life), folder / "run", life.failing)
        assert not differing_tensors(folder / "calm", folder / "run"), f"seed {seed}: {one}"
