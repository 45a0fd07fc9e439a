"""Small trainings on a device, for `nestpipe doctor --device`: the sequential step is the reference of every schedule.

Batches are made up, so that nothing is read or written. On an accelerator they are large enough for its streams to overlap.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from nestpipe.checkpoint.difference import same_bits
from nestpipe.distributed.process_group import BACKENDS, World
from nestpipe.embedding.config import Chunking, EmbeddingConfig
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import FuXiConfig, HSTUConfig, LossConfig, SASRecConfig
from nestpipe.models.retrieval import build_retrieval
from nestpipe.ops import device_memory
from nestpipe.ops.precision import bf16_problem
from nestpipe.pipeline import semi_async, sequential
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Mode, Schedule
from nestpipe.pipeline.stages import BatchWork, Clip, Rates, TrainState
from nestpipe.training.device import exact_device
from nestpipe.training.device_checks import CPU, AbsentError, DeviceProbe, on_accelerator, require
from nestpipe.training.process import exact_arithmetic

MAX_SYNCS = 2  # of the host per step
_MICRO_BATCHES = 2
_NO_CLIP = Clip()
_SYNC_WARNING = "synchroniz"  # in torch's text


@dataclass(frozen=True, slots=True)
class TrialSize:
    """The size of a training."""

    num_samples: int
    max_len: int
    num_items: int
    dim: int
    num_batches: int

    @staticmethod
    def of(device: torch.device) -> TrialSize:
        """Large on hardware; small on the CPU, and on an accelerator that a test has registered."""
        if device.type in BACKENDS and device.type != "cpu":
            return TrialSize(num_samples=128, max_len=64, num_items=200_000, dim=64, num_batches=12)
        return TrialSize(num_samples=6, max_len=8, num_items=600, dim=8, num_batches=4)


@dataclass(frozen=True, slots=True)
class TrialCase:
    """One training; without a mode its stages run one after the other."""

    mode: Mode | None = None
    depth: int = 1
    chunks: Chunking = 1
    stale: bool = False
    clip: Clip = _NO_CLIP
    optimizer: str = "lazy_adam"
    backbone: str = "hstu"
    loss: str = "sampled"
    precision: torch.dtype = torch.float32
    device_bytes: int = 0

    def rates(self, number: int) -> Rates:
        return Rates(dense=0.02 / (number + 1), rows=0.05 / (number + 1), clip=self.clip)


_NESTED = TrialCase(mode="nested")
SCHEDULES = {
    "serial": TrialCase(mode="serial"),
    "dual-buffer": TrialCase(mode="dual-buffer", depth=2),
    "frozen-window": TrialCase(mode="frozen-window", optimizer="adagrad"),
    "nested": _NESTED,
    "nested at depth 3": replace(_NESTED, depth=3),
    "nested in 3 chunks": replace(_NESTED, chunks=3),
    "nested in shared chunks": replace(_NESTED, chunks="shared", depth=2),
    "nested with clipping": replace(_NESTED, clip=Clip(0.5, rows=True), optimizer="adagrad"),
    "nested with exact Adam": replace(_NESTED, optimizer="adam"),
    "nested with stale rows": replace(_NESTED, stale=True),
    "nested SASRec with full softmax": replace(_NESTED, backbone="sasrec", loss="full"),
    "nested FuXi with in-batch softmax": replace(_NESTED, backbone="fuxi", loss="in_batch"),
}


def training_probes() -> Iterator[DeviceProbe]:
    """Checks of whole training steps."""
    yield DeviceProbe("losses of the CPU", "models and losses", check_losses)
    for name, case in SCHEDULES.items():
        yield DeviceProbe(f"bitwise sequential: {name}", "schedules", _same_as_sequential(case))
    yield DeviceProbe("bitwise sequential: nested in bf16", "mixed precision", check_bf16)
    yield DeviceProbe("device buffer smaller than the table", "device row buffer", check_small_buffer)
    yield DeviceProbe(f"at most {MAX_SYNCS} waits of the host per step", "host waits", check_host_waits)


def trial_batches(size: TrialSize) -> Iterator[Batch]:
    """Histories with times, targets and groups."""
    for number in range(1000):
        samples = range(size.num_samples)
        lengths = [(3 * sample + number) % (size.max_len - 1) + 2 for sample in samples]
        events = [
            [(7 * place * (place + sample) + 13 * number + sample) % size.num_items for place in range(length)]
            for sample, length in enumerate(lengths)
        ]
        targets = [[*row[1:], (row[0] + 1) % size.num_items] for row in events]
        times = [[100 * place**2 for place in range(length)] for length in lengths]
        asked = [[100 * (place + 1) ** 2 for place in range(length)] for length in lengths]
        items, after, at, then = (Jagged.from_rows(one) for one in (events, targets, times, asked))
        yield Batch(
            cursor=Cursor(0, number),
            sample_ids=torch.arange(size.num_samples) + size.num_samples * number,
            items=items,
            times=at,
            query_times=then,
            targets=after,
            groups=torch.arange(size.num_samples) // 3,
        )


def trained(device: torch.device, case: TrialCase, size: TrialSize | None = None) -> dict[str, Tensor]:
    """The loss of each step, and dense part and rows at the end; stopped and continued in the middle."""
    size = size or TrialSize.of(device)
    with exact_device(device), exact_arithmetic(torch.get_num_threads()):
        state, batches, losses = _new_state(device, case, size), trial_batches(size), list[float]()
        half = size.num_batches // 2
        for num_batches in (half, size.num_batches - half):
            some = islice(batches, num_batches)
            if case.mode is None:
                losses += _in_order(state, case, some)
            else:
                _overlapped(state, case, list(some), losses)
        content = {f"dense.{name}": one for name, one in state.dense.export().items()}
        for table, own in state.embedding.tables.items():
            content |= {f"{table}.{name}": one for name, one in own.export().items()}
    return {"loss": torch.tensor(losses, dtype=torch.float64), **content}


reference = cache(trained)  # several schedules have the same


def _new_state(device: torch.device, case: TrialCase, size: TrialSize) -> TrainState:
    shape: dict[str, Any] = {"dim": size.dim, "num_blocks": 1, "num_heads": 2, "dropout": 0.2}
    heads: dict[str, Any] = {"qk_dim": size.dim // 2, "v_dim": size.dim // 2}
    configs = {"sasrec": SASRecConfig(**shape), "hstu": HSTUConfig(**shape, **heads)}
    model = build_retrieval(
        configs.get(case.backbone) or FuXiConfig(**shape, **heads),
        LossConfig(kind=case.loss, num_negatives=4, segment=64),  # type: ignore[arg-type]
        catalogue=torch.arange(size.num_items),
        max_len=size.max_len,
        seed=0,
        counts=torch.arange(1, size.num_items + 1),
    )
    return build_state(
        model,
        embedding=EmbeddingConfig(optimizer=case.optimizer, device_bytes=case.device_bytes),  # type: ignore[arg-type]
        pipeline=PipelineConfig(micro_batches=_MICRO_BATCHES, staleness=int(case.stale)),
        channels=Channels.of(World.single(device=device)),
        precision=case.precision,
    )


def _in_order(state: TrainState, case: TrialCase, batches: Iterator[Batch]) -> list[float]:
    means, before = [], None
    for batch in batches:
        rates = case.rates(state.num_steps)
        if case.stale:
            before = semi_async.step(state, batch, rates, before)
            means.append(before.means)
        else:
            means.append(sequential.step(state, batch, rates))
    if before is not None:
        semi_async.finish(state, before, at_barrier=True)
    return [one["loss"] for one in means]


def _overlapped(state: TrainState, case: TrialCase, batches: list[Batch], losses: list[float]) -> None:
    assert case.mode is not None
    schedule = Schedule.of(
        case.mode,
        _MICRO_BATCHES,
        depth=case.depth + case.stale,
        clip_rows=case.clip.rows and case.clip.norm > 0,
        stale=case.stale,
        chunks=case.chunks,
    )

    def on_step(work: BatchWork) -> None:
        losses.append(work.means["loss"])

    Runner(state, schedule).run(
        BatchFeed(batches=iter(batches), rates=case.rates, num_batches=len(batches), on_step=on_step)
    )


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Raises CheckFailedError with the tensors that differ."""
    differing = [name for name, one in expected.items() if name not in found or not same_bits(one, found[name])]
    require(not differing, f"{len(differing)} of {len(expected)} tensors differ: {', '.join(differing[:4])}")
    return f"{len(expected)} tensors after {len(expected['loss'])} steps"


