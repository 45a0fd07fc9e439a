"""`nestpipe serve`: one instance of a run, on its own port."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro

from nestpipe.errors import ConfigError
from nestpipe.models.encdec_config import EncDecConfig
from nestpipe.run import Run
from nestpipe.serve.config import EngineConfig, Limits, Stages, TriggerConfig
from nestpipe.serve.engine import Engine
from nestpipe.serve.event_log import EventLog
from nestpipe.serve.histories import Histories
from nestpipe.serve.measure import measure
from nestpipe.serve.model import open_served
from nestpipe.serve.notes import Notes, Told
from nestpipe.serve.prefix import Served
from nestpipe.serve.swap import load_beside

EVENTS = "events.log"
_SECRET_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """The flags of the command."""

    run: tyro.conf.Positional[Path | None] = None
    """Folder of a run that ranks, or of one that generates."""
    step: int | None = None
    """Checkpoint to serve [default: the best one if the run validated, else the latest]."""
    label: str = ""
    """Label to order by [default: the model's first]."""
    compare: Path | None = None
    """Folder of a second run on the same data, which answers a share of the users."""
    share: float = 0.1
    """How many of the users those are, 0 .. 1, by a hash of the user."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8701
    """Port for requests; 0 takes a free one."""
    admin_port: int = 8751
    """Port for administration; 0 takes a free one. Its token is in RUN/serve/token."""
    admin_host: str = "127.0.0.1"
    """Address for administration: another one than --host, so that who is let in for requests is not let in there."""
    name: str = ""
    """Name of the instance, which must outlive restarts [default: host name and port]."""
    notes: Path | None = None
    """File of what the instance is told to serve by 'nestpipe swap': a process that starts with it goes on with that."""
    num_threads: int = 1
    """Threads of the model."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    limits: Limits = field(default_factory=Limits)
    instances: int = 0
    """Start so many instances and a gateway in front of them, which takes --port; docs/fleet.md says more."""
    ray: int = 0
    """Start so many replicas under Ray Serve instead, whose proxy takes --port; docs/fleet.md says more."""
    retrieval: Path | None = None
    """Folder of a trained retrieval run for the gateway [default: means of this run's item vectors]."""
    stages: Stages = field(default_factory=Stages)
    demo: bool = False
    """Show a page at the gateway's address to try it with; whoever opens it may read histories."""
    print_nginx: bool = False
    """Print a configuration of nginx for the gateway's place, and end."""

    def check(self) -> None:
        found = [f"engine.{problem}" for problem in self.engine.problems()]
        found += [f"trigger.{problem}" for problem in self.trigger.problems()]
        found += [f"limits.{problem}" for problem in self.limits.problems()]
        found += [f"stages.{problem}" for problem in self.stages.problems()]
        if not 0 <= self.share <= 1:
            found.append(f"share is {self.share}; it must be in 0 .. 1")
        if self.instances < 0:
            found.append(f"instances is {self.instances}; it must be 0 (no gateway) or more")
        if self.notes is not None and (self.instances or self.demo):
            found.append(f"notes is {self.notes}; that is for one instance, those of a fleet have files of their own")
        if self.ray < 0:
            found.append(f"ray is {self.ray}; it must be 0 (no Ray) or more")
        beside = [
            name
            for name in ("instances", "demo", "print_nginx", "compare", "retrieval", "notes")
            if getattr(self, name)
        ]
        if self.ray and beside:
            found.append(f"ray is {self.ray}, but {beside[0].replace('_', '-')} is for a gateway or a single instance")
        if found:
            raise ConfigError("the configuration has problems:\n" + "\n".join(f"  - {problem}" for problem in found))


def parse(argv: Sequence[str]) -> ServeArguments:
    """The flags of a command line, checked."""
    example = "Example: nestpipe serve runs/ranking --port 8701 --trigger.budget-ms 50"
    text = f"Serves a run that ranks or generates, as one instance; docs/serving.md says more.\n\n{example}"
    arguments = tyro.cli(ServeArguments, prog="nestpipe serve", description=text, args=argv)
    arguments.check()
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.ray:
        from nestpipe.serve.ray_command import serve_on_ray

        _refuse_generative(open_run(arguments), True, "--ray")
        return serve_on_ray(arguments)
    if arguments.print_nginx or arguments.instances or arguments.demo:
        return _fleet(arguments)
    return _one(arguments)


def _one(arguments: ServeArguments) -> int:
    """One instance, until it is told to stop."""
    try:
        from nestpipe.serve.admin import Admin
        from nestpipe.serve.http import Instance
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

        def load(folder: Path, step: int | None) -> Served:
            chunk = arguments.engine.chunk
            return load_beside(engine.histories, folder, step=step, label=arguments.label, tables=tables, chunk=chunk)

        del run  # whose sequences stay mapped, also those of users that are forgotten later
        other = str(arguments.compare) if arguments.compare else None
        notes = Notes(arguments.notes, first=Told(compared=other, share=arguments.share if other else 0.0))
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
            print(f"serving {engine.lineup.main.name} as {instance.name} on {where}", flush=True)

        engine.start()
        try:
            asyncio.run(run_apps(apps, on_stop=stop, started=started))
        finally:
            engine.stop()
    return 0


def _generative(run: Run, arguments: ServeArguments) -> int:
    """An instance that generates instead of ranking."""
    from nestpipe.serve.generate_command import GenerativePlace, open_generator, serve_generative

    folder = run.folder / "serve"
    torch.set_num_threads(arguments.num_threads)
    generator = open_generator(run, folder / EVENTS, config=arguments.engine, step=arguments.step)
    del run  # whose sequences stay mapped, also those of users that are forgotten later
    place = GenerativePlace(
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
        from nestpipe.serve.fleet_command import (
            Place,
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
    place = Place(
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


def open_run(arguments: ServeArguments) -> Run:
    """The run to serve; raises ConfigError if none was named."""
    if arguments.run is None:
        raise ConfigError("name the folder of a run that ranks: nestpipe serve RUN.")
    return Run.open(arguments.run)


def open_engine(
    run: Run, *, engine: EngineConfig, trigger: TriggerConfig, step: int | None = None, label: str = ""
) -> Engine:
    """A run's model with its histories, measured on this machine; the engine is not started yet."""
    folder = run.folder / "serve"
    served = open_served(run, step=step, label=label, folder=folder)
    histories = Histories(run.sequences, EventLog(folder / EVENTS))
    served.costs = measure(served, histories, chunk=engine.chunk)
    return Engine(served, histories, config=engine, trigger=trigger)


def kept_secret(path: Path) -> str:
    """The secret in a file that only its owner reads; made once, so that all instances of a run share it. Raises ConfigError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())  # a name without content would be a secret that everybody knows
    try:
        os.link(draft, path)  # unless another instance was first
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    found = path.read_text().strip()
    if len(found) < 2 * _SECRET_BYTES:
        raise ConfigError(
            f"{path} has {len(found)} characters, so it was cut or changed, and others could guess it. Remove it; it is made anew."
        )
    return found
