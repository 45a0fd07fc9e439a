"""The command line: a table of commands. `nestpipe COMMAND --help` teaches each of them.

    arguments -> parser (imports no torch) -> flags -> work (imported only now) -> exit code

So `--help` and refused flags answer at once. A parser is a dataclass of flags, whose docstring is the help, or a function.
Commands whose flags depend on a recipe or a model parse for themselves.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from nestpipe.distributed.local_host import end_with_parent, usable_cores
from nestpipe.distributed.rank_failure import record_failure
from nestpipe.errors import ConfigError, NestPipeError


class Command(NamedTuple):
    """A command: `work` gets what `parser` returns, or the arguments themselves if it has none."""

    summary: str
    work: str  # module:function, a module of this package
    parser: str = ""  # module:class or module:function


_HELP = ("-h", "--help")
GROUPS = {  # first word of commands that have two: what they are for, and an example
    "data": ("logs into sequence folders", "data synthetic --out data/tiny"),
    "sid": ("semantic ids of a catalogue, for generative models", "sid build data/beauty --out data/beauty-ids"),
    "tune": ("measure a recipe on this machine and recommend settings", "tune pipeline tiny"),
    "checkpoint": ("inspect, verify, compare and rewrite checkpoints", "checkpoint verify runs/tiny"),
}
SECTIONS: dict[str, dict[str, Command]] = {
    "Get data in": {
        "data ingest": Command("a log as CSV, Parquet or JSONL", "data:ingest", "data_arguments:Ingest"),
        "data append": Command("new events join a sequence folder", "data:append", "data_arguments:Append"),
        "data merge": Command("shards of a log into one folder", "data:merge", "data_arguments:Merge"),
        "data movielens": Command("MovieLens-1M", "data:movielens", "data_arguments:MovieLens"),
        "data kuairand": Command("KuaiRand", "data:kuairand", "data_arguments:KuaiRand"),
        "data amazon": Command("Amazon reviews, one line per user", "data:amazon", "data_arguments:Amazon"),
        "data synthetic": Command("a generated log for retrieval", "data:synthetic", "data_arguments:Synthetic"),
        "data clicks": Command("a generated log for ranking", "data:clicks", "data_arguments:Clicks"),
        "data content": Command("a generated log with new items", "data:content", "data_arguments:ContentLog"),
        "data inspect": Command("counts, lengths, features, quarantine", "data:inspect", "data_arguments:Inspect"),
        "data verify": Command("every file against its digest", "data:verify", "data_arguments:Verify"),
        "sid build": Command("ids from item texts", "sid:build", "arguments:BuildSid"),
        "sid extend": Command("ids for new items", "sid:extend", "arguments:ExtendSid"),
        "sid inspect": Command("coverage, collisions, balance", "sid:inspect", "arguments:InspectSid"),
        "forget": Command("erase a user from data and event logs", "forget:main", "arguments:ForgetArguments"),
    },
    "Train": {
        "start": Command("from a log to a trained run, in one command", "start:main", "arguments:StartArguments"),
        "train": Command("train a recipe, in one process or under launch", "train:main"),
        "align": Command("improve a generative run by rewards", "align:main", "align_arguments:AlignArguments"),
        "launch": Command("a command on several ranks, of one machine or many", "launch:main", "launch:parse"),
        "tune pipeline": Command("pipeline settings, from a few measured steps", "tune:pipeline"),
        "tune balance": Command("cost of a sample by its length, for load balance", "tune:balance"),
    },
    "Evaluate and recommend": {
        "eval": Command("metrics of a run, or two runs compared", "eval:main", "arguments:EvalArguments"),
        "recommend": Command("items for users, in own ids", "recommend:recommend", "arguments:RecommendArguments"),
        "similar": Command("items that are like an item", "recommend:similar", "arguments:SimilarArguments"),
        "report": Command("one HTML file about a run", "report:main", "arguments:ReportArguments"),
    },
    "Serve": {
        "serve": Command("serve a run over HTTP", "serve:main", "nestpipe.serve.serve_flags:parse"),
        "swap": Command("load another model into running instances", "swap:main", "arguments:SwapArguments"),
        "prefill": Command(
            "store KV prefixes of a ranker before requests come", "prefill:main", "prefill_arguments:PrefillArguments"
        ),
        "think": Command(
            "write instructions for a generative run, near-line", "think:main", "think_arguments:ThinkArguments"
        ),
    },
    "Look inside": {
        "trace": Command("where the time of training steps went", "trace:main", "arguments:TraceArguments"),
        "checkpoint inspect": Command(
            "step, tables, parameters", "checkpoint:inspect", "checkpoint_arguments:InspectCheckpoint"
        ),
        "checkpoint verify": Command(
            "files against digests", "checkpoint:verify", "checkpoint_arguments:VerifyCheckpoint"
        ),
        "checkpoint diff": Command(
            "two checkpoints, bitwise", "checkpoint:diff", "checkpoint_arguments:DiffCheckpoints"
        ),
        "checkpoint compact": Command(
            "a delta made full", "checkpoint:compact", "checkpoint_arguments:CompactCheckpoint"
        ),
        "checkpoint rebucket": Command(
            "other buckets", "checkpoint:rebucket", "checkpoint_arguments:RebucketCheckpoints"
        ),
        "checkpoint import-hstu": Command(
            "a run of Meta's checkpoint", "checkpoint:import_hstu", "checkpoint_arguments:ImportHSTU"
        ),
        "simulate": Command("predict a step's time on many workers", "simulate:main", "arguments:SimulateArguments"),
    },
    "Check": {
        "doctor": Command("what this machine can run, and what is missing", "doctor:main", "arguments:DoctorArguments"),
        "check-model": Command("does a model of yours keep the contracts of exact training?", "check_model:main"),
        "demo": Command(
            "everything once, on generated data, each step checked", "demo:main", "arguments:DemoArguments"
        ),
    },
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}
_FIRST_WORDS = list(dict.fromkeys(name.split()[0] for name in COMMANDS))


def main(argv: list[str] | None = None) -> int:
    """Runs one command; a user's mistake is one message on stderr and exit code 2, never a traceback."""
    words = sys.argv[1:] if argv is None else argv
    name = " ".join(["nestpipe", *(word for word in words[:1] if word in _FIRST_WORDS)])
    try:
        _prepare_process()
        return run(words)
    except (NestPipeError, OSError) as error:  # OSError: no such folder, no permission, disk full
        print(f"{name}: {error}", file=sys.stderr)
        record_failure(f"{name}: {error}", error)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    finally:
        if argv is None and "triton" not in sys.modules:  # triton would print what stays as leaks
            gc.freeze()  # the process ends: Python's last collections would look at everything once more, 0.5 s of CPU


