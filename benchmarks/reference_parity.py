"""Our backbones against the published modules with the same weights: outputs and every gradient, in float32 (fbgemm's CPU operators have no float64).

    git clone https://github.com/facebookresearch/generative-recommenders references/generative-recommenders
    git clone https://github.com/USTC-StarTeam/FuXi-alpha references/FuXi-alpha
    make peers && .venv-peers/bin/python benchmarks/reference_parity.py

A reference that is not in the folder is skipped, with the reason. Exit code 1 if a difference is above 1e-5.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor, nn

from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import FuXiConfig, HSTUConfig, LossConfig, RetrievalConfig, SASRecConfig
from nestpipe.models.retrieval import build_retrieval

LENGTHS = (7, 1, 12, 5)
MAX_LEN, DIM, HEADS, KEYS, VALUES, BUCKETS = 12, 8, 2, 3, 5, 128
LIMIT = 1e-5


@dataclass(frozen=True)
class Case:
    """A reference, where it is from, our model, and the function that gives its output and weights under our names."""

    name: str
    repository: str
    model: RetrievalConfig
    run: Callable[[nn.Module, Tensor, Batch], tuple[Tensor, dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]]]


def batch_of() -> Batch:
    items = Jagged.from_rows([list(range(length)) for length in LENGTHS])
    times = torch.cat([torch.arange(length) ** 3 * 977 + 1_000_000 for length in LENGTHS])
    # The references have no place for the request behind a sequence of full length: its time is that of the last event.
    following = torch.cat(
        [torch.arange(1, length + 1).clamp(max=MAX_LEN - 1) ** 3 * 977 + 1_000_000 for length in LENGTHS]
    )
    return Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.arange(len(LENGTHS)),
        items=items,
        times=items.with_values(times),
        query_times=items.with_values(following),
    )


def same(tensor: Tensor) -> Tensor:
    return tensor


def padded(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, times with the one of the request behind them, and the causal mask, as the references take them."""
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    times = torch.zeros(len(LENGTHS), MAX_LEN, dtype=torch.int64)
    assert batch.query_times is not None
    assert batch.times is not None
    for row, length in enumerate(LENGTHS):
        own = batch.times.values[offsets[row] : offsets[row + 1]]
        times[row, :length] = own
        if length < MAX_LEN:
            times[row, length] = batch.query_times.values[offsets[row + 1] - 1]
    mask = torch.ones(MAX_LEN, MAX_LEN).tril()
    return offsets, times, mask


