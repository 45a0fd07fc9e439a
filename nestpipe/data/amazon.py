"""Amazon review sequences as S3-Rec and TIGER distribute them: 'user item item ...' per line, oldest first.

The files have no times, so the log is order-only. Item texts (a Parquet file with item_id and title) are kept as
text.parquet in the sequence folder, for models that read them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl

from nestpipe.data.build import BuildOptions, write_sequences
from nestpipe.data.folder import check_place
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.source import LINE, RECORD, LogSource, columns_of, expand, require_columns

SCHEMA = Schema(time=None)


def ingest(
    path: str | Path, out: str | Path, *, texts: str | Path | None = None, options: BuildOptions | None = None
) -> Sequences:
    """Every item of a line is an event of its user; a record of the counts is an event, not a line."""
    options = options or BuildOptions()
    if texts is not None:
        check_place(Path(out), overwrite=options.overwrite, inputs=[Path(texts)])
        options = dataclasses.replace(options, attachments={**options.attachments, "text": read_texts(texts)})
    return write_sequences(
        out, schema=SCHEMA, log=LogSource(paths=(str(path),), format="lines", transform=_events), options=options
    )


def _events(lines: pl.DataFrame) -> pl.DataFrame:
    words = pl.col(LINE).str.strip_chars().str.split(" ")
    parts = lines.select(RECORD, user=words.list.first(), item=words.list.slice(1))
    return parts.explode("item", empty_as_null=True)


def read_texts(path: str | Path) -> pl.DataFrame:
    """Item texts from a Parquet file with item_id and title."""
    source = LogSource(paths=(str(path),), format="parquet")
    require_columns(str(path), columns_of(source), ("item_id", "title"))
    return pl.read_parquet(expand(source)[0]).rename({"item_id": "item"})
