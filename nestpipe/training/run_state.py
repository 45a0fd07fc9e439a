"""The training state of a run on one of its ranks: new, from a checkpoint, or from the weights of another run."""

from __future__ import annotations

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import warm_start
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.places import place_of
from nestpipe.checkpoint.state import restore_state
from nestpipe.models.build_model import build_model
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.stages import TrainState
from nestpipe.training.run_folder import Run


def new_state(run: Run, channels: Channels | None = None) -> TrainState:
    """The state of this rank before the first step."""
    config = run.config
    return build_state(
        build_model(config, run.sequences, ids=run.semantic_ids),
        embedding=config.embedding,
        dense=config.dense,
        pipeline=config.pipeline,
        seed=config.seed,
        channels=channels,
        skip_nonfinite=config.train.skip_nonfinite,
    )


def load_state(run: Run, step: int | None = None, channels: Channels | None = None) -> tuple[TrainState, Manifest]:
    """The state of this rank from a checkpoint, by default the latest; any number of ranks can load it."""
    state = new_state(run, channels)
    folder = checkpoint_folders.checkpoint_folder(run.checkpoints, step)
    manifest = Manifest.read(folder)
    run.check_settings(folder, manifest)
    restore_state(state, folder, manifest)
    return state, manifest


def warm_state(run: Run, channels: Channels | None = None) -> tuple[TrainState, warm_start.WarmStartReport]:
    """The state of this rank before the first step, with the matching weights of the run's origin."""
    if run.origin is None:
        raise ValueError(f"{run.folder} has no origin")
    state = new_state(run, channels)
    folder = place_of(run.origin.checkpoint)
    manifest = run.origin.check(Manifest.read(folder))
    lines = warm_start.compare(state, folder, manifest, settings=run.settings, data_digest=run.sequences.digest)
    warm_start.check(lines, run.origin, run.folder)
    warm_start.load_into(state, folder, manifest, lines)
    return state, warm_start.WarmStartReport(run.origin, tuple(lines))
