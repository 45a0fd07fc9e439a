"""`nestpipe train`: a recipe, its overrides, a run folder."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from nestpipe.checkpoint.config import Word
from nestpipe.cli import importing
from nestpipe.config import Config, keys, unknown_key
from nestpipe.errors import ConfigError
from nestpipe.models.config import EncDecConfig
from nestpipe.recipes import RECIPES
from nestpipe.registry import entry_named, entry_of, find

_MODEL_HELP = "--model NAME trains another model: one of nestpipe ('hstu') or package.module:Class; its settings are --model.FIELD."


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
    scenarios: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = ""
    """Generative models: scenario file, which the run keeps."""
    instructions: Annotated[str, tyro.conf.arg(metavar="STORE", help_behavior_hint="")] = ""
    """Generative models: instructions of 'nestpipe think --for-training' to train on."""
    profile: bool = False
    """Profile a few steps: print a table, write a trace to RUN/profile."""
    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]


def main(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        print(_usage())
        return 0
    name, *rest = argv
    recipe, (model, rest) = find_recipe(name), take_model(rest)
    config = recipe()
    defaults = TrainArguments(config=replace(config, model=entry_named(model).config()) if model else config)
    check_keys(
        rest, ["run", "resume", "init_from", "allow", "scenarios", "instructions", "profile", *keys(defaults.config)]
    )
    arguments = tyro.cli(
        TrainArguments,
        prog=f"nestpipe train {name}",
        description=f"{recipe.__doc__}\n\n{_MODEL_HELP}\n\nExample: nestpipe train {name} --train.minutes 15 --run runs/first",
        args=rest,
        default=defaults,
    )
    if arguments.allow and arguments.init_from is None:
        raise ConfigError("--allow says what may differ from another run; name that run with --init-from.")
    with importing():
        from nestpipe.checkpoint.origin import InitFrom
        from nestpipe.training.loop import INTERRUPTED, train_to_end

    outcome = train_to_end(
        _steered(arguments),
        arguments.run or f"runs/{name.replace(':', '.')}",
        resume=arguments.resume,
        init_from=InitFrom(arguments.init_from, arguments.allow) if arguments.init_from is not None else None,
        profile=arguments.profile,
        quiet=False,
        recipe=name,
    )
    is_interrupted = outcome.stopped == INTERRUPTED
    if int(os.environ.get("RANK", "0")) == 0:
        folder = shlex.quote(str(outcome.run.folder))
        print("Next: the same command with --resume continues" if is_interrupted else f"Next: nestpipe eval {folder}")
    return 130 if is_interrupted else 0  # so that 'train && eval' does not continue after Ctrl-C


def _steered(arguments: TrainArguments) -> Config:
    """The configuration with the files of a generative model."""
    given = {name: getattr(arguments, name) for name in ("scenarios", "instructions") if getattr(arguments, name)}
    config = arguments.config
    if given and not isinstance(config.model, EncDecConfig):
        raise ConfigError(f"--{next(iter(given))} is for generative models, not for '{entry_of(config.model).kind}'.")
    return replace(config, model=replace(config.model, **given)) if given else config


def recipe_of(name: str) -> Config:
    """The configuration of a recipe. Raises ConfigError."""
    return find_recipe(name)()


def find_recipe(name: str) -> Callable[[], Config]:
    """A recipe of this package, or a function written as 'package.module:recipe'. Raises ConfigError."""
    if ":" in name:
        recipe: Callable[[], Config] = find(name)
        if not callable(recipe) or not isinstance(recipe(), Config):
            raise ConfigError(
                f"'{name}' is no recipe: a recipe is a function without arguments that returns a nestpipe.Config."
            )
        return recipe
    if name not in RECIPES:
        nearest = difflib.get_close_matches(name, RECIPES, n=1)
        hint = (
            f"did you mean '{nearest[0]}'?"
            if nearest
            else f"there are: {', '.join(RECIPES)}, and package.module:recipe"
        )
        raise ConfigError(f"unknown recipe '{name}'; {hint}")
    return RECIPES[name]


def take_model(argv: list[str]) -> tuple[str | None, list[str]]:
    """The name after --model, which decides which flags --model.FIELD exist, and the other arguments. Raises ConfigError."""
    rest, model = list[str](), None
    arguments = iter(argv)
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if flag != "--model":
            rest.append(argument)
        elif not (model := value or next(arguments, "")) or model.startswith("-"):
            raise ConfigError("--model needs a name: a model of nestpipe ('hstu') or package.module:Class.")
    return model, rest


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
        "usage: nestpipe train RECIPE [--run DIR] [--resume] [--init-from RUN [--allow WORD ...]]\n"
        "                      [--scenarios FILE] [--instructions STORE] [--model NAME] [--section.field VALUE ...]\n\n"
        f"recipes:\n{rows}\n"
        "  package.module:recipe  a function of yours that returns a nestpipe.Config\n\n"
        f"{_MODEL_HELP}\n\n"
        "Example: nestpipe train tiny --train.epochs 5 --run runs/first\n"
        "'nestpipe train RECIPE --help' lists every setting with its value in that recipe."
    )
