"""`nestpipe think`: near-line job that writes instructions for users with new events."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from nestpipe.cli.think_arguments import ThinkArguments
from nestpipe.cli.think_progress import ProgressLine
from nestpipe.cli.think_provider import open_provider
from nestpipe.cli.think_training import check_trained, write_for_training
from nestpipe.data.item_texts import read_item_texts
from nestpipe.data.schema import Label
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.instruction_encoder import instruction_encoder
from nestpipe.generative.instruction_store import ANY, INSTRUCTIONS, SqliteStore, version_of
from nestpipe.generative.instruction_template import TemplateProvider
from nestpipe.generative.nearline_job import (
    FolderHistoryFeed,
    History,
    HistoryFeed,
    JobLedger,
    NearlineJob,
    ledger_of,
)
from nestpipe.generative.prompt_builder import CoVisits, Encode, InstructionProvider, RequestBuilder
from nestpipe.generative.scenario_triggers import with_trigger_rules
from nestpipe.generative.scenarios import Scenarios, scenario_numbers
from nestpipe.generative.semantic_ids import Registry
from nestpipe.generative.work_shard import WorkShard
from nestpipe.models.config import EncDecConfig
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.open_service import open_histories
from nestpipe.serve.service_folder import EVENTS
from nestpipe.serve.user_history import id_of
from nestpipe.training.run_folder import Run


def main(arguments: ThinkArguments) -> int:
    if found := list(arguments.think.problems()):
        raise ConfigError("the configuration has problems:\n" + "\n".join(f"  - think.{one}" for one in found))
    scenarios = _scenarios(arguments)
    template = TemplateProvider(None if scenarios is None else scenarios.templates)
    with open_provider(arguments, template) as provider:
        if arguments.for_training:
            _for_training(arguments, provider, template, scenarios)
        else:
            _near_line(arguments, provider, scenarios)
    return 0


def _near_line(arguments: ThinkArguments, provider: InstructionProvider, scenarios: Scenarios | None) -> None:
    job, store, words = _open(arguments, provider, scenarios)

    def state() -> list[str]:
        counts, pending = job.counts, job.ledger.num_pending
        return [f"{counts['written']:,} written", f"{counts['unchanged']:,} users unchanged", f"{pending:,} pending"]

    line = ProgressLine(provider, text=state, remaining=lambda: job.ledger.num_pending, quiet=arguments.quiet)
    try:
        with job.ledger.only_one():
            job.run(line.show)
            while arguments.follow:
                time.sleep(arguments.every_s)
                job.builder = words.builder()
                job.run(line.show)
    except sqlite3.Error as error:
        raise DataError(
            f"{job.ledger.path} cannot be used ({error}). Nothing is lost: fix it and start again."
        ) from error
    finally:
        line.end()
        job.ledger.close()
        store.close()


def _scenarios(arguments: ThinkArguments) -> Scenarios | None:
    """The scenario file that is named, else that of the run."""
    if arguments.scenarios is not None:
        return Scenarios.load(arguments.scenarios)
    return Run.open(arguments.path).scenarios if Run.exists(arguments.path) else None


def _for_training(
    arguments: ThinkArguments,
    provider: InstructionProvider,
    template: TemplateProvider,
    scenarios: Scenarios | None,
) -> None:
    behaviour: tuple[Label | None, tuple[float, ...]] = (None, (1.0,))
    store, ids = arguments.store, arguments.ids
    if Run.exists(arguments.path):
        run = Run.open(arguments.path)
        sequences, behaviour, ids = run.sequences, _behaviour(run), ids or Path(_generative(run).ids)
    else:
        sequences = Sequences.open(arguments.path)
    if scenarios is not None:
        records = scenarios.by_number(_logged_scenarios(sequences), str(sequences.path))
        sequences = with_trigger_rules(sequences, records)
    if store is None or ids is None:
        raise ConfigError("--for-training needs --store FILE to write and, with a sequence folder, --ids FOLDER.")
    write_for_training(
        sequences,
        provider=provider,
        template=template,
        encoder=text_encoder(Registry.load(ids)),
        store=store,
        behaviour=behaviour,
        share=arguments.share,
        column=arguments.column,
        shard=WorkShard.parse(arguments.shard),
        quiet=arguments.quiet,
    )


def _generative(run: Run) -> EncDecConfig:
    if not isinstance(model := run.config.model, EncDecConfig):
        raise ConfigError(f"{run.folder} is not a generative run; instructions steer generative models only.")
    return model


def _behaviour(run: Run) -> tuple[Label | None, tuple[float, ...]]:
    """The label of behaviours of a run, and the weights of its levels."""
    model = _generative(run)
    labels = run.sequences.schema.labels_named((model.behaviour,)) if model.behaviour else ()
    return (labels[0] if labels else None), model.behaviour_weights


class _FolderBacked(HistoryFeed, Protocol):
    @property
    def sequences(self) -> Sequences: ...


class _Words:
    """Builds prompts from the current sequence folder: texts and co-visits lose users that were forgotten."""

    def __init__(self, feed: _FolderBacked, behaviour: Label | None, weights: tuple[float, ...]):
        self._feed, self._behaviour, self._weights = feed, behaviour, weights
        self._read: Sequences | None = None
        self._made = RequestBuilder(texts={})

    def builder(self) -> RequestBuilder:
        """A new builder if the folder was replaced."""
        if (now := self._feed.sequences) is not self._read:
            self._read = now
            self._made = RequestBuilder(
                texts=read_item_texts(now) or {},
                co_visits=None if now.times is None else CoVisits(now),
                behaviour=self._behaviour,
                behaviour_weights=self._weights,
                items=now.vocabulary("item"),
            )
        return self._made


def _open(
    arguments: ThinkArguments, provider: InstructionProvider, scenarios: Scenarios | None
) -> tuple[NearlineJob, SqliteStore, _Words]:
    feed: _FolderBacked
    wanted = arguments.think.scenarios or (ANY, *(scenarios.templates if scenarios is not None else ()))
    shard = WorkShard.parse(arguments.shard)
    if Run.exists(arguments.path):
        run = Run.open(arguments.path)
        model = _generative(run)
        check_trained(run)
        folder = run.folder / "serve"
        store = arguments.store or folder / INSTRUCTIONS
        ids = arguments.ids or Path(model.ids)
        feed = RunFeed(run, folder / EVENTS)
        _check_scenarios(wanted, scenario_numbers(run.sequences, model.num_scenarios))
        behaviour, weights = _behaviour(run)
    else:
        sequences = Sequences.open(arguments.path)
        if arguments.store is None or arguments.ids is None:
            raise ConfigError(f"{arguments.path} is a sequence folder; name --store FILE and --ids FOLDER with it.")
        store, ids = arguments.store, arguments.ids
        feed, behaviour, weights = FolderHistoryFeed(sequences), None, (1.0,)
        if numbers := _logged_scenarios(sequences):
            _check_scenarios(wanted, numbers)
    encode, version = text_encoder(Registry.load(ids))
    kept, words = SqliteStore(store), _Words(feed, behaviour, weights)
    job = NearlineJob(
        feed=feed,
        builder=words.builder(),
        provider=provider,
        store=kept,
        ledger=JobLedger(ledger_of(store, shard)),
        encode=encode,
        version=version,
        config=replace(arguments.think, scenarios=wanted),
        shard=shard,
    )
    return job, kept, words


def _logged_scenarios(sequences: Sequences) -> dict[str, int]:
    """The scenarios that a log names; none if it has no texts of scenarios."""
    if "scenario" not in sequences.meta["encodings"]:
        return {}
    vocabulary = sequences.vocabulary("scenario")
    return scenario_numbers(sequences, len(vocabulary.table)) if vocabulary.encoding == "dictionary" else {}


def _check_scenarios(wanted: Sequence[str], known: Mapping[str, int]) -> None:
    if unknown := [name for name in wanted if name != ANY and name not in known]:
        names = ", ".join(known) or "none"
        raise ConfigError(
            f"there is no scenario {unknown[0]!r} (--think.scenarios, or the scenario file); the log has: {names}, and * for any."
        )


def text_encoder(registry: Registry) -> tuple[Encode, str]:
    """The encoder of instructions, the one of the item texts; and the version of its vectors."""
    encode = instruction_encoder(registry.encoder)
    return encode, version_of(registry.version, registry.encoder.partition("/")[0])


class RunFeed:
    """The sequence folder of a run, then its event log: the cursor is the folder's digest, and the last event that was read."""

    def __init__(self, run: Run, log: Path):
        self._histories = open_histories(run, log)
        self._log = EventLog(log)
        self._events: list[tuple[str, int]] = []  # digest of the id, and user
        self._logged: Counter[int] = Counter()

    def changed_users(self, cursor: str) -> tuple[Iterable[int], str]:
        with self._log.news() as (is_other, events):
            found = [(id_of(event).hex(), event["user"]) for event in events]
            self._events = found if is_other else self._events + found
        self._logged = Counter(user for _, user in self._events)
        self._histories.refresh()
        folder, number, last = json.loads(cursor) if cursor else ("", 0, "")
        own = self._histories.sequences
        users = set[int]() if folder == own.digest else set(own.users.tolist())
        # A log from which a user was erased is read again from its beginning.
        is_known = not number or (number <= len(self._events) and self._events[number - 1][0] == last)
        users |= {user for _, user in self._events[number if is_known else 0 :]}
        last = self._events[-1][0] if self._events else ""
        return sorted(users), json.dumps([own.digest, len(self._events), last])

    @property
    def sequences(self) -> Sequences:
        self._histories.refresh()
        return self._histories.sequences

    def history(self, user: int) -> History | None:
        self._histories.refresh()
        own = self._histories.of(user)
        return History(own, 0, len(own.items)) if len(own.items) else None

    def num_events(self, user: int) -> int:
        own = self._histories.sequences
        row = int(np.searchsorted(own.users, user))
        is_stored = row < len(own.users) and own.users[row] == user
        return self._logged[user] + (int(own.offsets[row + 1] - own.offsets[row]) if is_stored else 0)
