"""`nestpipe train --train.device` on the fake accelerator: checkpoints, validation, kill -9 and resume, refused devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.atomic_files import read_jsonl
from nestpipe.cli.demo import differing_tensors
from nestpipe.config import Config
from nestpipe.distributed.process_group import World
from nestpipe.errors import ConfigError
from nestpipe.models.config import EncDecConfig
from nestpipe.training.device import resolve_device
from nestpipe.training.loop import train_to_end
from tests.fake_accelerator.fake_ranks import run_on_fake
from tests.rank_pool import exit_code_of
from tests.small_runs import small_config, small_log

STEPS = 9


def train(world: World, config: Config, folder: Path) -> str:
    return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped


def config_of(log: Path, mode: str, **settings: object) -> Config:
    config = small_config(log, "sasrec", pipeline={"mode": mode, "micro_batches": 2}, epochs=0, **settings)
    embedding = replace(config.embedding, device_bytes=8000)  # of a table of 30 rows, 100 bytes each
    return replace(config, embedding=embedding, data=replace(config.data, batch_size=6))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_log(tmp_path_factory.mktemp("device") / "log").path


@pytest.mark.parametrize("world_size", [2])
def test_a_nested_run_that_is_resumed_ends_as_a_sequential_one(log: Path, tmp_path: Path, world_size: int) -> None:
    run_on_fake(world_size, train, config_of(log, "sequential", steps=STEPS), tmp_path / "sequential")
    for steps in (4, STEPS):
        run_on_fake(world_size, train, config_of(log, "nested", steps=steps), tmp_path / "nested", delay_us=50)
    assert not differing_tensors(tmp_path / "sequential", tmp_path / "nested")


def test_a_run_of_the_cpu_is_resumed_on_a_device(log: Path, tmp_path: Path) -> None:
    train(World.single(), config_of(log, "sequential", steps=2), tmp_path / "run")
    run_on_fake(1, train, config_of(log, "nested", steps=3), tmp_path / "run")
    steps = [one["step"] for one in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in one]
    assert steps == [1, 2, 3]


def validated(folder: Path) -> list[float]:
    return [one["validation/ndcg@10"] for one in read_jsonl(folder / "metrics.jsonl") if "validation/ndcg@10" in one]


def test_validation_reads_the_rows_and_weights_of_the_device(log: Path, tmp_path: Path) -> None:
    config = small_config(log, "hstu", epochs=1)
    config = replace(config, data=replace(config.data, validation=True))
    run_on_fake(1, train, config, tmp_path / "device")
    train_to_end(config, tmp_path / "host", quiet=True, world=World.single())
    (device,), (host,) = validated(tmp_path / "device"), validated(tmp_path / "host")
    assert device == pytest.approx(host, abs=0.02)  # other kernels round differently, and one rank may move


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


def test_models_with_semantic_ids_train_on_the_cpu_only() -> None:
    assert resolve_device("auto", EncDecConfig()).type == "cpu"
    with pytest.raises(ConfigError, match="semantic ids train on the CPU only"):
        resolve_device("cuda", EncDecConfig())


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
