"""`nestpipe data ...`: turns logs into sequence folders and describes them; data_arguments.py has the flags."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from nestpipe.cli.data_arguments import (
    Amazon,
    Append,
    Clicks,
    ContentLog,
    Ingest,
    Inspect,
    KuaiRand,
    LogFlags,
    Merge,
    MovieLens,
    ReadingLimits,
    Synthetic,
    Verify,
)
from nestpipe.cli.data_describe import describe
from nestpipe.data import public_datasets
from nestpipe.data.append import append_log
from nestpipe.data.append_events import append_events
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.shards import merge_shards, write_shard
from nestpipe.data.synthetic_clicks import ingest_clicks
from nestpipe.data.synthetic_content import ingest_content
from nestpipe.data.synthetic_sequences import ingest_synthetic
from nestpipe.errors import ConfigError
from nestpipe.serve.event_source import event_source, is_stored, reads_folder

_FEATURE_FORM = "name:kind:scope[:option=value]..."
_LABEL_FORM = "name:kind:feature=NUMBER[:option=value]..."


def ingest(flags: Ingest) -> None:
    schema = Schema(
        user=flags.user,
        item=flags.item,
        time=None if flags.time == "none" else flags.time,
        time_unit=flags.time_unit,
        user_encoding=flags.user_encoding,
        item_encoding=flags.item_encoding,
        features=tuple(parse_feature_flag(text) for text in flags.feature),
        labels=tuple(parse_label_flag(text) for text in flags.label),
    )
    log = _log_source(flags, flags.paths)
    items, users = _side_tables(flags, flags.paths, item=flags.item, user=flags.user)
    if flags.texts is not None and (flags.shard or flags.ray):
        raise ConfigError(
            "--texts is not kept by shards: item texts are attached to whole folders only. Leave out --shard and --ray."
        )
    texts = None
    if flags.texts is not None:
        texts = public_datasets.text_table(_side_source(flags, flags.paths, str(flags.texts), ""), item=flags.item)
    with _building(flags) as options:
        own = dataclasses.replace(options, dedupe=flags.dedupe, overwrite=flags.overwrite)
        if flags.shard:
            shard = parse_shard_flag(flags.shard)
            write_shard(flags.out, shard=shard, schema=schema, log=log, items=items, users=users, options=own)
        elif flags.ray:
            from nestpipe.data.ray_ingest import RayShards

            shards = RayShards(flags.ray, address=flags.ray_address)
            sequences = shards.ingest(flags.out, schema=schema, log=log, items=items, users=users, options=own)
        else:
            sequences = write_sequences(
                flags.out, schema=schema, log=log, items=items, users=users, texts=texts, options=own
            )
    if flags.shard:
        print(f"{flags.out}: shard {flags.shard} of the log; 'nestpipe data merge' joins all shards")
    else:
        describe(sequences)


def append(flags: Append) -> None:
    if any(map(is_stored, flags.source)):
        _append_served(flags)
        return
    schema = Sequences.open(flags.folder).schema
    items, users = _side_tables(flags, flags.source, item=schema.item, user=schema.user)
    with _building(flags) as options:
        log = _log_source(flags, flags.source)
        sequences = append_log(flags.folder, log=log, items=items, users=users, options=options, force=flags.force)
    describe(sequences)


def _append_served(flags: Append) -> None:
    """Appends what services have stored, each event once."""
    schema = Sequences.open(flags.folder).schema
    items, users = _side_tables(flags, flags.source, item=schema.item, user=schema.user)
    for address in flags.source:
        if not is_stored(address):
            raise ConfigError(
                f"{address} is not the event log of a service, but other sources are. Append logs of both kinds by two commands."
            )
        source, is_read = event_source(address), reads_folder(address, flags.folder)
        with _building(flags) as options:
            found = append_events(flags.folder, source, items=items, users=users, options=options, compact=is_read)
        print(
            f"{address}: {found.num_new:,} events appended, {found.num_held:,} were in the folder already, "
            f"{found.num_removed:,} removed from the log"
        )
        if found.num_nameless:
            print(f"{found.num_nameless:,} events stay in the log: their user or item has no own id")
        if not is_read:
            print(f"nothing is removed there: no run that it belongs to is known to read {flags.folder}")
    describe(found.sequences)


def merge(flags: Merge) -> None:
    with _progress() as show:
        options = BuildOptions(overwrite=flags.overwrite, progress=show)
        sequences = merge_shards(flags.out, flags.shards, options=options)
    describe(sequences)


def parse_shard_flag(text: str) -> tuple[int, int]:
    """The number of a shard and of all shards, from I/N; raises ConfigError."""
    number, _, total = text.partition("/")
    if not (number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
        raise ConfigError(f"--shard {text!r} is not of the form I/N with I from 1 to N, for example 1/4.")
    return int(number), int(total)


def _log_source(flags: LogFlags, paths: tuple[str, ...]) -> LogSource:
    return LogSource(
        paths=paths,
        format=flags.format,
        delimiter=_tabbed(flags.delimiter),
        columns=tuple(flags.columns.split(",")) if flags.columns else (),
        encoding=flags.encoding,
    )


def _side_tables(
    flags: LogFlags, paths: tuple[str, ...], *, item: str, user: str
) -> tuple[SideTable | None, SideTable | None]:
    """The tables of items and of users; `item` and `user` are the names of the log's columns."""
    items = _side_table(flags, paths, flags.items_table, key=flags.items_key or item, delimiter=flags.items_delimiter)
    users = _side_table(flags, paths, flags.users_table, key=flags.users_key or user, delimiter=flags.users_delimiter)
    return items, users


