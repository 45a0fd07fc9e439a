"""How fast is jagged attention, forward and backward with both biases? Vs. padded PyTorch, our blocks, and sgemm.

Lengths are `lengths-kuai` (log-normal(6.0, 1.1) cut at 2,048), scaled to the longest length of each shape. The padded arm is
what TorchEasyRec and generative-recommenders run on a CPU: padded q, k and v, L x L bias matrices gathered from tables, one
masked silu, autograd. All arms get the same jagged q, k, v and gradient and return the same gradients. Work is counted as
in nestpipe.training.mfu; `of_sgemm` is its rate over that of a large sgemm in the same block.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import measure
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops.attention import Bias, Layout, attention_layout, jagged_attention
from nestpipe.ops.kernel_args import bucket_boundaries

SEED, NUM_BUCKETS = 0, 128
ARMS = ("native", "blocks", "padded")  # the arms whose memory is measured


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences, longest length, heads, width of a head; what the speedup over padded has to be."""

    num_sequences: int
    max_len: int
    num_heads: int
    width: int
    aim: float

    @property
    def name(self) -> str:
        return f"{self.num_sequences}x{self.max_len}x{self.num_heads}x{self.width}"


SHAPES = (
    Shape(256, 50, 4, 16, 6.0),
    Shape(64, 200, 2, 25, 10.0),
    Shape(16, 512, 4, 32, 10.0),
    Shape(16, 1024, 4, 32, 25.0),
    Shape(8, 1024, 4, 64, 25.0),
    Shape(8, 2048, 4, 64, 25.0),
)
QUICK = (*SHAPES[:3], SHAPES[4])  # the fourth is twice the work of the fifth, padded


