"""Opens a run for serving: its model, the histories of its users and its measured costs."""

from __future__ import annotations

import time
from pathlib import Path

from nestpipe.errors import ConfigError
from nestpipe.generative.instruction_store import INSTRUCTIONS, Instructions, SqliteStore
from nestpipe.generative.scenarios import scenario_numbers
from nestpipe.serve.config import EngineConfig, TriggerConfig
from nestpipe.serve.engine import Engine
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.generation_engine import Generator
from nestpipe.serve.generation_model import open_generative
from nestpipe.serve.latency_model import measure_costs, measure_generation
from nestpipe.serve.model import open_served
from nestpipe.serve.next_item_engine import NextItemEngine
from nestpipe.serve.next_item_model import open_next_item
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.serve.service_folder import EVENTS
from nestpipe.serve.user_history import UserHistories
from nestpipe.training.run_folder import Run


def open_run(arguments: ServeArguments) -> Run:
    """The run to serve; raises ConfigError if none was named."""
    if arguments.run is None:
        raise ConfigError("name the folder of a run: nestpipe serve RUN.")
    return Run.open(arguments.run)


def open_engine(
    run: Run, *, engine: EngineConfig, trigger: TriggerConfig, step: int | None = None, label: str = ""
) -> Engine:
    """The engine of a run, not started yet: model, histories, and costs measured on this machine."""
    folder = run.folder / "serve"
    served = open_served(run, step=step, label=label, folder=folder)
    histories = UserHistories(run.sequences, EventLog(folder / EVENTS))
    served.costs = measure_costs(served, histories, chunk=engine.chunk)
    return Engine(served, histories, config=engine, trigger=trigger)


_STORE_S = 0.02  # timeout of a busy instruction store; then the default instruction is used


def open_histories(run: Run, log: Path) -> UserHistories:
    """The histories of a run and of its event log."""
    return UserHistories(run.sequences, EventLog(log))


def open_next_item_engine(run: Run, log: Path, *, config: EngineConfig, step: int | None = None) -> NextItemEngine:
    """The engine of a next-item run, not started yet: model and histories."""
    return NextItemEngine(open_next_item(run, step=step, folder=log.parent), open_histories(run, log), config=config)


def open_generator(run: Run, log: Path, *, config: EngineConfig, step: int | None = None) -> Generator:
    """The generator of a run, not started yet: model, histories, instructions, and costs measured on this machine."""
    folder = log.parent
    served = open_generative(run, step=step, folder=folder)
    histories, model = open_histories(run, log), served.model.config
    instructions = None
    if model.reasoning_dim and model.placement != "none":
        store = SqliteStore(folder / INSTRUCTIONS, read_only=True, timeout_s=_STORE_S)
        instructions = Instructions(store, version=served.instruction_version, dim=model.reasoning_dim, clock=time.time)
    scenarios = scenario_numbers(run.sequences, model.num_scenarios)
    return Generator(
        served, histories, instructions, measure_generation(served, histories), config=config, scenarios=scenarios
    )