def _side_table(
    flags: LogFlags, paths: tuple[str, ...], path: str | None, *, key: str, delimiter: str
) -> SideTable | None:
    return None if path is None else SideTable(source=_side_source(flags, paths, path, delimiter), key=key)


def _side_source(flags: LogFlags, paths: tuple[str, ...], path: str, delimiter: str) -> LogSource:
    """A file beside the log, read as the log is if it has its ending."""
    source = LogSource(paths=(path,), delimiter=_tabbed(delimiter))
    if _ending(path) != _ending(paths[0]):
        return source
    read_as = source.delimiter or _tabbed(flags.delimiter)
    return dataclasses.replace(source, format=flags.format, delimiter=read_as, encoding=flags.encoding)


def _tabbed(delimiter: str) -> str:
    """A shell passes a backslash and a t where a tab is meant."""
    return delimiter.replace("\\t", "\t")


def _ending(path: str) -> str:
    """The ending of a file's name that tells its format, in front of .gz or .zst."""
    suffixes = [suffix for suffix in Path(path.lower()).suffixes if suffix not in {".gz", ".zst"}]
    return suffixes[-1] if suffixes else ""


def movielens(flags: MovieLens) -> None:
    with _building(flags) as options:
        own = dataclasses.replace(options, ties=flags.ties)
        sequences = public_datasets.ingest_movielens(flags.folder, flags.out, options=own)
    describe(sequences)


def kuairand(flags: KuaiRand) -> None:
    with _building(flags) as options:
        sequences = public_datasets.ingest_kuairand(
            flags.paths, flags.out, published_filter=flags.published_filter, core=flags.core, options=options
        )
    describe(sequences)


def amazon(flags: Amazon) -> None:
    with _building(flags) as options:
        sequences = public_datasets.ingest_amazon(flags.path, flags.out, texts=flags.texts, options=options)
    describe(sequences)


def synthetic(flags: Synthetic) -> None:
    describe(ingest_synthetic(flags.out, flags.config, overwrite=flags.overwrite))


def clicks(flags: Clicks) -> None:
    describe(ingest_clicks(flags.out, flags.config, overwrite=flags.overwrite))


def content(flags: ContentLog) -> None:
    describe(ingest_content(flags.out, flags.config, overwrite=flags.overwrite))


def inspect(flags: Inspect) -> None:
    describe(Sequences.open(flags.folder), histogram=True)


def verify(flags: Verify) -> None:
    sequences = Sequences.open(flags.folder)
    sequences.verify()
    print(f"{flags.folder}: all {len(sequences.meta['files'])} files are as ingested, digest {sequences.digest[:16]}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A progress line on stderr."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,.0f} rows"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(phase: str, num_rows: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=None)
            bar.update(tasks[phase], completed=num_rows)

        yield show


@contextmanager
def _building(flags: ReadingLimits) -> Iterator[BuildOptions]:
    """How to build, with a progress line on stderr."""
    with _progress() as show:
        yield BuildOptions(
            max_quarantine_share=flags.max_quarantine_share,
            overwrite=getattr(flags, "overwrite", False),
            budget_rows=flags.budget_rows,
            progress=show,
        )


def parse_feature_flag(text: str) -> Feature:
    """A feature from name:kind:scope[:option=value]...; raises ConfigError that names the bad part."""
    example = "genres:ids:item:encoding=dictionary"
    name, values = _parse_flag("--feature", text, Feature, ("kind", "scope"), f"{_FEATURE_FORM}, for example {example}")
    return Feature(name=name, **values)


def parse_label_flag(text: str) -> Label:
    """A label from name:kind:feature=NUMBER[:option=value]...; raises ConfigError that names the bad part."""
    form = f"{_LABEL_FORM}, for example liked:binary:feature=rating:threshold=4"
    name, values = _parse_flag("--label", text, Label, ("kind",), form)
    if "feature" not in values:
        raise ConfigError(f"--label {text!r} is not of the form {form}.")
    return Label(name=name, **values)


def _parse_flag(
    flag: str, text: str, declared: type[Any], places: tuple[str, ...], form: str
) -> tuple[str, dict[str, Any]]:
    """The name and the fields of a declaration; the first parts have places, the others names."""
    name, *rest = text.split(":")
    positional = dict(zip(places, (part for part in rest if "=" not in part), strict=False))
    options = dict(part.split("=", 1) for part in rest if "=" in part)
    if len(rest) != len(positional) + len(options) or "kind" not in positional:
        raise ConfigError(f"{flag} {text!r} is not of the form {form}.")
    kinds = typing.get_type_hints(declared)
    values: dict[str, Any] = {}
    for option, value in {**positional, **options}.items():
        if option not in kinds or option == "name":
            raise ConfigError(
                f"{flag} {text!r}: unknown option '{option}'; there are: {', '.join(sorted(set(kinds) - {'name'}))}."
            )
        values[option] = _parse_value(f"{flag} {text!r}: {option} is '{value}'", value, kinds[option])
    return name, values


def _parse_value(where: str, value: str, kind: Any) -> Any:
    legal = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal and value not in legal:
        raise ConfigError(f"{where}, but it must be one of {', '.join(legal)}.")
    if kind is bool:
        if value not in {"true", "false"}:
            raise ConfigError(f"{where}, but it must be true or false.")
        return value == "true"
    if kind is int:
        if not value.removeprefix("-").isdecimal():
            raise ConfigError(f"{where}, but it must be a whole number.")
        return int(value)
    if kind is float:
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"{where}, but it must be a number.") from None
    return value
