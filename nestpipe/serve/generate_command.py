"""A generative run as one instance: what `nestpipe serve` does with it."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nestpipe.instruct.store import INSTRUCTIONS, Instructions, SqliteStore
from nestpipe.run import Run
from nestpipe.serve.config import EngineConfig, Limits
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.generate import Generator
from nestpipe.serve.generate_costs import measure
from nestpipe.serve.generate_model import open_generative
from nestpipe.serve.histories import Histories

_STORE_S = 0.02  # how long a request waits for a store that is busy, before the default takes the instruction's place


def open_histories(run: Run, log: Path) -> Histories:
    """The users of a run, with what came by the event log."""
    return Histories(run.sequences, EventLog(log))


def open_generator(run: Run, log: Path, *, config: EngineConfig, step: int | None = None) -> Generator:
    """A run's model with its histories and instructions, measured on this machine; it is not started yet."""
    folder = log.parent
    served = open_generative(run, step=step, folder=folder)
    histories, model = open_histories(run, log), served.model.config
    instructions = None
    if model.reasoning_dim and model.placement != "none":
        store = SqliteStore(folder / INSTRUCTIONS, read_only=True, timeout_s=_STORE_S)
        instructions = Instructions(store, version=served.instruction_version, dim=model.reasoning_dim, clock=time.time)
    scenarios = [str(number) for number in range(model.num_scenarios)]
    return Generator(served, histories, instructions, measure(served, histories), config=config, scenarios=scenarios)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerativePlace:
    """Where an instance listens, what it is called, and what it takes."""

    host: str
    port: int
    admin_host: str
    admin_port: int
    name: str
    token: str
    budget_ms: float
    limits: Limits


def serve_generative(generator: Generator, place: GenerativePlace) -> int:
    """Answers until a signal; what is under way is answered first."""
    from nestpipe.serve.generate_http import GenerativeInstance
    from nestpipe.serve.server import bind, run_apps

    with bind(place.host, place.port) as public, bind(place.admin_host, place.admin_port) as private:
        port, admin_port = (one.getsockname()[1] for one in (public, private))
        name = place.name or f"{socket.gethostname()}-{port}"
        instance = GenerativeInstance(generator, name=name, budget_ms=place.budget_ms, limits=place.limits)

        def stop() -> None:
            instance.is_draining = True
            with suppress(OSError):  # nobody may be reading any more
                print("stopping: what is under way is answered first", file=sys.stderr, flush=True)

        def started() -> None:
            where = f"http://{place.host}:{port}, admin on port {admin_port} of {place.admin_host}"
            print(f"serving {generator.served.name} as {name} on {where}", flush=True)

        generator.start()
        try:
            apps = [(instance.app(), public), (instance.admin_app(place.token), private)]
            asyncio.run(run_apps(apps, on_stop=stop, started=started))
        finally:
            generator.stop()
    return 0
