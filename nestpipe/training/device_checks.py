"""Checks of the kernels of a device, for `nestpipe doctor --device`: streams, row updates, attention, negatives.

A check is a function of a device that returns what it found. It raises `CheckFailedError`, or `AbsentError` with what is
missing. The CPU's results are the reference: rows bitwise, everything else in fp64 within the rounding of fp32. Kernels are
called as training calls them, so the dispatch of the device decides which one runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nestpipe.checkpoint.difference import same_bits
from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_ops import ArrivedGrads, add_rows, gather_rows, scatter_rows
from nestpipe.embedding.row_optimizer import OPTIMIZERS, gather_slots, update_slots
from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops.attention import Bias, attention_layout, jagged_attention
from nestpipe.ops.backends import BackendRequest, accumulates_in_fp32, decide
from nestpipe.ops.device_memory import download, upload, used_here
from nestpipe.ops.kernel_args import Kind, Mode
from nestpipe.ops.negatives import Blocks, choose, draw_shifts, plain_sampled_softmax, sampled_softmax
from nestpipe.ops.precision import bf16_problem, mixed_precision

Result = Literal["pass", "fail", "absent"]
CPU = torch.device("cpu")
WIDTHS = (1, 3, 64, 100)
_FP32, _BF16 = 1e-4, 2e-2  # largest error relative to the largest value; sums have some hundred terms
_ROUNDS = 20


class CheckFailedError(Exception):
    """The device is wrong; says where."""


class AbsentError(Exception):
    """The check needs something that is not there; says what."""


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """The result of one check of a device."""

    name: str
    component: str
    result: Result
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """A check that has not run. `component` is the row of docs/how-to/devices.md that it belongs to."""

    name: str
    component: str
    run: Callable[[torch.device], str]

    def on(self, device: torch.device) -> DeviceCheck:
        """Runs the check; whatever it raises is a result."""
        began = time.perf_counter()
        result: Result = "pass"
        try:
            detail = self.run(device)
        except AbsentError as error:
            result, detail = "absent", str(error)
        except CheckFailedError as error:
            result, detail = "fail", str(error)
        except Exception as error:
            result, detail = "fail", f"{type(error).__name__}: {error}"
        return DeviceCheck(self.name, self.component, result, detail, time.perf_counter() - began)


def kernel_probes() -> Iterator[DeviceProbe]:
    """Checks of streams and kernels, without training."""
    yield DeviceProbe("streams are ordered by events", "streams", check_order)
    yield DeviceProbe("memory in use on another stream is not reused", "streams", check_lifetime)
    yield DeviceProbe("gather and scatter and sums of rows", "row kernels", check_row_moves)
    for kind in OPTIMIZERS:
        yield DeviceProbe(f"row update {kind}", "row kernels", _row_update(kind))
    for kind, mode, biases in _ATTENTION:
        name = f"attention {kind} {mode} with {biases}"
        yield DeviceProbe(name, f"attention {kind}", _attention(kind, mode, biases, torch.float32))
    for kind, mode, biases in _ATTENTION[::3]:
        name = f"attention {kind} {mode} with {biases} in bf16"
        yield DeviceProbe(name, "mixed precision", _attention(kind, mode, biases, torch.bfloat16))
    for source in ("token", "sample", "pool", "shared"):
        yield DeviceProbe(f"negatives of each {source}", "negatives", _negatives(source))


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers in -1 .. 1 that look random, in fp64."""
    size = torch.Size(shape).numel()
    return torch.sin((torch.arange(size, dtype=torch.float64) + 1) * (seed + 1) * 12.9898).reshape(shape)


def require(is_true: bool, text: str) -> None:
    """Raises CheckFailedError unless a finding is as it must be."""
    if not is_true:
        raise CheckFailedError(text)


def on_accelerator(device: torch.device) -> None:
    if device.type == "cpu":
        raise AbsentError("the CPU has no streams: a stage that has returned is done")


# Streams


def check_order(device: torch.device) -> str:
    """A stream that waits for an event sees all that was launched before it."""
    on_accelerator(device)
    writer, reader, num_running = torch.Stream(device), torch.Stream(device), 0
    for number in range(_ROUNDS):
        target, work = torch.zeros(1 << 12, device=device), torch.ones(256, 256, device=device)
        torch.accelerator.synchronize()
        with writer:
            target += _slowly(work)[0, 0] * (number + 1)
            done = writer.record_event()
        with reader:
            reader.wait_event(done)
            copy = target.clone()
        num_running += not done.query()
        torch.accelerator.synchronize()
        least = float(download(copy).min())
        require(least == number + 1, f"round {number}: a stream read {least} after the event of {number + 1}")
    return f"{_ROUNDS} rounds; in {num_running} of them the write was still running when the read was queued"