def _same_as_sequential(case: TrialCase) -> Callable[[torch.device], str]:
    def check(device: torch.device) -> str:
        return require_equal(trained(device, case), reference(device, replace(case, mode=None, depth=1, chunks=1)))

    return check


def check_losses(device: torch.device) -> str:
    """The losses of a device are near those of the CPU: other kernels, other order of sums."""
    if device.type == "cpu":
        raise AbsentError("the device is the CPU")
    size = TrialSize.of(device)
    size = replace(size, num_samples=min(size.num_samples, 32), num_items=600, num_batches=4)  # for the CPU
    largest = 0.0
    for backbone, loss in (("hstu", "sampled"), ("sasrec", "full"), ("fuxi", "in_batch")):
        case = TrialCase(backbone=backbone, loss=loss)
        found, expected = (trained(where, case, size)["loss"] for where in (device, CPU))
        error = float(((found - expected) / expected).abs().max())
        require(error < 1e-3, f"{backbone}, {loss}: losses differ by {error:.1e}, limit 1e-03")
        largest = max(largest, error)
    return f"within {largest:.0e}, over {size.num_batches} steps of three models"


def check_bf16(device: torch.device) -> str:
    """Mixed precision repeats bitwise, and its losses are near those of fp32."""
    if problem := bf16_problem(device):
        raise AbsentError(problem)
    case = TrialCase(precision=torch.bfloat16)
    found = trained(device, replace(case, mode="nested"))
    text = require_equal(found, trained(device, case))
    first, expected = found["loss"][0], reference(device, TrialCase())["loss"][0]
    error = float(((first - expected) / expected).abs())
    require(0 < error < 0.02, f"the first loss differs from fp32 by {error:.1e}; between 0 and 2e-02 is expected")
    return f"{text}; first loss within {error:.0e} of fp32"


