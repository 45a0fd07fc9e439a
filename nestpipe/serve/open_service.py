"""Opens a run for serving: its model, the histories of its users and its measured costs."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nestpipe.errors import ConfigError
from nestpipe.gateway.candidates import retriever_of
from nestpipe.generative.instruction_store import INSTRUCTIONS, Instructions, SqliteStore
from nestpipe.generative.scenarios import scenario_numbers
from nestpipe.generative.training_instructions import follows_instructions, untrained_message
from nestpipe.models.config import DCNConfig, EncDecConfig, RankingConfig
from nestpipe.serve.config import EngineConfig, TriggerConfig
from nestpipe.serve.engine import Engine
from nestpipe.serve.followed_search import followed_search
from nestpipe.serve.generation_engine import GenerativeVersion, Generator
from nestpipe.serve.generation_model import open_generative
from nestpipe.serve.known_items import CandidateSearch, no_past
from nestpipe.serve.latency_model import measure_costs, measure_generation
from nestpipe.serve.model import open_served
from nestpipe.serve.next_item_engine import NextItemEngine
from nestpipe.serve.next_item_model import open_next_item
from nestpipe.serve.openapi import ServiceKind
from nestpipe.serve.pointwise_engine import PointwiseEngine
from nestpipe.serve.pointwise_model import open_pointwise
from nestpipe.serve.request_instruction import SWITCHED_OFF, UNTRAINED, RequestTexts
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.serve.service_folder import EVENTS
from nestpipe.serve.stored_prefixes import StoredPrefixes
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import open_state
from nestpipe.training.run_folder import Run

_log = logging.getLogger("nestpipe.serve")


def open_run(arguments: ServeArguments) -> Run:
    """The run to serve; raises ConfigError if none was named."""
    if arguments.run is None:
        raise ConfigError("name the folder of a run: nestpipe serve RUN.")
    return Run.open(arguments.run)


def kind_of(run: Run) -> ServiceKind:
    """How the model of a run is served."""
    match run.config.model:
        case EncDecConfig():
            return "generative"
        case RankingConfig():
            return "ranker"
        case DCNConfig():
            return "pointwise"
        case _:
            return "next_item"


def open_engine(
    run: Run,
    *,
    engine: EngineConfig,
    trigger: TriggerConfig,
    step: int | None = None,
    label: str = "",
    state: str = "",
    stored: StoredPrefixes | None = None,
    device: torch.device | None = None,
) -> Engine:
    """The engine of a run, not started yet: model, histories, and costs measured on this machine."""
    folder = run.folder / "serve"
    served = open_served(run, step=step, label=label, folder=folder, device=device)
    histories = open_histories(run, folder / EVENTS, state)
    served.costs = measure_costs(served, histories, chunk=engine.chunk, store=stored.store if stored else None)
    return Engine(served, histories, config=engine, trigger=trigger, stored=stored)


_STORE_S = 0.02  # timeout of a busy instruction store; then the default instruction is used


def open_histories(run: Run, log: Path, state: str = "") -> UserHistories:
    """The histories of a run and of its state: beside its event log, or in the database at an address."""
    return UserHistories(run.sequences, open_state(state, log))


def open_next_item_engine(
    run: Run, log: Path, *, config: EngineConfig, step: int | None = None, state: str = ""
) -> NextItemEngine:
    """The engine of a next-item run, not started yet: model and histories."""
    served = open_next_item(run, step=step, folder=log.parent)
    return NextItemEngine(served, open_histories(run, log, state), config=config)


def open_pointwise_engine(
    run: Run, log: Path, *, config: EngineConfig, step: int | None = None, label: str = "", state: str = ""
) -> PointwiseEngine:
    """The engine of a run without histories (DCN), not started yet: model and histories."""
    served = open_pointwise(run, step=step, label=label, folder=log.parent)
    return PointwiseEngine(served, open_histories(run, log, state), config=config)


def open_search(folder: Path, ranker: Run) -> CandidateSearch:
    """Retrieval for a run that ranks, with the queries and item vectors of another run; raises ConfigError."""
    run, keeps_seen = open_retrieval(folder, ranker), ranker.config.eval.seen == "none"
    if getattr(run.config.model, "item_features", ()):
        return followed_search(run, keeps_seen=keeps_seen)
    return CandidateSearch(replace(retriever_of(run, past_of=no_past), keeps_seen=keeps_seen))


def open_retrieval(folder: Path, ranker: Run) -> Run:
    """A run that finds candidates for a ranker; raises ConfigError if it cannot, or if its items are others."""
    run = Run.open(folder)
    if isinstance(run.config.model, EncDecConfig):
        raise ConfigError(
            f"{folder} generates items and has no vectors to search; name a next-item run as --retrieval."
        )
    own, other = run.sequences, ranker.sequences
    same_folder = Path(own.path).resolve() == Path(other.path).resolve()
    if not same_folder and not (
        np.array_equal(own.catalogue, other.catalogue)
        and own.vocabulary("item").own_ids(own.catalogue) == other.vocabulary("item").own_ids(other.catalogue)
    ):
        raise ConfigError(
            f"{folder} was trained on {own.path}, whose items are not those of {other.path}, which {ranker.folder} ranks. "
            "Train it on the same sequence folder."
        )
    return run


def open_generator(
    run: Run,
    log: Path,
    *,
    config: EngineConfig,
    step: int | None = None,
    state: str = "",
    request_instructions: bool = True,
) -> Generator:
    """The generator of a run, not started yet: model, histories, instructions, and costs measured on this machine."""
    histories = open_histories(run, log, state)
    version = generative_version(run, histories, log.parent, step=step, request_instructions=request_instructions)
    scenarios = scenario_numbers(run.sequences, version.served.model.config.num_scenarios)
    records = {} if run.scenarios is None else {one.name: one for one in run.scenarios}
    return Generator(
        version.served,
        histories,
        version.instructions,
        version.costs,
        config=config,
        scenarios=scenarios,
        records=records,
        texts=version.texts,
    )


def generative_version(
    run: Run, histories: UserHistories, folder: Path, *, step: int | None = None, request_instructions: bool = True
) -> GenerativeVersion:
    """The model of a generative run, its instructions in `folder`, and its costs measured on this machine."""
    served = open_generative(run, step=step, folder=folder)
    model, instructions = served.model.config, None
    texts = RequestTexts(None, refusal=UNTRAINED)
    if not follows_instructions(model, run.sequences):
        if (folder / INSTRUCTIONS).exists():
            _log.warning("%s is not used: %s", folder / INSTRUCTIONS, untrained_message(run.folder, run.config))
    else:
        store = SqliteStore(folder / INSTRUCTIONS, read_only=True, timeout_s=_STORE_S)
        instructions = Instructions(store, version=served.instruction_version, dim=model.reasoning_dim, clock=time.time)
        encoder = served.instruction_version.partition("/")[2]
        texts = RequestTexts.open(encoder, dim=model.reasoning_dim)
    if not request_instructions:
        texts = RequestTexts(None, refusal=SWITCHED_OFF)
    return GenerativeVersion(served, instructions, measure_generation(served, histories), texts)
