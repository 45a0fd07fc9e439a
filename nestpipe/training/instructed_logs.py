"""The logs that the evaluation of instructions compares: that of a run, and the same with the instructions of other stores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nestpipe.errors import ConfigError
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.instruction_eval import InstructedLog
from nestpipe.eval.protocol import Target
from nestpipe.eval.scenario_eval import target_events
from nestpipe.generative.training_instructions import follows_instructions, open_store
from nestpipe.models.config import EncDecConfig
from nestpipe.training.run_folder import Run


def instructed_logs(run: Run, report: EvalReport, target: Target, stores: Sequence[Path]) -> list[InstructedLog]:
    """The log of a run first; empty if it was trained without instructions. Raises ConfigError for a store that does not fit."""
    model = run.config.model
    if not isinstance(model, EncDecConfig) or not follows_instructions(model, run.sequences):
        if stores:
            raise ConfigError(
                f"{run.folder} was trained without instructions, so those of {stores[0]} would steer nothing. "
                "Train with 'nestpipe train --instructions STORE'."
            )
        return []
    events = target_events(report, run.sequences, run.split, target).tolist()
    store = model.instructions
    own = open_store(store) if store else None
    found = [InstructedLog(sequences=run.instructed, sources=own.authors(events) if own else {})]
    for path in stores:
        other = open_store(path)
        if own and (other.about["version"], other.dim) != (own.about["version"], own.dim):
            raise ConfigError(
                f"{path} has vectors of {other.about['version']} (width {other.dim}), but {run.folder} was trained on those of "
                f"{own.about['version']} (width {own.dim}); it cannot read them. Write the store with the run's --ids."
            )
        names = {event: f"{path.stem}: {author}" for event, author in other.authors(events).items()}
        found.append(InstructedLog(sequences=other.attach(run.instructed), sources=names))
    return found
