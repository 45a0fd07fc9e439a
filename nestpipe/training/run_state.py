"""The training state of a run on one of its ranks: new, from a checkpoint, or from the weights of another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import warm_start
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.places import place_of
from nestpipe.checkpoint.state import restore_state
from nestpipe.errors import ConfigError
from nestpipe.generative.config import AlignedConfig
from nestpipe.generative.policy_model import build_policy_model
from nestpipe.generative.scenario_pools import scenario_pools
from nestpipe.generative.scenarios import Scenario
from nestpipe.models.contract import Model
from nestpipe.models.encdec import EncDec
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.stages import TrainState
from nestpipe.training.device import PRECISIONS
from nestpipe.training.run_folder import Run


def new_state(run: Run, channels: Channels | None = None) -> TrainState:
    """The state of this rank before the first step."""
    config = run.config
    return build_state(
        _trained_model(run),
        embedding=config.embedding,
        dense=config.dense,
        pipeline=config.pipeline,
        seed=config.seed,
        channels=channels,
        skip_nonfinite=config.train.skip_nonfinite,
        precision=PRECISIONS[config.train.precision],
    )


def _trained_model(run: Run) -> Model:
    """The model as it is trained; that of an aligned run has another loss than the one that is served."""
    config, ids = run.config, run.semantic_ids
    if not isinstance(config.model, AlignedConfig) or ids is None:
        model = run.build_model()
        if isinstance(model, EncDec) and run.scenarios is not None:
            model.behaviour_weights = behaviour_table(run.scenario_records, config.model.behaviour_weights)
        return model
    sizes = {"max_len": config.data.max_len, "seed": config.seed}
    policy = build_policy_model(config.model, ids, **sizes, text=run.item_texts)
    policy.pools = scenario_pools(run.scenario_records, run.sequences, ids)
    return policy


def behaviour_table(records: Sequence[Scenario], default: tuple[float, ...]) -> Tensor:
    """The weights of behaviours [S, levels]; raises ConfigError for a record with another number of them."""
    for one in records:
        if len(one.behaviour_weights) not in {0, len(default)}:
            raise ConfigError(
                f"scenario '{one.name}' has {len(one.behaviour_weights)} behaviour_weights, but the model has {len(default)} levels "
                "of behaviour (--model.behaviour-weights); give one weight for each."
            )
    return torch.tensor([one.behaviour_weights or default for one in records])


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
    lines = warm_start.compare(state, folder, manifest, settings=run.settings, data=run.sequences)
    if isinstance(run.config.model, AlignedConfig):  # gradients of another loss have another scale
        lines = [replace(line, state="fresh") if line.what == "loaded" else line for line in lines]
    warm_start.check(lines, run.origin, run.folder)
    warm_start.load_into(state, folder, manifest, lines)
    return state, warm_start.WarmStartReport(run.origin, tuple(lines))
