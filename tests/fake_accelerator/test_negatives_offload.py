"""The loss on a device with rows on the host: equal to the definition, ordered, and in two buffers."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from nestpipe.distributed.process_group import World
from nestpipe.ops import negatives_offload
from nestpipe.ops.negatives import plain_sampled_softmax, sampled_softmax
from nestpipe.ops.negatives_offload import _Room
from tests.fake_accelerator.fake_ranks import run_on_fake, unordered_pairs
from tests.ops.test_negatives import make

SEGMENT = 4  # of 23 tokens


def offloaded(world: World, source: str, rounded: bool) -> list[torch.Tensor]:
    """Loss and gradients with queries on the device, all on the host."""
    case = make(source, dtype=torch.float32, rounded=rounded, dim=8)
    queries = case.queries.detach().to(world.device).requires_grad_()
    others = case.positive_rows
    loss = sampled_softmax(
        queries, case.rows, case.positives, case.negatives, positive_rows=others, blocks=case.blocks, segment=SEGMENT
    )
    leaves = [queries, case.rows, *([] if others is None else [others])]
    return [one.detach().cpu() for one in (loss, *torch.autograd.grad(loss * 0.37, leaves))]


# fp32 sums of at most a few hundred terms of order ten: 2e-5 is some tens of roundings of the largest value.
@pytest.mark.parametrize(("source", "rounded"), [("token", False), ("2", True)])
def test_rows_on_the_host_give_the_loss_of_the_definition(source: str, rounded: bool) -> None:
    expected = make(source, dtype=torch.float32, rounded=rounded, dim=8).run(plain_sampled_softmax)
    for seed in range(3):
        (found,) = run_on_fake(1, offloaded, source, rounded, delay_us=200 * seed, seed=seed)
        for one, other in zip(found, expected, strict=True):
            assert float((one - other).abs().max()) <= 2e-5 * max(float(other.abs().max()), 1.0)


def without_upload_wait(room: _Room, part: negatives_offload._Part, stream: torch.Stream) -> torch.Tensor:
    return _UPLOAD(room, part, _Unwaited(stream, records=False))  # type: ignore[arg-type]


def without_download_wait(room: _Room, grads: torch.Tensor, stream: torch.Stream) -> None:
    _DOWNLOAD(room, grads, _Unwaited(stream, waits=False))  # type: ignore[arg-type]


def without_collecting_first(room: _Room, sums: torch.Tensor) -> None:
    """The host fills a buffer again while its upload may still be in flight."""


class _Unwaited:
    """A stream that waits for no event, or for whose events nobody waits."""

    def __init__(self, stream: torch.Stream, *, waits: bool = True, records: bool = True) -> None:
        self._stream, self._waits, self._records = stream, waits, records

    def __enter__(self) -> object:
        return self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def wait_event(self, event: torch.Event) -> None:
        if self._waits:
            self._stream.wait_event(event)

    def record_event(self) -> torch.Event:
        return (self._stream if self._records else torch.accelerator.current_stream()).record_event()


_UPLOAD, _DOWNLOAD = _Room.upload, _Room.download
MUTANTS: dict[str, Callable[..., object]] = {
    "upload": without_upload_wait,
    "download": without_download_wait,
    "collect": without_collecting_first,
}


def mutated(world: World, name: str) -> None:
    with patch.object(_Room, name, MUTANTS[name]):
        offloaded(world, "token", False)


def without_declared_use(world: World) -> None:
    with patch.object(negatives_offload, "used_here", lambda *tensors: None):
        offloaded(world, "token", False)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_seen(name: str) -> None:
    assert unordered_pairs(1, mutated, name, delay_us=500)


def test_a_missing_declaration_of_use_is_seen() -> None:
    assert unordered_pairs(1, without_declared_use, delay_us=500)


def mixed(world: World) -> str:
    case = make("token", dtype=torch.float32)
    queries, positives = case.queries.detach().to(world.device), case.positives.to(world.device)
    try:
        sampled_softmax(queries, case.rows, positives, case.negatives, segment=4)
    except ValueError as error:
        return str(error)
    return ""


def test_places_on_the_device_for_rows_on_the_host_are_refused() -> None:
    assert "'positives' is on fake:0, but 'rows' is on the host" in run_on_fake(1, mixed)[0]
