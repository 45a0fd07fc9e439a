"""Sampled softmax loss of one positive among shared negatives, summed over tokens, and the choice of its backend.

Negatives are drawn in blocks of R, and a token is scored against one block or several:

    source   blocks                        a token's blocks
    token    one for each token            its own; with sharing also those of k - 1 other tokens of its unit
    sample   one for each sample           that of its sample
    pool     one for the whole batch       that one

With sharing, token i of a unit (a sample, or a declared group of samples) of L tokens also takes the blocks of tokens
(i + s) mod L for k - 1 shifts s drawn for the unit: k·R negatives for the lookups of R. A negative that is the receiving
token's own positive is left out. `plain_sampled_softmax` is the definition. The backends compute the same, and the
gradients in the same pass: the gradient of a sum is the sum of the gradients of its segments.

Memory: k·R scores for C tokens at a time (C = `segment`, or the longest unit); never a vector for each pair.

Shapes: T tokens, U distinct rows, G blocks of R negatives, k blocks per token, N units, C tokens of a segment, D width.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.jagged import ranges
from nestpipe.ops import negatives_native, negatives_offload, negatives_torch
from nestpipe.ops.backends import triton_runs
from nestpipe.ops.device_memory import download, upload
from nestpipe.ops.native_library import Native, load

log = logging.getLogger("nestpipe")

LossBackend = Literal["native", "gather", "product", "gemm", "triton"]
# Measured: up to this U / (k·R), scoring all U rows by one GEMM beats gathering the negatives (torch) or the native kernel.
_GEMM_RATIO, _GEMM_RATIO_NATIVE = 48, 2
_TRITON: tuple[LossBackend, str] = ("triton", "a GPU")


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Which blocks of negatives each token is scored against. A unit's tokens use the unit's blocks and no others."""

    of_token: Tensor  # [T, k] blocks, distinct; -1 for none
    unit_tokens: Tensor  # [N + 1] where each unit's tokens begin
    unit_blocks: Tensor  # [N + 1] where its blocks begin

    @staticmethod
    def own(num_tokens: int) -> Blocks:
        """One block for each token."""
        every = torch.arange(num_tokens + 1)
        return Blocks(every[:-1].unsqueeze(1), every, every)

    @staticmethod
    def of_rows(offsets: Tensor) -> Blocks:
        """One block for each row (sample) of jagged tokens; a single row is a pool."""
        units = torch.arange(len(offsets))
        row = units[:-1].repeat_interleave(offsets.diff(), output_size=int(offsets[-1]))
        return Blocks(row.unsqueeze(1), offsets, units)

    @staticmethod
    def shifted(offsets: Tensor, shifts: Tensor) -> Blocks:
        """One block for each token, shared within units with offsets [N + 1] by shifts [N, k - 1]; shift 0 is none."""
        lengths = offsets.diff()
        num_tokens = int(offsets[-1])
        unit = torch.arange(len(lengths)).repeat_interleave(lengths, output_size=num_tokens)
        first, length, shift = (of.index_select(0, unit) for of in (offsets[:-1], lengths, shifts))
        place = ranges(torch.zeros_like(lengths), lengths)
        others = first.unsqueeze(1) + (place.unsqueeze(1) + shift) % length.unsqueeze(1)
        own = torch.arange(num_tokens).unsqueeze(1)
        return Blocks(torch.cat([own, others.masked_fill(shift == 0, -1)], dim=1), offsets, offsets)

    @property
    def is_pool(self) -> bool:
        """Whether all tokens have one and the same block."""
        return len(self.unit_blocks) == 2 and int(self.unit_blocks[-1]) == 1

    @property
    def one_per_unit(self) -> bool:
        return self.of_token.shape[1] == 1 and len(self.unit_blocks) == int(self.unit_blocks[-1]) + 1


def draw_shifts(numbers: Tensor, lengths: Tensor) -> Tensor:
    """Distinct shifts [N, k - 1] in 1 .. L - 1 from numbers [N, k - 1] in 0 .. 2**31 - 2; 0 where there are no more.

    The possible shifts are divided into k - 1 ranges; one shift is drawn from each.
    """
    count = numbers.shape[1]
    edges = torch.arange(count + 1) * (lengths.unsqueeze(1) - 1).clamp(min=0) // max(count, 1)
    low, size = edges[:, :-1], edges.diff(dim=1)
    return torch.where(size > 0, 1 + low + (numbers * size >> 31), 0)


def sampled_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    segment: int,
    positive_rows: Tensor | None = None,
    blocks: Blocks | None = None,
    backend: LossBackend | None = None,
) -> Tensor:
    """Sum over tokens of the softmax loss of one positive among its negatives.

    queries [T, D]; rows [U, D]; positives [T] and negatives [G, R] index `rows`. Positives index `positive_rows` [U, D]
    if given: the same rows before they were rounded for the wire. Without `blocks` each token has its own block.
    `backend` None chooses the fastest that supports the call. With queries on a device, `rows` (with positives, negatives
    and `positive_rows`) may be on the host: then the device holds the rows of two segments at a time.
    """
    blocks = blocks or Blocks.own(len(queries))
    if (int(blocks.unit_blocks[-1]), len(blocks.of_token), len(positives)) != (
        len(negatives),
        len(queries),
        len(queries),
    ):
        raise ValueError(
            f"{len(queries)} queries with {len(positives)} positives and {len(negatives)} blocks of negatives do not match "
            f"{len(blocks.of_token)} tokens with {int(blocks.unit_blocks[-1])} blocks"
        )
    is_offloaded = rows.device.type != queries.device.type
    backend = backend or choose(rows, negatives, blocks, device=queries.device, is_offloaded=is_offloaded)
    of_token = upload(blocks.of_token, rows.device)  # the other sizes are for the host, which decides about launches
    task = negatives_torch.LossTask(positives, negatives, of_token, blocks.unit_tokens, blocks.unit_blocks, segment)
    same = rows if positive_rows is None else positive_rows
    run = _backend(backend)
    if is_offloaded:
        _check_host(queries, rows=rows, positive_rows=same, positives=positives, negatives=negatives)
        run = partial(negatives_offload.run, run)
    loss: Tensor = _SampledSoftmax.apply(queries, rows, same, task, run)  # type: ignore[no-untyped-call]
    return loss


