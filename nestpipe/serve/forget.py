"""`nestpipe forget`: a user's events leave the histories of a run, on the disk and in every instance that serves it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from nestpipe.data.forget import forget_user
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.metrics import replace_file
from nestpipe.run import Run
from nestpipe.serve.command import EVENTS
from nestpipe.serve.event_log import EventLog


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of all runs on one sequence folder."""
    user: int
    """Id of the user."""


def main(argv: list[str]) -> int:
    text = (
        "Removes a user from the sequence folder of some runs and from their event logs. Instances that serve them notice "
        "within a second and drop all prefixes. A run on the same data that is not named will refuse it as other data.\n\n"
        "Example: nestpipe forget runs/ranking --user 42"
    )
    arguments = tyro.cli(_Arguments, prog="nestpipe forget", description=text, args=argv)
    runs = [Run.open(folder) for folder in arguments.runs]
    num_stored, num_logged = forget(runs, arguments.user)
    print(f"user {arguments.user}: {num_stored:,} stored and {num_logged:,} logged events are gone")
    print("weights that were trained with them stay as they are; train again to have them without")
    if num_stored:
        print("evaluation reports, which list users, are gone too; 'nestpipe eval' makes them again")
    return 0


def forget(runs: Sequence[Run], user: int) -> tuple[int, int]:
    """How many events left the sequence folder, how many the event logs; raises ConfigError unless it is one folder."""
    folders = {Path(run.config.data.path).resolve() for run in runs}
    if len(folders) != 1:
        raise ConfigError(f"the runs have {len(folders)} sequence folders; name runs on one of them at a time.")
    logs = [run.folder / "serve" / EVENTS for run in runs]
    num_logged = sum(EventLog(log).rewrite(lambda event: event["user"] != user) for log in logs if log.exists())
    num_stored = forget_user(runs[0].sequences, user)
    if num_stored:
        digest = Sequences.open(folders.pop()).digest
        for run in runs:
            facts = run.folder / "run.json"
            content = {**json.loads(facts.read_text()), "data_digest": digest}
            replace_file(facts, (json.dumps(content, indent=2) + "\n").encode())
            shutil.rmtree(run.folder / "eval", ignore_errors=True)
    return num_stored, num_logged
