"""`nestpipe data ...`: logs into sequence folders, and a look into them.

Each subcommand is a frozen dataclass: its fields are the flags, its docstring is the help, `run` does the work.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from nestpipe.cli.data_describe import describe
from nestpipe.data import public_datasets
from nestpipe.data.config import ClicksConfig, Format, SyntheticConfig
from nestpipe.data.ingest import BuildOptions, SideTable, write_sequences
from nestpipe.data.log_reader import LogSource
from nestpipe.data.schema import Encoding, Feature, Label, Schema, TimeUnit
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError

_FEATURE_FORM = "name:kind:scope[:option=value]..."
_LABEL_FORM = "name:kind:feature=NUMBER[:option=value]..."


class Command(Protocol):
    """What every subcommand has."""

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Flags of all commands that write a folder."""

    out: Path
    """The sequence folder to write."""
    overwrite: bool = False
    """Replace the folder if it exists."""
    max_quarantine_share: float = 0.01
    """Stop if more than this share of the records is bad."""
    budget_rows: int = 10_000_000
    """Events held in memory at a time; a larger log is sorted on disk."""

    def build(self, work: Callable[[BuildOptions], Sequences], *, dedupe: bool = False) -> None:
        """Runs the work under a progress line and describes the result."""
        with _progress() as progress:
            options = BuildOptions(
                dedupe=dedupe,
                max_quarantine_share=self.max_quarantine_share,
                overwrite=self.overwrite,
                budget_rows=self.budget_rows,
                progress=progress,
            )
            sequences = work(options)
        describe(sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest(Writing):
    """CSV, Parquet or JSONL through a column mapping; plain, .gz or .zst; quoted globs.

    Example: nestpipe data ingest 'logs/*.csv.gz' --user user_id --item movie --time ts --time-unit s
    --feature rating:number:event --feature genres:ids:item:encoding=dictionary --items-table movies.csv --out data/mine
    """

    paths: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files or globs, in the order of time where the log has none."""
    user: str = "user"
    """Column of user ids."""
    item: str = "item"
    """Column of item ids."""
    time: str = "time"
    """Column of times; 'none' for an order-only log."""
    time_unit: TimeUnit = "s"
    """Unit of the times; ISO 8601 dates without offset are UTC."""
    user_encoding: Encoding = "int64"
    """How user ids become int64: as they are, by hash, or by a dictionary."""
    item_encoding: Encoding = "int64"
    """How item ids become int64."""
    feature: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """name:kind:scope[:option=value]..., any number of times; the options are the fields of a Feature."""
    label: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """name:kind:feature=NUMBER[:option=value]..., what a ranking model predicts; the options are the fields of a Label."""
    items_table: str | None = None
    """File of item attributes; read with the log's delimiter, encoding and format if it has the log's ending."""
    items_key: str = ""
    """Column of item ids in that file; named as in the log if not given."""
    items_delimiter: str = ""
    """CSV: between fields of that file."""
    users_table: str | None = None
    """File of user attributes; likewise."""
    users_key: str = ""
    """Column of user ids in that file; named as in the log if not given."""
    users_delimiter: str = ""
    """CSV: between fields of that file."""
    format: Format = "auto"
    """Format of the log; by its ending if not given."""
    delimiter: str = ""
    r"""CSV: between fields, \t for a tab; by default a tab for .tsv, a comma otherwise."""
    columns: str = ""
    """CSV without header: the names of its columns, like user,item,time."""
    encoding: str = "utf-8"
    """Encoding of the text, for example latin-1."""
    dedupe: bool = False
    """Keep only the first of equal records."""
    texts: Path | None = None
    """Parquet file with item_id and title, kept as text.parquet; item ids must be int64."""

    def run(self) -> None:
        schema = Schema(
            user=self.user,
            item=self.item,
            time=None if self.time == "none" else self.time,
            time_unit=self.time_unit,
            user_encoding=self.user_encoding,
            item_encoding=self.item_encoding,
            features=tuple(parse_feature_flag(text) for text in self.feature),
            labels=tuple(parse_label_flag(text) for text in self.label),
        )
        columns = tuple(self.columns.split(",")) if self.columns else ()
        log = LogSource(
            paths=self.paths,
            format=self.format,
            delimiter=_tabbed(self.delimiter),
            columns=columns,
            encoding=self.encoding,
        )
        items = self._table(self.items_table, key=self.items_key or self.item, delimiter=self.items_delimiter)
        users = self._table(self.users_table, key=self.users_key or self.user, delimiter=self.users_delimiter)

        if self.texts is not None and self.item_encoding != "int64":
            raise ConfigError(
                f"--texts names items by number, but --item-encoding is {self.item_encoding}: they would not be found."
            )

        def work(options: BuildOptions) -> Sequences:
            if self.texts is not None:
                options = dataclasses.replace(options, attachments={"text": public_datasets.read_texts(self.texts)})
            return write_sequences(self.out, schema=schema, log=log, items=items, users=users, options=options)

        self.build(work, dedupe=self.dedupe)

    def _table(self, path: str | None, *, key: str, delimiter: str) -> SideTable | None:
        if path is None:
            return None
        source = LogSource(paths=(path,), delimiter=_tabbed(delimiter))
        if _ending(path) == _ending(self.paths[0]):
            source = dataclasses.replace(
                source,
                format=self.format,
                delimiter=source.delimiter or _tabbed(self.delimiter),
                encoding=self.encoding,
            )
        return SideTable(source=source, key=key)


def _tabbed(delimiter: str) -> str:
    """A shell passes a backslash and a t where a tab is meant."""
    return delimiter.replace("\\t", "\t")


def _ending(path: str) -> str:
    """The ending of a file's name that tells its format, in front of .gz or .zst."""
    suffixes = [suffix for suffix in Path(path.lower()).suffixes if suffix not in {".gz", ".zst"}]
    return suffixes[-1] if suffixes else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLens(Writing):
    """MovieLens-1M: ratings.dat, movies.dat, users.dat. Example: nestpipe data movielens ml-1m --out data/ml1m"""

    folder: Annotated[Path, tyro.conf.Positional]
    """The unpacked folder."""

    def run(self) -> None:
        self.build(lambda options: public_datasets.ingest_movielens(self.folder, self.out, options=options))


@dataclass(frozen=True, slots=True, kw_only=True)
class KuaiRand(Writing):
    """KuaiRand log_standard files. Example: nestpipe data kuairand 'data/log_standard_*.csv' --published-filter --out data/kuairand"""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files or globs."""
    published_filter: bool = False
    """Drop disliked impressions and those without a positive signal, then take the core."""
    core: int = 5
    """Events that every user and item must keep under the filter."""

    def run(self) -> None:
        self.build(
            lambda options: public_datasets.ingest_kuairand(
                self.paths, self.out, published_filter=self.published_filter, core=self.core, options=options
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Amazon(Writing):
    """Lines 'user item item ...', oldest first. Example: nestpipe data amazon sequences.txt.gz --texts items.parquet --out data/beauty"""

    path: Annotated[Path, tyro.conf.Positional]
    """The sequence file."""
    texts: Path | None = None
    """Parquet file with item_id and title, kept as text.parquet."""

    def run(self) -> None:
        self.build(
            lambda options: public_datasets.ingest_amazon(self.path, self.out, texts=self.texts, options=options)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Counts, lengths, time span, features and quarantine of a folder. Example: nestpipe data inspect data/ml1m"""

    folder: Annotated[Path, tyro.conf.Positional]
    """A sequence folder."""

    def run(self) -> None:
        describe(Sequences.open(self.folder), histogram=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Reads every file of a folder and compares its digest. Example: nestpipe data verify data/ml1m"""

    folder: Annotated[Path, tyro.conf.Positional]
    """A sequence folder."""

    def run(self) -> None:
        sequences = Sequences.open(self.folder)
        sequences.verify()
        print(
            f"{self.folder}: all {len(sequences.meta['files'])} files are as ingested, digest {sequences.digest[:16]}"
        )


def main(argv: list[str]) -> int:
    """Parses the arguments and runs the subcommand; errors of the user propagate as NestPipeError."""
    commands: dict[str, Callable[..., Any]] = {
        "ingest": Ingest,
        "movielens": MovieLens,
        "kuairand": KuaiRand,
        "amazon": Amazon,
        "synthetic": _synthetic(),
        "clicks": _clicks(),
        "inspect": Inspect,
        "verify": Verify,
    }
    command: Command = tyro.extras.subcommand_cli_from_dict(
        commands, prog="nestpipe data", description="Turns logs into sequence folders, and looks into them.", args=argv
    )
    command.run()
    return 0


def _synthetic() -> type[Command]:
    """Its flags are the fields of its config, which is imported only here: it draws in the generator's dependencies."""
    from nestpipe.data.synthetic_sequences import ingest_synthetic

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Synthetic:
        """A generated log with planted signal and a known best metric. Example: nestpipe data synthetic --out data/tiny"""

        out: Path
        """The sequence folder to write."""
        overwrite: bool = False
        """Replace the folder if it exists."""
        config: Annotated[SyntheticConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=SyntheticConfig)

        def run(self) -> None:
            describe(ingest_synthetic(self.out, self.config, overwrite=self.overwrite))

    # tyro resolves the annotations of a class by name, and these names are local
    Synthetic.__annotations__.update(config=Annotated[SyntheticConfig, tyro.conf.arg(name="")])
    return Synthetic


def _clicks() -> type[Command]:
    """Likewise."""
    from nestpipe.data.synthetic_clicks import ingest_clicks

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Clicks:
        """A generated click log with planted interactions and a known best AUC. Example: nestpipe data clicks --out data/clicks"""

        out: Path
        """The sequence folder to write."""
        overwrite: bool = False
        """Replace the folder if it exists."""
        config: Annotated[ClicksConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=ClicksConfig)

        def run(self) -> None:
            describe(ingest_clicks(self.out, self.config, overwrite=self.overwrite))

    Clicks.__annotations__.update(config=Annotated[ClicksConfig, tyro.conf.arg(name="")])
    return Clicks


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
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
