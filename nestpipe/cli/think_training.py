"""`nestpipe think --for-training`: instructions for the targets of a log, from what was known before each."""

from __future__ import annotations

import shlex
import sqlite3
from pathlib import Path

from nestpipe.cli.think_progress import ProgressLine
from nestpipe.data.item_texts import read_item_texts
from nestpipe.data.schema import Label
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.instruction_template import TemplateProvider
from nestpipe.generative.prompt_builder import CoVisits, Encode, InstructionProvider, RequestBuilder
from nestpipe.generative.training_instructions import (
    TrainingInstructions,
    TrainingJob,
    check_column,
    follows_instructions,
    untrained_message,
)
from nestpipe.generative.work_shard import WorkShard
from nestpipe.training.run_folder import Run


def write_for_training(
    sequences: Sequences,
    *,
    provider: InstructionProvider,
    template: TemplateProvider | None = None,
    encoder: tuple[Encode, str],
    store: Path,
    behaviour: tuple[Label | None, tuple[float, ...]] = (None, (1.0,)),
    share: float = 1.0,
    column: str = "",
    shard: WorkShard | None = None,
    quiet: bool = False,
) -> None:
    """Writes or completes the store of a log."""
    _check(sequences, share=share, column=column)
    encode, version = encoder
    builder = RequestBuilder(
        texts=read_item_texts(sequences) or {},
        co_visits=CoVisits(sequences),
        behaviour=behaviour[0],
        behaviour_weights=behaviour[1],
        items=sequences.vocabulary("item"),
    )
    opened = TrainingInstructions(store, read_only=False)
    job = TrainingJob(
        sequences=sequences,
        builder=builder,
        provider=provider,
        template=template or TemplateProvider(),
        store=opened,
        encode=encode,
        version=version,
        share=share,
        column=column,
        shard=shard or WorkShard(),
    )
    done = [0]

    def state() -> list[str]:
        targets, texts = opened.counts()
        return [f"{done[0]:,} of {len(sequences.users):,} users", f"{targets:,} targets, {texts:,} different texts"]

    line = ProgressLine(provider, text=state, remaining=lambda: len(sequences.users) - done[0], quiet=quiet)

    def show(num_users: int) -> None:
        done[0] = num_users
        line.show()

    try:
        job.run(show)
        done[0] = len(sequences.users)
        line.end()
    except sqlite3.Error as error:
        raise DataError(f"{store} cannot be used ({error}). Nothing is lost: fix it and start again.") from error
    finally:
        opened.close()
    if not quiet:
        print(f"Next: nestpipe train scenarios --instructions {shlex.quote(str(store))} --data.path {sequences.path}")


def _check(sequences: Sequences, *, share: float, column: str) -> None:
    """Raises ConfigError for what cannot be written."""
    if not 0 <= share <= 1:
        raise ConfigError(f"--share is {share}; it must be in 0 .. 1.")
    check_column(sequences, column)
    if sequences.times is None:
        raise ConfigError(
            f"{sequences.path} is an order-only log: nothing says which events of other users came before a target. "
            "Ingest the log with its times."
        )


def check_trained(run: Run) -> None:
    """Raises ConfigError unless a run learned to follow instructions, with the commands that train one that does."""
    if follows_instructions(run.config.model, run.sequences):
        return
    raise ConfigError(untrained_message(run.folder, run.config))
