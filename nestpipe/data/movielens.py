"""MovieLens in the format of ML-1M: ratings.dat, movies.dat and users.dat, '::' between fields, latin-1."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from nestpipe.data.build import BuildOptions, SideTable, write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.source import LogSource
from nestpipe.errors import DataError

SCHEMA = Schema(
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


def ingest(folder: str | Path, out: str | Path, *, options: BuildOptions | None = None) -> Sequences:
    """Every rating is an event and every movie a candidate, without any filter; equal times keep the order of the file."""
    return write_sequences(
        out,
        schema=SCHEMA,
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
            f"{folder} has no {name}; a MovieLens-1M folder has ratings.dat, movies.dat and users.dat. Unpack ml-1m.zip and give that folder."
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
    """The year stands at the end of the title: 'Toy Story (1995)'."""
    return movies.with_columns(pl.col("title").str.extract(r"\((\d{4})\)\s*$").alias("year"))
