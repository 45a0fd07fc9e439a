"""The attention op in Triton, for GPUs: all kinds, modes and biases, forward and backward, float32 and bfloat16.

    plan       blocks of queries and of keys, bands of tiles: made on the host, once per batch
    forward    attention_kernels.forward
    backward   attention_kernels.query_grads, key_grads; attention_bias_kernels.bias_grads, then sum_groups per bias

Scores, biases and all sums are float32. With bfloat16 the weights are rounded to bfloat16 before they are multiplied by
values, and results are rounded once. Equal calls give equal bits: no sum is atomic.

Tests run the kernels in Triton's interpreter and compile them for sm_80, sm_90 and gfx942. They have not run on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nestpipe.ops import attention_bias_kernels, attention_kernels
from nestpipe.ops.device_memory import upload
from nestpipe.ops.kernel_args import Gradients, KernelInputs, Layout, bucket_boundaries
from nestpipe.ops.limits import MAX_KERNEL_LENGTH, MAX_KERNEL_STRIDE, MAX_KERNEL_WIDTH

_DTYPES = (torch.float32, torch.bfloat16)
_SUMMED_ROWS = 16  # that a program of sum_groups loads at once


class LaunchOptions(NamedTuple):
    """How a kernel is compiled: B, CHUNK and the options of Triton."""

    block: int
    chunk: int
    num_warps: int
    registers: int | None  # of a thread, at most; None leaves the limit to ptxas

    def for_target(self, *, is_nvidia: bool) -> dict[str, Any]:
        """Arguments of a launch; only NVIDIA's compiler takes a limit of registers."""
        options = {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": True}
        return {**options, "maxnreg": self.registers} if is_nvidia and self.registers else options


def _widths(
    narrow: LaunchOptions,
    at_128: LaunchOptions,
    at_256: LaunchOptions,
    *,
    at_32: LaunchOptions | None = None,
    at_64: LaunchOptions | None = None,
) -> dict[int, LaunchOptions]:
    return {16: narrow, 32: at_32 or narrow, 64: at_64 or narrow, 128: at_128, 256: at_256}


# Nothing can be timed without a GPU. These are the largest blocks, and the fewest warps, that compile without spills for
# sm_80, sm_90 and gfx942 (tests/ops/test_attention_compiled.py). Products of float32 are unrolled, which takes registers,
# so their blocks are smaller and their threads more. Without a limit of registers, or with one that is too close, ptxas
# spills some bytes to run more blocks at once: a limit is here because it was tried. ptxas also spills some bytes when it
# uses all registers that a limit allows, so what helps is a kernel that stays below: with 4 warps float32 takes 152.
_FOUR_WARPS, _WIDE = LaunchOptions(16, 32, 4, 255), LaunchOptions(16, 32, 16, 128)
_HALF, _HALF_WIDE = LaunchOptions(32, 256, 4, 255), LaunchOptions(32, 64, 8, 255)
LAUNCH: dict[tuple[str, torch.dtype], dict[int, LaunchOptions]] = {
    ("forward", torch.float32): _widths(LaunchOptions(32, 32, 8, 192), _WIDE, _WIDE),
    ("bias_channels", torch.float32): _widths(LaunchOptions(16, 32, 8, 192), _WIDE, _WIDE),
    ("query_grads", torch.float32): _widths(
        LaunchOptions(32, 32, 8, 192), _FOUR_WARPS, _WIDE, at_32=LaunchOptions(16, 32, 8, 192)
    ),
    ("key_grads", torch.float32): _widths(
        LaunchOptions(16, 32, 8, 255), LaunchOptions(16, 32, 16, None), _WIDE, at_64=_FOUR_WARPS
    ),
    ("value_grads", torch.float32): _widths(LaunchOptions(16, 32, 8, 192), _WIDE, _WIDE),
    ("bias_grads", torch.float32): _widths(
        LaunchOptions(16, 32, 8, 255), LaunchOptions(16, 32, 8, None), _WIDE, at_64=_FOUR_WARPS
    ),
    ("forward", torch.bfloat16): _widths(_HALF, LaunchOptions(32, 256, 8, 255), _HALF_WIDE),
    ("bias_channels", torch.bfloat16): _widths(_HALF, _HALF, _HALF_WIDE),
    ("query_grads", torch.bfloat16): _widths(_HALF, _HALF, _HALF_WIDE),
    ("key_grads", torch.bfloat16): _widths(_HALF, _HALF, _HALF_WIDE),
    ("value_grads", torch.bfloat16): _widths(_HALF, _HALF, _HALF_WIDE),
    ("bias_grads", torch.bfloat16): _widths(_HALF, LaunchOptions(16, 256, 4, 255), LaunchOptions(16, 64, 8, 255)),
}
"""Kernel and type -> width of a head, padded -> options."""
BLOCKS = sorted({one.block for table in LAUNCH.values() for one in table.values()})


class _TilePlan(NamedTuple):
    """For a block size: (sequence, first row) of blocks, (sequence, band) by band, and the first row of each band."""

    queries: Tensor  # [n, 2]
    keys: Tensor  # [n, 2]
    bands: Tensor  # [n, 2]
    band_starts: Tensor  # [bands + 2]; the first is band -1


def plan(layout: Layout) -> list[Tensor]:
    """The boundaries of time buckets, then a `_TilePlan` for each block size."""
    device, layout = layout.key_offsets.device, layout.host or layout
    longest = int(layout.key_offsets.diff().max()) if len(layout.num_targets) else 0
    if longest > MAX_KERNEL_LENGTH:
        raise ValueError(
            f"attention backend triton: a sequence has {longest:,} keys; supported are {MAX_KERNEL_LENGTH:,}."
        )
    tensors = [one for block in BLOCKS for one in _tile_plan(layout, block)]
    packed = upload(torch.cat([one.flatten() for one in tensors]).to(torch.int32), device)
    parts = packed.split([one.numel() for one in tensors])
    boundaries = upload(bucket_boundaries(max(layout.num_buckets, 1)), device)
    return [boundaries, *(part.reshape(one.shape) for part, one in zip(parts, tensors, strict=True))]


def forward(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """The output [Q, channels, H, V], and for softmax the logsumexp of each row [Q, H] in float32."""
    call = _Call(inputs)
    out = inputs.new_output()
    saved = inputs.q.new_empty(inputs.q.shape[:2] if inputs.kind == "softmax" else 0, dtype=torch.float32)
    call.launch(attention_kernels.forward, "queries", out=out, saved=saved)
    if inputs.mode == "channel" and (inputs.position is not None or inputs.uses_time):
        call.launch(attention_kernels.bias_channels, "queries", out=out)
    return out, saved


def backward(inputs: KernelInputs, grad: Tensor, out: Tensor, saved: Tensor) -> Gradients:
    """All gradients; recomputes the scores."""
    call = _Call(inputs)
    row_dots = (grad[:, 0].float() * out[:, 0].float()).sum(2) if inputs.kind == "softmax" else None
    d_q, d_k, d_v = (
        torch.zeros_like(one, memory_format=torch.contiguous_format) for one in (inputs.q, inputs.k, inputs.v)
    )
    given = {"grad": grad, "saved": saved, "row_dots": row_dots}
    call.launch(attention_kernels.query_grads, "queries", **given, d_q=d_q)
    call.launch(attention_kernels.key_grads, "keys", **given, d_k=d_k)
    call.launch(attention_kernels.value_grads, "keys", **given, d_v=d_v)
    return Gradients(d_q, d_k, d_v, *call.bias_grads(**given))


class _Call:
    """The arguments that all kernels of a call share."""

    def __init__(self, inputs: KernelInputs):
        if problem := _problem(inputs):
            raise ValueError(f"attention backend triton: {problem}.")
        self.inputs = inputs
        q, k, v = (_with_plain_rows(one) for one in (inputs.q, inputs.k, inputs.v))
        tables = {"position": inputs.position, "time": inputs.time, "decay": inputs.decay}
        self.tables = {name: None if one is None else one.detach().float().contiguous() for name, one in tables.items()}
        both = (inputs.query_times, inputs.key_times) if inputs.uses_time else (None, None)
        self.arguments: dict[str, Any] = {
            "q": q, "k": k, "v": v, "q_stride": q.stride(0), "k_stride": k.stride(0), "v_stride": v.stride(0),
            "query_offsets": inputs.query_offsets, "key_offsets": inputs.key_offsets, "num_targets": inputs.num_targets,
            "query_times": both[0], "key_times": both[1], "boundaries": inputs.plan[0], **self.tables,
            "heads": q.shape[1], "channels": inputs.num_channels, "qk_width": q.shape[2], "v_width": v.shape[2],
            "num_position": 1 if inputs.position is None else len(inputs.position),
            "num_buckets": 1 if inputs.time is None else len(inputs.time) - 1,
            "scale": inputs.scale, "inverse_norm": 1.0 / inputs.norm,
            "SOFTMAX": inputs.kind == "softmax", "CHANNEL": inputs.mode == "channel",
            "D": padded_width(q.shape[2]), "V": padded_width(v.shape[2]),
        }  # fmt: skip

    def options(self, kernel: str) -> LaunchOptions:
        return LAUNCH[kernel, self.inputs.q.dtype][max(self.arguments["D"], self.arguments["V"])]

    def tile_plan(self, block: int) -> _TilePlan:
        first = 1 + 4 * BLOCKS.index(block)
        return _TilePlan(*self.inputs.plan[first : first + 4])

    def launch(self, kernel: Any, per: str, **given: Any) -> None:
        """Starts a kernel with a program for each of the plan's `queries`, `keys` or `bands`, and each head."""
        options = self.options(kernel.__name__)
        programs = getattr(self.tile_plan(options.block), per)
        if not len(programs):
            return
        chunk = min(options.chunk, self.arguments["D"], self.arguments["V"])
        arguments = {**self.arguments, **given, "blocks": programs, "B": options.block, "CHUNK": chunk}
        kernel[(len(programs), self.arguments["heads"])](
            **{name: arguments[name] for name in kernel.arg_names},
            **options.for_target(is_nvidia=torch.version.hip is None),
        )

    def bias_grads(self, **given: Any) -> list[Tensor | None]:
        """Gradients of position, time and decay: one row per band, sequence and head, then sums in order."""
        inputs, heads = self.inputs, self.arguments["heads"]
        block = self.options("bias_grads").block
        plan = self.tile_plan(block)
        num_buckets = triton.next_power_of_2(self.arguments["num_buckets"] + 1)
        widths = {"position": 2 * block, "time": num_buckets, "decay": 4}
        rows = {
            name: inputs.q.new_zeros(len(plan.bands) * heads, width, dtype=torch.float32)
            for name, width in widths.items()
            if self.tables[name] is not None and (name == "position" or inputs.uses_time)
        }
        if rows:
            results = {f"d_{name}": rows.get(name) for name in widths}
            self.launch(attention_bias_kernels.bias_grads, "bands", **given, **results, T=num_buckets)
        found: list[Tensor | None] = []
        for name, table in (("position", inputs.position), ("time", inputs.time), ("decay", inputs.decay)):
            if table is None or name not in rows:  # a log without times has no gradient of the time bias
                found.append(None if table is None else torch.zeros_like(table))
                continue
            sums = self._sum_groups(rows[name], plan.band_starts)
            total = _by_distance(sums, len(table)) if name == "position" else sums.sum(0)[: len(table)]
            found.append(total.to(table.dtype))
        return found

    def _sum_groups(self, rows: Tensor, starts: Tensor) -> Tensor:
        sums = rows.new_empty(len(starts) - 1, rows.shape[1])
        attention_bias_kernels.sum_groups[(len(sums),)](
            rows, starts, sums, self.arguments["heads"], W=rows.shape[1], R=_SUMMED_ROWS
        )
        return sums


def padded_width(width: int) -> int:
    """The width of a head in kernels: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(width)))


def _by_distance(sums: Tensor, num_position: int) -> Tensor:
    """The gradient of the position table from the sums [bands + 1, 2 B] of diagonals; the first row is band -1."""
    upper, lower = sums.chunk(2, dim=1)
    distances = upper[1:].clone()
    distances[:-1] += lower[2:]
    distances[0] += upper[0]  # targets and themselves: zero but for distance 0
    distances = distances.flatten()
    grad = sums.new_zeros(num_position)
    last = num_position - 1
    grad[: min(last, len(distances))] = distances[:last]
    grad[last] = distances[last:].sum()
    return grad


def _with_plain_rows(tensor: Tensor) -> Tensor:
    """Heads of a row must lie back to back; rows may have anything between them."""
    plain = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] and tensor.stride(0) <= MAX_KERNEL_STRIDE
    return tensor if plain else tensor.contiguous()


def _problem(inputs: KernelInputs) -> str | None:
    """What the kernels cannot do, or None."""
    dtypes = {one.dtype for one in (inputs.q, inputs.k, inputs.v)}
    if len(dtypes) > 1 or inputs.q.dtype not in _DTYPES:
        return f"q, k and v are {', '.join(sorted(map(str, dtypes)))}; supported are float32 and bfloat16, the same for all"
    width = max(inputs.q.shape[2], inputs.v.shape[2])
    if width > MAX_KERNEL_WIDTH:
        return f"a head has {width} values; supported are {MAX_KERNEL_WIDTH}"
    if (row := inputs.num_channels * inputs.q.shape[1] * width) > MAX_KERNEL_STRIDE:
        return f"a row has {row:,} values; supported are {MAX_KERNEL_STRIDE:,}"
    return None


def _tile_plan(layout: Layout, block: int) -> _TilePlan:
    num_queries, num_keys = layout.query_offsets.diff(), layout.key_offsets.diff()
    num_bands = torch.where(num_queries > 0, (num_keys + block - 2) // block + 1, 0)
    sequences, bands = _numbered(torch.where(num_bands > 0, num_bands + 1, 0))
    wanted = (bands > 0) | (layout.num_targets > 0).index_select(0, sequences)  # without targets no band -1
    bands, order = bands[wanted].sort(stable=True)
    starts = torch.bincount(bands, minlength=2).cumsum(0)
    return _TilePlan(
        queries=_blocks(num_queries, block),
        keys=_blocks(num_keys, block),
        bands=torch.stack([sequences[wanted][order], bands - 1], dim=1),
        band_starts=torch.cat([starts.new_zeros(1), starts]),
    )


def _blocks(lengths: Tensor, block: int) -> Tensor:
    sequences, numbers = _numbered((lengths + block - 1) // block)
    return torch.stack([sequences, numbers * block], dim=1)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the counted things: whose it is, and its number there."""
    owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    firsts = (counts.cumsum(0) - counts).index_select(0, owners)
    return owners, torch.arange(len(owners), device=counts.device) - firsts
