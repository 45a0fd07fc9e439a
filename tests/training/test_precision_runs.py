"""`nestpipe train --train.precision bf16`: bitwise repeatable in every mode and on every number of ranks, fp32 in its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nestpipe.atomic_files import read_jsonl
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.cli.demo import differing_tensors
from nestpipe.config import Config
from nestpipe.distributed.process_group import World
from nestpipe.embedding.lookup import Lookup, TableSpec
from nestpipe.errors import ConfigError, TrainError
from nestpipe.generative.config import AlignedConfig
from nestpipe.models.contract import Output
from nestpipe.ops import precision
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates
from nestpipe.training.device import check_precision
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from tests.fake_accelerator.device_training import DeviceCase, history_batches, train_ranking, train_retrieval
from tests.fake_accelerator.test_schedules import assert_equal
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

STEPS = 6


def train(world: World, config: Config, folder: Path) -> str:
    return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_log(tmp_path_factory.mktemp("precision") / "log").path


def config_of(log: Path, mode: str, *, precision: str = "bf16", steps: int = STEPS, **pipeline: Any) -> Config:
    settings = {"mode": mode, "micro_batches": 2, **pipeline}
    return small_config(log, "hstu", pipeline=settings, epochs=0, steps=steps, precision=precision)


@pytest.mark.parametrize(
    ("world_size", "first", "then"),
    [
        (1, {"mode": "nested"}, {"mode": "dual-buffer"}),
        (2, {"mode": "frozen-window"}, {"mode": "nested", "chunks": 2}),
        (3, {"mode": "nested", "depth": 2}, {"mode": "sequential"}),
    ],
)
def test_every_mode_is_bitwise_sequential_also_resumed(
    log: Path, tmp_path: Path, world_size: int, first: dict[str, Any], then: dict[str, Any]
) -> None:
    run_ranks(world_size, train, config_of(log, "sequential"), tmp_path / "sequential")
    for steps, settings in ((3, first), (STEPS, then)):
        run_ranks(world_size, train, config_of(log, steps=steps, **settings), tmp_path / "run")
    assert not differing_tensors(tmp_path / "sequential", tmp_path / "run")


@pytest.mark.parametrize(
    "case",
    [
        (train_retrieval, "sasrec", "in_batch"),
        (train_retrieval, "fuxi", "full"),
        (train_ranking, "hstu"),
        (train_ranking, "dcn"),
    ],
    ids=lambda case: " ".join(case[1:]),
)
def test_nested_is_bitwise_sequential_for_every_model(case: tuple[Any, ...]) -> None:
    run, *arguments = case
    settings = DeviceCase(num_batches=3, barrier=1, precision=torch.bfloat16)
    sequential = run_ranks(2, run, settings, *arguments)
    assert_equal(run_ranks(2, run, replace(settings, mode="nested"), *arguments), sequential)
    stale = replace(settings, stale=True)
    assert_equal(run_ranks(2, run, replace(stale, mode="nested"), *arguments), run_ranks(2, run, stale, *arguments))
    exact = run_ranks(2, run, replace(settings, precision=torch.float32), *arguments)
    torch.testing.assert_close(sequential[0]["loss"], exact[0]["loss"], rtol=0.02, atol=0)
    assert not torch.equal(sequential[0]["loss"], exact[0]["loss"])


@pytest.fixture(scope="module")
def runs(log: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run in each precision."""
    folders = {name: tmp_path_factory.mktemp("precision") / name for name in ("fp32", "bf16")}
    for name, folder in folders.items():
        train(World.single(), config_of(log, "nested", precision=name), folder)
    return folders


def test_checkpoints_hold_fp32_and_losses_are_near(runs: dict[str, Path]) -> None:
    parent = checkpoint_folders.checkpoints_of(runs["bf16"])
    _, content = checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(parent))
    kinds = {one.dtype for tensors in content.values() for one in tensors.values() if one.is_floating_point()}
    assert kinds == {torch.float32}
    losses = {
        name: [one["loss"] for one in read_jsonl(folder / "metrics.jsonl") if "loss" in one]
        for name, folder in runs.items()
    }
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)


def test_evaluation_of_a_bf16_run_is_in_fp32(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("mixed precision outside training")

    monkeypatch.setattr(torch, "autocast", refused)
    assert Run.open(runs["bf16"]).predictor().evaluate(progress=False).scalars()


def test_a_run_keeps_its_precision(runs: dict[str, Path], log: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.precision: 'bf16' -> 'fp32'"):
        train(World.single(), config_of(log, "nested", precision="fp32", steps=STEPS + 1), runs["bf16"])


def test_an_aligned_run_and_a_device_without_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    check_precision("fp32", cpu, AlignedConfig())
    with pytest.raises(ConfigError, match="an aligned run compares probabilities"):
        check_precision("bf16", cpu, AlignedConfig())
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: False)
    with pytest.raises(ConfigError, match=r"no mixed precision for cpu; use --train.precision fp32"):
        check_precision("bf16", cpu)


def test_a_cpu_without_instructions_for_bf16_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(precision.torch.cpu, name, lambda: False)
    caplog.set_level("INFO", "nestpipe")
    check_precision("bf16", torch.device("cpu"))
    assert "This CPU has no instructions for bf16" in caplog.text
    assert "optimizers: fp32" in caplog.text


class _SumsInBf16(nn.Module):
    """A model of somebody who sums what a linear layer gives."""

    tables = (TableSpec(name="item", dim=4),)
    coupling = "none"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def lookups(self, batch: Any, rng: Any) -> dict[str, Lookup]:
        return {"history": Lookup(table="item", ids=batch.items.values)}

    def weight(self, batch: Any) -> float:
        return float(batch.num_tokens)

    def forward(self, rows: Any, batch: Any, rng: Any) -> Output:
        return Output(self.head(rows["history"].gather()).square().sum())


def test_a_loss_that_is_summed_in_bf16_is_refused() -> None:
    state = build_state(_SumsInBf16(), precision=torch.bfloat16)
    with pytest.raises(TrainError, match=r"the loss of _SumsInBf16 is a sum in bfloat16, .* scores.float\(\)"):
        step(state, next(history_batches(0)), Rates(0.1, 0.1))
