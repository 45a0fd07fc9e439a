"""`nestpipe align`: policy optimisation of a generative run with the rewards of a scenario file."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.origin import InitFrom
from nestpipe.cli.align_arguments import AlignArguments
from nestpipe.config import Config
from nestpipe.errors import ConfigError
from nestpipe.generative.config import AlignedConfig, PolicyConfig, PolicyKind
from nestpipe.generative.scenarios import FILE
from nestpipe.models.config import EncDecConfig
from nestpipe.training.align_report import align_report
from nestpipe.training.loop import INTERRUPTED, train_to_end
from nestpipe.training.off_policy_log import ShownBy
from nestpipe.training.run_folder import Run

_BATCH = 64
_NEVER = 10**9  # validations: the best checkpoint by NDCG would be the start
_KINDS: dict[str, PolicyKind] = {"sa-gcpo": "sa_gcpo", "sapo": "sapo", "gspo": "gspo", "grpo": "grpo"}


def main(arguments: AlignArguments) -> int:
    folder = arguments.run or arguments.start.with_name(f"{arguments.start.name}-aligned")
    start = Run.open(arguments.start)
    shown_by = ShownBy(arguments.propensity, arguments.shown_by)
    shown_by.check(start.sequences)
    source = start.folder
    if arguments.step is not None:
        source = Path(str(checkpoint_folders.checkpoint_folder(start.checkpoints, arguments.step)))
    outcome = train_to_end(
        aligned_config(start, arguments),
        folder,
        resume=arguments.resume,
        init_from=InitFrom(source, ("model", "optimizer")),
        quiet=arguments.quiet,
        recipe="align",
    )
    is_interrupted = outcome.stopped == INTERRUPTED
    if int(os.environ.get("RANK", "0")) == 0:
        if is_interrupted:
            print("Next: the same command with --resume continues")
            return 130
        report = align_report(Run.open(folder), shown_by)
        report.save(outcome.run.folder)
        Console().print(report)
        Console().print(report.off_policy, soft_wrap=True, highlight=False)
        print(f"Next: nestpipe serve {shlex.quote(str(folder))}")
    return 130 if is_interrupted else 0


def aligned_config(start: Run, arguments: AlignArguments) -> Config:
    """The configuration of the new run: that of its start, but for objective, limits and learning rates."""
    config, model = start.config, start.config.model
    if not isinstance(model, EncDecConfig):
        raise ConfigError(f"{start.folder} is not a generative run; policy optimisation draws semantic ids.")
    if arguments.passes < 1 or not arguments.lr_factor > 0:
        raise ConfigError(
            f"--passes is {arguments.passes} and --lr-factor {arguments.lr_factor}; they must be at least 1 and above 0."
        )
    policy = PolicyConfig(
        kind=_KINDS[arguments.policy],
        group_size=arguments.group_size,
        threshold=not arguments.no_threshold,
        sft_weight=arguments.anchor,
    )
    own = {one.name: getattr(model, one.name) for one in fields(EncDecConfig)}
    own["scenarios"] = _scenarios(start, arguments)
    ranker = "" if arguments.ranker is None else str(arguments.ranker)
    factor = arguments.lr_factor
    return replace(
        config,
        model=AlignedConfig(**own, start=str(start.folder), ranker=ranker, policy=policy),
        data=replace(config.data, batch_size=arguments.batch_size or _BATCH, batch_tokens=0, group_size=1),
        dense=replace(config.dense, lr=config.dense.lr * factor),
        embedding=replace(config.embedding, lr=config.embedding.lr * factor),
        pipeline=replace(config.pipeline, mode=arguments.mode or config.pipeline.mode),
        train=replace(
            config.train,
            precision="fp32",  # that of the reference's probabilities
            epochs=arguments.passes,
            steps=0,
            minutes=0.0,
            patience=0,
            eval_epochs=_NEVER,
            warmup_steps=0,
            decay_steps=0,
            decay_epochs=0,
            save_steps=arguments.save_steps,
            checkpoints="",
        ),
    )


def _scenarios(start: Run, arguments: AlignArguments) -> str:
    if arguments.scenarios is not None:
        return str(arguments.scenarios)
    kept = start.folder / FILE
    return str(kept) if kept.exists() else ""