def _slowly(work: Tensor) -> Tensor:
    """Ones [256, 256] again, after some time on the device."""
    for _ in range(20):
        work = work @ work * (1 / 256)
    return work


def check_lifetime(device: torch.device) -> str:
    """A block that another stream reads is not handed out before that stream is done, if its use is declared."""
    on_accelerator(device)
    reader = torch.Stream(device)
    for number in range(_ROUNDS):
        block = torch.full((1 << 14,), float(number), device=device)
        written = torch.accelerator.current_stream(device).record_event()
        with reader:
            reader.wait_event(written)
            copy = block * _slowly(torch.ones(256, 256, device=device))[0, 0]
            used_here(block)
        del block
        others = [torch.full((1 << 14,), -1.0, device=device) for _ in range(4)]
        torch.accelerator.synchronize()
        found = download(copy)
        require(bool((found == number).all()), f"round {number}: memory was reused while a stream read it")
        del others
    return f"{_ROUNDS} rounds"


# Rows


def check_row_moves(device: torch.device) -> str:
    """Gather, scatter, ordered sums and the sums of arrived gradients, against the native library."""
    for width in WIDTHS:
        rows, slots = numbers(width, 90, width).float(), torch.arange(40) * 7 % 90
        others, places = numbers(2, 200, width).float(), torch.arange(200) * 11 % 90
        starts, order = torch.arange(0, 201, 5), torch.arange(200) * 3 % 200
        found = []
        for where in (CPU, device):
            own, values = upload(rows.clone(), where), upload(others, where)
            gathered = gather_rows(own, slots)
            scatter_rows(own, slots, values[: len(slots)])
            add_rows(own, places, values)
            sums = ArrivedGrads([values[:60], values[60:]], starts, order).total()
            found.append([download(one) for one in (gathered, own, sums)])
        for name, one, other in zip(("gather", "scatter and add", "sums"), *found, strict=True):
            require(same_bits(one, other), f"{name} of width {width}: {_differences(one, other)}")
    return f"widths {', '.join(map(str, WIDTHS))}"


def _row_update(kind: str) -> Callable[[torch.device], str]:
    def check(device: torch.device) -> str:
        for width in WIDTHS:
            for one, other in zip(*(_updated(kind, width, where) for where in (CPU, device)), strict=True):
                require(same_bits(one, other), f"width {width}: {_differences(one, other)}")
        return f"widths {', '.join(map(str, WIDTHS))}"

    return check


def _updated(kind: str, width: int, device: torch.device) -> list[Tensor]:
    """Rows and state after some updates, on the host."""
    config = OptimizerConfig(optimizer=kind, weight_decay=0.03, eps=1e-7)  # type: ignore[arg-type]
    optimizer = OPTIMIZERS[kind](config)
    rows = upload(numbers(width, 60, width).float(), device)
    state = {name: upload(one, device) for name, one in optimizer.new_state(60, width).items()}
    for step in range(4):
        slots = (torch.arange(10 + 10 * step) * 13 + step) % 60
        if step % 2:
            slots[::4] = -1
        known = slots.clamp(min=0).unique()
        read = gather_slots(optimizer, rows, state, known, batch=step)
        grads = upload(numbers(step, len(slots), width).float(), device)
        update_slots(optimizer, rows, state, slots, grads, 0.0123, batch=step)
    return [download(one) for one in (rows, read, *state.values())]


def _differences(one: Tensor, other: Tensor) -> str:
    differ = (one != other).sum()
    largest = float((one - other).abs().max()) if one.is_floating_point() else 0.0
    return f"{int(differ):,} of {one.numel():,} values differ from the CPU, by up to {largest:.1e}"


# Attention and negatives

_ATTENTION: tuple[tuple[Kind, Mode, str], ...] = tuple(
    (kind, mode, biases)
    for kind in ("silu", "softmax")
    for mode in ("add", "channel")
    for biases in ("no bias", "position and time", "decay")
    if kind == "silu" or mode == "add"
)
_LENGTHS = (3, 0, 65, 1, 130, 40, 9)


