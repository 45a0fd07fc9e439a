"""What the ranks of the ranking tests run; functions here are called by name in other processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from nestpipe import recipes
from nestpipe.config import Config
from nestpipe.data.config import CLICKS_SPLIT_TIME, DataConfig
from nestpipe.data.loader import Loader
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.jagged import Cursor
from nestpipe.models.build_model import build_model, inputs_of
from nestpipe.models.config import DCNConfig, RankingConfig
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from nestpipe.training.loop import train_to_end

State = dict[str, torch.Tensor]
MODELS = {
    "hstu": RankingConfig(
        dim=8, num_heads=2, qk_dim=3, v_dim=5, head_dim=8, features=("device", "category", "tags", "price", "segment")
    ),
    "fuxi": RankingConfig(backbone="fuxi", dim=8, qk_dim=3, v_dim=5, ffn_dim=8, head_dim=8, features=("tags",)),
    "dcn": DCNConfig(
        dim=4, hidden=(8,), features=("user", "item", "device", "hour", "category", "tags", "price", "segment")
    ),
}


def ranking_config(path: Path, model: str) -> Config:
    """A run of two epochs on a small click log."""
    recipe = recipes.clicks_dcn()
    return replace(
        recipe,
        data=DataConfig(
            path=str(path),
            split="time",
            split_time=str(CLICKS_SPLIT_TIME),
            max_len=8,
            truncate_block=4,
            windows="all",
            batch_size=16,
        ),
        model=MODELS[model],
        embedding=replace(recipe.embedding, num_buckets=8),
        train=replace(recipe.train, epochs=2, num_threads=1, log_steps=1),
        eval=replace(recipe.eval, num_bootstrap=100),
    )


def train_run(world: World, path: Path, model: str, mode: str, folder: Path) -> str:
    """A whole run in one of the pipeline's modes; returns why it stopped."""
    config = ranking_config(path, model)
    config = replace(config, pipeline=config.pipeline.changed(mode=mode, micro_batches=3, depth=2))
    return train_to_end(config, folder, quiet=True, world=world).stopped


def train_ranking(world: World, path: Path, model: str, num_steps: int, num_micro_batches: int) -> dict[str, State]:
    """Trains from the first batch on in fp64; returns the losses, this rank's rows and the dense part."""
    config, log, channels = ranking_config(path, model), Sequences.open(path), Channels.of(world)
    loader = Loader(
        log,
        make_split(log, config.data),
        config.data,
        seed=0,
        rank=world.rank,
        world_size=world.size,
        inputs=inputs_of(config, log),
    )
    built = build_model(config, log, dtype=torch.float64)
    optimizer = OPTIMIZERS["adam"](config.embedding)
    tables = {
        spec.name: Table(spec, optimizer, seed=0, config=config.embedding, dtype=torch.float64) for spec in built.tables
    }
    state = TrainState(
        model=built,
        embedding=ShardedTables(tables, channels.keys, channels.rows, Owners(8, world.size)),
        dense=DenseParams(built, config.dense, channels.dense),
        control=channels.control,
        seed=0,
        micro_batching=MicroBatchConfig(micro_batches=num_micro_batches),
    )
    cursor, losses = Cursor(0, 0), []
    for _ in range(num_steps):
        losses.append(step(state, loader.batch(cursor), Rates(dense=0.002, rows=0.004))["loss"])
        cursor = loader.next_cursor(cursor)
    found = {name: table.export() for name, table in state.embedding.tables.items()}
    return {**found, "dense": state.dense.export(), "losses": {"loss": torch.tensor(losses, dtype=torch.float64)}}
