"""Self-checks of the fake accelerator: what it must catch, it catches always; correct programs pass."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch

from nestpipe.distributed.process_group import World
from tests.fake_accelerator import accelerator
from tests.fake_accelerator.fake_ranks import run_on_fake, unordered_pairs
from tests.rank_pool import RanksError

Program = Callable[[World], None]
DEVICE = accelerator.NAME


def _streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream(DEVICE), torch.Stream(DEVICE)


def read_after_write(world: World, *, waits: bool = True) -> None:
    first, second = _streams()
    with first:
        value = torch.full((100,), 1.0, device=DEVICE)
        event = first.record_event()
    with second:
        if waits:
            second.wait_event(event)
        doubled = value * 2
        value.record_stream(second)
        first.wait_event(second.record_event())
    with first:
        assert doubled.sum().item() == 200.0 or not waits
        doubled.record_stream(first)


def missing_wait(world: World) -> None:
    read_after_write(world, waits=False)


def write_after_read(world: World, *, waits: bool = True) -> None:
    first, second = _streams()
    with first:
        value = torch.ones(100, device=DEVICE)
    second.wait_event(first.record_event())
    with second:
        copy = value.clone()
    value.record_stream(second)
    if waits:
        first.wait_event(second.record_event())
    with first:
        value.fill_(2.0)
    with second:
        copy.add_(1)


def missing_wait_before_write(world: World) -> None:
    write_after_read(world, waits=False)


def freed_in_use(world: World, *, records: bool = True) -> None:
    first, second = _streams()
    with first:
        value = torch.ones(100, device=DEVICE)
    second.wait_event(first.record_event())
    with second:
        copy = value.clone()
        if records:
            value.record_stream(second)
    del value
    with second:
        copy.add_(1)


def missing_record_stream(world: World) -> None:
    freed_in_use(world, records=False)


def disjoint_rows(world: World, *, overlap: bool = False) -> None:
    first, second = _streams()
    with first:
        table = torch.zeros(8, 4, device=DEVICE)
        low = torch.arange(4, device=DEVICE)
        high = torch.arange(4 - overlap, 8 - overlap, device=DEVICE)
    second.wait_event(first.record_event())
    for one in (table, high):
        one.record_stream(second)
    with first:
        table.index_copy_(0, low, torch.ones(4, 4, device=DEVICE))
    with second:
        table.index_select(0, high)


def overlapping_rows(world: World) -> None:
    disjoint_rows(world, overlap=True)


def pinned_upload(world: World, *, waits: bool = True) -> None:
    (stream, _), values = _streams(), torch.arange(100.0).pin_memory()
    with stream:
        torch.accelerator.current_stream().synchronize()
        big = torch.zeros(300, 300, device=DEVICE)
        for _ in range(3):
            big = big @ big
        on_device = values.to(DEVICE, non_blocking=True)
        if waits:
            stream.record_event().synchronize()
        values.zero_()
        assert on_device.sum().item() == 4950.0 or not waits


def changed_before_upload(world: World) -> None:
    pinned_upload(world, waits=False)


CORRECT = (read_after_write, write_after_read, freed_in_use, disjoint_rows, pinned_upload)
WRONG: dict[Program, str] = {
    missing_wait: "aten::mul",  # which of the two is named first depends on which ran first
    missing_wait_before_write: "aten::fill_",
    missing_record_stream: "freeing of 512 bytes",
    overlapping_rows: "nothing orders the two",
    changed_before_upload: "the host changed a pinned tensor",
}


@pytest.mark.parametrize("program", CORRECT)
def test_ordered_programs_pass(program: Program) -> None:
    for seed in range(3):
        run_on_fake(1, program, delay_us=200 * seed, seed=seed)


@pytest.mark.parametrize("program", WRONG)
def test_unordered_programs_are_seen_in_every_run(program: Program) -> None:
    for seed in range(5):
        delay_us = 2000 if program is changed_before_upload else 100 * seed
        pairs = unordered_pairs(1, program, delay_us=delay_us, seed=seed)
        assert any(WRONG[program] in one for one in pairs)


def test_a_race_fails_the_run() -> None:
    with pytest.raises(RanksError, match="saw races"):
        run_on_fake(1, missing_wait)


def _poisoned(world: World) -> list[float]:
    value = torch.ones(100, device=DEVICE)
    address = value.data_ptr()
    del value
    torch.accelerator.synchronize()
    behind = accelerator._native().fake_host_view(address)
    return list((ctypes.c_float * 100).from_address(behind))


def test_freed_memory_is_poisoned() -> None:
    ((*values,),) = run_on_fake(1, _poisoned)
    assert all(map(math.isnan, values))


def _read_on_host(world: World) -> float:
    value = torch.ones(100, device=DEVICE)
    return ctypes.c_float.from_address(value.data_ptr()).value


def test_the_host_cannot_read_device_addresses() -> None:
    with pytest.raises(RanksError, match="died with exit code -11"):
        run_on_fake(1, _read_on_host)


def _early_download(world: World) -> tuple[bool, float]:
    host, value = torch.zeros(4, pin_memory=True), torch.ones(4, device=DEVICE)
    torch.zeros(400, 400, device=DEVICE) @ torch.zeros(400, 400, device=DEVICE)
    host.copy_(value, non_blocking=True)
    early = bool(host.isnan().all())
    torch.accelerator.current_stream().record_event().synchronize()
    return early, float(host.sum())


def test_a_download_is_unreadable_until_it_is_done() -> None:
    assert run_on_fake(1, _early_download, delay_us=5000, seed=3) == [(True, 4.0)]


def _mixed(world: World) -> str:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(3, device=DEVICE).index_select(0, torch.arange(2))
    return str(caught.value)


def test_mixed_arguments_are_refused() -> None:
    (message,) = run_on_fake(1, _mixed)
    assert "same device" in message
    assert "index_select" in message


def _counted(world: World) -> dict[str, int]:
    accelerator.take_syncs()
    value = torch.ones(4, device=DEVICE)
    value.sum().item()
    value.nonzero()
    value.cpu()
    value.to("cpu", non_blocking=True)  # torch pins the result
    torch.ones(3).to(DEVICE)
    torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)
    return accelerator.take_syncs()


def test_host_synchronisations_are_counted() -> None:
    assert run_on_fake(1, _counted) == [{"aten::nonzero": 1, "download": 1, "item": 1, "upload": 1}]