def _attention(kind: Kind, mode: Mode, biases: str, dtype: torch.dtype) -> Callable[[torch.device], str]:
    def check(device: torch.device) -> str:
        if dtype != torch.float32 and (problem := bf16_problem(device)):
            raise AbsentError(problem)
        exact = _attended(kind, mode, biases, CPU, torch.float64, dtype, "reference")
        found = _attended(kind, mode, biases, device, torch.float32, dtype, None)
        limit = _FP32 if dtype == torch.float32 else _BF16
        error = max(_error(one, other) for one, other in zip(found, exact, strict=True))
        request = BackendRequest(device.type, dtype, kind, mode, biases == "decay")
        if dtype != torch.float32 and not accumulates_in_fp32(request):
            request = replace(request, dtype=torch.float32)
        backend, _ = decide(request)
        require(error < limit, f"{backend}: {error:.1e} from the definition, limit {limit:.0e}")
        return f"{backend}: {error:.0e} from the definition, forward and backward"

    return check


def _attended(
    kind: Kind,
    mode: Mode,
    biases: str,
    device: torch.device,
    dtype: torch.dtype,
    rounded: torch.dtype,
    backend: str | None,
) -> list[Tensor]:
    """The output and all gradients, on the host. Queries, keys and values are rounded to a type, and of it if no backend is named."""
    offsets = offsets_of(torch.tensor(_LENGTHS))
    items = Jagged(torch.arange(int(offsets[-1])), offsets, max(_LENGTHS))
    times = items.with_values(torch.arange(len(items.values)) ** 2 * 7)
    asked = times.with_values(times.values + 50)
    has_times, decay = biases != "no bias", biases == "decay"
    values: list[Any] = [numbers(one, len(items.values), 2, 16).to(rounded) for one in range(3)]
    values.append(numbers(4, max(_LENGTHS)) if has_times else None)
    values.append(numbers(5, 41) if has_times and not decay else None)
    values.append(torch.tensor([0.5, 0.02, 0.4]) if decay else None)
    own: list[Any] = [None if one is None else upload(one.to(dtype), device).requires_grad_() for one in values]
    jagged = [one.moved(lambda tensor: upload(tensor, device)) for one in (items, times, asked)]
    layout = attention_layout(
        jagged[0],
        times=jagged[1] if has_times else None,
        query_times=jagged[2] if has_times else None,
        num_buckets=0 if decay else 40,
        decay=decay,
    )
    q, k, v, position, time_bias, decayed = own
    with mixed_precision(device, rounded if backend is None else torch.float32):
        q, k, v = (one.to(rounded) if backend is None else one for one in (q, k, v))
        bias = Bias(position, time_bias, decayed, mode)
        out = jagged_attention(q, k, v, layout, kind=kind, scale=0.25, norm=11.0, bias=bias, backend=backend)
    leaves = [one for one in own if one is not None]
    grads = torch.autograd.grad((out.to(dtype) * upload(numbers(6, *out.shape).to(dtype), device)).sum(), leaves)
    return [download(one.detach()) for one in (out, *grads)]


def _negatives(source: str) -> Callable[[torch.device], str]:
    def check(device: torch.device) -> str:
        offsets = offsets_of(torch.tensor([5, 0, 1, 9, 2, 6, 17]))
        num_tokens, blocks = int(offsets[-1]), Blocks.own(int(offsets[-1]))
        if source == "shared":
            shifts = draw_shifts(torch.arange(14).reshape(7, 2) * 12345 + 7, offsets.diff())
            blocks = Blocks.shifted(offsets, shifts)
        elif source != "token":
            blocks = Blocks.of_rows(offsets if source == "sample" else torch.tensor([0, num_tokens]))
        num_blocks = int(blocks.unit_blocks[-1])
        positives = torch.arange(num_tokens) * 7 % 30
        negatives = (torch.arange(num_blocks * 8).reshape(num_blocks, 8) * 11 + 3) % 30
        vectors = numbers(1, num_tokens, 16), numbers(2, 30, 16)
        exact = _scored(plain_sampled_softmax, vectors, positives, negatives, CPU, torch.float64, blocks=blocks)
        found = _scored(
            sampled_softmax, vectors, positives, negatives, device, torch.float32, blocks=blocks, segment=16
        )
        error = max(_error(one, other) for one, other in zip(found, exact, strict=True))
        backend = choose(upload(vectors[1].float(), device), negatives, blocks, device=device)
        require(error < _FP32, f"{backend}: {error:.1e} from the definition, limit {_FP32:.0e}")
        return f"{backend}: {error:.0e} from the definition, loss and gradients"

    return check


def _scored(
    loss_of: Callable[..., Tensor],
    vectors: tuple[Tensor, Tensor],
    positives: Tensor,
    negatives: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    **settings: Any,
) -> list[Tensor]:
    queries, rows = (upload(one.to(dtype), device).requires_grad_() for one in vectors)
    loss = loss_of(queries, rows, upload(positives, device), upload(negatives, device), **settings)
    return [download(one.detach()) for one in (loss, *torch.autograd.grad(loss, (queries, rows)))]


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9))
