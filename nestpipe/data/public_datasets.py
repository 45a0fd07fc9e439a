"""Ingest of public data sets: MovieLens-1M (three .dat files), KuaiRand (log_standard files), Amazon (one user per line)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from nestpipe.data.external_sort import Bools
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.item_texts import text_key
from nestpipe.data.log_reader import LINE, LogSource, columns_of
from nestpipe.data.raw_chunk import RECORD, require_columns
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError

MOVIELENS_SCHEMA = Schema(
    features=(
        Feature(name="rating", kind="number"),
        Feature(name="genres", kind="ids", scope="item", encoding="dictionary"),
        Feature(name="year", kind="number", scope="item", missing="mean", transform="standardise"),
        Feature(name="gender", kind="id", scope="user", encoding="dictionary"),
        Feature(name="age", kind="id", scope="user"),
        Feature(name="occupation", kind="id", scope="user"),
        Feature(name="zip", kind="id", scope="user", encoding="dictionary"),
    ),
    labels=(
        Label(name="liked", kind="binary", feature="rating", threshold=4),
        Label(name="loved", kind="binary", feature="rating", threshold=5),
        Label(name="stars", kind="ordinal", feature="rating", lowest=1, num_levels=5),
    ),
)


def ingest_movielens(folder: str | Path, out: str | Path, *, options: BuildOptions | None = None) -> Sequences:
    """Every rating is an event and every movie a candidate; nothing is filtered. `options.ties` orders equal times."""
    return write_sequences(
        out,
        schema=MOVIELENS_SCHEMA,
        log=_source(folder, "ratings.dat", ("user", "item", "rating", "time")),
        items=SideTable(source=_source(folder, "movies.dat", ("item", "title", "genres")), key="item"),
        users=SideTable(
            source=_source(folder, "users.dat", ("user", "gender", "age", "occupation", "zip")), key="user"
        ),
        options=options,
    )


def _source(folder: str | Path, name: str, columns: tuple[str, ...]) -> LogSource:
    path = Path(folder) / name
    if not path.is_file():
        raise DataError(
            f"{folder} has no {name}, but a MovieLens-1M folder has ratings.dat, movies.dat and users.dat. Unpack ml-1m.zip and pass that folder."
        )
    return LogSource(
        paths=(str(path),),
        format="csv",
        delimiter="::",
        columns=columns,
        encoding="latin-1",
        transform=_with_year if "title" in columns else None,
    )


def _with_year(movies: pl.DataFrame) -> pl.DataFrame:
    """The year at the end of the title: 'Toy Story (1995)'."""
    return movies.with_columns(pl.col("title").str.extract(r"\((\d{4})\)\s*$").alias("year"))


POSITIVE = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_profile_enter", "long_view")


NEGATIVE = "is_hate"


_LOGGED = ("play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time")  # milliseconds, long-tailed


Runs = Callable[[], Iterator[pl.DataFrame]]


def ingest_kuairand(
    paths: str | tuple[str, ...],
    out: str | Path,
    *,
    published_filter: bool = False,
    core: int = 5,
    options: BuildOptions | None = None,
) -> Sequences:
    """Every impression is an event; the signals and durations that the files have are event features."""
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
    """The published filter: a mask per run, and dropped impressions per rule; raises DataError without signal columns."""
    masks, num_disliked, num_silent = [], 0, 0
    for run in runs():
        signals = [name for name in POSITIVE if name in run.columns]
        if not signals:
            raise DataError(
                f"the published filter keeps events with a positive signal, but the log has none of the columns {', '.join(POSITIVE)}. Turn the filter off, or ingest files that have one."
            )
        # A missing signal is NaN, which Polars compares as larger than any number; it counts as none.
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
    """Masks under which every remaining user and item has at least `core` events."""
    while True:
        before = sum(int(mask.sum()) for mask in masks)
        for key in ("user", "item"):
            kept = [run.filter(mask)[key].value_counts(name="num") for run, mask in zip(runs(), masks, strict=True)]
            total = pl.concat(kept).group_by(key).agg(pl.col("num").sum())
            rare = total.filter(pl.col("num") < core)[key].implode()
            masks = [mask & ~run[key].is_in(rare).to_numpy() for run, mask in zip(runs(), masks, strict=True)]
        if sum(int(mask.sum()) for mask in masks) == before:
            return [np.asarray(mask) for mask in masks]


AMAZON_SCHEMA = Schema(time=None)


def ingest_amazon(
    path: str | Path, out: str | Path, *, texts: str | Path | None = None, options: BuildOptions | None = None
) -> Sequences:
    """Every item of a line is an event of its user; counts are of events, not lines."""
    options = options or BuildOptions()
    log = LogSource(paths=(str(path),), format="lines", transform=_events)
    table = None if texts is None else text_table(LogSource(paths=(str(texts),)), item=AMAZON_SCHEMA.item)
    return write_sequences(out, schema=AMAZON_SCHEMA, log=log, texts=table, options=options)


def _events(lines: pl.DataFrame) -> pl.DataFrame:
    words = pl.col(LINE).str.strip_chars().str.split(" ")
    users = lines.select(RECORD, user=words.list.first(), item=words.list.slice(1))
    return users.explode("item", empty_as_null=True)


def text_table(source: LogSource, *, item: str) -> SideTable:
    """A file of item texts, whose ids are in a column named as the log's or item_id."""
    return SideTable(source=source, key=text_key(source, item))
