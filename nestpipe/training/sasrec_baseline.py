"""The trained baseline of an evaluation: SASRec with cross-entropy, on the data and in the protocol of another run."""

from __future__ import annotations

from dataclasses import replace

from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.distributed.process_group import World
from nestpipe.errors import ConfigError
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.protocol import Target
from nestpipe.training.fit import choose_config
from nestpipe.training.loop import INTERRUPTED, train_to_end
from nestpipe.training.run_folder import Run

SASREC = "SASRec, cross-entropy"
_FOLDER = "baseline-sasrec"


def evaluate_sasrec(run: Run, target: Target, *, quiet: bool = False) -> EvalReport:
    """The report of SASRec on the targets of a run. It is trained once, in the run's folder, and an interrupted one resumes."""
    config = baseline_config(run.config, run.sequences)
    folder = run.folder / _FOLDER
    is_there = (folder / "run.json").exists()
    if not quiet and not is_there:
        print(f"training the SASRec baseline in {folder}, once; later evaluations use it")
    outcome = train_to_end(config, folder, resume=is_there, quiet=quiet, world=World.single())
    if outcome.stopped == INTERRUPTED:
        raise ConfigError("the training of the SASRec baseline was interrupted; the same command continues it.")
    own = replace(outcome.run, config=replace(outcome.run.config, eval=run.config.eval))
    report = own.predictor().evaluate(target)
    assert isinstance(report, EvalReport)
    return report


def baseline_config(config: Config, sequences: Sequences) -> Config:
    """The settings that `nestpipe.fit` chooses for this log, with the split and history of the run."""
    chosen = choose_config(sequences, seed=config.seed)
    train = chosen.train if config.data.validation else replace(chosen.train, patience=0)
    return replace(
        chosen,
        data=replace(config.data, batch_size=chosen.data.batch_size, batch_tokens=0, group_size=1),
        train=replace(train, num_threads=config.train.num_threads),
    )
