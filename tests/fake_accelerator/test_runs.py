"""`nestpipe train --train.device` on the fake accelerator: checkpoints, validation, kill -9 and resume, refused devices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from nestpipe.atomic_files import read_jsonl
from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from nestpipe.config import Config
from nestpipe.distributed.process_group import World
from nestpipe.embedding import device_budget
from nestpipe.embedding.device_budget import DeviceBuffers
from nestpipe.errors import ConfigError
from nestpipe.training.device import resolve_device
from nestpipe.training.loop import train_to_end
from tests.fake_accelerator.fake_ranks import run_on_fake
from tests.generative.test_training import make_ids
from tests.rank_pool import exit_code_of
from tests.small_runs import small_config, small_log
from tests.training.aligned_runs import align, start_config, write_scenarios, write_shop

STEPS = 6


def train(world: World, config: Config, folder: Path) -> str:
    return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped


def config_of(log: Path, mode: str, more: dict[str, object] | None = None, **settings: object) -> Config:
    pipeline = {"mode": mode, "micro_batches": 2, **(more or {})}
    config = small_config(log, "sasrec", pipeline=pipeline, epochs=0, **settings)
    embedding = replace(config.embedding, device_bytes=8000)  # of a table of 30 rows, 100 bytes each
    return replace(config, embedding=embedding, data=replace(config.data, batch_size=6))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_log(tmp_path_factory.mktemp("device") / "log").path


@pytest.mark.parametrize("more", [{}, {"groups": 2}, {"staleness": 1, "sync_steps": 2}], ids=str)
def test_a_nested_run_that_is_resumed_ends_as_a_sequential_one(
    log: Path, tmp_path: Path, more: dict[str, object]
) -> None:
    run_on_fake(2, train, config_of(log, "sequential", more, steps=STEPS), tmp_path / "sequential")
    for steps in (3, STEPS):
        run_on_fake(2, train, config_of(log, "nested", more, steps=steps), tmp_path / "nested", delay_us=50)
    assert not differing_tensors(tmp_path / "sequential", tmp_path / "nested")


def test_a_run_of_the_cpu_is_resumed_on_a_device(log: Path, tmp_path: Path) -> None:
    train(World.single(), config_of(log, "sequential", steps=2), tmp_path / "run")
    run_on_fake(1, train, config_of(log, "nested", steps=3), tmp_path / "run")
    steps = [one["step"] for one in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in one]
    assert steps == [1, 2, 3]


def _resized(world: World, config: Config, folder: Path) -> list[str]:
    """Trains with buffers that are resized after two steps and later; returns what was said."""
    said, resize = list[str](), DeviceBuffers.resize

    def noted(buffers: DeviceBuffers) -> str:
        said.append(resize(buffers))
        return said[-1]

    with (
        patch.object(device_budget, "_FIRST_STEPS", 2),
        patch.object(device_budget, "_FLOOR_BYTES", 0),
        patch.object(DeviceBuffers, "resize", noted),
    ):
        train(world, config, folder)
    return said


def test_buffers_are_resized_at_barriers_and_nothing_else_changes(log: Path, tmp_path: Path) -> None:
    fixed = config_of(log, "nested", steps=7, save_steps=3)
    run_on_fake(1, train, fixed, tmp_path / "fixed")
    chosen = replace(fixed, embedding=replace(fixed.embedding, device_bytes=0))
    ((first, *later),) = run_on_fake(1, _resized, chosen, tmp_path / "chosen", delay_us=50)
    assert re.search(
        r"table 'item': room for \d+ rows on fake instead of [\d,]{5,}, [\d,]+ bytes \(\d+ rows here", first
    )
    assert later  # at the barrier of a save
    assert not differing_tensors(tmp_path / "fixed", tmp_path / "chosen")


def validated(folder: Path) -> list[float]:
    return [one["validation/ndcg@10"] for one in read_jsonl(folder / "metrics.jsonl") if "validation/ndcg@10" in one]


def test_validation_reads_the_rows_and_weights_of_the_device(log: Path, tmp_path: Path) -> None:
    config = small_config(log, "hstu", epochs=1)
    config = replace(config, data=replace(config.data, validation=True))
    run_on_fake(1, train, config, tmp_path / "device")
    train_to_end(config, tmp_path / "host", quiet=True, world=World.single())
    (device,), (host,) = validated(tmp_path / "device"), validated(tmp_path / "host")
    assert device == pytest.approx(host, abs=0.02)  # other kernels round differently, and one rank may move


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder)
    make_ids(folder / "ids")
    write_scenarios(folder)
    return folder


def test_models_with_semantic_ids_train_and_validate(shop: Path, tmp_path: Path) -> None:
    config = start_config(shop, scenarios=str(shop / "scenarios.json"))
    data, epochs = replace(config.data, validation=True, batch_size=20), replace(config.train, epochs=1)
    config = replace(config, data=data, train=epochs)
    run_on_fake(1, train, config, tmp_path / "device")
    train_to_end(config, tmp_path / "host", quiet=True, world=World.single())
    (device,), (host,) = validated(tmp_path / "device"), validated(tmp_path / "host")
    assert device == pytest.approx(host, abs=0.02)  # as above


def test_a_run_is_aligned_on_devices(shop: Path, tmp_path: Path) -> None:
    train_to_end(start_config(shop, num_scenarios=2), tmp_path / "start", quiet=True, world=World.single())
    flags = {"scenarios": shop / "scenarios.json", "passes": 1, "group_size": 2, "mode": "nested"}
    assert run_on_fake(2, _align, tmp_path / "start", tmp_path / "run", flags) == ["1 epochs done"] * 2


def _align(world: World, start: Path, folder: Path, flags: dict[str, object]) -> str:
    return align(world, start, folder, **flags)  # type: ignore[arg-type]


COMMAND = """
import os, signal, sys
from tests.fake_accelerator import accelerator
accelerator.load(delay_us=50, seed=1)
from nestpipe.cli import main
from nestpipe.training import loop
after_step, last = loop._Loop._after_step, int(sys.argv[1])
def dying(self, *arguments):
    after_step(self, *arguments)
    if self._state.num_steps == last:
        os.kill(os.getpid(), signal.SIGKILL)
