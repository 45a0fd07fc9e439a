"""The command line: a list of the subcommands that the packages own. `nestpipe COMMAND --help` teaches each of them."""

from __future__ import annotations

import difflib
import importlib
import sys

from nestpipe.errors import NestPipeError

COMMANDS = {
    "demo": ("nestpipe.cli.demo", "everything once, on generated data, each step checked"),
    "data": (
        "nestpipe.cli.data",
        "logs into sequence folders: ingest, movielens, kuairand, amazon, synthetic, inspect, verify",
    ),
    "train": ("nestpipe.cli.train", "train a recipe: nestpipe train tiny --train.epochs 5"),
    "eval": ("nestpipe.cli.eval", "evaluate a run, or compare two: nestpipe eval runs/a --compare runs/b"),
    "tune": ("nestpipe.cli.tune", "measure a recipe here and say which settings fit: nestpipe tune pipeline tiny"),
    "sid": ("nestpipe.cli.sid", "semantic ids of a catalogue: build, extend, inspect"),
    "think": ("nestpipe.cli.think", "instructions for a generative run, near-line: nestpipe think runs/beauty_sid"),
    "trace": ("nestpipe.cli.trace", "where the time of a run's steps went, as numbers and as a drawing"),
    "report": ("nestpipe.cli.report", "one HTML file about a run: curves, quality, overlap, balance, settings"),
    "checkpoint": (
        "nestpipe.cli.checkpoint",
        "look into a run's checkpoints, or check every byte: inspect, verify",
    ),
    "check-model": (
        "nestpipe.cli.check_model",
        "does a class of yours train exactly? nestpipe check-model my_package.gru:GRU",
    ),
    "serve": ("nestpipe.cli.serve", "serve a run that ranks over HTTP: nestpipe serve runs/ranking"),
    "swap": (
        "nestpipe.cli.swap",
        "another model for instances that run: nestpipe swap runs/ranking runs/better",
    ),
    "forget": ("nestpipe.cli.forget", "remove a user from the data and the event log of a run"),
    "simulate": (
        "nestpipe.cli.simulate",
        "a step on many workers, in a model: nestpipe simulate --workers 1536",
    ),
    "doctor": ("nestpipe.cli.doctor", "what this machine can run, and what is missing"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; a user's mistake is one message on stderr and exit code 2, never a traceback."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else f"; there are: {', '.join(COMMANDS)}"
        print(f"nestpipe: unknown command '{name}'{hint}", file=sys.stderr)
        return 2
    try:
        code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
        return code
    except NestPipeError as error:
        print(f"nestpipe {name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # no such folder, no permission, disk full: the system's words and the path say it
        print(f"nestpipe {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"nestpipe {name}: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    rows = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    return f"usage: nestpipe COMMAND ...\n\nTurns interaction logs into recommendations, exactly and fast.\n\n{rows}\n\nExample: nestpipe demo\n'nestpipe COMMAND --help' says more."
