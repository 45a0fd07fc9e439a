"""Mixed precision of every model: products in bf16, loss and gradients in fp32, close to the fp32 result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.routing import route
from nestpipe.jagged import Batch, Cursor
from nestpipe.models import retrieval as retrieval_model
from nestpipe.models.config import DCNConfig, FuXiConfig, HSTUConfig, LossConfig, SASRecConfig
from nestpipe.models.dcn import build_dcn
from nestpipe.models.encdec import build_encdec
from nestpipe.models.ranking import build_ranking
from nestpipe.models.retrieval import build_retrieval
from nestpipe.ops import backends
from nestpipe.ops.precision import full_precision, is_mixed, mixed_precision, widened
from nestpipe.rng import Rng
from tests.fake_accelerator.device_training import history_batches
from tests.models import small_ranking, test_encdec

CPU = torch.device("cpu")
SIZES = {"dim": 8, "num_blocks": 2, "num_heads": 2}
BACKBONES = {
    "sasrec": SASRecConfig(**SIZES),
    "sasrec ligr": SASRecConfig(**SIZES, block="ligr"),
    "sasrec meta": SASRecConfig(**SIZES, block="meta"),
    "hstu": HSTUConfig(**SIZES, qk_dim=4, v_dim=4),
    "fuxi": FuXiConfig(**SIZES, qk_dim=4, v_dim=4),
    "fuxi decay": FuXiConfig(**SIZES, qk_dim=4, v_dim=4, time="decay"),
}


def retrieval(backbone: str, kind: str) -> tuple[Any, Batch]:
    loss = LossConfig(kind=kind, num_negatives=4, segment=16)  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"catalogue": torch.arange(40), "max_len": 8, "seed": 0, "counts": torch.arange(1, 41)}
    return build_retrieval(BACKBONES[backbone], loss, **sizes), next(history_batches(0))


def ranking(kind: str) -> tuple[Any, Batch]:
    batch = small_ranking.history([3, 5, 1, 4], seed=1)
    batch = replace(batch, cursor=Cursor(0, 0), target_features=batch.event_features, targets=batch.items)
    if kind == "dcn":
        config = DCNConfig(dim=4, hidden=(8,), num_cross=2, features=("item", "hour", "tags", "price", "age"))
        return build_dcn(config, small_ranking.SCHEMA, seed=0), batch
    config = replace(small_ranking.CONFIG, num_blocks=1, backbone=kind)
    return build_ranking(config, small_ranking.SCHEMA, max_len=small_ranking.MAX_LEN, seed=0), batch


def generative(**settings: Any) -> tuple[Any, Batch]:
    config = replace(test_encdec.SMALL, **{"reasoning_dim": 4, **settings})
    batch = test_encdec.batch_of([[0, 5, 9, 2], [7, 3, 1]], scenario=1, trigger=4, reasoning=0.5)
    batch = replace(batch, groups=torch.zeros(2, dtype=torch.int64))
    return build_encdec(config, test_encdec.TRIE, max_len=6, seed=3), batch


MODELS: dict[str, Any] = {
    **{f"{one}, sampled": (retrieval, one, "sampled") for one in BACKBONES},
    "hstu, full": (retrieval, "hstu", "full"),
    "fuxi, in batch": (retrieval, "fuxi", "in_batch"),
    **{f"ranking {one}": (ranking, one) for one in ("hstu", "fuxi", "dcn")},
    "generative": (generative,),
    "generative, users": (lambda: generative(user_rows=True, softmax="full", label_smoothing=0.1),),
    "generative, prefixes": (lambda: generative(prefix_vectors=7),),
    "generative, q2i": (lambda: generative(q2i=0.5),),
}


def computed(model: Any, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients of weights and rows."""
    rng = Rng(0, 0)
    plan = route([model.lookups(batch, rng)], sorted(one.name for one in model.tables), Owners(1, 1))
    dims = {one.name: one.dim for one in model.tables}
    tables = {
        name: torch.sin(one.ids.unsqueeze(1) + torch.arange(dims[name])).requires_grad_()
        for name, one in plan.tables.items()
    }
    model.zero_grad()
    with mixed_precision(CPU, dtype):
        loss = model(plan.rows(0, tables), batch, rng).loss_sum
    loss.backward()
    grads = {name: one.grad for name, one in (*model.named_parameters(), *tables.items()) if one.grad is not None}
    return loss.detach(), {name: one.clone() for name, one in grads.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_all_gradients_are_fp32_and_near(name: str) -> None:
    build, *arguments = MODELS[name]
    model, batch = build(*arguments)
    assert not is_mixed(CPU)
    exact, exact_grads = computed(model, batch, torch.float32)
    loss, grads = computed(model, batch, torch.bfloat16)
    assert loss.dtype == torch.float32
    assert {one.dtype for one in grads.values()} == {torch.float32}
    assert loss != exact, "nothing ran in bf16"
    # bf16 keeps 8 bits: each product is off by up to 0.4 %, and a small network multiplies a few of them.
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.0)
    assert grads.keys() == exact_grads.keys()
    # A gradient near the kink of a ReLU may flip, so all of them together are compared.
    flat, exact_flat = (torch.cat([one[name].flatten() for name in grads]) for one in (grads, exact_grads))
    assert (flat - exact_flat).norm() / exact_flat.norm() < 0.05


def test_attention_of_mixed_precision_runs_in_fp32_where_the_kernel_is_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    choose = backends.choose
    monkeypatch.setattr(backends, "choose", lambda request: asked.append(request.dtype) or choose(request))
    for backbone in ("hstu", "sasrec"):
        computed(*retrieval(backbone, "sampled"), torch.bfloat16)
    assert set(asked) == {torch.float32}


@pytest.mark.parametrize("kind", ["sampled", "full", "in_batch"])
def test_losses_are_computed_in_full_precision(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sampled_softmax" if kind == "sampled" else f"{kind}_softmax"
    loss_of, seen = getattr(retrieval_model, name), []

    def watched(queries: torch.Tensor, items: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append((is_mixed(CPU), queries.dtype, items.dtype))
        return loss_of(queries, items, *rest, **more)

    monkeypatch.setattr(retrieval_model, name, watched)
    computed(*retrieval("hstu", kind), torch.bfloat16)
    assert seen == [(False, torch.float32, torch.float32)]


def test_a_region_of_full_precision_is_left_as_it_was_entered() -> None:
    one = torch.ones(2, 2)
    with mixed_precision(CPU, torch.bfloat16):
        assert (one @ one).dtype == torch.bfloat16
        with full_precision(CPU):
            assert (one @ one).dtype == torch.float32
        assert (one @ one).dtype == torch.bfloat16
        assert widened(one @ one).dtype == torch.float32
    assert (one @ one).dtype == torch.float32
    assert widened(one.double()).dtype == torch.float64
