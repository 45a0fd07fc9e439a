"""Dense gradients summed by bucket during the last backward are bitwise identical to one sum after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestpipe.distributed.process_group import World
from nestpipe.embedding.config import DenseConfig
from nestpipe.errors import TrainError
from nestpipe.pipeline import dense_params
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.stages import Clip
from tests.pipeline.dense_towers import WholeDense, every_layer, new_tower, spoiled_message, unlike_whole
from tests.rank_pool import run_ranks

ARMS = {
    1: [({}, ["sequential", "nested"])],
    2: [({}, ["sequential", "dual-buffer", "frozen-window"]), ({"clip": Clip(0.01)}, ["sequential", "nested"])],
    3: [
        ({"micro_batches": 1}, ["nested"]),
        ({"optimizer": "rowwise_adagrad"}, ["sequential", "nested"]),
        ({"clip": Clip(0.01, rows=True)}, ["sequential", "nested"]),
    ],
    4: [({}, ["sequential", "nested", "shared"])],
}


@pytest.mark.parametrize("world_size", ARMS)
def test_every_mode_equals_one_sum_and_one_update(world_size):
    assert run_ranks(world_size, unlike_whole, ARMS[world_size]) == [[]] * world_size


@pytest.mark.parametrize("wrong", ["launched by hook", "not awaited", "in place", "gathers not awaited"])
def test_mistakes_show(wrong):
    found = run_ranks(3, unlike_whole, [({}, ["nested"])], wrong)
    assert any(found), f"{wrong}: equal"


def test_the_flag_names_the_rank_whose_gradient_is_not_finite():
    for world_size in (2, 3):
        expected = f"dense gradient is nan at step 1 on rank {world_size - 1}; no parameter was updated."
        assert run_ranks(world_size, spoiled_message) == [expected] * world_size
    assert "on rank 0;" in run_ranks(2, spoiled_message, "sum over gradients")[0]


def loaded(world: World, content: dict[str, torch.Tensor]) -> tuple[bool, int]:
    state = new_tower(Channels.of(world), {})
    state.dense.load(content)
    found = state.dense.export()
    same = found.keys() == content.keys() and all(torch.equal(found[name], content[name]) for name in content)
    return same, sum(bucket.state["mean"].numel() for bucket in state.dense.buckets)


def saved_whole(world: World) -> dict[str, torch.Tensor]:
    """The dense part as it was saved before its state was sharded."""
    generator = torch.Generator().manual_seed(0)
    empty = new_tower(Channels.of(world), {}, WholeDense).dense.export()
    return {
        name: torch.randn(one.shape, generator=generator) if one.is_floating_point() else one + 7
        for name, one in empty.items()
    }


def test_any_number_of_ranks_loads_a_whole_state_and_keeps_its_pieces():
    content = saved_whole(World.single())
    num_weights = content["state.mean"].shape[1]
    assert content["state.step"].shape == (1, 1)
    for world_size in (1, 2, 3):
        found = run_ranks(world_size, loaded, content)
        assert all(same for same, _ in found)
        assert sum(own for _, own in found) == num_weights
        assert max(own for _, own in found) <= num_weights / world_size + 5


def test_buckets_are_whole_modules_from_the_last_to_the_first(monkeypatch):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 1), nn.Linear(1, 1))
    channel = World.single().channel("dense")
    names = [bucket.names for bucket in DenseParams(model, DenseConfig(), channel).buckets]
    small = ["4.weight", "4.bias", "5.weight", "5.bias"]
    layers = [[f"{layer}.weight", f"{layer}.bias"] for layer in (3, 2, 1, 0)]
    assert names == [layers[0] + small, *layers[1:]]
    monkeypatch.setattr(dense_params, "_MAX_BUCKETS", 2)
    names = [bucket.names for bucket in DenseParams(model, DenseConfig(), channel).buckets]
    assert names == [layers[1] + layers[0] + small, layers[3] + layers[2]]


def test_a_parameter_with_two_gradients_in_one_backward_is_an_error():
    """Its bucket could be sent after the first."""
    model = nn.Linear(2, 2)
    dense, ready = DenseParams(model, DenseConfig(), World.single().channel("dense")), list[int]()

    def twice() -> None:
        with dense.last_backward(ready.append):
            for _ in range(2):
                model(torch.ones(2)).sum().backward()

    with pytest.raises(TrainError, match=r"parameter '(weight|bias)' got two gradients in one backward"):
        twice()
    with every_layer(), dense.last_backward(ready.append):
        pass  # nothing has a gradient
    assert ready == [0, 0]
