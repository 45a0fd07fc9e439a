"""`nestpipe think --for-training`: instructions for the targets of a log, from what was known before each."""

from __future__ import annotations

import shlex
import sqlite3
import sys
import time
from pathlib import Path

from nestpipe.data.item_texts import read_item_texts
from nestpipe.data.schema import Label
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.llm_provider import TemplateProvider
from nestpipe.generative.prompt_builder import CoVisits, Encode, InstructionProvider, RequestBuilder
from nestpipe.generative.training_instructions import (
    TrainingInstructions,
    TrainingJob,
    check_column,
    follows_instructions,
)
from nestpipe.training.run_folder import Run

_LINE_S = 15.0


def write_for_training(
    sequences: Sequences,
    *,
    provider: InstructionProvider,
    encoder: tuple[Encode, str],
    store: Path,
    behaviour: tuple[Label | None, tuple[float, ...]] = (None, (1.0,)),
    share: float = 1.0,
    column: str = "",
    quiet: bool = False,
) -> None:
    """Writes or completes the store of a log."""
    if not 0 <= share <= 1:
        raise ConfigError(f"--share is {share}; it must be in 0 .. 1.")
    check_column(sequences, column)
    if sequences.times is None:
        raise ConfigError(
            f"{sequences.path} is an order-only log: nothing says which events of other users came before a target. "
            "Ingest the log with its times."
        )
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
        template=TemplateProvider(),
        store=opened,
        encode=encode,
        version=version,
        share=share,
        column=column,
    )
    said = [time.monotonic()]

    def show(num_users: int) -> None:
        if not quiet and time.monotonic() - said[0] > _LINE_S:
            said[0] = time.monotonic()
            print(f"think: {num_users:,} of {len(sequences.users):,} users", file=sys.stderr, flush=True)

    try:
        job.run(show)
        targets, texts = opened.counts()
    except sqlite3.Error as error:
        raise DataError(f"{store} cannot be used ({error}). Nothing is lost: fix it and start again.") from error
    finally:
        opened.close()
    if not quiet:
        print(f"think: {targets:,} targets, {texts:,} different texts in {store}", file=sys.stderr)
        print(f"Next: nestpipe train scenarios --instructions {shlex.quote(str(store))} --data.path {sequences.path}")


def check_trained(run: Run) -> None:
    """Raises ConfigError unless a run learned to follow instructions, with the commands that train one that does."""
    if follows_instructions(run.config.model, run.sequences):
        return
    data, ids = shlex.quote(run.config.data.path), shlex.quote(run.config.model.ids)
    raise ConfigError(
        f"{run.folder} never saw an instruction in training, so instructions would steer nothing. Write some for its log and "
        f"train with them:\n  nestpipe think {data} --for-training --ids {ids} --store instructions.sqlite\n"
        f"  nestpipe train scenarios --data.path {data} --model.ids {ids} --instructions instructions.sqlite"
    )
