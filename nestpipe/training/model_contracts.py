"""The contracts of a model (models/contract.py) as checks that run on any class: `nestpipe check-model`.

Exact training in every mode, on any number of ranks and after a resume rests on these contracts. Each check tests one of them and
names the submodule, parameter, attribute or source line that breaks it. Sums are compared in float64, where rounding (about
1e-13) is far below the effect of a broken contract.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.distributed.process_group import World
from nestpipe.jagged import Batch
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.stages import TrainState
from nestpipe.pipeline.train_batches import train_batches
from nestpipe.training.model_under_test import Calls, ModelUnderTest

TOLERANCE = 1e-9  # relative, in float64: far above rounding, far below any broken contract
_NUM_STEPS, _LR = 3, 1e-2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `cause` names what breaks the contract and what to do, and is empty if it holds."""

    contract: str
    cause: str = ""

    @property
    def holds(self) -> bool:
        return not self.cause


def check_model(config: Config, sequences: Sequences, say: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """Runs all checks; `say` is called with the name of each before it runs."""
    subject, findings = ModelUnderTest(config, sequences), list[Finding]()
    couples_batch = subject.new_model().coupling == "batch"
    for contract, check in CHECKS.items():
        say(contract)
        if couples_batch and check in SEPARABLE:  # declared: the engine rejects micro-batches and several ranks
            findings.append(Finding(contract))
            continue
        try:
            findings.append(Finding(contract, check(subject)))
        except Exception as error:  # foreign code may raise anything; the other checks still run
            findings.append(Finding(contract, f"not checked: {type(error).__name__}: {error}"))
    return findings


def check_randomness(subject: ModelUnderTest) -> str:
    """All randomness comes from `rng`: no global generator advances, and two passes are bitwise equal."""
    model, first, second = subject.new_model(), Calls(), Calls()
    outputs = [subject.forward(model, subject.batch, calls).loss_sum for calls in (first, second)]
    if first.global_draws:
        return (
            f"{_where(subject, first.global_draws[0])} draws from a global generator, whose state depends on all earlier draws, so a resumed "
            "or pipelined run differs. Draw from `rng` (nestpipe.rng.dropout, integers, bell)."
        )
    if not torch.equal(*outputs):
        differing = next(
            (a[0] for a, b in zip(first.outputs, second.outputs, strict=False) if not _equal(a[2], b[2])), ""
        )
        return f"two forward passes on the same batch differ, first in {_where(subject, differing)}."
    return ""


def check_indexing(subject: ModelUnderTest) -> str:
    """No gradient flows through `tensor[index]`, whose backward adds equal indices in an unspecified order."""
    model = subject.new_model()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # records the source line of each node
        loss = subject.forward(model, subject.batch).loss_sum
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "IndexBackward0":
            metadata: Any = node.metadata
            return (
                f"{_line_of(metadata.get('traceback_', []))} indexes a tensor that needs a gradient (IndexBackward0); its "
                "backward adds equal indices in an unspecified order. Use index_select, or Rows.gather() for rows."
            )
        todo += [parent for parent, _ in node.next_functions]
    return ""


def check_batch_independence(subject: ModelUnderTest) -> str:
    """A submodule's output for a sample does not depend on the other samples of the batch."""
    model, together = subject.new_model(), Calls()
    subject.forward(model, subject.batch, together)
    # The longest samples first: some layers refuse a single event, which says less than what they mix.
    samples = sorted(enumerate(subject.samples()), key=lambda one: -one[1].num_tokens)
    for place, sample in samples:
        alone = Calls()
        try:
            subject.forward(model, sample, alone)
        except Exception as error:
            return (
                f"{_where(subject, alone.active[-1])} cannot compute a batch of one sample ({type(error).__name__}: {error}); "
                "it mixes the samples of a batch, or does not accept so few."
            )
        for (name, inputs, outputs), (_, inputs_alone, outputs_alone) in zip(
            together.outputs, alone.outputs, strict=False
        ):
            own = _rows_of_sample(subject, place, inputs), _rows_of_sample(subject, place, outputs)
            if own[0] and own[1] and _close(own[0], inputs_alone) and not _close(own[1], outputs_alone):
                return (
                    f"{_where(subject, name)} mixes the samples of a batch: its output for sample {place} differs with and without "
                    "the other samples. Normalise over features (LayerNorm), not over the batch."
                )
    return ""


def check_weight(subject: ModelUnderTest) -> str:
    """`weight` is a sum over samples, so the weight of a batch is the sum over its micro-batches."""
    model = subject.new_model()
    whole, alone = model.weight(subject.batch), [model.weight(sample) for sample in subject.samples()]
    if not (whole > 0 and np.isfinite(whole)):
        return f"{subject.name}.weight(batch) is {whole}; it must be above 0 for a batch with events."
    if abs(whole - sum(alone)) > TOLERANCE * whole:
        return (
            f"{subject.name}.weight gives {whole:g} for a batch and {sum(alone):g} for its {len(alone)} samples together; the "
            "global mean would depend on the number of micro-batches and ranks. Return a sum over samples or events."
        )
    return ""


def check_coupling(subject: ModelUnderTest) -> str:
    """The loss is a sum over samples, or over the groups that `coupling` declares."""
    model = subject.new_model()
    whole = float(subject.forward(model, subject.batch).loss_sum.detach())
    samples = subject.samples()
    alone = [float(subject.forward(model, sample).loss_sum.detach()) for sample in samples]
    if abs(whole - sum(alone)) <= TOLERANCE * max(abs(whole), 1e-30):
        return ""
    weights = [model.weight(sample) for sample in samples]
    mean = sum(loss * weight for loss, weight in zip(alone, weights, strict=True)) / sum(weights)
    if abs(whole - mean) <= TOLERANCE * abs(whole) or abs(whole - sum(alone) / len(alone)) <= TOLERANCE * abs(whole):
        return f"{subject.name}.forward returns a mean ({whole:.6g}); return the sum ({sum(alone):.6g}), the engine divides it."
    return (
        f"{subject.name} has coupling '{model.coupling}', but its loss mixes samples: {whole:.6g} for a batch, {sum(alone):.6g} for "
        "its samples one by one. Declare coupling 'group' (with --data.group-size) or remove the mixing."
    )


def check_gradients(subject: ModelUnderTest) -> str:
    """Gradients of a batch are the sum of those of its samples, parameter by parameter."""
    whole = _gradients(subject, [subject.batch])
    alone = _gradients(subject, subject.samples())
    differing = _differing(whole, alone)
    if differing:
        return f"the gradient of {differing} for a batch is not the sum of those of its samples; is something detached or cached?"
    return ""


def check_micro_batches(subject: ModelUnderTest) -> str:
    """Training with one and with three micro-batches gives the same weights."""
    trained = [_trained(subject, subject.state(micro_batches=number)) for number in (1, 3)]
    differing = _differing(*trained)
    return f"{differing} depends on the number of micro-batches after {_NUM_STEPS} steps." if differing else ""


def check_ranks(subject: ModelUnderTest) -> str:
    """Training on one and on two ranks gives the same weights."""
    store = HashStore()

    def train(rank: int) -> dict[str, Tensor]:
        world = World.from_store(store, rank, 2)
        try:
            return _trained(subject, subject.state(channels=Channels.of(world)), rank, 2)
        finally:
            world.close()

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(train, range(2))
    differing = _differing(_trained(subject, subject.state()), first | second)
    return f"{differing} depends on the number of ranks after {_NUM_STEPS} steps." if differing else ""


def check_modes(subject: ModelUnderTest) -> str:
    """Nested training is bitwise identical to sequential training."""
    trained = []
    for mode in (None, "nested"):
        state = subject.state(micro_batches=2, dtype=torch.float32)
        train_batches(state, subject.batches(), num_batches=_NUM_STEPS, lr=_LR, mode=mode)
        trained.append(_tensors(state))
    differing = _differing(*trained, exact=True)
    return f"{differing} is not bitwise identical in nested and sequential training." if differing else ""


def check_resume(subject: ModelUnderTest) -> str:
    """A state that is saved and loaded continues like one that was not interrupted."""
    batches = list(subject.batches())[: 2 * _NUM_STEPS]
    num_first = len(batches) // 2
    uninterrupted, first = subject.state(dtype=torch.float32), subject.state(dtype=torch.float32)
    train_batches(uninterrupted, batches, num_batches=len(batches), lr=_LR)
    before = _attributes(first.model)
    train_batches(first, batches[:num_first], num_batches=num_first, lr=_LR)
    after = _attributes(first.model)
    resumed = subject.state(dtype=torch.float32)
    resumed.dense.load(first.dense.export())
    for name, table in first.embedding.tables.items():
        resumed.embedding.tables[name].load(table.export())
        resumed.embedding.tables[name].load_rates(table.rates(first.num_steps), first.num_steps)
    resumed.num_steps = first.num_steps
    train_batches(resumed, batches[num_first:], num_batches=len(batches) - num_first, lr=_LR)
    differing = _differing(_tensors(uninterrupted), _tensors(resumed), exact=True)
    if not differing:
        return ""
    unsaved = [name for name, value in after.items() if name not in before or not _same_value(before[name], value)]
    cause = f"'{unsaved[0]}' changes in training and is not saved" if unsaved else "something changes that is not saved"
    return f"{cause}: {differing} differs after a resume. Register it as a parameter or a persistent buffer."


CHECKS: dict[str, Callable[[ModelUnderTest], str]] = {
    "randomness comes from rng": check_randomness,
    "no gradient through tensor[index]": check_indexing,
    "samples are independent": check_batch_independence,
    "weight is a sum over samples": check_weight,
    "loss is a sum, coupling is declared": check_coupling,
    "gradients are sums over samples": check_gradients,
    "micro-batches change nothing": check_micro_batches,
    "ranks change nothing": check_ranks,
    "nested equals sequential": check_modes,
    "a resume changes nothing": check_resume,
}
# Contracts that a loss over the whole batch (coupling 'batch') cannot keep and need not.
SEPARABLE = frozenset((check_coupling, check_gradients, check_micro_batches, check_ranks, check_modes))


def _where(subject: ModelUnderTest, name: str) -> str:
    return f"submodule '{name}' of {subject.name}" if name else f"{subject.name}.forward"


def _rows_of_sample(subject: ModelUnderTest, place: int, values: list[Tensor]) -> list[Tensor]:
    """The rows of one sample, of tensors with a row per event or per sample; empty if a tensor has neither."""
    if subject.batch.groups is not None:
        return []
    first, last = subject.batch.items.offsets[place : place + 2].tolist()
    own = []
    for value in values:
        if value.dim() and len(value) == subject.batch.num_tokens:
            own.append(value[first:last])
        elif value.dim() and len(value) == subject.batch.num_samples:
            own.append(value[place : place + 1])
        else:
            return []
    return own


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _close(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-7, atol=1e-10)
        for one, other in zip(first, second, strict=True)
    )


