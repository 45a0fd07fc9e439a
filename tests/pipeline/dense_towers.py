"""A model of several layers for the tests of dense gradients, the old way to sum them, and what ranks run with both.

Every layer is a bucket of its own. The backward pauses before the first layer, so that the buckets of later layers are sent
while it runs. `rare` has a gradient on odd ranks only, `unused` on none. Of the toy batches one has no sample on rank 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from nestpipe.distributed.process_group import World
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.embedding.row_optimizer import update_slots
from nestpipe.errors import TrainError
from nestpipe.jagged import Batch
from nestpipe.models.contract import Output
from nestpipe.pipeline import build_state as building
from nestpipe.pipeline import dense_params
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.dense_params import DenseBucket, DenseParams
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Clip, Rates, TrainState
from nestpipe.rng import Rng
from tests.pipeline.toy_training import toy_batches

NUM_STEPS = 6  # of the toy batches, number 3 has a sample that this model spoils and number 5 is empty on rank 1
_PAUSE_S = 0.003


class Pause(torch.autograd.Function):
    """Sleeps in its backward."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(_PAUSE_S)
        return grad


class Tower(nn.Module):
    """Layers over every row. A spoiled sample makes one gradient of the last layer, the first bucket, not finite."""

    tables = (TableSpec(name="item", dim=4, init_std=1.0),)
    coupling = "none"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second, self.rare, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return {"items": Lookup(table="item", ids=batch.items.values)}

    def weight(self, batch: Batch) -> float:
        return float(batch.num_tokens)

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        hidden = torch.tanh(self.second(Pause.apply(torch.tanh(self.first(rows["items"].gather())))))
        if bool((batch.sample_ids // 10 % 2 == 1).any()):  # samples of odd ranks
            hidden = hidden + self.rare(hidden)
        loss = self.last(hidden).square().sum()
        one = self.last.weight[0, 0]
        spoiled = (one - one.detach()).abs().sqrt()  # 0, with a gradient that is not a number
        return Output(loss + spoiled if bool((batch.sample_ids == -1).any()) else loss)


class WholeDense(DenseParams):
    """The obvious way: every rank adds all gradients of all ranks in rank order, then updates all weights."""

    def __init__(self, module: nn.Module, config: DenseConfig, channel: Any):
        super().__init__(module, config, channel)
        self._state, self._factor = self._new_state(self.weights), 1.0

    def reduce(self, ready: Any, on_sum: Any, *, where: str = "") -> None:
        whole = [torch.empty_like(self.grads) for _ in range(self.channel.world.size)]
        self.channel.exchange("sum", [self.grads] * len(whole), whole).wait()
        self.total = whole[0]
        for other in whole[1:]:
            self.total = self.total + other

    def own_square(self) -> float:
        return self.total.double().square().sum().item() if self.channel.world.rank == 0 else 0.0

    def advance(self, bucket: DenseBucket, lr: float, factor: float = 1.0, *, staged: bool) -> None:
        self._factor = factor

    def commit(self, lr: float, *, staged: bool) -> None:
        total, row = (self.total * self._factor).unsqueeze(0), torch.zeros(1, dtype=torch.int64)
        update_slots(self._optimizer, self.weights.unsqueeze(0), self._state, row, total, lr)

    def export(self, *, everywhere: bool = True) -> dict[str, Tensor]:
        named = {f"weights.{name}": one.detach().clone() for name, one in self._named.items()}
        return {**named, **{f"state.{name}": values.clone() for name, values in self._state.items()}}


@contextmanager
def every_layer() -> Iterator[None]:
    """Each layer is a bucket, however small."""
    with patch.object(dense_params, "_MIN_BUCKET_BYTES", 1), patch.object(dense_params, "_MAX_BUCKETS", 1000):
        yield


def new_tower(channels: Channels, settings: dict[str, Any], dense: type[DenseParams] = DenseParams) -> TrainState:
    with every_layer(), patch.object(building, "DenseParams", dense):
        return building.build_state(
            Tower(),
            embedding=EmbeddingConfig(num_buckets=4),
            dense=DenseConfig(optimizer=settings.get("optimizer", "adam"), weight_decay=0.01),
            pipeline=PipelineConfig(mode="sequential", micro_batches=settings.get("micro_batches", 2)),
            channels=channels,
            skip_nonfinite=settings.get("skip_nonfinite", True),
        )


def trained(channels: Channels, settings: dict[str, Any], mode: str, dense: type[DenseParams]) -> dict[str, bytes]:
    """The dense part after some steps."""
    state, clip = new_tower(channels, settings, dense), settings.get("clip", Clip())
    batches = islice(toy_batches(state.control.world.rank), NUM_STEPS)
    if mode == "sequential":
        for number, batch in enumerate(batches):
            step(state, batch, _rates(number, clip))
    else:
        chosen = {"chunks": "shared"} if mode == "shared" else {}
        schedule = Schedule.of("nested" if chosen else mode, settings.get("micro_batches", 2), clip_rows=clip.rows, **chosen)  # type: ignore[arg-type]  # fmt: skip
        Runner(state, schedule).run(
            BatchFeed(batches=batches, rates=lambda number: _rates(number, clip), num_batches=NUM_STEPS)
        )
    return {name: values.numpy().tobytes() for name, values in state.dense.export().items()}


def _rates(number: int, clip: Clip) -> Rates:
    return Rates(dense=0.02 / (number + 1), rows=0.05, clip=clip)


def unlike_whole(
    world: World, arms: list[tuple[dict[str, Any], list[str]]], wrong: str | None = None
) -> list[tuple[dict[str, Any], str, str]]:
    """What differs between the old sum and a mode: settings, mode, name of a tensor."""
    channels, found = Channels.of(world), []
    for settings, modes in arms:
        expected = trained(channels, settings, "sequential", WholeDense)
        for mode in modes:
            with WRONG[wrong]() if wrong else nullcontext():
                content = trained(channels, settings, mode, DenseParams)
            assert content.keys() == expected.keys()
            found += [(settings, mode, name) for name in expected if content[name] != expected[name]]
    return found


def spoiled_message(world: World, wrong: str | None = None) -> str:
    """How training ends when one gradient of the first bucket is not finite on the last rank."""
    channels, settings = Channels.of(world), {"skip_nonfinite": False, "micro_batches": 1}
    state = new_tower(channels, settings)
    batches = list(islice(toy_batches(world.rank), 1))
    batches[0].sample_ids[1] = 10  # `rare` has a gradient, so that its bucket does not hold up those after it
    if world.rank == world.size - 1:
        batches[0].sample_ids[0] = -1
    feed = BatchFeed(batches=iter(batches), rates=lambda number: _rates(number, Clip()), num_batches=1)
    try:
        with WRONG[wrong]() if wrong else nullcontext(), patch(f"{__name__}._PAUSE_S", 0.2):
            Runner(state, Schedule.of("nested", 1)).run(feed)
    except TrainError as error:
        return str(error)
    return "no error"


def _sum_over_gradients() -> AbstractContextManager[object]:
    """Sums overwrite local gradients, so the finite flag, taken after the backward, sees other ranks' values."""
    right = DenseParams._sum

    def wrong(self: DenseParams, bucket: DenseBucket) -> DenseBucket:
        found = right(self, bucket)
        self._own(self.grads, bucket.span).copy_(dense_params._summed(found))
        return found

    return patch.object(DenseParams, "_sum", wrong)


@contextmanager
def _launched_by_hook() -> Iterator[None]:
    """Buckets are launched in the order in which hooks mark them."""
    right, reduce, marked = DenseParams.last_backward, DenseParams.reduce, list[int]()

    def last_backward(self: DenseParams, on_ready: Any) -> AbstractContextManager[None]:
        marked.clear()
        return right(self, lambda number: (on_ready(number), marked.append(number))[0])

    def in_order_of_marks(self: DenseParams, ready: Any, on_sum: Any, *, where: str = "") -> None:
        in_layout = self.buckets
        for number in range(len(in_layout)):
            ready(number)
        while len(marked) < len(in_layout):
            time.sleep(0.0001)
        self.buckets = [in_layout[number] for number in marked]
        reduce(self, ready, on_sum, where=where)
        self.buckets = in_layout

    with (
        patch.object(DenseParams, "last_backward", last_backward),
        patch.object(DenseParams, "reduce", in_order_of_marks),
    ):
        yield


def _not_awaited() -> AbstractContextManager[object]:
    """A bucket is sent without waiting for its backward."""
    right = DenseParams.reduce

    def wrong(self: DenseParams, ready: Any, on_sum: Any, *, where: str = "") -> None:
        right(self, lambda number: ready(number) if number == 0 else None, on_sum, where=where)

    return patch.object(DenseParams, "reduce", wrong)


def _in_place() -> AbstractContextManager[object]:
    """The update does not wait for the flags: a batch that must be skipped changes the state."""
    right = DenseParams.advance

    def wrong(self: DenseParams, bucket: DenseBucket, lr: float, factor: float = 1.0, *, staged: bool) -> None:
        right(self, bucket, lr, factor, staged=False)

    return patch.object(DenseParams, "advance", wrong)


@contextmanager
def _gathers_not_awaited() -> Iterator[None]:
    """New weights are taken over before those of a late rank have arrived."""
    right = DenseParams.advance

    def late(self: DenseParams, bucket: DenseBucket, lr: float, factor: float = 1.0, *, staged: bool) -> None:
        time.sleep(0.03 if self.channel.world.rank == 0 else 0)
        right(self, bucket, lr, factor, staged=staged)

    with patch.object(DenseParams, "advance", late), patch.object(DenseParams, "wait_gathers", lambda self: None):
        yield


WRONG = {
    "sum over gradients": _sum_over_gradients,
    "launched by hook": _launched_by_hook,
    "not awaited": _not_awaited,
    "in place": _in_place,
    "gathers not awaited": _gathers_not_awaited,
}
