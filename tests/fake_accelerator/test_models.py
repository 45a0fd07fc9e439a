"""Every model and loss on the fake accelerator: nested is bitwise sequential, close to the CPU, with few waits of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nestpipe.distributed.process_group import World
from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.skipped_steps import MissedSteps, SkippedSteps
from nestpipe.ops.device_memory import address, download
from tests.fake_accelerator import accelerator
from tests.fake_accelerator.device_generation import train_generation
from tests.fake_accelerator.device_training import Content, DeviceCase, train_ranking, train_retrieval, train_toy
from tests.fake_accelerator.fake_ranks import run_on_fake
from tests.fake_accelerator.test_schedules import assert_equal
from tests.rank_pool import RanksError, run_ranks

SEQUENTIAL = DeviceCase(num_batches=3, barrier=1)
NESTED = replace(SEQUENTIAL, mode="nested")
CASES: list[tuple[Any, ...]] = [
    (train_retrieval, "sasrec", "sampled"),
    (train_retrieval, "hstu", "full"),
    (train_retrieval, "fuxi", "in_batch"),
    (train_ranking, "hstu"),
    (train_ranking, "dcn"),
    (train_generation, "codes"),
    (train_generation, "selected"),
    (train_generation, "aligned"),
]
MAX_SYNCS = 2  # of the host per step, in the thread that computes


def name_of(case: tuple[Any, ...]) -> str:
    return " ".join([case[0].__name__.removeprefix("train_"), *case[1:]])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_nested_is_bitwise_sequential_and_close_to_the_cpu(case: tuple[Any, ...]) -> None:
    train, *arguments = case
    num_ranks, num_batches = (1, 2) if train is train_generation else (2, 3)
    in_order, nested = (replace(one, num_batches=num_batches) for one in (SEQUENTIAL, NESTED))
    sequential = run_on_fake(num_ranks, train, in_order, *arguments)
    assert_equal(run_on_fake(num_ranks, train, nested, *arguments, delay_us=50), sequential)
    (host, *_) = run_ranks(num_ranks, train, in_order, *arguments)
    # Attention is another implementation, and sums of a few hundred terms are in another order.
    torch.testing.assert_close(sequential[0]["loss"], host["loss"], rtol=1e-5, atol=0)


def _syncs_per_step(world: World, mode: str | None, train: Any, *arguments: str) -> float:
    """By the difference of a longer and a shorter training: the start, barriers and exports do not count."""
    counts = []
    for num_batches in (2, 5):
        case = replace(SEQUENTIAL, mode=mode, num_batches=num_batches)  # type: ignore[arg-type]
        accelerator.take_syncs(0)
        train(World.single(device=world.device), case, *arguments)
        counts.append(sum(accelerator.take_syncs(0 if mode is None else None).values()))
    return (counts[1] - counts[0]) / 3


@pytest.mark.parametrize(
    ("case", "mode"),
    [(CASES[0], None), (CASES[0], "nested"), (CASES[3], None), (CASES[3], "nested"), (CASES[6], None)],
    ids=lambda one: name_of(one) if isinstance(one, tuple) else str(one),
)
def test_the_host_waits_at_most_twice_per_step(case: tuple[Any, ...], mode: str | None) -> None:
    train, *arguments = case
    (found,) = run_on_fake(1, _syncs_per_step, mode, train, *arguments)
    assert found <= (MAX_SYNCS if mode is None else 0)  # nested: the stream that sends gradients waits for the flags


EVICTING = DeviceCase(mode="nested", admit_after=1, max_rows=0, device_bytes=52 * 28)  # 52 bytes per row


def _with_evictions(world: World, case: DeviceCase) -> tuple[Content, int]:
    before = accelerator.counts()["downloads"]
    found = train_toy(world, replace(case, optimizer="lazy_adam"))
    return found, accelerator.counts()["downloads"] - before


def test_a_device_smaller_than_the_table() -> None:
    (oracle,) = run_ranks(1, train_toy, replace(EVICTING, mode=None))
    assert len(oracle["item.ids"]) > 28
    ((found, num_downloads),) = run_on_fake(1, _with_evictions, EVICTING, delay_us=50)
    assert_equal([found], [oracle])
    ((_, without),) = run_on_fake(1, _with_evictions, replace(EVICTING, device_bytes=1 << 20))
    assert num_downloads > without


def test_a_window_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(RanksError, match=r"TrainError: the batches in flight use .* Set --embedding.device-bytes"):
        run_on_fake(1, train_toy, replace(EVICTING, device_bytes=52 * 12))


def _uploads_of_skipped_steps(world: World) -> None:
    steps = SkippedSteps(OptimizerConfig(optimizer="adam", beta1=0.5), torch.float32)
    uploads = []
    streams = [torch.Stream(device=world.device) for _ in range(3)]
    for number in range(80):
        steps.record(number, 1e-3)
        missed = steps.at(number + 1)
        with streams[number % 2]:  # the other one has uploaded the rows before
            uploads.append((missed, missed.on(world.device)))
            for name in ("settled", "rates", "powers"):
                getattr(uploads[-1][1], name).add(1)  # the fake sees it if this does not wait for the uploads
        with streams[2]:
            on_other = missed.on(world.device)
            assert on_other is uploads[-1][1]
            on_other.recent.add(1)
    for stream in streams:
        stream.synchronize()
    assert uploads[-1][0].num_settled > uploads[-9][0].num_settled > 0
    # A batch has its own `recent`; of the others there are as many copies as a table has doubled, and the first one.
    for name, most in (("settled", 8), ("powers", 8), ("corrections", 8), ("rates", 8)):
        copies = {getattr(on_device, name).untyped_storage().data_ptr() for _, on_device in uploads}
        assert len(copies - {0}) <= most
    for missed, on_device in uploads:  # those before the table grew keep theirs
        _assert_uploaded(missed, on_device)
    for number in range(20, 80):  # these batches are read again, with another rate
        steps.record(number, 2e-3)
        again = steps.at(number + 1)
        _assert_uploaded(again, again.on(world.device))
    assert again.num_settled == uploads[-1][0].num_settled


def _assert_uploaded(missed: MissedSteps, on_device: MissedSteps) -> None:
    assert len(on_device.settled) == missed.num_settled
    for name in ("settled", "recent", "late", "rates", "keeps", "powers", "corrections"):
        assert torch.equal(download(getattr(on_device, name)), getattr(missed, name))


def test_skipped_steps_are_uploaded_once_and_grow() -> None:
    run_on_fake(1, _uploads_of_skipped_steps, delay_us=50)


def _given_to_native_code(world: World) -> str:
    value = torch.ones(4, 2, device=world.device)
    with pytest.raises(TypeError) as refused:
        address(value)
    with pytest.raises(TypeError):
        ArrivedGrads([value], torch.arange(5), torch.arange(4)).pointers()
    return str(refused.value)


def test_a_device_tensor_in_a_host_function_is_refused() -> None:
    (message,) = run_on_fake(1, _given_to_native_code)
    assert "native code" in message
    assert "[4, 2] on fake" in message


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=name_of)
def test_mixed_precision_is_bitwise_sequential_and_close_to_that_of_the_cpu(case: tuple[Any, ...]) -> None:
    train, *arguments = case
    settings = replace(SEQUENTIAL, precision=torch.bfloat16)
    sequential = run_on_fake(1, train, settings, *arguments)
    assert_equal(run_on_fake(1, train, replace(settings, mode="nested"), *arguments, delay_us=50), sequential)
    (host,) = run_ranks(1, train, settings, *arguments)
    (exact,) = run_ranks(1, train, SEQUENTIAL, *arguments)
    # The device rounds where the CPU does, except that torch's lists of operators differ a little.
    torch.testing.assert_close(sequential[0]["loss"], host["loss"], rtol=2e-3, atol=0)
    assert not torch.equal(sequential[0]["loss"], exact["loss"])
