"""KuaiRand: the official log_standard files, with the filter that TurboGR publishes for KuaiRand-27K as an option.

The filter drops disliked impressions and impressions without any positive signal, then users and items with fewer
than five events, again and again until none is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from nestpipe.data.build import BuildOptions, write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.source import LogSource, columns_of, require_columns
from nestpipe.data.spool import Bools
from nestpipe.errors import DataError

POSITIVE = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_profile_enter", "long_view")
NEGATIVE = "is_hate"
_LOGGED = ("play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time")  # milliseconds, long-tailed

Runs = Callable[[], Iterator[pl.DataFrame]]


def ingest(
    paths: str | tuple[str, ...],
    out: str | Path,
    *,
    published_filter: bool = False,
    core: int = 5,
    options: BuildOptions | None = None,
) -> Sequences:
    """Every impression is an event; signals and durations are event features, as far as the files have them."""
    options = options or BuildOptions()
    source = LogSource(paths=(paths,) if isinstance(paths, str) else tuple(paths))
    present = columns_of(source)
    require_columns(str(source.paths[0]), present, ("user_id", "video_id", "time_ms"))
    if published_filter:
        require_columns(str(source.paths[0]), present, (NEGATIVE,))
        options = dataclasses.replace(options, row_filter=partial(published, core=core))
    return write_sequences(out, schema=schema_of(present), log=source, options=options)


def schema_of(columns: list[str]) -> Schema:
    """The schema for the columns that a file has; the published sample lacks some."""
    features = [Feature(name=name, kind="number") for name in (*POSITIVE, NEGATIVE, "is_rand") if name in columns]
    features += [Feature(name=name, kind="number", transform="log_standardise") for name in _LOGGED if name in columns]
    if "tab" in columns:
        features.append(Feature(name="tab", kind="id"))
    return Schema(user="user_id", item="video_id", time="time_ms", time_unit="ms", features=tuple(features))


def published(runs: Runs, *, core: int) -> tuple[list[Bools], dict[str, int]]:
    """A mask per run, and how many impressions each rule dropped; raises DataError if no signal column is known."""
    masks, num_disliked, num_silent = [], 0, 0
    for run in runs():
        signals = [name for name in POSITIVE if name in run.columns]
        if not signals:
            raise DataError(
                f"the published filter needs at least one of the columns {', '.join(POSITIVE)}; switch it off."
            )
        # a missing signal counts as none; it is NaN, which Polars holds for larger than any number
        given = run.select(pl.col(NEGATIVE, *signals).fill_nan(0))
        liked = ~(given[NEGATIVE] > 0).to_numpy()
        positive = given.select(pl.any_horizontal(pl.col(name) > 0 for name in signals)).to_series().to_numpy()
        num_disliked += int((~liked).sum())
        num_silent += int((liked & ~positive).sum())
        masks.append(liked & positive)
    num_before = sum(int(mask.sum()) for mask in masks)
    masks = k_core(runs, masks, core=core)
    num_rare = num_before - sum(int(mask.sum()) for mask in masks)
    return masks, {"disliked": num_disliked, "no positive signal": num_silent, f"below {core}-core": num_rare}


def k_core(runs: Runs, masks: list[Bools], *, core: int) -> list[Bools]:
    """Masks under which every user and every item that is left has at least `core` events."""
    while True:
        before = sum(int(mask.sum()) for mask in masks)
        for key in ("user", "item"):
            kept = [run.filter(mask)[key].value_counts(name="num") for run, mask in zip(runs(), masks, strict=True)]
            total = pl.concat(kept).group_by(key).agg(pl.col("num").sum())
            rare = total.filter(pl.col("num") < core)[key].implode()
            masks = [mask & ~run[key].is_in(rare).to_numpy() for run, mask in zip(runs(), masks, strict=True)]
        if sum(int(mask.sum()) for mask in masks) == before:
            return [np.asarray(mask) for mask in masks]