def by_distance(weights: Tensor) -> Tensor:
    """The bias of distances 0 .. MAX_LEN - 1 from one of 2 N - 1 entries."""
    return weights[: len(weights) // 2 + 1].flip(0)


def bias_module(cls: Any) -> nn.Module:
    built: nn.Module = cls(
        max_seq_len=MAX_LEN,
        num_buckets=BUCKETS,
        bucketization_fn=lambda gap: (torch.log(torch.abs(gap).clamp(min=1)) / 0.301).long(),
    )
    return built


def run_hstu(ours: nn.Module, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    theirs = importlib.import_module("generative_recommenders.research.modeling.sequential.hstu")
    offsets, times, mask = padded(batch)
    weights: dict[str, Any] = {}
    for number in range(2):
        unit = drawn(
            theirs.SequentialTransductionUnitJagged(
                embedding_dim=DIM,
                linear_hidden_dim=VALUES,
                attention_dim=KEYS,
                dropout_ratio=0.0,
                attn_dropout_ratio=0.0,
                num_heads=HEADS,
                linear_activation="silu",
                relative_attention_bias_module=bias_module(theirs.RelativeBucketedTimeAndPositionBasedBias),
            )
        )
        x = unit(x, offsets, times, mask)[0]
        here = f"blocks.{number}."
        weights |= {
            f"{here}uvqk": (unit._uvqk, same),
            f"{here}position": (unit._rel_attn_bias._pos_w, by_distance),
            f"{here}time": (unit._rel_attn_bias._ts_w, same),
            f"{here}out.weight": (unit._o.weight, same),
            f"{here}out.bias": (unit._o.bias, same),
        }
    return x, weights


def run_fuxi(ours: nn.Module, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    theirs = importlib.import_module("generative_recommenders.modeling.sequential.fuxi")
    offsets, times, mask = padded(batch)
    weights: dict[str, Any] = {}
    # Theirs has the channels of a head side by side (position, time, content), ours those of all heads (content, position, time).
    order = torch.arange(3 * HEADS * VALUES).reshape(HEADS, 3, VALUES)[:, [2, 0, 1]].transpose(0, 1).flatten()
    others = torch.arange(3 * HEADS * VALUES, 3 * HEADS * VALUES + HEADS * (VALUES + 2 * KEYS))
    columns = torch.cat([order, others])
    for number in range(2):
        unit = drawn(
            theirs.FuXiBlockJagged(
                embedding_dim=DIM,
                linear_hidden_dim=VALUES,
                attention_dim=KEYS,
                dropout_ratio=0.0,
                attn_dropout_ratio=0.0,
                num_heads=HEADS,
                linear_activation="silu",
                relative_attention_bias_module=bias_module(theirs.SeperatedRelativeBucketedTimeAndPositionBasedBias),
            )
        )
        x = unit(x, offsets, times, mask)[0]
        here, feed = f"blocks.{number}.", unit._mffn
        weights |= {
            f"{here}uvqk": (unit._uvqk, lambda one: one[:, columns]),
            f"{here}position": (unit._rel_attn_bias._pos_w, by_distance),
            f"{here}time": (unit._rel_attn_bias._ts_w, same),
            f"{here}out.weight": (feed.lin0.weight, lambda one: one[:, order]),
            f"{here}out.bias": (feed.lin0.bias, same),
            f"{here}gate.weight": (feed.lin1.weight, same),
            f"{here}up.weight": (feed.lin3.weight, same),
            f"{here}down.weight": (feed.lin2.weight, same),
        }
    return x, weights


def run_sasrec(ours: nn.Module, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    theirs = importlib.import_module("generative_recommenders.research.modeling.sequential.sasrec")
    later = torch.ones(MAX_LEN, MAX_LEN, dtype=torch.bool).triu(1)
    weights: dict[str, Any] = {}
    rows = list(x.split(LENGTHS))
    for number in range(2):
        attention = drawn(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
        feed = drawn(theirs.StandardAttentionFF(DIM, DIM, "relu", 0.0))
        shell = theirs.SASRec.__new__(theirs.SASRec)
        nn.Module.__init__(shell)
        shell._embedding_dim = DIM
        shell.attention_layers, shell.forward_layers = nn.ModuleList([attention]), nn.ModuleList([feed])
        next_rows = []
        for row in rows:
            shell._attn_mask = later[: len(row), : len(row)]
            next_rows.append(shell._run_one_layer(0, row[None], torch.ones(1, len(row), 1))[0])
        rows = next_rows
        here = f"blocks.{number}."
        for place, name in enumerate(("query", "key", "value")):
            own = slice(place * DIM, (place + 1) * DIM)
            weights[f"{here}{name}.weight"] = (attention.in_proj_weight, lambda one, own=own: one[own])
            if name != "key":  # softmax cancels it
                weights[f"{here}{name}.bias"] = (attention.in_proj_bias, lambda one, own=own: one[own])
        weights |= {
            f"{here}out.weight": (attention.out_proj.weight, same),
            f"{here}out.bias": (attention.out_proj.bias, same),
            f"{here}up.weight": (feed._conv1d[0].weight, lambda one: one[:, :, 0]),
            f"{here}up.bias": (feed._conv1d[0].bias, same),
            f"{here}down.weight": (feed._conv1d[3].weight, lambda one: one[:, :, 0]),
            f"{here}down.bias": (feed._conv1d[3].bias, same),
        }
    return torch.cat(rows), weights


CASES = (
    Case(
        "HSTU",
        "generative-recommenders",
        HSTUConfig(dim=DIM, num_heads=HEADS, qk_dim=KEYS, v_dim=VALUES, dropout=0.0),
        run_hstu,
    ),
    Case(
        "SASRec, Meta",
        "generative-recommenders",
        SASRecConfig(dim=DIM, num_heads=HEADS, dropout=0.0, block="meta"),
        run_sasrec,
    ),
    Case(
        "FuXi-alpha",
        "FuXi-alpha",
        FuXiConfig(
            dim=DIM,
            num_heads=HEADS,
            qk_dim=KEYS,
            v_dim=VALUES,
            dropout=0.0,
            time="buckets",
            feed_dropout="input",
        ),
        run_fuxi,
    ),
)


def differences(case: Case) -> tuple[float, float, int]:
    """The largest difference of outputs and of gradients, relative to the largest value; and how many tensors were compared."""
    torch.manual_seed(0)
    loss = LossConfig(kind="full", normalise=False)
    ours = build_retrieval(case.model, loss, catalogue=torch.arange(50), max_len=MAX_LEN, seed=0).backbone
    batch, vectors = batch_of(), torch.randn(sum(LENGTHS), DIM, requires_grad=True)
    inputs = ours.input(vectors, batch)
    theirs, weights = case.run(ours, inputs, batch)
    names = {name for name, _ in ours.named_parameters() if name.startswith("blocks.")}
    assert names == weights.keys(), names ^ weights.keys()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in weights:
                weight, view = weights[name]
                parameter.copy_(view(weight))
    mine = ours(vectors, batch, None)
    direction = torch.randn_like(mine)
    (theirs * direction).sum().backward()
    wanted = vectors.grad
    assert wanted is not None
    vectors.grad = None
    (mine * direction).sum().backward()
    assert vectors.grad is not None
    gradients = [relative(vectors.grad, wanted)]
    for name, parameter in ours.named_parameters():
        if name in weights:
            weight, view = weights[name]
            assert parameter.grad is not None
            gradients.append(relative(parameter.grad, view(weight.grad)))
    return relative(mine, theirs), max(gradients), len(gradients)


def drawn(module: Any) -> Any:
    """The module with weights so large that every part of it shows in the output."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max().clamp(min=1e-30))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--references", type=Path, default=Path("references"), help="folder of the cloned repositories")
    options = parser.parse_args()
    rows, worst = [], 0.0
    for case in CASES:
        folder = options.references / case.repository
        if not folder.is_dir():
            rows.append([case.name, f"skipped: {folder} is not there", "", ""])
            continue
        for name in [name for name in sys.modules if name.startswith("generative_recommenders")]:
            del sys.modules[name]  # two repositories have packages of this name
        sys.path.insert(0, str(folder))
        try:
            importlib.import_module("fbgemm_gpu")
            output, gradient, num = differences(case)
        except ImportError as error:
            rows.append([case.name, f"skipped: {error}", "", ""])
            continue
        finally:
            sys.path.remove(str(folder))
        rows.append([case.name, f"{output:.1e}", f"{gradient:.1e}", str(num)])
        worst = max(worst, output, gradient)
    print(measure.table(["reference", "outputs", "gradients", "tensors"], rows))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