def _line_of(frames: list[str]) -> str:
    """The innermost line outside torch and this package, as 'file, line n: code'."""
    package = str(traceback.__file__).rpartition("/")[0]
    for frame in reversed(frames):
        place, _, code = frame.strip().partition("\n")
        if "/torch/" not in place and "/nestpipe/" not in place and package not in place and '"<' not in place:
            file, line = place.removeprefix('File "').split('", line ')
            return f"{file.rpartition('/')[2]}, line {line.split(',')[0]}: `{code.strip()}`"
    return "the forward pass"


def _gradients(subject: ModelUnderTest, batches: list[Batch]) -> dict[str, Tensor]:
    """The gradients of all parameters, summed over batches."""
    model = subject.new_model()
    for batch in batches:
        subject.forward(model, batch).loss_sum.backward()
    return {
        f"parameter '{name}'": torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters()
    }


def _trained(subject: ModelUnderTest, state: TrainState, rank: int = 0, world_size: int = 1) -> dict[str, Tensor]:
    train_batches(state, subject.batches(rank, world_size), num_batches=_NUM_STEPS, lr=_LR)
    return _tensors(state)


def _tensors(state: TrainState) -> dict[str, Tensor]:
    """Weights by parameter name and, of the rows that this rank owns, by id."""
    model: Any = state.model
    tensors = {f"parameter '{name}'": one.detach().clone() for name, one in model.named_parameters()}
    for table, content in ((name, one.export()) for name, one in state.embedding.tables.items()):
        tensors |= {
            f"row {row} of table '{table}'": content["rows"][place] for place, row in enumerate(content["ids"].tolist())
        }
    return tensors


def _differing(first: dict[str, Tensor], second: dict[str, Tensor], *, exact: bool = False) -> str:
    """The tensor that differs most between two sets, or '' if none does."""
    worst, name = 0.0 if exact else TOLERANCE, ""
    for key in first | second:
        if key not in first or key not in second:
            return key
        scale = float(first[key].abs().max()) if first[key].numel() else 0.0
        apart = float((first[key] - second[key]).abs().max()) / max(scale, 1e-30) if first[key].numel() else 0.0
        if not apart <= worst:
            worst, name = apart, key
    return name


def _attributes(model: Any) -> dict[str, Any]:
    """Values of modules that no checkpoint holds: non-persistent buffers, plain tensors and numbers."""
    saved = set(model.state_dict())
    unsaved = {name: one.clone() for name, one in model.named_buffers() if name not in saved}
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, Tensor | int | float) and name != "training":
                key = f"{module_name}.{name}".lstrip(".")
                unsaved[key] = value.clone() if isinstance(value, Tensor) else value
    return unsaved


def _same_value(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.equal(before, after)
    return bool(before == after)
