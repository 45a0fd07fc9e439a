"""`nestpipe forget`: erases a user's events from the data and event logs of runs; serving instances notice."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nestpipe.atomic_files import replace_file
from nestpipe.cli.arguments import ForgetArguments
from nestpipe.cli.report import REPORT
from nestpipe.config import Config
from nestpipe.data.array_files import remove_stale
from nestpipe.data.erase_user import forget_user, is_quarantined
from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.instruction_store import INSTRUCTIONS, SqliteStore
from nestpipe.generative.nearline_job import JobLedger, ledgers_of
from nestpipe.serve.prefix_folder import remove_user
from nestpipe.serve.service_folder import EVENTS, store_folders
from nestpipe.state.erase_entries import erase_entries, number_in
from nestpipe.state.service_state import ServiceState, open_state
from nestpipe.training.run_folder import Run


def main(arguments: ForgetArguments) -> int:
    num_stored, num_logged = forget(arguments.runs, arguments.user, state=arguments.state)
    print(f"user {arguments.user}: {num_stored:,} stored and {num_logged:,} logged events were erased")
    print("trained weights are unchanged; train again to remove their influence")
    if num_stored:
        print(
            "evaluations and report.html, which list users, were deleted; run 'nestpipe eval' and 'nestpipe report' again"
        )
    return 0


def forget(runs: Sequence[Path], own: OwnId, *, state: str = "") -> tuple[int, int]:
    """Numbers of events erased from the sequence folder and from the runs' states; raises ConfigError unless it is one folder.

    Crash-safe: the runs can be opened after an interruption at any point. The next call, for any user, completes a folder
    swap that was begun; a call for the same user completes the rest.
    """
    folders = {Path(Config.load(run / "config.json").data.path).resolve() for run in runs}
    if len(folders) != 1:
        shown = f"are on {len(folders)} sequence folders" if folders else "are not named"
        raise ConfigError(f"the runs {shown}; name all runs on one sequence folder.")
    (folder,) = folders

    def announce(digest: str) -> None:
        for run in runs:
            _note(run, next_digest=digest, forgetting=user)

    with _writing(folder):
        remove_stale(folder)
        sequences = Sequences.open(folder)
        for run in runs:
            Run.open(run)  # raises if it is on other data
            _settle(run, sequences.digest)
        user, states = sequences.vocabulary("user").number_of(own), _states(runs, state)
        if user is None:  # one who came after ingestion
            user = next((number for one in states if (number := number_in(one, own)) is not None), None)
        if user is None and not is_quarantined(sequences, own):
            raise DataError(f"user {own!r} is not in {folder}; nothing was erased.")
        num_logged = 0 if user is None else sum(_erase_everywhere(states, user))
        num_stored = forget_user(sequences, user, announce=announce, own=own)
        digest = Sequences.open(folder).digest
        for run in runs:
            if user is not None:
                _forget_derived(run / "serve", user)
            _settle(run, digest)
    return num_stored, num_logged


def _states(runs: Sequence[Path], state: str) -> list[ServiceState]:
    """What services of the runs have stored: files of each run, and the database if one is named."""
    logs = [run / "serve" / EVENTS for run in runs]
    return [open_state("", log) for log in logs if log.exists()] + ([open_state(state, logs[0])] if state else [])


def _erase_everywhere(states: Sequence[ServiceState], user: int) -> Iterator[int]:
    for one in states:
        yield erase_entries(one, user)
        one.close()


def _forget_derived(folder: Path, user: int) -> None:
    """Erases a user's stored KV prefixes and instructions, after the events: a job that writes now finds no history."""
    for prefixes in store_folders(folder):
        remove_user(prefixes, user)
    path = folder / INSTRUCTIONS
    if path.exists():
        store = SqliteStore(path)
        store.forget(user)
        store.close()
    for place in ledgers_of(path):
        ledger = JobLedger(place)
        ledger.forget(user)
        ledger.close()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Excludes other erasures; the lock file is next to the folder, because the folder is replaced."""
    with folder.with_name(f".{folder.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _settle(run: Path, digest: str) -> None:
    """Ends an announced folder swap: the run belongs to the folder that exists now, and instructions of the user are gone."""
    facts = json.loads((run / "run.json").read_text())
    if facts["data_digest"] != digest:
        shutil.rmtree(run / "eval", ignore_errors=True)
        (run / REPORT).unlink(missing_ok=True)
    if "next_digest" in facts:
        if facts.get("forgetting") is not None:
            _forget_derived(run / "serve", facts["forgetting"])
        _note(run, data_digest=digest)


def _note(run: Path, **changes: str | int | None) -> None:
    """Stores in run.json the digest of the run's folder, or of the one about to replace it and the number that it lacks."""
    facts = json.loads((run / "run.json").read_text())
    for name in ("next_digest", "forgetting"):
        facts.pop(name, None)
    replace_file(run / "run.json", (json.dumps({**facts, **changes}, indent=2) + "\n").encode())
