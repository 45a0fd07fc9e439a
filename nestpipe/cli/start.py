"""`nestpipe start LOG`: from a log to a trained, evaluated run, by commands that it proposes and prints.

    look at the log -> propose columns -> ingest -> choose a model -> train -> eval -> report

Every step is a normal command, shown before it runs. A second start continues where the first one stopped.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from nestpipe.cli import main as run_command
from nestpipe.cli.arguments import StartArguments
from nestpipe.config import flat
from nestpipe.data.log_reader import LogSource, columns_of, propose_delimiter, read_raw
from nestpipe.data.schema import Encoding
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.recipes import RECIPES
from nestpipe.training.fit import choose_config
from nestpipe.training.run_folder import Run

_NAMES = {
    "user": r"user|customer|visitor|member|client|account|buyer|reader|listener|uid|who|session",
    "item": r"item|product|article|movie|video|song|track|book|sku|asin|goods|content|what",
    "time": r"time|timestamp|date|when|\bts\b|created|_at\b",
}


@dataclass(frozen=True, slots=True)
class ProposedColumns:
    """Which columns of a log hold what, and how ids are read."""

    user: str
    item: str
    time: str
    user_encoding: Encoding
    item_encoding: Encoding


def main(arguments: StartArguments) -> int:
    source = LogSource(paths=arguments.log)
    source = replace(source, delimiter=propose_delimiter(source))
    columns = propose(source, user=arguments.user, item=arguments.item, time=arguments.time)
    data, run = arguments.out / "data", arguments.out / "run"
    ids = f"users in '{columns.user}' ({columns.user_encoding}), items in '{columns.item}' ({columns.item_encoding})"
    print(f"{', '.join(arguments.log)}: {ids}, times in '{columns.time}'")
    ingest = ["data", "ingest", *arguments.log, "--user", columns.user, "--item", columns.item, "--time", columns.time]
    ingest += ["--user-encoding", columns.user_encoding, "--item-encoding", columns.item_encoding]
    ingest += [*(["--delimiter", source.delimiter] if source.delimiter else []), *_declared(arguments)]
    ingest += ["--out", str(data)]
    steps: list[Callable[[], list[str] | None]] = [
        lambda: None if (data / "meta.json").exists() else ingest,
        lambda: _train(arguments, data, run),
        lambda: ["eval", str(run)],
        lambda: ["report", str(run)],
    ]
    if not _confirmed(arguments, ingest):
        return 0
    for step in steps:
        command = step()
        if command is None:
            print(f"{data} is there already; remove it to read the log again")
            continue
        print(f"\n$ nestpipe {shlex.join(command)}", flush=True)
        if code := run_command(command):
            print(f"stopped with code {code}; the same 'nestpipe start' continues from here", file=sys.stderr)
            return code
    _say_next(run)
    return 0


def _declared(arguments: StartArguments) -> list[str]:
    """What is read besides ids and times, as ingest takes it."""
    words = [word for one in arguments.feature for word in ("--feature", one)]
    words += [word for one in arguments.label for word in ("--label", one)]
    files = {"--items-table": arguments.items_table, "--users-table": arguments.users_table, "--texts": arguments.texts}
    return words + [word for flag, file in files.items() if file is not None for word in (flag, str(file))]


def _confirmed(arguments: StartArguments, ingest: list[str]) -> bool:
    if arguments.yes:
        return True
    print(f"\nThis will run:\n  nestpipe {shlex.join(ingest)}")
    print(f"  nestpipe train {arguments.model} ..., nestpipe eval, nestpipe report: sizes follow the log that was read")
    if not sys.stdin.isatty():
        print("\nNothing was run: add --yes.")
        return False
    return input("\nRun these? [Y/n] ").strip().lower() in {"", "y", "yes"}


def _train(arguments: StartArguments, data: Path, run: Path) -> list[str]:
    """The train command whose flags say everything that differs from the recipe."""
    config = choose_config(Sequences.open(data), model=arguments.model, epochs=arguments.epochs)
    recipe = flat(RECIPES[arguments.model]())
    flags = ["--data.path", str(data)]
    for key, value in flat(config).items():
        if key != "data.path" and value != recipe.get(key):
            flags += _flag(key.replace("_", "-"), value)
    resume = ["--resume"] if Run.exists(run) else []
    return ["train", arguments.model, *flags, "--run", str(run), *resume]


def _flag(key: str, value: object) -> list[str]:
    """A setting as the command line takes it."""
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return [f"--{key}" if value else f"--{section}.no-{name}"]
    return [f"--{key}", *map(str, value if isinstance(value, tuple) else (value,))]


def _say_next(run: Path) -> None:
    opened = Run.open(run)
    (user,) = opened.sequences.vocabulary("user").own_ids(opened.sequences.users[:1])
    print(f"\nThe report: {run / 'report.html'}")
    print(f"Next: nestpipe recommend {shlex.quote(str(run))} --user {shlex.quote(str(user))}")


def propose(source: LogSource, *, user: str = "", item: str = "", time: str = "") -> ProposedColumns:
    """The columns of a log by their names, and encodings by their values; raises ConfigError if a name tells nothing."""
    present = columns_of(source)
    given = {"user": user, "item": item, "time": time}
    if unknown := [name for name in given.values() if name and name != "none" and name not in present]:
        raise ConfigError(f"the log has no column {unknown}; it has {present}.")
    chosen: dict[str, str] = {role: name for role, name in given.items() if name}
    for role, pattern in _NAMES.items():
        if role not in chosen:
            free = [name for name in present if name not in chosen.values()]
            matches = [name for name in free if re.search(pattern, name, re.IGNORECASE)]
            exact = [name for name in matches if name.lower() in {role, f"{role}_id", f"{role}id"}]
            if found := exact or matches:
                chosen[role] = found[0]
    if missing := [role for role in ("user", "item") if role not in chosen]:
        raise ConfigError(
            f"cannot tell which column holds the {' and '.join(missing)} ids; the log has {present}. "
            f"Say it with {' '.join(f'--{role} COLUMN' for role in missing)}."
        )
    chosen.setdefault("time", "none")
    wanted = [chosen["user"], chosen["item"]]
    first = next(read_raw(source, wanted)).frame.select(pl.col(wanted).cast(pl.String))
    return ProposedColumns(
        chosen["user"], chosen["item"], chosen["time"], _encoding(first[wanted[0]]), _encoding(first[wanted[1]])
    )


def _encoding(texts: pl.Series) -> Encoding:
    """int64 if the values that are there are whole numbers as int64 would print them; 007 is a text."""
    there = texts.str.strip_chars().drop_nulls()
    there = there.filter(there != "")
    numbers = there.cast(pl.Int64, strict=False).cast(pl.String)
    return "int64" if (numbers == there).fill_null(False).all() else "dictionary"
