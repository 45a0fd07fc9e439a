"""The loss with negatives: every backend equals the definition, in bounded memory."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nestpipe.jagged import offsets_of
from nestpipe.ops import native_library
from nestpipe.ops import negatives as op
from nestpipe.ops.negatives import Blocks, draw_shifts, plain_sampled_softmax, sampled_softmax

LENGTHS = (5, 0, 1, 9, 2, 6)  # with an empty sample, and ones too short for all shifts
SEGMENTS = (1, 4, 7, 100)


@pytest.fixture
def compiler() -> None:
    if not isinstance(native_library.load(), native_library.Native):
        pytest.skip("no C++ compiler")


@dataclass(frozen=True)
class Case:
    """Inputs of the loss; rows of positives are others where negatives are rounded."""

    queries: Tensor
    rows: Tensor
    positive_rows: Tensor | None
    positives: Tensor
    negatives: Tensor
    blocks: Blocks

    def run(self, loss: object, **settings: object) -> list[Tensor]:
        value = loss(  # type: ignore[operator]
            self.queries,
            self.rows,
            self.positives,
            self.negatives,
            positive_rows=self.positive_rows,
            blocks=self.blocks,
            **settings,
        )
        leaves = [self.queries, self.rows, *([] if self.positive_rows is None else [self.positive_rows])]
        return [value.detach(), *torch.autograd.grad(value * 0.37, leaves)]  # a factor shows if backward ignores it


def make(
    source: str,
    *,
    dtype: torch.dtype = torch.float64,
    rounded: bool = False,
    dim: int = 5,
    num: int = 7,
    scale: float = 1,
) -> Case:
    """A case with accidental hits; source is token, sample, pool, or a factor of sharing."""
    generator = torch.Generator().manual_seed(0)
    offsets = offsets_of(torch.tensor(LENGTHS))
    num_tokens, num_rows = int(offsets[-1]), 11
    if source == "pool":
        blocks = Blocks.of_rows(torch.tensor([0, num_tokens]))
    elif source == "sample":
        blocks = Blocks.of_rows(offsets)
    elif source == "token":
        blocks = Blocks.own(num_tokens)
    else:
        numbers = torch.randint(2**31 - 1, (len(LENGTHS), int(source) - 1), generator=generator)
        blocks = Blocks.shifted(offsets, draw_shifts(numbers, offsets.diff()))
    queries = torch.randn(num_tokens, dim, dtype=dtype, generator=generator).mul_(3 * scale).requires_grad_()
    rows = torch.randn(num_rows, dim, dtype=dtype, generator=generator).requires_grad_()
    others = (rows.detach() + 0.1).requires_grad_() if rounded else None
    positives = torch.randint(num_rows, (num_tokens,), generator=generator)
    negatives = torch.randint(num_rows, (int(blocks.unit_blocks[-1]), num), generator=generator)
    hits = negatives[blocks.of_token.clamp(min=0)] == positives[:, None, None]
    assert bool(hits.any()), "there must be accidental hits"
    return Case(queries, rows, others, positives, negatives, blocks)


def backends_of(source: str) -> tuple[str, ...]:
    return (
        ("product",)
        if source == "pool"
        else ("product", "gather", "gemm")
        if source == "sample"
        else ("gather", "gemm")
    )


# The same sums in another order: 1e-12 covers a few hundred roundings of fp64 values of order ten.
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("source", ["token", "sample", "pool", "2", "4"])
def test_every_way_in_torch_equals_the_definition_for_every_segment(source: str, rounded: bool) -> None:
    case = make(source, rounded=rounded)
    plain = case.run(plain_sampled_softmax)
    for backend in (None, *backends_of(source)):
        for segment in SEGMENTS:
            for one, other in zip(case.run(sampled_softmax, segment=segment, backend=backend), plain, strict=True):
                assert torch.allclose(one, other, rtol=1e-12, atol=1e-12), (backend, segment)


# fp32 sums of at most a few hundred terms of order ten: 2e-5 is some tens of roundings of the largest value.
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dim", [1, 8, 50, 136])
@pytest.mark.parametrize("source", ["token", "sample", "2", "4"])
def test_native_equals_the_definition_and_segments_change_no_bit(source: str, dim: int) -> None:
    for rounded, num in ((False, 7), (True, 1), (False, 130)):
        case = make(source, dtype=torch.float32, rounded=rounded, dim=dim, num=num, scale=dim**-0.5)
        found = case.run(sampled_softmax, segment=4, backend="native")
        for one, other in zip(found, case.run(plain_sampled_softmax), strict=True):
            assert float((one - other).abs().max()) <= 2e-5 * max(float(other.abs().max()), 1.0)
        for segment in SEGMENTS:
            again = case.run(sampled_softmax, segment=segment, backend="native")
            assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("source", ["token", "3"])
def test_native_bits_do_not_depend_on_threads_or_on_other_samples(source: str) -> None:
    case, before = make(source, dtype=torch.float32, dim=50, num=40), torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2, 3, 2):
            torch.set_num_threads(num_threads)
            found.append(case.run(sampled_softmax, segment=100, backend="native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))
    bounds = offsets_of(torch.tensor(LENGTHS)).tolist()
    for first, last in itertools.pairwise(bounds):
        part = slice(first, last)
        of_token = torch.where(case.blocks.of_token[part] < 0, -1, case.blocks.of_token[part] - first)
        units = torch.tensor([0, last - first]) if source != "token" else torch.arange(last - first + 1)
        queries = case.queries[part].detach().requires_grad_()
        blocks = Blocks(of_token, units, units)
        alone = Case(queries, case.rows, None, case.positives[part], case.negatives[part], blocks)
        grad = alone.run(sampled_softmax, segment=100, backend="native")[1]
        assert torch.equal(grad, found[0][1][part])


def test_shifts_are_distinct_and_cover_what_there_is() -> None:
    lengths = torch.arange(0, 12)
    numbers = torch.tensor([0, 2**30, 2**31 - 2]).expand(len(lengths), 3)
    for length, shifts in zip(lengths.tolist(), draw_shifts(numbers, lengths).tolist(), strict=True):
        used = [shift for shift in shifts if shift]
        assert len(used) == len(set(used)) == min(3, max(length - 1, 0))
        assert all(1 <= shift < length for shift in used)


def test_shared_blocks_are_those_of_other_tokens_of_the_sample() -> None:
    blocks = Blocks.shifted(torch.tensor([0, 3, 3, 5]), torch.tensor([[1, 2], [0, 0], [1, 0]]))
    assert blocks.of_token.tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [3, 4, -1], [4, 3, -1]]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["native", "gather", "gemm"])
def test_only_accidental_hits_leave_a_loss_of_zero(backend: str) -> None:
    case = make("token", dtype=torch.float32)
    negatives = case.positives.unsqueeze(1).expand(-1, 4)
    assert sampled_softmax(case.queries, case.rows, case.positives, negatives, segment=8, backend=backend).item() == 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["native", "gather", "gemm"])
def test_extreme_scores_stay_finite_and_a_nan_shows(backend: str) -> None:
    case = make("token", dtype=torch.float32, scale=1e4)
    found = case.run(sampled_softmax, segment=8, backend=backend)
    assert all(bool(torch.isfinite(one).all()) for one in found)
    with torch.no_grad():
        case.rows[int(case.negatives[0, 0])] = torch.nan
    assert not torch.isfinite(case.run(sampled_softmax, segment=8, backend=backend)[1]).all()


@pytest.mark.usefixtures("compiler")
def test_no_tokens_is_a_loss_of_zero() -> None:
    for backend in ("native", "gather", "gemm", "product", None):
        rows = torch.ones(3, 4, requires_grad=True)
        none = torch.empty(0, dtype=torch.int64)
        loss = sampled_softmax(torch.empty(0, 4), rows, none, none.reshape(0, 2), segment=8, backend=backend)
        assert loss.item() == 0
        assert torch.equal(torch.autograd.grad(loss, rows)[0], torch.zeros(3, 4))


@pytest.mark.usefixtures("compiler")
def test_mistakes_are_named() -> None:
    case = make("token", dtype=torch.float32)
    with pytest.raises(IndexError, match="outside of the 11 rows"):
        sampled_softmax(case.queries, case.rows, case.positives, case.negatives + 11, segment=8, backend="native")
    with pytest.raises(ValueError, match="22 blocks of negatives do not match 23 tokens with 23 blocks"):
        sampled_softmax(case.queries, case.rows, case.positives, case.negatives[1:], segment=8)
    loss = sampled_softmax(case.queries, case.rows, case.positives, case.negatives, segment=8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="kept for one call"):
        loss.backward()


def test_the_log_says_once_which_way_runs(caplog: pytest.LogCaptureFixture) -> None:
    op._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="nestpipe"):
        for _ in range(2):
            make("pool").run(sampled_softmax, segment=8)
    assert [record.message for record in caplog.records] == ["negatives: product (one pool: every token by one GEMM)"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_growth(work: object) -> int:
    """By how much the process grows at most while it works, looked at by a thread; kernels release the GIL."""
    done, start = threading.Event(), resident_bytes()
    peak = start

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    work()  # type: ignore[operator]
    done.set()
    thread.join()
    return max(peak, resident_bytes()) - start


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("source", ["token", "4"])
def test_no_vector_for_every_pair_is_ever_held(source: str) -> None:
    """6,000 tokens with 128 negatives of 64 floats would be 196 MB as vectors; 12 MB are gradients and weights."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(0, 6001, 100)
    shifts = torch.tensor([[1, 20, 50]]).expand(60, -1)
    blocks = Blocks.own(6000) if source == "token" else Blocks.shifted(offsets, shifts)
    queries, rows = torch.randn(6000, 64, generator=generator), torch.randn(4000, 64, generator=generator)
    places = torch.randint(4000, (6000, 129), generator=generator)

    def work() -> None:
        sampled_softmax(
            queries, rows, places[:, 0], places[:, 1:].contiguous(), segment=256, blocks=blocks, backend="native"
        )

    work()  # the first call compiles, starts threads and fills the allocator's pools
    assert peak_growth(work) < 24 << 20
