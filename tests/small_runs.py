"""Small data and runs for tests."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import polars as pl

from nestpipe import recipes
from nestpipe.config import Config
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences
from nestpipe.models.config import HSTUConfig, LossConfig, SASRecConfig

MODELS = {"sasrec": SASRecConfig(dim=8, num_heads=2), "hstu": HSTUConfig(dim=8, num_heads=2, qk_dim=3, v_dim=5)}
LOSSES = {
    "full": LossConfig(kind="full", normalise=False, temperature=1.0, segment=16),
    "sampled": LossConfig(num_negatives=5, segment=16),
    "sample": LossConfig(num_negatives=5, segment=16, source="sample", wire="bfloat16"),
    "pool": LossConfig(num_negatives=9, segment=16, source="pool", wire="float16"),
    "shared": LossConfig(num_negatives=5, segment=16, share="sample", share_factor=3, wire="bfloat16"),
    "shared in groups": LossConfig(num_negatives=5, segment=16, share="group"),
    "in batch": LossConfig(kind="in_batch", segment=16),
}


def write_log(out: Path, histories: dict[int, list[int]], *, times: bool = True) -> Sequences:
    """A sequence folder with the given items per user, a minute apart."""
    rows = [
        (user, item, 1_000_000 + 60 * place) for user, items in histories.items() for place, item in enumerate(items)
    ]
    log = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    return write_sequences(out, schema=Schema() if times else Schema(time=None), log=log if times else log.drop("time"))


def small_log(out: Path, *, num_users: int = 40, num_items: int = 30, times: bool = True) -> Sequences:
    """Users of 0 to 3 + 12 events; items follow a rule, so there is something to learn."""
    return write_log(
        out,
        {user: [(user + 7 * k) % num_items for k in range(3 + user % 13)] for user in range(num_users)},
        times=times,
    )


def small_config(
    path: Path,
    model: str = "hstu",
    loss: str = "sampled",
    *,
    pipeline: dict[str, object] | None = None,
    **train: object,
) -> Config:
    """A run of three epochs of four batches on one thread."""
    recipe = recipes.tiny()
    settings: dict[str, object] = {
        "epochs": 3,
        "save_steps": 5,
        "keep_last": 9,
        "log_steps": 1,
        "num_threads": 1,
        **train,
    }
    return replace(
        recipe,
        data=replace(recipe.data, path=str(path), max_len=8, batch_size=11),
        model=replace(MODELS[model], dropout=0.2),
        loss=LOSSES[loss],
        embedding=replace(recipe.embedding, num_buckets=4),
        pipeline=recipe.pipeline.changed(**(pipeline or {})),
        train=replace(recipe.train, **settings),
        eval=replace(recipe.eval, ks=(1, 10), num_bootstrap=100),
    )


def files_naming(folder: Path, text: str) -> list[Path]:
    """The files below a folder that hold a text as a whole; Parquet is compressed, so its values are looked at."""
    whole = re.compile(rf"(?<![\w ]){re.escape(text)}(?![\w])".encode())
    found = []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            frame = pl.read_parquet(path)
            content = "\n".join(str(value) for row in frame.iter_rows() for value in row).encode()
        if whole.search(content):
            found.append(path)
    return found