loop._Loop._after_step = dying
code = main(sys.argv[2:])
accelerator.check()
sys.exit(code)
"""


def test_a_run_killed_by_the_system_resumes_bitwise(log: Path, tmp_path: Path) -> None:
    settings = {
        **{"data.path": log, "data.batch-size": 6, "embedding.num-buckets": 4},
        **{"train.device": "fake", "train.epochs": 0, "train.steps": 8, "train.save-steps": 3, "train.num-threads": 1},
        **{"pipeline.mode": "nested", "pipeline.micro-batches": 2},
    }
    arguments = ["--resume", *(text for name, value in settings.items() for text in (f"--{name}", str(value)))]
    assert exit_code_of(COMMAND, "-1", "train", "tiny", "--run", str(tmp_path / "calm"), *arguments) == 0
    killed = ["train", "tiny", "--run", str(tmp_path / "killed"), *arguments]
    assert exit_code_of(COMMAND, "5", *killed) == -9
    assert exit_code_of(COMMAND, "-1", *killed) == 0
    assert not differing_tensors(tmp_path / "calm", tmp_path / "killed")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("cuda", "this machine has no such device"), ("cuda:9", "no such device"), ("rocket", "does not know")],
)
def test_a_device_that_is_not_there_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve_device(name)


def test_the_command_says_that_there_is_no_such_device(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data.path", str(log), "--run", str(tmp_path / "run"), "--train.device", "cuda"]
    assert main(["train", "tiny", *arguments]) == 2
    assert "train.device is 'cuda', but this machine has no such device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_auto_is_the_cpu_where_there_is_no_accelerator() -> None:
    assert resolve_device("auto").type == "cpu"


def _resolved(world: World) -> tuple[str, str]:
    with pytest.raises(ConfigError) as refused:
        resolve_device("fake:7")
    return str(resolve_device("auto")), str(refused.value)


def test_auto_is_the_accelerator_where_there_is_one() -> None:
    ((found, refused),) = run_on_fake(1, _resolved)
    assert found == "fake:0"
    assert "the machine has 1" in refused
