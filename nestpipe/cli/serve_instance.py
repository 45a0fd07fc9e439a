"""`nestpipe serve RUN`: one instance in this process, which ranks, recommends or generates, on two ports (requests, administration)."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from starlette.applications import Starlette

from nestpipe.cli.serve import require_ranker
from nestpipe.errors import ConfigError
from nestpipe.models.config import DCNConfig, EncDecConfig, RankingConfig
from nestpipe.serve.admin import Admin
from nestpipe.serve.api import Instance
from nestpipe.serve.generation_api import GenerativeInstance
from nestpipe.serve.http_instance import HttpInstance
from nestpipe.serve.known_items import CandidateSearch
from nestpipe.serve.model_versions import VersionFile, VersionRecord, load_version
from nestpipe.serve.next_item_api import NextItemInstance
from nestpipe.serve.open_service import (
    open_engine,
    open_generator,
    open_next_item_engine,
    open_pointwise_engine,
    open_run,
    open_search,
)
from nestpipe.serve.pointwise_api import PointwiseInstance
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.serve.server import bind, run_apps
from nestpipe.serve.service_folder import EVENTS, kept_secret
from nestpipe.serve.worker_thread import WorkerThread
from nestpipe.training.run_folder import Run

STOPPING = "stopping: requests in flight are answered first"


class _Service(NamedTuple):
    """An instance that has loaded its model, before it is started."""

    engine: WorkerThread
    instance: HttpInstance
    app: Starlette
    admin_app: Starlette
    model: str


def serve_instance(arguments: ServeArguments) -> int:
    """Runs until SIGINT or SIGTERM."""
    run = open_run(arguments)
    if arguments.compare is not None or arguments.notes is not None:
        require_ranker(run, "--compare" if arguments.compare is not None else "--notes")
    if arguments.retrieval is not None and not isinstance(run.config.model, RankingConfig | DCNConfig):
        raise ConfigError(f"{run.folder} finds items itself, and --retrieval is for runs that rank; leave it out.")
    torch.set_num_threads(arguments.num_threads)
    with bind(arguments.host, arguments.port) as public, bind(arguments.admin_host, arguments.admin_port) as private:
        port, admin_port = (one.getsockname()[1] for one in (public, private))
        name = arguments.name or f"{socket.gethostname()}-{port}"
        service = _opener(run)(run, arguments, name)
        del run  # whose sequences stay mapped, also those of users that are forgotten later

        def stop() -> None:
            service.instance.is_draining = True
            with suppress(OSError):  # nobody may be reading any more
                print(STOPPING, file=sys.stderr, flush=True)

        def started() -> None:
            where = f"http://{arguments.host}:{port}, admin on port {admin_port} of {arguments.admin_host}"
            print(f"serving {service.model} as {name} on {where}", flush=True)

        service.engine.start()
        try:
            apps = [(service.app, public), (service.admin_app, private)]
            asyncio.run(run_apps(apps, on_stop=stop, started=started))
        finally:
            service.engine.stop()
    return 0


def _opener(run: Run) -> Callable[[Run, ServeArguments, str], _Service]:
    """How the model of a run is served."""
    match run.config.model:
        case EncDecConfig():
            return _generative
        case RankingConfig():
            return _ranking
        case DCNConfig():
            return _pointwise
        case _:
            return _next_item


def _next_item(run: Run, arguments: ServeArguments, name: str) -> _Service:
    folder = run.folder / "serve"
    engine = open_next_item_engine(run, folder / EVENTS, config=arguments.engine, step=arguments.step)
    budget_ms, limits = arguments.trigger.budget_ms, arguments.limits
    instance = NextItemInstance(engine, name=name, budget_ms=budget_ms, limits=limits)
    admin_app = instance.admin_app(kept_secret(folder / "token"))
    return _Service(engine, instance, instance.app(), admin_app, engine.served.name)


def _ranking(run: Run, arguments: ServeArguments, name: str) -> _Service:
    folder = tables = run.folder / "serve"
    engine = open_engine(
        run, engine=arguments.engine, trigger=arguments.trigger, step=arguments.step, label=arguments.label
    )

    def load(folder: Path, step: int | None) -> ServedModel:
        chunk = arguments.engine.chunk
        return load_version(engine.histories, folder, step=step, label=arguments.label, tables=tables, chunk=chunk)

    other = str(arguments.compare) if arguments.compare else None
    notes = VersionFile(arguments.notes, first=VersionRecord(compared=other, share=arguments.share if other else 0.0))
    notes.follow(engine, load)
    secret = kept_secret(folder / "secret").encode()
    instance = Instance(
        engine,
        name=name,
        secret=secret,
        limits=arguments.limits,
        search=_search(run, arguments),
        stages=arguments.stages,
    )
    admin = Admin(instance, kept_secret(folder / "token"), load, notes)
    return _Service(engine, instance, instance.app(), admin.app(), engine.versions.main.name)


def _pointwise(run: Run, arguments: ServeArguments, name: str) -> _Service:
    folder = run.folder / "serve"
    engine = open_pointwise_engine(
        run, folder / EVENTS, config=arguments.engine, step=arguments.step, label=arguments.label
    )
    instance = PointwiseInstance(
        engine,
        name=name,
        budget_ms=arguments.trigger.budget_ms,
        limits=arguments.limits,
        search=_search(run, arguments),
        stages=arguments.stages,
    )
    admin_app = instance.admin_app(kept_secret(folder / "token"))
    return _Service(engine, instance, instance.app(), admin_app, engine.served.name)


def _search(run: Run, arguments: ServeArguments) -> CandidateSearch | None:
    """Retrieval by another run, if one is named."""
    return open_search(arguments.retrieval, run) if arguments.retrieval else None


def _generative(run: Run, arguments: ServeArguments, name: str) -> _Service:
    folder = run.folder / "serve"
    generator = open_generator(run, folder / EVENTS, config=arguments.engine, step=arguments.step)
    budget_ms, limits = arguments.trigger.budget_ms, arguments.limits
    instance = GenerativeInstance(generator, name=name, budget_ms=budget_ms, limits=limits)
    admin_app = instance.admin_app(kept_secret(folder / "token"))
    return _Service(generator, instance, instance.app(), admin_app, generator.served.name)
