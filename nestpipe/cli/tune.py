"""`nestpipe tune WHAT RECIPE`: measures a few steps on this machine and recommends settings."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Annotated, TypeVar

import tyro

from nestpipe.cli.train import check_keys, recipe_of
from nestpipe.config import Config, keys
from nestpipe.recipes import RECIPES


@dataclass(frozen=True, kw_only=True)
class TunePipelineArguments:
    """Recommends pipeline settings: trains a few steps that are discarded, and searches a cost model fitted to them.

    Run it under 'nestpipe launch' to measure with all ranks. Needs the recipe's data.

    Example: nestpipe tune pipeline tiny --data.path data/tiny

    Next: nestpipe train tiny with the flags that it prints.
    """

    json: bool = False
    """Print JSON instead of a table."""
    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]


@dataclass(frozen=True, kw_only=True)
class TuneBalanceArguments:
    """Measures what a sample of L events costs: trains a few steps that are discarded, and fits a·L + b·L².

    Ranks then get samples of equal cost instead of equal numbers of samples. Needs the recipe's data.

    Example: nestpipe tune balance tiny --events 8192

    Next: nestpipe train tiny with the flags that it prints.
    """

    json: bool = False
    """Print JSON instead of words."""
    events: int = 4096
    """Events of a step that is measured."""
    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]


Flags = TypeVar("Flags", TunePipelineArguments, TuneBalanceArguments)


def pipeline(argv: list[str]) -> int:
    arguments = _parse(argv, "pipeline", TunePipelineArguments)
    if arguments is not None:
        from nestpipe.cli.tune_pipeline import report

        report(arguments.config, as_json=arguments.json)
    return 0


def balance(argv: list[str]) -> int:
    arguments = _parse(argv, "balance", TuneBalanceArguments)
    if arguments is not None:
        from nestpipe.cli.tune_balance import report

        report(arguments.config, num_events=arguments.events, as_json=arguments.json)
    return 0


def _parse(argv: list[str], what: str, kind: type[Flags]) -> Flags | None:
    """The flags, with the settings of the recipe that is named first; None if only help was wanted."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(f"usage: nestpipe tune {what} RECIPE [--section.field VALUE ...]\n")
        print(f"{inspect.getdoc(kind)}\n\nrecipes: {', '.join(RECIPES)}")
        return None
    name, *rest = argv
    defaults: Flags = kind(config=recipe_of(name))
    check_keys(rest, [*(one.name for one in fields(kind)), *keys(defaults.config)])
    return tyro.cli(kind, prog=f"nestpipe tune {what} {name}", args=rest, default=defaults)
