"""`nestpipe train`: a recipe, its overrides, a run folder."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Annotated

import tyro

from nestpipe.checkpoint.config import Word
from nestpipe.config import Config, keys, unknown_key
from nestpipe.errors import ConfigError
from nestpipe.recipes import RECIPES


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    run: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Folder of the run [default: runs/RECIPE]."""
    resume: bool = False
    """Resume the run in that folder, if there is one."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="RUN_OR_CHECKPOINT", help_behavior_hint="")] = None
    """Start a new run from the weights of another run (its best checkpoint, else the latest) or of a checkpoint."""
    allow: tuple[Word, ...] = ()
    """With --init-from: what may differ from the other run; other differences are refused."""
    profile: bool = False
    """Profile a few steps: print a table, write a trace to RUN/profile."""
    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]


def main(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        print(_usage())
        return 0
    name, *rest = argv
    defaults = TrainArguments(config=recipe_of(name))
    check_keys(rest, ["run", "resume", "init_from", "allow", "profile", *keys(defaults.config)])
    arguments = tyro.cli(
        TrainArguments,
        prog=f"nestpipe train {name}",
        description=f"{RECIPES[name].__doc__}\n\nExample: nestpipe train {name} --train.minutes 15 --run runs/first",
        args=rest,
        default=defaults,
    )
    if arguments.allow and arguments.init_from is None:
        raise ConfigError("--allow says what may differ from another run; name that run with --init-from.")
    from nestpipe.checkpoint.origin import InitFrom
    from nestpipe.training.loop import INTERRUPTED, train_to_end

    outcome = train_to_end(
        arguments.config,
        arguments.run or f"runs/{name}",
        resume=arguments.resume,
        init_from=InitFrom(arguments.init_from, arguments.allow) if arguments.init_from is not None else None,
        profile=arguments.profile,
        quiet=False,
        recipe=name,
    )
    return 130 if outcome.stopped == INTERRUPTED else 0  # so that 'train && eval' does not go on after Ctrl-C


def recipe_of(name: str) -> Config:
    """The configuration of a recipe; raises ConfigError with the nearest one, or all, if there is none of that name."""
    if name not in RECIPES:
        nearest = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(RECIPES)}"
        raise ConfigError(f"unknown recipe '{name}'; {hint}")
    return RECIPES[name]()


def check_keys(argv: list[str], known: list[str]) -> None:
    """Raises ConfigError for the first flag that does not exist, naming the nearest that does."""
    for argument in argv:
        if match := re.fullmatch(r"--([^=]+)(=.*)?", argument):
            key = match[1].replace("-", "_")
            if key != "help" and key not in known and re.sub(r"(^|\.)no_", r"\1", key) not in known:
                raise unknown_key(key, known)


def _usage() -> str:
    rows = "\n".join(f"  {name:<18}{recipe.__doc__}" for name, recipe in RECIPES.items())
    return (
        "usage: nestpipe train RECIPE [--run DIR] [--resume] [--init-from RUN [--allow WORD ...]] [--section.field VALUE ...]\n\n"
        f"recipes:\n{rows}\n\n"
        "Example: nestpipe train tiny --train.epochs 5 --run runs/first\n"
        "'nestpipe train RECIPE --help' lists every setting with its value in that recipe."
    )
