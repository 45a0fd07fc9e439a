"""Flags of `nestpipe data ...`: the docstring of a class is the help of its command."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nestpipe.data.config import ClicksConfig, Format, SyntheticConfig
from nestpipe.data.schema import Encoding, TimeUnit

SequenceFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
LogFiles = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOG [LOG ...]", help_behavior_hint="(required)")
]
# Flags without a value of their own by default; their text says what happens then.
OptionalText = Annotated[str, tyro.conf.arg(help_behavior_hint="")]
OptionalTable = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalTexts = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Flags of all commands that write a sequence folder."""

    out: Path
    """Sequence folder to write."""
    overwrite: bool = False
    """Replace the folder if it exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Writing):
    """Flags of all commands that read a log."""

    max_quarantine_share: float = 0.01
    """Stop if more than this share of the records is bad."""
    budget_rows: int = 10_000_000
    """Events held in memory at a time; a larger log is sorted on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest(Reading):
    """Turns a log into a sequence folder: each user's events in the order of time.

    Reads CSV, Parquet or JSONL, plain, .gz or .zst. Flags map columns to user, item, time and features. Bad records go to
    quarantine.jsonl in the folder, each with its reason, and the counts add up. Globs are quoted.

    Example: nestpipe data ingest 'logs/*.csv.gz' --user user_id --item movie --time ts --feature rating:number:event --out data/mine

    Next: nestpipe data inspect data/mine, then nestpipe train sasrec --data.path data/mine
    """

    paths: LogFiles
    """Files or globs; if the log has no times, in the order of time."""
    user: str = "user"
    """Column of user ids."""
    item: str = "item"
    """Column of item ids."""
    time: str = "time"
    """Column of times; 'none' for a log that is only ordered."""
    time_unit: TimeUnit = "auto"
    """Unit of the times; ISO 8601 dates without offset are UTC."""
    user_encoding: Encoding = "int64"
    """How user ids become int64: as they are, by hash, or by a dictionary, which strings need."""
    item_encoding: Encoding = "int64"
    """How item ids become int64; likewise."""
    feature: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """name:kind:scope[:option=value]..., such as genres:ids:item:encoding=dictionary; the options are the fields of nestpipe.Feature."""
    label: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """name:kind:feature=NUMBER[:option=value]..., what a ranking model predicts, such as liked:binary:feature=rating:threshold=4."""
    items_table: OptionalTable = None
    """File of item attributes, joined by item id. With the log's ending it is read with the log's delimiter and encoding."""
    items_key: OptionalText = ""
    """Column of item ids in that file [default: --item]."""
    items_delimiter: OptionalText = ""
    """CSV: delimiter of that file [default: a comma, or the log's]."""
    users_table: OptionalTable = None
    """File of user attributes, joined by user id; likewise."""
    users_key: OptionalText = ""
    """Column of user ids in that file [default: --user]."""
    users_delimiter: OptionalText = ""
    """CSV: delimiter of that file [default: a comma, or the log's]."""
    format: Format = "auto"
    """Format of the log; auto: by its ending."""
    delimiter: OptionalText = ""
    r"""CSV: delimiter, \t for a tab [default: a tab for .tsv, else a comma]."""
    columns: OptionalText = ""
    """CSV without header: the names of its columns, such as user,item,time."""
    encoding: str = "utf-8"
    """Encoding of the text, for example latin-1."""
    dedupe: bool = False
    """Keep only the first of equal records."""
    texts: OptionalTexts = None
    """File with item ids as in the log (column item_id, or as --item names it) and title, kept for 'nestpipe sid build'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLens(Reading):
    """Turns MovieLens-1M into a sequence folder: ratings with genres, age, gender and occupation.

    Needs ratings.dat, movies.dat and users.dat of ml-1m.zip, from grouplens.org/datasets/movielens/1m.

    Example: nestpipe data movielens ml-1m --out data/ml1m

    Next: nestpipe train ml1m_hstu
    """

    folder: SequenceFolder
    """The unpacked folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KuaiRand(Reading):
    """Turns KuaiRand's log_standard files into a sequence folder.

    Needs the unpacked CSV files, from kuairand.com.

    Example: nestpipe data kuairand 'data/log_standard_*.csv' --published-filter --out data/kuairand

    Next: nestpipe train hstu_tiny
    """

    paths: LogFiles
    """Files or globs."""
    published_filter: bool = False
    """Drop disliked impressions and those without a positive signal, then take the core, as the published tables do."""
    core: int = 5
    """Events that every user and item must keep under the filter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amazon(Reading):
    """Turns lines 'user item item ...', oldest first, into a sequence folder, as published for Amazon reviews.

    Example: nestpipe data amazon sequences.txt.gz --texts items.parquet --out data/beauty

    Next: nestpipe sid build data/beauty --out data/beauty-ids
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The sequence file."""
    texts: OptionalTexts = None
    """File with item_id and title, kept for 'nestpipe sid build'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic(Writing):
    """Generates a log with planted signal, whose best possible metrics are known (truth.json).

    Example: nestpipe data synthetic --out data/tiny

    Next: nestpipe train tiny
    """

    config: Annotated[SyntheticConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=SyntheticConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clicks(Writing):
    """Generates a click log with planted feature interactions, whose best possible AUC is known (truth.json).

    Example: nestpipe data clicks --out data/clicks

    Next: nestpipe train clicks_dcn
    """

    config: Annotated[ClicksConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=ClicksConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Shows counts, history lengths, time span, features and quarantine of a sequence folder.

    Example: nestpipe data inspect data/ml1m
    """

    folder: SequenceFolder
    """Sequence folder that 'nestpipe data' wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Reads every file of a sequence folder and compares it with its digest.

    Exit code 2 names the first file that has changed since it was ingested.

    Example: nestpipe data verify data/ml1m
    """

    folder: SequenceFolder
    """Sequence folder that 'nestpipe data' wrote."""