def _prepare_process() -> None:
    """Settings that must come before torch is imported, and the end of a rank whose launcher is gone."""
    # Threads that wait for work must not spin: at a load of 9 on 2 cores a step took 4.7 s, passively 0.8 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if (cores := usable_cores()) < (os.cpu_count() or 1):  # torch counts the cores of the machine, not the quota
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def run(words: Sequence[str]) -> int:
    """The exit code of one command; errors propagate."""
    if not words or words[0] in _HELP:
        print(_usage())
        return 0
    if words[0] in GROUPS and (len(words) == 1 or words[1] in _HELP):
        print(_group_usage(words[0]))
        return 0
    length = 2 if words[0] in GROUPS else 1
    name, rest = " ".join(words[:length]), list(words[length:])
    if name not in COMMANDS:
        raise ConfigError(_unknown(name))
    command, given = COMMANDS[name], rest
    if command.parser:
        parser = _load(command.parser)
        given = _parse(parser, name, rest) if isinstance(parser, type) else parser(rest)
    code: int | None = _load(command.work)(given)
    return code or 0


@contextmanager
def importing() -> Iterator[None]:
    """Pauses the garbage collector, which looks at the objects of 1,600 modules again and again: 0.2 s of CPU."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    with importing():
        return getattr(importlib.import_module(module if "." in module else f"nestpipe.cli.{module}"), attribute)


def _parse(flags: type[Any], name: str, argv: list[str]) -> Any:
    import tyro

    return tyro.cli(flags, prog=f"nestpipe {name}", args=argv, config=(tyro.conf.FlagCreatePairsOff,))


def _unknown(name: str) -> str:
    group, _, member = name.partition(" ")
    known = list(_members(group)) if group in GROUPS else _FIRST_WORDS
    nearest = difflib.get_close_matches(member or group, known, n=1)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(known)}"
    return f"unknown command '{member or group}'; {hint}"


def _usage() -> str:
    parts = ["usage: nestpipe COMMAND ...", "Turns interaction logs into recommendations, exactly and fast."]
    for title, commands in SECTIONS.items():
        names = dict.fromkeys(name.split()[0] for name in commands)
        parts.append(f"{title}\n" + "\n".join(f"  {name:<13}{_summary(name)}" for name in names))
    parts.append("Example: nestpipe demo\n'nestpipe COMMAND --help' explains a command and its flags.")
    return "\n\n".join(parts)


def _summary(name: str) -> str:
    return f"{GROUPS[name][0]}: {', '.join(_members(name))}" if name in GROUPS else COMMANDS[name].summary


def _group_usage(group: str) -> str:
    members, (about, example) = _members(group), GROUPS[group]
    rows = "\n".join(f"  {name:<13}{command.summary}" for name, command in members.items())
    return (
        f"usage: nestpipe {group} COMMAND ...\n\n{about[0].upper()}{about[1:]}.\n\n{rows}\n\n"
        f"Example: nestpipe {example}\n'nestpipe {group} COMMAND --help' explains a command and its flags."
    )


def _members(group: str) -> dict[str, Command]:
    own = {name: command for name, command in COMMANDS.items() if name.startswith(f"{group} ")}
    return {name.removeprefix(f"{group} "): command for name, command in own.items()}
