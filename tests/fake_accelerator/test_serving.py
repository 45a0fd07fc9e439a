"""`nestpipe serve --device`: model, KV prefixes and hits on the fake accelerator; cached = full on every path, bytes bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nestpipe.cli import serve_fleet
from nestpipe.distributed.process_group import World
from nestpipe.errors import ConfigError
from nestpipe.serve import prefix_moves
from nestpipe.serve.config import EngineConfig, TriggerConfig
from nestpipe.serve.model import open_served
from nestpipe.serve.open_instance import check_flags, ranking_device
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.training.run_folder import Run
from tests.fake_accelerator import accelerator
from tests.fake_accelerator.fake_ranks import run_on_fake, unordered_pairs
from tests.serve.small_rankers import Clock, hint, make_engine, make_log, make_run, settle
from tests.serve.test_engine import EXACT, add, answer, scores

TENSOR = 512  # what a tensor may take beyond its bytes
Answers = dict[str, dict[int, float]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("serving")
    log = make_log(folder)
    return {name: make_run(log, folder / name, name).folder for name in ("hstu", "fuxi")}


def _engine(device: torch.device, folder: Path, place: Path, **settings: Any) -> Any:
    run = Run.open(folder)
    served = open_served(run, folder=place / "tables", device=device)
    return make_engine(run, place, clock=Clock(), served=served, **settings)


def _by_path(device: torch.device, folder: Path, place: Path) -> Answers:
    """What each path answers, of the same requests."""
    engine, found = _engine(device, folder, place), {}
    found["full"] = answer(engine, 3)
    hint(engine, 3)
    settle(engine)
    for path in ("hit_device", "hit_host"):
        found[path] = answer(engine, 3, request="r")
    add(engine, "a", 3, click=1, dwell=3.0, device=1)
    found["extend"] = answer(engine, 3)
    hint(engine, 4)
    engine._accept()
    engine._prefills.run()
    found["join"] = answer(engine, 4)
    assert [one.path for one in found.values()] == list(found)
    engine = _engine(device, folder, place / "keeping", trigger=TriggerConfig(mode="on", burst_ms=1e9))
    answer(engine, 5)
    found["kept by full"] = answer(engine, 5)
    assert found["kept by full"].path == "hit_host"
    return {path: scores(one) for path, one in found.items()}


def _on_device(world: World, folder: Path, place: Path) -> Answers:
    return _by_path(world.device, folder, place)


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
def test_every_path_gives_the_scores_of_the_cpu(runs: dict[str, Path], tmp_path: Path, backbone: str) -> None:
    (found,) = run_on_fake(1, _on_device, runs[backbone], tmp_path / "fake", delay_us=30)
    host = _by_path(torch.device("cpu"), runs[backbone], tmp_path / "cpu")
    assert found.keys() == host.keys()
    for path, own in found.items():
        assert own == pytest.approx(host[path], abs=EXACT), path


def _bytes(world: World, folder: Path, place: Path) -> tuple[int, int, int]:
    """The most that prefixes of many users take on the device, the cap, and how often one was moved."""
    engine = _engine(world.device, folder, place, device_bytes=20_000, host_bytes=60_000)
    answer(engine, 0)
    torch.accelerator.synchronize()
    before, most = accelerator.memory()[0], 0
    for user in range(16):
        hint(engine, user, f"r{user}")
        settle(engine)
        torch.accelerator.synchronize()
        most = max(most, before - accelerator.memory()[0])
        assert engine.cache.device.used <= 20_000
        if user >= 8:  # until then prefixes wait for their requests
            for _ in range(2):
                answer(engine, user - 8, request=f"r{user - 8}")
    return most, 20_000, engine.cache.host.copies + engine.cache.device.copies


def test_the_device_tier_is_bounded(runs: dict[str, Path], tmp_path: Path) -> None:
    ((most, cap, num_moves),) = run_on_fake(1, _bytes, runs["hstu"], tmp_path)
    assert num_moves >= 8
    assert cap / 2 < most <= cap + 40 * TENSOR


class _Unordered:
    """The current stream of a device, on which events are neither recorded in order nor waited for."""

    def __init__(self, device: torch.device):
        self._other = torch.Stream(device)

    def record_event(self) -> torch.Event:
        return self._other.record_event()

    def wait_event(self, event: torch.Event) -> None:
        pass


@contextmanager
def _without_waits() -> Iterator[None]:
    module = SimpleNamespace(current_stream=_Unordered)
    stand_in = SimpleNamespace(accelerator=module, Stream=torch.Stream, empty=torch.empty)
    with patch.object(prefix_moves, "torch", stand_in):
        yield


def _moved_without_waits(world: World, folder: Path, place: Path) -> None:
    engine = _engine(world.device, folder, place)
    with _without_waits():
        hint(engine, 3)
        settle(engine)
        for _ in range(2):
            answer(engine, 3, request="r")


def test_moves_that_nobody_waits_for_are_seen(runs: dict[str, Path], tmp_path: Path) -> None:
    assert unordered_pairs(1, _moved_without_waits, runs["hstu"], tmp_path, delay_us=50)


def _refused(world: World) -> str:
    with pytest.raises(ConfigError) as refused:
        ranking_device(ServeArguments(device="fake", engine=EngineConfig(device_bytes=1 << 40)))
    small = EngineConfig(device_bytes=1 << 10)
    assert ranking_device(ServeArguments(engine=small)).type == "fake"
    return str(refused.value)


def test_what_cannot_be_obeyed_is_refused(runs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="--device is 'cuda', but this machine has no such device"):
        ranking_device(ServeArguments(device="cuda"))
    (message,) = run_on_fake(1, _refused)
    assert "--engine.device-bytes is 1,099,511,627,776" in message
    run = Run.open(runs["hstu"])
    other: Any = SimpleNamespace(config=replace(run.config, model=object()), folder=run.folder)
    with pytest.raises(ConfigError, match="only such runs are served on a device"):
        check_flags(other, ServeArguments(device="cuda"))


def test_the_instances_of_a_fleet_get_the_device(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(serve_fleet, "_run_fleet", lambda plan: plans.append(plan) or 0)
    assert serve_fleet.serve_fleet(ServeArguments(run=runs["hstu"], instances=1, port=0, device="cpu")) == 0
    (worker,) = plans[0].workers
    assert "--device cpu" in " ".join(worker.command)
    with pytest.raises(ConfigError, match="this machine has no such device"):
        serve_fleet.serve_fleet(ServeArguments(run=runs["hstu"], instances=1, port=0, device="cuda"))