def check_small_buffer(device: torch.device) -> str:
    """A buffer for some of the rows gives the result of one for all of them."""
    if device.type == "cpu":
        raise AbsentError("rows of the CPU are in host memory as a whole")
    size = replace(TrialSize.of(device), num_batches=12)
    whole = trained(device, _NESTED, size)
    num_rows = len(whole["item.ids"])
    each = sum(one[0].nbytes for name, one in whole.items() if name.startswith("item.") and name != "item.ids")
    small = (num_rows * 3 // 4) * each
    text = require_equal(trained(device, replace(_NESTED, device_bytes=small), size), whole)
    return f"{small:,} bytes for a table of {num_rows * each:,}; {text}"


def check_host_waits(device: torch.device) -> str:
    """How often the host waits for the device in a step: by the difference of a longer and a shorter training."""
    on_accelerator(device)
    size = TrialSize.of(device)
    counts = []
    for num_batches in (4, 12):
        with counted_waits(device) as count:
            trained(device, TrialCase(), replace(size, num_batches=num_batches))
        counts.append(count())
    per_step = (counts[1] - counts[0]) / 8
    require(per_step <= MAX_SYNCS, f"{per_step:.1f} waits per step")
    return f"{per_step:.1f} per step"


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Callable[[], int]]:
    """Counts explicit waits of the host (downloads) and those that torch reports of its operators."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        raise AbsentError(f"torch cannot report the waits of {device.type}")
    before = device_memory.num_downloads()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            yield (
                lambda: device_memory.num_downloads() - before + sum(_SYNC_WARNING in str(one.message) for one in seen)
            )
        finally:
            module.set_sync_debug_mode("default")