def plain_sampled_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    positive_rows: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """`sampled_softmax` by definition, with a vector for every pair: the oracle of its tests."""
    of_token = (blocks or Blocks.own(len(queries))).of_token
    places = negatives.index_select(0, of_token.clamp(min=0).flatten()).reshape(*of_token.shape, -1)
    left_out = (places == positives[:, None, None]) | (of_token < 0).unsqueeze(2)
    scores = (
        (F.embedding(places.flatten(1), rows) * queries.unsqueeze(1))
        .sum(2)
        .masked_fill(left_out.flatten(1), -torch.inf)
    )
    own = (F.embedding(positives, rows if positive_rows is None else positive_rows) * queries).sum(1, keepdim=True)
    return F.cross_entropy(torch.cat([own, scores], dim=1), torch.zeros_like(positives), reduction="sum")


def choose(
    rows: Tensor, negatives: Tensor, blocks: Blocks, *, device: torch.device, is_offloaded: bool = False
) -> LossBackend:
    """The fastest backend on a device that supports the call; logged once with the reason."""
    per_token = negatives.shape[1] * blocks.of_token.shape[1]
    is_single = blocks.one_per_unit and len(negatives) != len(blocks.of_token)  # of a sample, or a pool
    if rows.dtype != torch.float64 and triton_runs(device.type) and (is_offloaded or not is_single):
        backend, reason = _TRITON
    elif is_offloaded:
        backend, reason = "gather", f"rows on the host, segments on {device.type}"
    else:
        fits = device.type == "cpu" and rows.dtype == torch.float32
        is_pool = blocks.is_pool
        backend, reason = _decide(fits, is_pool, is_single and not is_pool, len(rows) / max(per_token, 1))
    _log_once(backend, reason)
    return backend


def _decide(fits: bool, is_pool: bool, is_sample: bool, rows_per_negative: float) -> tuple[LossBackend, str]:
    if is_pool:
        return "product", "one pool: every token by one GEMM"
    native = load() if fits else "the native kernel computes in float32 on the CPU"
    if isinstance(native, Native) and (is_sample or rows_per_negative > _GEMM_RATIO_NATIVE):
        return "native", "float32 on the CPU"
    if is_sample:
        return "product", f"a GEMM for each sample; {native}"
    if isinstance(native, Native) or rows_per_negative <= _GEMM_RATIO:
        return "gemm", "few distinct rows: all are scored by one GEMM"
    return "gather", f"{native}. Expect about 8x slower"


def _check_host(queries: Tensor, **tensors: Tensor) -> None:
    """Rows are on the host, so all that refers to them must be."""
    for name, one in tensors.items():
        if not one.is_cpu:
            raise ValueError(
                f"'{name}' is on {one.device}, but 'rows' is on the host and queries on {queries.device}. Rows that are "
                "uploaded by segments need their positives, negatives and positive_rows on the host too."
            )


@cache
def _log_once(backend: str, reason: str) -> None:
    log.info("negatives: %s (%s)", backend, reason)


class _Run(Protocol):
    """Computes the loss and the gradients of queries, rows and positive rows; the last two may be one tensor."""

    def __call__(
        self, queries: Tensor, rows: Tensor, positive_rows: Tensor, task: negatives_torch.LossTask
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def _backend(name: LossBackend) -> _Run:
    if name == "triton":
        from nestpipe.ops import negatives_triton  # Triton is there where a device is

        return negatives_triton.run
    return BACKENDS[name]


BACKENDS: dict[LossBackend, _Run] = {
    "native": negatives_native.run,
    "gather": negatives_torch.gather,
    "product": negatives_torch.product,
    "gemm": negatives_torch.gemm,
}


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, rows: Tensor, positive_rows: Tensor, task: negatives_torch.LossTask, run: _Run
    ) -> Tensor:
        ctx.same = positive_rows is rows
        loss, *ctx.grads = run(queries, rows, positive_rows, task)
        return loss.to(queries.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        # Scaled in place, because they are large; so backward runs once.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "backward of the sampled softmax ran twice; its gradients are kept for one call. Compute the loss again"
            )
        grad_queries, grad_rows, grad_positive_rows = grads
        grad_queries.mul_(grad)
        of_rows = download(grad) if grad_rows.is_cpu else grad  # rows may be on the host
        grad_rows.mul_(of_rows)
        return grad_queries, grad_rows, None if ctx.same else grad_positive_rows.mul_(of_rows), None, None