def lengths_kuai(num_sequences: int, max_len: int) -> Tensor:
    """The workload's lengths, scaled so that its cut at 2,048 becomes max_len."""
    drawn = np.exp(np.random.default_rng(SEED).normal(6.0, 1.1, num_sequences)).clip(max=2048)
    return torch.from_numpy(np.ceil(drawn * max_len / 2048).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Work:
    """The inputs of one shape."""

    shape: Shape
    lengths: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    times: Jagged
    query_times: Jagged
    position: Tensor
    time: Tensor
    grad: Tensor

    @staticmethod
    def of(shape: Shape) -> Work:
        generator = torch.Generator().manual_seed(SEED)
        lengths = lengths_kuai(shape.num_sequences, shape.max_len)
        num_tokens = int(lengths.sum())
        rand = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
        q, k, v, grad = (rand(num_tokens, shape.num_heads, shape.width) for _ in range(4))
        gaps = torch.exp(rand(num_tokens) * 2 + 6).long()
        rows = Jagged(gaps.cumsum(0), offsets_of(lengths), shape.max_len)
        position, time = rand(shape.max_len).mul_(0.02), rand(NUM_BUCKETS + 1).mul_(0.02)
        leaves = [one.requires_grad_() for one in (q, k, v, position, time)]
        return Work(shape, lengths, *leaves[:3], rows, rows.with_values(rows.values + 60), *leaves[3:], grad)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.position, self.time)

    def flops(self) -> float:
        """Scores four times, values three times, causal pairs, two per multiply-add."""
        pairs = float((self.lengths * (self.lengths + 1) // 2).sum())
        return 2 * 7 * self.shape.width * self.shape.num_heads * pairs


def our_step(work: Work, backend: str) -> Callable[[], None]:
    """The op; its layout is made once, because all blocks of a model share it."""
    layout: Layout = attention_layout(
        work.times, times=work.times, query_times=work.query_times, num_buckets=NUM_BUCKETS
    )
    layout.plan(backend)
    bias = Bias(position=work.position, time=work.time)

    def step() -> None:
        out = jagged_attention(
            work.q, work.k, work.v, layout, kind="silu", norm=work.shape.max_len, bias=bias, backend=backend
        )
        torch.autograd.grad(out, work.leaves, work.grad)

    return step


def padded_step(work: Work) -> Callable[[], None]:
    """Padding, masks and bucket ids are made once; the rest is one step of a padded model."""
    longest = work.shape.max_len
    steps = torch.arange(longest)
    rows = (work.times.offsets[:-1, None] + steps).masked_fill(steps >= work.lengths[:, None], len(work.q))
    real = (rows < len(work.q)).flatten().nonzero().squeeze(1)
    pad = lambda values: torch.cat([values, values.new_zeros(1, *values.shape[1:])]).index_select(0, rows.flatten())  # noqa: E731
    times, query_times = (pad(one.values).reshape(rows.shape) for one in (work.times, work.query_times))
    gap = (query_times[:, :, None] - times[:, None, :]).abs().clamp(min=1)
    buckets = torch.bucketize(gap, bucket_boundaries(NUM_BUCKETS), right=True)
    distance = (steps[:, None] - steps).clamp(min=0)
    causal = torch.ones(longest, longest).tril()

    def step() -> None:
        q, k, v = (pad(one).reshape(*rows.shape, *one.shape[1:]) for one in (work.q, work.k, work.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        by_position = work.position.index_select(0, distance.flatten()).reshape(distance.shape)
        by_time = work.time.index_select(0, buckets.flatten()).reshape(buckets.shape)
        scores = scores + by_position + by_time.unsqueeze(1)
        weights = F.silu(scores) / longest * causal
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(0, 1).index_select(0, real)
        torch.autograd.grad(out, work.leaves, work.grad)

    return step


def sgemm_step() -> Callable[[], None]:
    left, right, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    return lambda: torch.mm(left, right, out=out)  # type: ignore[return-value]


def timed(step: Callable[[], object], num_repeats: int) -> Callable[[], float]:
    def block() -> float:
        start = time.perf_counter()
        for _ in range(num_repeats):
            step()
        return (time.perf_counter() - start) / num_repeats

    return block


def steps_of(work: Work) -> dict[str, Callable[[], object]]:
    return {
        "native": our_step(work, "native"),
        "blocks": our_step(work, "blocks"),
        "padded": padded_step(work),
        "sgemm": sgemm_step(),
    }


def repeats(step: Callable[[], object], seconds: float) -> int:
    step()
    start = time.perf_counter()
    step()
    return max(1, int(seconds / (time.perf_counter() - start)))


def peak_memory(shape: Shape, arm: str, num_threads: int) -> float:
    """MiB that two steps take at their peak, beyond the inputs, in a fresh process: layouts and masks included."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_measure_memory, args=(shape, arm, num_threads, answers))
    process.start()
    found: float = answers.get()
    process.join()
    return found


def _measure_memory(shape: Shape, arm: str, num_threads: int, answers: multiprocessing.SimpleQueue[float]) -> None:
    torch.set_num_threads(num_threads)
    small = steps_of(Work.of(Shape(2, 8, 1, 8, 1.0)))[arm]
    small()
    work = Work.of(shape)
    trim = ctypes.CDLL(None).malloc_trim  # else freed memory would serve the step unseen
    trim(0)
    before = resident_mib("VmRSS")
    step = padded_step(work) if arm == "padded" else our_step(work, arm)
    trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    step()
    step()
    answers.put(resident_mib("VmHWM") - before)


def resident_mib(field: str) -> float:
    """A figure of this process's memory; not ru_maxrss, which a child inherits from its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter blocks, four shapes, no memory; under 50 seconds")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, dict[str, object]] = {}
    rows = []
    for shape in QUICK if options.quick else SHAPES:
        figures[shape.name] = one = measure_shape(shape, 0.02 if options.quick else 0.2)
        peaks = {} if options.quick else {arm: round(peak_memory(shape, arm, options.threads), 1) for arm in ARMS}
        one["peak_mib"] = peaks
        rows.append([shape.name, *(str(one[key]) for key in ("ms", "vs_padded", "vs_padded_range", "aim", "verdict"))])
        rows[-1] += [str(one[key]) for key in ("vs_blocks", "vs_blocks_range", "of_sgemm", "fill")]
        rows[-1] += [str(peak) for peak in peaks.values()]
    settings = {"workload": "lengths-kuai", "threads": options.threads, "quick": options.quick}
    measure.append("attention", measure.record(seed=SEED, figures=figures, settings=settings))
    print(f"forward and backward with both biases, {options.threads} thread(s); medians of blocks (10-90 %)")
    header = [
        "BxLxHxwidth",
        "ms",
        "vs padded",
        "range",
        "aim",
        "",
        "vs blocks",
        "range",
        "of sgemm",
        "fill",
        *([] if options.quick else [f"{arm} MiB" for arm in ARMS]),
    ]
    print(measure.table(header, rows))
    print(json.dumps(figures))


def measure_shape(shape: Shape, seconds: float) -> dict[str, object]:
    work = Work.of(shape)
    arms = {name: timed(step, repeats(step, seconds)) for name, step in steps_of(work).items()}
    times = measure.alternate(arms)
    rate = [
        work.flops() / ours / (2 * 1024**3 / bound) for ours, bound in zip(times["native"], times["sgemm"], strict=True)
    ]
    vs_padded, vs_blocks = (measure.ratio(times[name], times["native"]) for name in ("padded", "blocks"))
    return {
        "ms": round(1e3 * measure.Spread.of(times["native"]).median, 2),
        "vs_padded": round(vs_padded.median, 2),
        "vs_padded_range": vs_padded.range,
        "aim": shape.aim,
        "verdict": measure.verdict(vs_padded, at_least=shape.aim),
        "vs_blocks": round(vs_blocks.median, 2),
        "vs_blocks_range": vs_blocks.range,
        "vs_blocks_verdict": measure.verdict(vs_blocks, at_least=2.5),
        "of_sgemm": round(measure.Spread.of(rate).median, 3),
        "fill": round(float(work.lengths.sum()) / (shape.num_sequences * shape.max_len), 3),
    }


if __name__ == "__main__":
    main()
