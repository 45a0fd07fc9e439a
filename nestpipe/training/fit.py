"""`nestpipe.fit`: from a frame of interactions to recommendations in one call.

    frame --columns--> sequence folder --choose_config--> run folder --> TrainedRun

Encodings follow the column types: whole numbers are taken as they are, texts are numbered. Model and sizes follow counts of the
log (users, items, lengths of histories), so that one frame and seed give one result.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl

from nestpipe.config import Config
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Encoding, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.models.config import LossConfig
from nestpipe.recipes import RECIPES
from nestpipe.training.config import FitModel
from nestpipe.training.loop import train
from nestpipe.training.trained_run import TrainedRun

_FULL_SOFTMAX_ITEMS = 20_000  # above, every step over the whole catalogue costs more than it teaches
_STEPS = 1_500  # that a small log is trained for at least, if the epochs allow it


def fit(
    frame: Any,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = "time",
    model: FitModel = "sasrec",
    epochs: int | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    quiet: bool = False,
) -> TrainedRun:
    """Trains a next-item model on a frame of interactions (Polars, pandas or Arrow) and returns what it recommends.

    `time` may be a date, an ISO text, or seconds or milliseconds since 1970; None takes the order of the rows. The run
    and its data go to `folder` [default: a temporary folder, which ends with the process; see `TrainedRun.save`].
    """
    log = as_polars(frame, [user, item, *([time] if time else [])])
    schema = schema_of(log, user=user, item=item, time=time)
    place = Path(folder) if folder is not None else Path(_keep(tempfile.TemporaryDirectory(prefix="nestpipe-")))
    sequences = write_sequences(place / "data", schema=schema, log=log)
    config = choose_config(sequences, model=model, epochs=epochs, seed=seed)
    if not quiet:
        print(f"fit: {describe(config, sequences)}")
    return TrainedRun(train(config, place / "run", quiet=quiet))


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def _keep(folder: tempfile.TemporaryDirectory[str]) -> str:
    _FOLDERS.append(folder)
    return folder.name


def as_polars(frame: Any, columns: list[str]) -> pl.DataFrame:
    """The named columns of a Polars, pandas or Arrow frame; raises ConfigError for a column that it lacks."""
    if isinstance(frame, pl.LazyFrame):
        frame = frame.collect()
    names = getattr(frame, "column_names", None) or list(getattr(frame, "columns", ()))
    if missing := [name for name in columns if name not in names]:
        raise ConfigError(
            f"the frame has no column {missing}; it has {list(names)}. Name yours with user=, item= and time= (None: no times)."
        )
    return pl.DataFrame({name: _series(name, frame[name]) for name in columns})


def _series(name: str, column: Any) -> pl.Series:
    """A column of any of the libraries; missing values are null, texts and numbers in one column become texts."""
    if isinstance(column, pl.Series):
        return column
    if hasattr(column, "to_pylist"):  # Arrow
        return pl.Series(name, column.to_pylist(), strict=False)
    missing = column.isna().to_numpy()  # pandas
    if str(column.dtype).startswith("datetime64"):
        milliseconds = column.astype("int64") // {"s": 1, "ms": 1, "us": 10**3, "ns": 10**6}[column.dt.unit]
        milliseconds *= 1000 if column.dt.unit == "s" else 1
        times = pl.Series(name, milliseconds.to_numpy()).set(pl.Series(missing), None)
        return times.cast(pl.Datetime("ms", "UTC"))
    values = [None if gone else one for one, gone in zip(column.tolist(), missing.tolist(), strict=True)]
    kinds = {type(one) for one in values if one is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        values = [None if one is None else str(one) for one in values]
    return pl.Series(name, values, strict=False)


def schema_of(log: pl.DataFrame, *, user: str, item: str, time: str | None) -> Schema:
    """How the columns of a log are read, from their types."""
    return Schema(
        user=user,
        item=item,
        time=time,
        user_encoding=_encoding(log[user]),
        item_encoding=_encoding(log[item]),
    )


def _encoding(column: pl.Series) -> Encoding:
    return "int64" if column.dtype.is_integer() else "dictionary"


def choose_config(
    sequences: Sequences, *, model: FitModel = "sasrec", epochs: int | None = None, seed: int | None = None
) -> Config:
    """A model and sizes that fit a log, from its counts alone."""
    lengths, num_items = np.diff(sequences.offsets), len(sequences.catalogue)
    max_len = int(np.clip(2 ** math.ceil(math.log2(max(np.quantile(lengths, 0.95), 8))), 8, 256))
    num_samples = int((lengths >= 3).sum())  # shorter histories leave nothing to train on next to two held-out events
    batch_size = int(np.clip(2 ** int(math.log2(max(num_samples / 8, 1))), 16, 128))
    steps_per_epoch = max(math.ceil(num_samples / batch_size), 1)
    dim = 64 if num_items < 50_000 else 128
    chosen = epochs if epochs is not None else int(np.clip(math.ceil(_STEPS / steps_per_epoch), 5, 100))
    if model not in get_args(FitModel):
        raise ConfigError(f"model is {model!r}; it must be one of {', '.join(get_args(FitModel))}.")
    recipe = RECIPES[model]()
    return replace(
        recipe,
        data=replace(recipe.data, path=str(sequences.path), max_len=max_len, batch_size=batch_size),
        model=replace(recipe.model, dim=dim),
        loss=recipe.loss if num_items <= _FULL_SOFTMAX_ITEMS else LossConfig(),
        train=replace(
            recipe.train,
            epochs=chosen,
            eval_epochs=max(chosen // 20, 1),
            patience=recipe.train.patience if epochs is None else 0,
        ),
        seed=recipe.seed if seed is None else seed,
    )


def describe(config: Config, sequences: Sequences) -> str:
    """What was chosen, in one line."""
    kind = type(config.model).__name__.removesuffix("Config")
    softmax = "full softmax" if config.loss.kind == "full" else f"{config.loss.num_negatives} sampled negatives"
    return (
        f"{kind}, width {config.model.dim}, histories of up to {config.data.max_len} events, {softmax} over "
        f"{len(sequences.catalogue):,} items, up to {config.train.epochs} epochs of {len(sequences.users):,} users"
    )
