"""`nestpipe serve`: one instance of a run, on its own port."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch

from nestpipe.errors import ConfigError
from nestpipe.models.config import EncDecConfig
from nestpipe.serve.arguments import ServeArguments, parse
from nestpipe.serve.model_versions import VersionFile, VersionRecord, load_version
from nestpipe.serve.open_service import open_engine, open_run
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.service_folder import EVENTS, kept_secret
from nestpipe.training.run_folder import Run


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.ray:
        from nestpipe.cli.serve_ray import serve_on_ray

        _refuse_generative(open_run(arguments), True, "--ray")
        return serve_on_ray(arguments)
    if arguments.print_nginx or arguments.instances or arguments.demo:
        return _fleet(arguments)
    return _one(arguments)


def _one(arguments: ServeArguments) -> int:
    """One instance, until it is told to stop."""
    try:
        from nestpipe.serve.admin import Admin
        from nestpipe.serve.api import Instance
        from nestpipe.serve.server import bind, run_apps
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving needs the package '{error.name}'; install it with: pip install 'nestpipe[serve]'"
        ) from None
    run = open_run(arguments)
    if isinstance(run.config.model, EncDecConfig):
        _refuse_generative(run, arguments.compare is not None, "--compare")
        _refuse_generative(run, arguments.notes is not None, "--notes")
        return _generative(run, arguments)
    folder = tables = run.folder / "serve"
    with bind(arguments.host, arguments.port) as public, bind(arguments.admin_host, arguments.admin_port) as private:
        port, admin_port = (one.getsockname()[1] for one in (public, private))
        torch.set_num_threads(arguments.num_threads)
        engine = open_engine(
            run, engine=arguments.engine, trigger=arguments.trigger, step=arguments.step, label=arguments.label
        )

        def load(folder: Path, step: int | None) -> ServedModel:
            chunk = arguments.engine.chunk
            return load_version(engine.histories, folder, step=step, label=arguments.label, tables=tables, chunk=chunk)

        del run  # whose sequences stay mapped, also those of users that are forgotten later
        other = str(arguments.compare) if arguments.compare else None
        notes = VersionFile(
            arguments.notes, first=VersionRecord(compared=other, share=arguments.share if other else 0.0)
        )
        notes.follow(engine, load)
        instance = Instance(
            engine,
            name=arguments.name or f"{socket.gethostname()}-{port}",
            secret=kept_secret(folder / "secret").encode(),
            limits=arguments.limits,
        )
        admin = Admin(instance, kept_secret(folder / "token"), load, notes)
        apps = [(instance.app(), public), (admin.app(), private)]

        def stop() -> None:
            instance.is_draining = True
            with suppress(OSError):  # nobody may be reading any more
                print("stopping: what is under way is answered first", file=sys.stderr, flush=True)

        def started() -> None:
            where = f"http://{arguments.host}:{port}, admin on port {admin_port} of {arguments.admin_host}"
            print(f"serving {engine.versions.main.name} as {instance.name} on {where}", flush=True)

        engine.start()
        try:
            asyncio.run(run_apps(apps, on_stop=stop, started=started))
        finally:
            engine.stop()
    return 0


def _generative(run: Run, arguments: ServeArguments) -> int:
    """An instance that generates instead of ranking."""
    from nestpipe.cli.serve_generative import GenerativeAddress, serve_generative
    from nestpipe.serve.open_service import open_generator

    folder = run.folder / "serve"
    torch.set_num_threads(arguments.num_threads)
    generator = open_generator(run, folder / EVENTS, config=arguments.engine, step=arguments.step)
    del run  # whose sequences stay mapped, also those of users that are forgotten later
    place = GenerativeAddress(
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        name=arguments.name,
        token=kept_secret(folder / "token"),
        budget_ms=arguments.trigger.budget_ms,
        limits=arguments.limits,
    )
    return serve_generative(generator, place)


def _fleet(arguments: ServeArguments) -> int:
    """A gateway and its instances, or a configuration of nginx for them."""
    try:
        from nestpipe.cli.serve_fleet import (
            FleetAddresses,
            flags_of,
            fleet_histories,
            fleet_retriever,
            notes_of,
            serve_fleet,
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving needs the package '{error.name}'; install it with: pip install 'nestpipe[serve]'"
        ) from None
    place = FleetAddresses(
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        num_instances=max(arguments.instances, 1),
    )
    if not arguments.print_nginx:
        place = place.settled()
    place.check()
    if arguments.print_nginx:
        print(place.nginx(), end="")
        return 0
    run = open_run(arguments)
    _refuse_generative(run, True, "a gateway (--instances, --demo)")
    folder = run.folder / "serve"
    flags = ["--num-threads", str(arguments.num_threads), "--label", arguments.label]
    flags += ["--step", str(arguments.step)] if arguments.step is not None else []
    flags += ["--compare", str(arguments.compare), "--share", str(arguments.share)] if arguments.compare else []
    for name in ("engine", "trigger", "limits"):
        flags += flags_of(name, getattr(arguments, name))
    workers, histories = place.workers(run.folder, flags), fleet_histories(run, folder / EVENTS)
    for one in place.members():
        notes_of(run.folder, one).unlink(missing_ok=True)  # what a fleet of before was told
    retriever = fleet_retriever(Run.open(arguments.retrieval) if arguments.retrieval else run, histories)
    del run  # whose sequences stay mapped, also those of users that are forgotten later
    return serve_fleet(
        place,
        workers,
        histories=histories,
        retriever=retriever,
        stages=arguments.stages,
        token=kept_secret(folder / "token"),
        demo=arguments.demo,
    )


def _refuse_generative(run: Run, is_asked: bool, what: str) -> None:
    if is_asked and isinstance(run.config.model, EncDecConfig):
        raise ConfigError(f"{run.folder} generates, and {what} is for runs that rank; serve it as one instance.")
