"""Row kernels in Triton's interpreter against C++, bit for bit, and the kernels of negatives against their definition.

A program, because TRITON_INTERPRET counts at import: `python -m tests.embedding.interpreted_kernels` prints a line of JSON for each check: its name and its error, or null. Device
"cpu" stands for a GPU, so the calls below go the way that they go there: through row_ops.py and row_optimizer.py.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from triton.runtime import interpreter

from nestpipe.distributed.process_group import World
from nestpipe.embedding import row_ops
from nestpipe.embedding.config import OptimizerConfig
from nestpipe.embedding.row_adam import SEEN, Adam
from nestpipe.embedding.row_ops import (
    ArrivedGrads,
    add_from,
    add_rows,
    copy_from,
    gather_each,
    gather_rows,
    scatter_rows,
)
from nestpipe.embedding.row_optimizer import OPTIMIZERS, gather_slots, update_slots
from nestpipe.ops import negatives
from nestpipe.ops.negatives import plain_sampled_softmax, sampled_softmax
from tests.embedding import test_row_adam as adam
from tests.embedding.test_row_ops import numbers, places, same_bits
from tests.fake_accelerator.device_training import DeviceCase, train_retrieval, train_toy
from tests.ops.test_negatives import make

WIDTHS = (1, 3, 8, 64, 100, 128, 200, 512)
NUM_SLOTS = 60
Columns = dict[str, Tensor]
launched: list[str] = []  # the kernels, launch after launch


@contextmanager
def triton() -> Iterator[None]:
    """Row kernels run in Triton in here, and in C++ outside."""
    row_ops.triton_runs = lambda device_type: True  # type: ignore[assignment]
    try:
        yield
    finally:
        row_ops.triton_runs = lambda device_type: False  # type: ignore[assignment]


def both(call: Callable[[], Columns]) -> None:
    """Makes a call with both kernels and compares what it returns."""
    expected = call()
    before = len(launched)
    with triton():
        found = call()
    assert expected.keys() == found.keys()
    assert len(launched) > before, "no kernel of Triton was launched"
    for name in expected:
        assert same_bits(found[name], expected[name]), f"{name} differs: {found[name]} and {expected[name]}"


def check_copies() -> None:
    for width in WIDTHS:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32)[: 4 if width == 3 else 1]:
            for size in (0, 1, 9):
                both(lambda w=width, d=dtype, s=size: copies(w, d, s))


def copies(width: int, dtype: torch.dtype, size: int) -> Columns:
    column = numbers(width, 30, width).to(dtype)
    gathered = gather_rows(column, places(size, size, 30))
    part = gather_rows(column, places(1, 2, 30), torch.zeros(4, width, dtype=dtype)[1:3])
    other = column.clone()
    scatter_rows(other, torch.randperm(30, generator=torch.Generator().manual_seed(1))[:size], gathered)
    target, sources = torch.zeros(30, width).to(dtype), places(2, size, 20)
    some = sources.div(10, rounding_mode="floor") * 2  # of columns 0 and 2; column 1 has no rows
    columns = [column[5:25], column[:0], other[1:20]]
    copy_from(target, torch.arange(size), (some << 32) + sources % 10, columns)
    return {"gathered": gathered, "part": part, "scattered": other, "copied": target}


def check_sums() -> None:
    for width in WIDTHS:
        for size in (0, 12):
            both(lambda w=width, s=size: sums(w, s))


def sums(width: int, size: int) -> Columns:
    rows = numbers(width, size, width)
    added, moved = numbers(1, 10, width), numbers(2, 15, width)
    add_rows(added, places(size, size, 9), rows)
    columns, sources = [numbers(3, 8, width)[1:], numbers(4, 0, width), numbers(5, 9, width)], places(6, size, 7)
    add_from(moved, torch.arange(size), ((sources % 2) << 33) + sources, columns)
    arrived = ArrivedGrads(columns, torch.tensor([0, 1, 4, 5, 14, 16]), torch.randperm(16, generator=_seeded()))
    unique = numbers(7, 9, width).requires_grad_()
    vectors = gather_each(unique, places(8, size, 9))
    vectors.backward(rows)
    assert unique.grad is not None
    totals = {"arrived": arrived.total(), "part": arrived.at(torch.tensor([3, 0])).total()}
    return {"added": added, "moved": moved, "vectors": vectors.detach(), "grad": unique.grad, **totals}


def check_order() -> None:
    """Sums whose terms cancel, and sums of -0.0."""
    with triton():
        target = torch.zeros(3, 1)
        add_rows(target, torch.tensor([2, 2, 2, 2]), torch.tensor([[1e8], [1.0], [-1e8], [1.0]]))
        assert target.flatten().tolist() == [0, 0, 1]
        zeros = ArrivedGrads([torch.full((3, 2), -0.0)], torch.tensor([0, 1, 3]), torch.arange(3)).total()
        assert torch.signbit(zeros).all()


def check_updates() -> None:
    for kind in OPTIMIZERS:
        for width in WIDTHS:
            both(lambda k=kind, w=width: updates(k, w))


def updates(kind: str, width: int) -> Columns:
    """The columns after an update by gradients and one by what arrived; a third of the places has no slot."""
    optimizer = OPTIMIZERS[kind](OptimizerConfig(optimizer=kind, weight_decay=0.03 if width % 2 else 0.0, eps=1e-7))
    rows, state = numbers(width, NUM_SLOTS, width), optimizer.new_state(NUM_SLOTS, width)
    for step in range(2):
        slots = torch.randperm(NUM_SLOTS, generator=_seeded(step))[:9]
        slots[torch.rand(len(slots), generator=_seeded(step)) < 0.3] = -1
        segments = [numbers(step, 10, width)[1:], numbers(2, 0, width), numbers(step + 2, 11, width)]
        starts = torch.tensor([0, 1, 2, 5, 6, 13, 14, 15, 17, 20])
        arrived = ArrivedGrads(segments, starts, torch.randperm(20, generator=_seeded(step)))
        update_slots(optimizer, rows, state, slots, arrived if step else segments[0], 0.0123, batch=step)
    return {"rows": rows, **state}


def check_missed_steps() -> None:
    """Exact Adam: gaps of one step to more than the horizon, rows of the first batches, rows never updated."""
    ways = set()
    for beta1, beta2, weight_decay in ((0.5, 0.98, 0.3), (0.5, 0.98, 0.0), (0.7, 0.9, 0.0)):  # the last has no series
        optimizer = Adam(OptimizerConfig(optimizer="adam", beta1=beta1, beta2=beta2, weight_decay=weight_decay))
        rows, state = adam.new_rows(optimizer, torch.float32)
        for number in range(60):
            optimizer.steps(torch.float32).record(number, adam.rate(number))
            own, grads = adam.batch(number, 0.02 if number % 20 else 0.3)
            own, grads = own[own > 2], grads[own > 2].float()
            if number in (0, 1, 3, 20, 40, 59):
                both(lambda o=optimizer, r=rows, s=state, n=number, i=own, g=grads: read_and_updated(o, r, s, n, i, g))
                missed, seen = optimizer.missed(number, torch.float32), state[SEEN].flatten().long()
                ways |= {"walks" if one else "never" for one in seen[seen < missed.first_series].tolist()}
                ways |= {one < missed.num_settled for one in seen[seen >= missed.first_series].tolist()}
            update_slots(optimizer, rows, state, own, grads, adam.rate(number), batch=number)
    assert ways == {"never", "walks", True, False}, ways


def read_and_updated(optimizer: Adam, rows: Tensor, state: Columns, number: int, own: Tensor, grads: Tensor) -> Columns:
    """What a batch reads of all rows, and copies of the columns after its update."""
    read = gather_slots(optimizer, rows, state, adam.ALL, batch=number)
    rows, state = rows.clone(), {name: one.clone() for name, one in state.items()}
    update_slots(optimizer, rows, state, own, grads, adam.rate(number), batch=number)
    return {"read": read, "rows": rows, **state}


def check_errors() -> None:
    rows, optimizer = torch.zeros(4, 3), OPTIMIZERS["sgd"](OptimizerConfig(optimizer="sgd"))
    with triton():
        for wrong in (-2, 4):
            slots = torch.tensor([0, wrong, 2])
            for call in (
                lambda s=slots: gather_rows(rows, s),
                lambda s=slots: scatter_rows(rows, s, torch.ones(3, 3)),
                lambda s=slots: update_slots(optimizer, rows, {}, s, torch.ones(3, 3), 0.1),
            ):
                try:
                    call()
                except IndexError as error:
                    assert f"slot {wrong} (place 1 of 3) is not among 4 slots" in str(error)  # noqa: PT017
                else:
                    raise AssertionError("a slot that does not exist was taken")
    assert not rows.any()


def check_training() -> None:
    """Whole steps: routing, windows, gradients and updates call the kernels wherever rows on a device do."""
    for optimizer in ("adam", "rowwise_adagrad"):
        both(lambda one=optimizer: train_toy(World.single(), DeviceCase(optimizer=one, num_batches=5)))
    both(lambda: train_retrieval(World.single(), DeviceCase(num_batches=4), "sasrec", "sampled"))


def check_negatives() -> None:
    """Loss and gradients of the definition; no bit depends on the segment size, and bf16 inputs are added in fp32."""
    for source, dim, num, rounded in (("token", 1, 7, False), ("token", 50, 40, True), ("4", 136, 9, False)):
        case = make(source, dtype=torch.float32, rounded=rounded, dim=dim, num=num, scale=dim**-0.5)
        found = case.run(sampled_softmax, segment=4, backend="triton")
        # fp32 sums of at most a few hundred terms of order ten: 2e-5 is some tens of roundings of the largest value.
        assert_close(found, case.run(plain_sampled_softmax), 2e-5)
        assert all(map(torch.equal, case.run(sampled_softmax, segment=100, backend="triton"), found))
    values = [case.queries.detach().bfloat16(), case.rows.detach().bfloat16()]
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [one.to(dtype).requires_grad_() for one in values]
        loss = sampled_softmax(*leaves, case.positives, case.negatives, blocks=case.blocks, segment=4, backend="triton")
        grads.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(same_bits(one.reshape(-1), other.bfloat16().reshape(-1)) for one, other in zip(*grads, strict=True))


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= tolerance * max(float(other.abs().max()), 1.0)


def check_choice_of_negatives() -> None:
    """A GPU takes the kernels where every token has its own negatives, and a GEMM where they are shared."""
    negatives.triton_runs = lambda device_type: True  # type: ignore[assignment]
    for source, backend in (("token", "triton"), ("2", "triton"), ("sample", "native"), ("pool", "product")):
        case = make(source, dtype=torch.float32)
        assert negatives.choose(case.rows, case.negatives, case.blocks, device=case.rows.device) == backend
    before = len(launched)
    make("token", dtype=torch.float32).run(sampled_softmax, segment=4)
    assert "score_kernel" in launched[before:]


def check_launched() -> None:
    """Every kernel was launched by the checks before."""
    from nestpipe.ops import adam_triton, negatives_triton, rows_triton

    kernels = {
        name
        for module in (adam_triton, rows_triton, negatives_triton)
        for name in vars(module)
        if name.endswith("_kernel")
    }
    assert set(launched) == kernels, kernels.symmetric_difference(launched)


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    run = interpreter.GridExecutor.__call__

    def noted(self: interpreter.GridExecutor, *arguments: object, **more: object) -> object:
        launched.append(self.fn.__name__)
        return run(self, *arguments, **more)

    interpreter.GridExecutor.__call__ = noted
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
            except Exception:
                print(json.dumps([name, traceback.format_exc()[-4000:]]))
            else:
                print(json.dumps([name, None]))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
