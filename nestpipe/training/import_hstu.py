"""Imports a checkpoint of Meta's HSTU (generative-recommenders) as a run that `eval`, `recommend`, `serve` and `train` take.

The file is what its trainer saves: {"model_state_dict": ...}. Letters: D width, N the reference's longest sequence.

    reference                                                here
    _embedding_module._item_emb.weight [items + 1, D]        row of item i: its row i; row 0 is padding
    _input_features_preproc._pos_emb.weight [N, D]           the first max_len positions
    _hstu._attention_layers.B._uvqk, ._o.*                   the same
    ..._rel_attn_bias._ts_w                                  time bias, the same
    ..._rel_attn_bias._pos_w [2 N - 1]                       entry N - 1 - d is the bias of distance d
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nestpipe.checkpoint.state import StateSource
from nestpipe.checkpoint.writer import save_checkpoint
from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import WEIGHTS
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.jagged import Cursor
from nestpipe.models.config import HSTUConfig
from nestpipe.recipes import ml1m_hstu
from nestpipe.training.open_run import with_absolute_paths
from nestpipe.training.process import lock_run
from nestpipe.training.run_folder import Run
from nestpipe.training.run_limits import LoopProgress, validation_of
from nestpipe.training.run_state import new_state

_ITEMS, _POSITIONS = "_embedding_module._item_emb.weight", "_input_features_preproc._pos_emb.weight"
_BLOCK, _BIAS = "_hstu._attention_layers.", "._rel_attn_bias."
_NEXT_ITEMS = 11  # positions beyond the history that Meta's published settings have


@dataclass(frozen=True, slots=True)
class Imported:
    """The run, and how many items of the log the file has rows for."""

    run: Run
    num_rows: int
    num_missing: int


def import_hstu(path: Path, data: Path, folder: Path, *, num_heads: int = 1, max_len: int = 0) -> Imported:
    """A new run with the weights of `path` on a sequence folder whose item ids are whole numbers, the reference's own."""
    weights = read_reference(path)
    config = config_of(weights, data, num_heads=num_heads, max_len=max_len)
    sequences = Sequences.open(data)
    if sequences.vocabulary("item").encoding != "int64":
        raise ConfigError(
            f"the items of {data} are numbered by its ingest, but rows of {path} belong to item numbers of its own log. "
            "Ingest with --item-encoding int64, in the numbers that the checkpoint was trained with."
        )
    run = Run.create(with_absolute_paths(config), folder)
    state = new_state(run)
    dense = state.dense.export()
    for name, tensor in dense_of(weights, config.data.max_len).items():
        dense[f"weights.{name}"] = tensor.to(dense[f"weights.{name}"].dtype)
    state.dense.load(dense)
    ids = torch.tensor(sequences.catalogue)
    known = (ids > 0) & (ids < len(weights[_ITEMS]))
    if not bool(known.any()):
        raise CheckpointError(f"{path} has rows for items 1 .. {len(weights[_ITEMS]) - 1}; {data} has none of them.")
    table = state.embedding.tables["item"]
    own = ids[known]
    table.load_index({"ids": own})
    settings = table.spec.optimizer or table.config
    fresh = OPTIMIZERS[settings.optimizer](settings).new_state(len(own), table.spec.dim)
    rows = {WEIGHTS: weights[_ITEMS].index_select(0, own), **{f"state.{name}": one for name, one in fresh.items()}}
    table.load_rows({"ids": own, **rows})
    progress = {
        **asdict(LoopProgress()),
        "settings": run.settings,
        "data": sequences.digest,
        "validated": validation_of(run.config),
    }
    with lock_run(run.folder), contextlib.closing(StateSource(state).snapshot(concurrent=False, delta=False)) as now:
        run.write(statistics={}, facts={"recipe": None, "imported_from": str(path), "num_ranks": 1, "hosts": []})
        save_checkpoint(run.checkpoints, 0, Cursor(0, 0), progress, now.content())
    return Imported(run, len(own), int((~known).sum()))


def read_reference(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint file by name; raises CheckpointError if it is not one of the reference's HSTU."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind fails in many ways
        raise CheckpointError(f"{path} cannot be read as a torch file: {str(error).splitlines()[0]}") from error
    found = content.get("model_state_dict", content) if isinstance(content, Mapping) else {}
    weights = {str(name).removeprefix("module."): value for name, value in found.items() if isinstance(value, Tensor)}
    needed = (_ITEMS, _POSITIONS, f"{_BLOCK}0._uvqk", f"{_BLOCK}0._o.weight", f"{_BLOCK}0{_BIAS}_pos_w")
    if missing := [name for name in needed if name not in weights]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}: it is not a checkpoint of HSTU as generative-recommenders saves it "
            "(with learned positions and the bias of times and positions)."
        )
    return weights


def config_of(weights: Mapping[str, Tensor], data: Path, *, num_heads: int, max_len: int) -> Config:
    """The settings that the shapes say; the number of heads and the longest history are in no shape."""
    (num_positions, dim), uvqk = weights[_POSITIONS].shape, weights[f"{_BLOCK}0._uvqk"]
    values = weights[f"{_BLOCK}0._o.weight"].shape[1]
    keys = uvqk.shape[1] // 2 - values
    if values % num_heads or keys % num_heads or keys < num_heads:
        raise ConfigError(f"--num-heads {num_heads} does not divide values of width {values} and keys of {keys}.")
    longest = max_len or num_positions - _NEXT_ITEMS
    if not 1 <= longest <= num_positions:
        raise ConfigError(
            f"the checkpoint has {num_positions} positions; give --max-len between 1 and {num_positions}."
        )
    base = ml1m_hstu()
    model = HSTUConfig(
        dim=dim,
        num_blocks=sum(name.startswith(_BLOCK) and name.endswith("._uvqk") for name in weights),
        num_heads=num_heads,
        qk_dim=keys // num_heads,
        v_dim=values // num_heads,
        num_time_buckets=len(weights[f"{_BLOCK}0{_BIAS}_ts_w"]) - 1,
        divisor=num_positions,
    )
    return replace(
        base,
        model=model,
        data=replace(base.data, path=str(data), max_len=longest),
        train=replace(base.train, num_threads=torch.get_num_threads()),
    )


def dense_of(weights: Mapping[str, Tensor], max_len: int) -> dict[str, Tensor]:
    """The dense tensors of the model here, by name."""
    found = {"backbone.input.position": weights[_POSITIONS][:max_len]}
    for name, tensor in weights.items():
        block, _, inner = name.removeprefix(_BLOCK).partition(".")
        if not name.startswith(_BLOCK):
            continue
        here = f"backbone.blocks.{block}."
        match inner:
            case "_uvqk":
                found[f"{here}uvqk"] = tensor
            case "_o.weight" | "_o.bias":
                found[f"{here}out.{inner.removeprefix('_o.')}"] = tensor
            case "_rel_attn_bias._ts_w":
                found[f"{here}time"] = tensor
            case "_rel_attn_bias._pos_w":
                nearest = len(tensor) // 2
                found[f"{here}position"] = tensor[nearest - max_len + 1 : nearest + 1].flip(0)
            case _:
                raise CheckpointError(f"the checkpoint has a tensor '{name}', which HSTU here has no place for.")
    return found
