"""Attention kernels in Triton's interpreter against the reference: a program, because TRITON_INTERPRET counts at import.

    python -m tests.ops.interpreted_attention             all modes and dtypes on small shapes
    python -m tests.ops.interpreted_attention shapes      all shapes of attention_cases.py; takes minutes
    python -m tests.ops.interpreted_attention mutants     kernels with an error each, which the comparison must see

Prints a line of JSON for each check: its name and its error, or null.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

import nestpipe.ops
from nestpipe.ops import attention_triton, backends
from nestpipe.rng import Rng
from tests.models import test_backbones as backbones
from tests.ops.attention_cases import BIASES, SHAPES, Case, Shape, make
from tests.ops.test_attention_parity import assert_equal_to_reference

MODES = tuple(itertools.product(("silu", "softmax"), ("add", "channel")))
ALL = "position+time+decay"
FLOAT32 = 3e-6  # 50 roundings of the largest value, as for the native kernel
# A rounding to bfloat16 is 2**-9 of a value. Inputs are exact in it; outputs, weights and gradients of scores are rounded,
# and the softmax gradient is a difference of such numbers.
BFLOAT16 = 2**-6
# Blocks of 16: more than one tile of queries and keys, a prefix and targets that begin within a block.
SMALL = Shape((19, 2), prefix=(1, 0), targets=(3, 0), heads=1)
LARGER = Shape((37, 3, 0, 36), prefix=(5, 0, 0, 20), targets=(9, 0, 0, 1), heads=2, qk=9, v=17)
WIDE = Shape((18,), heads=1, qk=50, v=33)
MUTATED = Shape((35,), prefix=(1,), targets=(3,), heads=2)
launched: list[str] = []


def patch_once_per_launch() -> None:
    """The interpreter patches Triton's language in each call of a helper: 60 % of its time. Here once per launch."""
    patched: set[str] = set()
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        launched.append(self.fn.__name__)
        run(self, *arguments, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as 16 bits and would multiply those as integers: here they are widened first."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(one: Any) -> Any:
        if one.dtype.scalar != tl.bfloat16:
            return one
        return interpreter.TensorHandle((one.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def use_blocks(size: int, chunk: int = 256) -> None:
    """Other launch options than those of the table: the same kernels with smaller tiles are tested on shorter sequences."""
    backend = sys.modules[attention_triton.__name__]  # a mutant replaces it
    for table in backend.LAUNCH.values():
        table.update(dict.fromkeys(table, backend.LaunchOptions(size, chunk, 4, 255)))
    backend.BLOCKS[:] = [size]


def case_of(shape: Shape, bias: str = ALL, mode: str = "add", **more: Any) -> Case:
    return make(shape, bias, mode, num_positions=12, **more)  # most sequences are longer than the position table


def agrees(case: Case, kind: str, dtype: torch.dtype) -> None:
    tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
    exact = case.to(dtype).to(torch.float64)  # both sides read the same numbers
    assert_equal_to_reference(exact, "triton", kind, dtype=dtype, tolerance=tolerance)


def twice_the_same(kind: str, mode: str) -> None:
    case = case_of(SMALL, mode=mode).to(torch.float32)
    (out, grads), (again, grads_again) = case.run("triton", kind), case.run("triton", kind)
    for one, other in zip([out, *grads], [again, *grads_again], strict=True):
        assert torch.equal(one, other)


def slices_are_read_in_place() -> None:
    """q, k and v as models make them: columns of one matrix. A layout of heads that kernels cannot read is copied."""
    case = case_of(SMALL).to(torch.float32)
    expected, _ = case.run("triton", "silu")
    wide = [torch.cat([one.detach(), one.detach()], dim=1) for one in (case.q, case.k, case.v)]
    rows = [one[:, :1].requires_grad_() for one in wide]
    columns = [
        one.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in (case.q, case.k, case.v)
    ]
    for q, k, v in (rows, columns):
        assert torch.equal(Case(q, k, v, case.layout, case.bias, case.grad).run("triton", "silu")[0], expected)


def a_model_reaches_the_kernels(name: str) -> None:
    """The gradient of a training loss in float32, with the kernels and without, where `backends.py` chooses them."""
    grads = []
    for backend in ("blocks", "triton"):
        model, num_launched = backbones.build(name, "sampled", torch.float32), len(launched)
        with mock.patch.object(backends, "decide", lambda request, chosen=backend: (chosen, "a test")):
            rng, batch = Rng(0, 3), backbones.batch_of([11, 4, 1])
            rows, leaf = backbones.rows_for(model.lookups(batch, rng), torch.float32)
            loss = model(rows, batch, rng).loss_sum
            grads.append(torch.autograd.grad(loss, [leaf, *model.parameters()], allow_unused=True))
        assert (backend == "triton") == (len(launched) > num_launched)
    for one, other in zip(*grads, strict=True):
        if one is not None:
            assert torch.allclose(one, other, rtol=0, atol=1e-5 * max(1.0, float(one.abs().max())))


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    float32, bfloat16 = torch.float32, torch.bfloat16
    for (kind, mode), bias in itertools.product(MODES, BIASES):
        yield f"{kind} {mode} {bias}", lambda k=kind, m=mode, b=bias: agrees(case_of(SMALL, b, m), k, float32)
    for kind, mode in MODES:
        yield f"{kind} {mode} bfloat16", lambda k=kind, m=mode: agrees(case_of(SMALL, mode=m), k, bfloat16)
        yield f"{kind} {mode} no times", lambda k=kind, m=mode: agrees(case_of(SMALL, mode=m, times=False), k, float32)
    for kind, mode in (MODES[0], MODES[3]):
        yield f"{kind} {mode} larger", lambda k=kind, m=mode: agrees(case_of(LARGER, mode=m), k, float32)
    yield "wide", lambda: (use_blocks(16, 16), agrees(case_of(WIDE), "softmax", float32), use_blocks(16))  # type: ignore[return-value]
    for name in ("empty", "none"):
        yield name, lambda n=name: agrees(case_of(SHAPES[n]), "softmax", float32)
    yield "twice", lambda: twice_the_same("softmax", "add")
    for name in ("hstu", "fuxi", "fuxi-buckets", "sasrec"):
        yield name, lambda n=name: a_model_reaches_the_kernels(n)
    yield "slices", slices_are_read_in_place


def all_shapes() -> Iterator[tuple[str, Callable[[], None]]]:
    """With the launch options of the table."""
    for (kind, mode), name, dtype in itertools.product(MODES, SHAPES, (torch.float32, torch.bfloat16)):
        yield (
            f"{kind} {mode} {name} {dtype}",
            lambda k=kind, m=mode, n=name, d=dtype: agrees(make(SHAPES[n], ALL, m), k, d),
        )


TILES, KERNELS, BIASED, BACKEND = MODULES = (
    "attention_tiles",
    "attention_kernels",
    "attention_bias_kernels",
    "attention_triton",
)
MUTANTS = {
    "the future is seen": (TILES, " & (key <= query)", "", "silu", "add"),
    "targets see each other": (TILES, "((key < history) | (key == query))", "(key <= query)", "silu", "channel"),
    "the next bucket is never taken": (TILES, "guess + 1, guess)", "guess, guess)", "silu", "add"),
    "no decay": (TILES, "bias += decay_bias(tables[3], gaps)", "bias += 0.0", "silu", "channel"),
    "the position table ends early": (TILES, "tables[1] - 1)", "tables[1] - 2)", "silu", "channel"),
    "sums of softmax are not scaled": (KERNELS, "total *= shrink[:, None]", "total *= 1.0", "softmax", "add"),
    "softmax's Jacobian without its row term": (TILES, "(d_weights - dots[:, None])", "d_weights", "softmax", "add"),
    "keys without scale": (KERNELS, "keys, qk_width, total * scale", "keys, qk_width, total", "silu", "add"),
    "no queries behind the first block": (KERNELS, "num_keys), num_keys)", "num_keys), first + B)", "silu", "add"),
    "a diagonal too far": (BIASED, "behind >= 0", "behind > 0", "silu", "add"),
    "gradient of the next bucket": (BIASED, "== bucket, of_bucket", "== bucket + 1, of_bucket", "silu", "channel"),
    "targets and themselves left out": (BACKEND, "distances[0] += upper[0]", "distances[0] += 0", "silu", "add"),
    "lower halves left out": (BACKEND, "distances[:-1] += lower[2:]", "distances[:-1] += 0", "silu", "add"),
    "one head's rows are summed": (BIASED, "+ 1) * heads", "+ 1)", "silu", "channel"),
}
"""Name -> module, its text and what replaces it, kind and mode."""


def load(mutated: str, old: str, new: str, folder: Path) -> None:
    """Imports the modules of the kernels again, one of them with another text."""
    for name in MODULES:
        path = Path(nestpipe.ops.__file__).with_name(f"{name}.py")
        if name == mutated:
            text = path.read_text()
            assert text.count(old) == 1, f"{name}.py has {old!r} {text.count(old)} times"
            path = folder / path.name  # Triton reads the source again
            path.write_text(text.replace(old, new))
        spec = importlib.util.spec_from_file_location(f"nestpipe.ops.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(nestpipe.ops, name, module)
        spec.loader.exec_module(module)


def caught(module: str, old: str, new: str, kind: str, mode: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        load(module, old, new, Path(folder))
        use_blocks(16)
        try:
            agrees(case_of(MUTATED, mode=mode), kind, torch.float32)
        except AssertionError:
            return
    raise AssertionError("not caught")


def mutants() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "none", lambda: agrees(case_of(MUTATED), "silu", torch.float32)
    for name, mutant in MUTANTS.items():
        yield name, lambda one=mutant: caught(*one)


def main(which: str) -> None:
    patch_once_per_launch()
    multiply_bfloat16()
    if which != "shapes":
        use_blocks(16)
    for name, check in {"modes": checks, "shapes": all_shapes, "mutants": mutants}[which]():
        try:
            check()
            error = None
        except Exception as problem:
            error = repr(problem)[-2000:]
        print(json.dumps([name, error]), flush=True)
    print(json.dumps(["launched", sorted(set(launched))]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "modes")
