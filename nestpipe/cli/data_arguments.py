"""Flags of `nestpipe data ...`: the docstring of a class is the help of its command."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nestpipe.data.config import ClicksConfig, ContentLogConfig, Format, SyntheticConfig
from nestpipe.data.schema import Encoding, TimeUnit

SequenceFolder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
LogFiles = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOG [LOG ...]", help_behavior_hint="(required)")
]
# Flags without a value of their own by default; their text says what happens then.
OptionalText = Annotated[str, tyro.conf.arg(help_behavior_hint="")]
OptionalTable = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalTexts = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Flags of all commands that write a sequence folder."""

    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """Sequence folder to write; also s3://... or gs://..."""
    overwrite: bool = False
    """Replace the folder if it exists."""


@dataclass(frozen=True, kw_only=True)
class ReadingLimits:
    """Flags of all commands that read a log."""

    max_quarantine_share: float = 0.01
    """Stop if more than this share of the records is bad."""
    budget_rows: int = 10_000_000
    """Events held in memory at a time; a larger log is sorted on disk."""


@dataclass(frozen=True, kw_only=True)
class Reading(ReadingLimits, Writing):
    """Flags of all commands that turn a log into a new folder."""


@dataclass(frozen=True, kw_only=True)
class LogFlags(ReadingLimits):
    """How the log and its side tables are written."""

    items_table: OptionalTable = None
    """File of item attributes, joined by item id. With the log's ending it is read with the log's delimiter and encoding."""
    items_key: OptionalText = ""
    """Column of item ids in that file [default: the log's]."""
    items_delimiter: OptionalText = ""
    """CSV: delimiter of that file [default: a comma, or the log's]."""
    users_table: OptionalTable = None
    """File of user attributes, joined by user id; likewise."""
    users_key: OptionalText = ""
    """Column of user ids in that file [default: the log's]."""
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


@dataclass(frozen=True, kw_only=True)
class Ingest(LogFlags, Writing):
    """Turns a log into a sequence folder: each user's events in the order of time.

    Reads CSV, Parquet or JSONL, plain, .gz or .zst. Flags map columns to user, item, time and features. Bad records go to
    quarantine.jsonl in the folder, each with its reason, and the counts add up. Globs are quoted.

    Example: nestpipe data ingest 'logs/*.csv.gz' --user user_id --item movie --time ts --feature rating:number:event --out data/mine

    Next: nestpipe data inspect data/mine, then nestpipe train sasrec --data.path data/mine
    """

    paths: LogFiles
    """Files, URLs (s3://, gs://) or globs; if the log has no times, in the order of time."""
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
    dedupe: bool = False
    """Keep only the first of equal records."""
    texts: OptionalTexts = None
    """File with item ids as in the log (column item_id, or as --item names it) and title, kept for 'nestpipe sid build'."""
    shard: Annotated[str, tyro.conf.arg(metavar="I/N", help_behavior_hint="")] = ""
    """Read only part I (from 1) of N of the log's files, for 'nestpipe data merge'; for logs of many machines."""
    ray: int = 0
    """Read the log in this many shards under Ray Data and merge them; the folder must be on a disk that all machines share."""
    ray_address: str = "local"
    """Ray cluster to use; local: this machine alone."""


@dataclass(frozen=True, kw_only=True)
class Append(LogFlags):
    """Adds new events, users and items to a sequence folder, without reading the old log again.

    The columns are those of the folder's schema, ids keep their numbers, and duplicates are dropped if they were when the
    folder was made. With int64 and hash ids the folder becomes that of one ingest of both logs. A file that is in the folder
    already is refused. Runs on the folder keep the old events until they are started again.

    The event log of a service (RUN/serve/events.log) is such a log too. Each of its events is appended once, also after a crash,
    and removed from the log when the folder holds it; the service keeps running meanwhile.

    Example: nestpipe data append data/mine --from 'logs/2024-06-*.csv.gz'

    Next: nestpipe train ml1m_sasrec --data.path data/mine
    """

    folder: SequenceFolder
    """Sequence folder that 'nestpipe data' wrote."""
    source: Annotated[tuple[str, ...], tyro.conf.arg(name="from", metavar="LOG [LOG ...]")]
    """Files or globs of the new log, or what a service has stored: RUN/serve/events.log, or postgresql://..."""
    force: bool = False
    """Append files that are in the folder already."""


@dataclass(frozen=True, kw_only=True)
class Merge(Writing):
    """Joins the shards of a log into one sequence folder: the same bytes as one ingest of the whole log.

    Every shard is needed once, in any order.

    Example: nestpipe data merge shards/1 shards/2 shards/3 shards/4 --out data/mine

    Next: nestpipe data inspect data/mine
    """

    shards: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="SHARD [SHARD ...]", help_behavior_hint="(required)"),
    ]
    """Folders that 'nestpipe data ingest --shard' wrote."""


@dataclass(frozen=True, kw_only=True)
class MovieLens(Reading):
    """Turns MovieLens-1M into a sequence folder: ratings with genres, age, gender and occupation.

    Needs ratings.dat, movies.dat and users.dat of ml-1m.zip, from grouplens.org/datasets/movielens/1m.

    Example: nestpipe data movielens ml-1m --out data/ml1m

    Next: nestpipe train ml1m_hstu
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The unpacked folder."""
    ties: Annotated[str, tyro.conf.arg(metavar="file|meta|shuffle:SEED")] = "file"
    """Order of ratings at the same second, which decides the test target of a quarter of the users."""


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Amazon(Reading):
    """Turns lines 'user item item ...', oldest first, into a sequence folder, as published for Amazon reviews.

    Example: nestpipe data amazon sequences.txt.gz --texts items.parquet --out data/beauty

    Next: nestpipe sid build data/beauty --out data/beauty-ids
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The sequence file."""
    texts: OptionalTexts = None
    """File with item_id and title, kept for 'nestpipe sid build'."""


@dataclass(frozen=True, kw_only=True)
class Synthetic(Writing):
    """Generates a log with planted signal, whose best possible metrics are known (truth.json).

    Example: nestpipe data synthetic --out data/tiny

    Next: nestpipe train tiny
    """

    config: Annotated[SyntheticConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=SyntheticConfig)


@dataclass(frozen=True, kw_only=True)
class Clicks(Writing):
    """Generates a click log with planted feature interactions, whose best possible AUC is known (truth.json).

    Example: nestpipe data clicks --out data/clicks

    Next: nestpipe train clicks_dcn
    """

    config: Annotated[ClicksConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=ClicksConfig)


@dataclass(frozen=True, kw_only=True)
class ContentLog(Writing):
    """Generates a log whose items have brand, category, tags, price, look and title, and of which some items are new.

    Example: nestpipe data content --out data/content

    Next: nestpipe train sasrec --data.path data/content --model.item-features brand category tags price look title
    """

    config: Annotated[ContentLogConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=ContentLogConfig)


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Shows counts, history lengths, time span, features and quarantine of a sequence folder.

    Example: nestpipe data inspect data/ml1m
    """

    folder: SequenceFolder
    """Sequence folder that 'nestpipe data' wrote."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Reads every file of a sequence folder and compares it with its digest.

    Exit code 2 names the first file that has changed since it was ingested.

    Example: nestpipe data verify data/ml1m
    """

    folder: SequenceFolder
    """Sequence folder that 'nestpipe data' wrote."""
