"""`nestpipe serve RUN --instances N`: a gateway in this process, N instances in processes of their own.

--port P            the gateway; instances listen on P + 1, P + 2, ...; 0 takes free ones
--admin-port A      its administration, on --admin-host; the instances' on A + 1, A + 2, ...; likewise
--retrieval RUN     for rankers: vectors and queries of a trained retrieval run; else means of the run's own item vectors

The instances of a ranker order what the gateway has retrieved; those of other runs find items themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nestpipe.cli.serve_instance import STOPPING
from nestpipe.errors import ConfigError
from nestpipe.eval.catalogue_predictor import training_counts
from nestpipe.gateway.candidates import PastEvents, Retriever, retriever_of
from nestpipe.gateway.cascade import Cascade, LocalCandidateStages
from nestpipe.gateway.forwarding import Forwarding
from nestpipe.gateway.gateway import FleetRecommender, Gateway, admin_app
from nestpipe.gateway.instance_client import InstanceClient, make_client
from nestpipe.gateway.nginx import nginx_config
from nestpipe.gateway.router import InstanceAddress, Members
from nestpipe.gateway.supervisor import Fleet, Worker
from nestpipe.rules.rule_book import RuleBook
from nestpipe.serve.config import Stages
from nestpipe.serve.known_items import known_items
from nestpipe.serve.live_attributes import LiveSource
from nestpipe.serve.open_instance import check_flags
from nestpipe.serve.open_service import kind_of, open_histories, open_retrieval, open_run
from nestpipe.serve.openapi import ServiceKind
from nestpipe.serve.operator_page import OperatorPage
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.schemas import RecommendRequest
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.serve.server import PortError, bind, run_apps
from nestpipe.serve.service_folder import EVENTS, PREFIXES, kept_secret
from nestpipe.serve.user_history import UserHistories
from nestpipe.training.run_folder import Run

_log = logging.getLogger("nestpipe.serve")
_PROBED_USERS = 1000  # among whom the user of a readiness check is chosen
_READY_S = 0.25  # between two polls of the instances' readiness
# Below the ephemeral ports of outgoing connections, which could take a port before its instance has started.
_FREE_PORTS = range(10_000, 32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAddresses:
    """Where a fleet of this machine listens."""

    host: str
    port: int
    admin_host: str
    admin_port: int
    num_instances: int

    def check(self) -> None:
        for name, first in (("port", self.port), ("admin-port", self.admin_port)):
            if not 0 < first < 2**16 - self.num_instances:
                raise ConfigError(f"--{name} {first} leaves no room for {self.num_instances} instances behind it.")
        if 0 <= abs(self.port - self.admin_port) <= self.num_instances:
            raise ConfigError(
                f"--port {self.port} and --admin-port {self.admin_port} are too near for {self.num_instances} instances: "
                f"each takes {self.num_instances + 1} ports."
            )

    def settled(self) -> FleetAddresses:
        """The same with free ports where 0 was asked for; raises PortError if there are none."""
        size = self.num_instances + 1
        if not self.port and not self.admin_port:
            first = free_ports(self.host, 2 * size)
            return replace(self, port=first, admin_port=first + size)
        port, admin_port = (
            self.port or free_ports(self.host, size),
            self.admin_port or free_ports(self.admin_host, size),
        )
        return replace(self, port=port, admin_port=admin_port)

    def members(self) -> list[InstanceAddress]:
        numbers = range(1, self.num_instances + 1)
        return [InstanceAddress(name=f"i{one}", url=f"http://{self.host}:{self.port + one}") for one in numbers]

    def nginx(self, *, timeout_ms: int) -> str:
        """A configuration for nginx in the gateway's place."""
        urls = [one.url for one in self.members()]
        return nginx_config(urls, listen=f"{self.host}:{self.port}", timeout_ms=timeout_ms)

    def workers(self, run: Path, flags: Sequence[str], *, stores: Path | None = None) -> list[Worker]:
        """The instances as commands; `flags` are those that all of them share, `stores` the folder of their prefix stores."""
        start = (sys.executable, "-m", "nestpipe.cli", "serve", str(run), "--host", self.host)
        return [
            Worker(
                name=one.name,
                command=(
                    *start,
                    *("--name", one.name, "--port", str(self.port + number)),
                    *("--admin-host", self.admin_host, "--admin-port", str(self.admin_port + number)),
                    *("--notes", str(notes_of(run, one))),
                    *(("--prefix-store", str(stores / f"{one.name}-{self.port + number}")) if stores else ()),
                    *flags,
                ),
            )
            for number, one in enumerate(self.members(), start=1)
        ]


def free_ports(host: str, size: int, *, tries: int = 100) -> int:
    """The first of `size` consecutive free ports; raises PortError."""
    for _ in range(tries):
        first = _FREE_PORTS[secrets.randbelow(len(_FREE_PORTS) - size)]
        with suppress(OSError), ExitStack() as held:
            for port in range(first, first + size):
                held.enter_context(socket.socket()).bind((host, port))
            return first
    raise PortError(
        f"{host} has no {size} consecutive free ports in {_FREE_PORTS[0]} .. {_FREE_PORTS[-1]}; name --port."
    )


def notes_of(run: Path, instance: InstanceAddress) -> Path:
    """File of the model versions that an instance serves, for its next process; another fleet of the run has other ports."""
    return run / "serve" / f"{instance.name}-{instance.url.rpartition(':')[2]}.notes.json"


def flags_of(prefix: str, section: Any) -> list[str]:
    """The command-line flags that make a section of a configuration."""
    return [
        word
        for one in fields(section)
        for word in (f"--{prefix}.{one.name.replace('_', '-')}", str(getattr(section, one.name)))
    ]


def serve_fleet(arguments: ServeArguments) -> int:
    """Runs a gateway and its instances until SIGINT or SIGTERM."""
    place = addresses_of(arguments).settled()
    place.check()
    run = open_run(arguments)
    check_flags(run, arguments)
    kind, folder = kind_of(run), run.folder / "serve"
    flags = ["--num-threads", str(arguments.num_threads), "--label", arguments.label, "--device", arguments.device]
    flags += ["--step", str(arguments.step)] if arguments.step is not None else []
    flags += ["--compare", str(arguments.compare), "--share", str(arguments.share)] if arguments.compare else []
    flags += [] if arguments.request_instructions else ["--no-request-instructions"]
    flags += ["--rules", str(arguments.rules.resolve())] if arguments.rules else []
    flags += ["--state", arguments.state] if arguments.state else []
    flags += ["--prefix-store-bytes", str(arguments.prefix_store_bytes)]
    for name in ("engine", "trigger", "limits"):
        flags += flags_of(name, getattr(arguments, name))
    histories = open_histories(run, folder / EVENTS, arguments.state)
    for one in place.members():
        notes_of(run.folder, one).unlink(missing_ok=True)  # of an earlier fleet
    retriever = None
    if kind in ("ranker", "pointwise"):
        other, keeps_seen = arguments.retrieval, run.config.eval.seen == "none"
        retriever = (
            fleet_retriever(open_retrieval(other, run), histories, keeps_seen=keeps_seen)
            if other
            else fleet_retriever(run, histories, keeps_seen=keeps_seen, step=arguments.step)
        )
    # Ports that change with every start would leave a store behind each time: then each instance takes a free one.
    stores = arguments.prefix_store or (folder / PREFIXES if arguments.port else None)
    plan = _FleetPlan(
        place=place,
        workers=place.workers(run.folder, flags, stores=stores),
        kind=kind,
        histories=histories,
        retriever=retriever,
        rules=RuleBook.open(LiveSource(lambda: histories.sequences, histories.living), arguments.rules),
        stages=arguments.stages,
        budget_ms=arguments.trigger.budget_ms,
        token=kept_secret(folder / "token"),
        page=arguments.page or arguments.demo,
    )
    del run  # whose sequences stay mapped, also those of users that are forgotten later
    return _run_fleet(plan)


def print_nginx(arguments: ServeArguments) -> int:
    """Prints a configuration for nginx in the gateway's place."""
    place = addresses_of(arguments)
    place.check()
    print(place.nginx(timeout_ms=math.ceil(2 * arguments.trigger.budget_ms)), end="")
    return 0


def addresses_of(arguments: ServeArguments) -> FleetAddresses:
    return FleetAddresses(
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        num_instances=max(arguments.instances, 1),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _FleetPlan:
    """What a fleet of one kind of run needs; `retriever` is for rankers alone."""

    place: FleetAddresses
    workers: Sequence[Worker]
    kind: ServiceKind
    histories: UserHistories
    retriever: Retriever | None
    rules: RuleBook
    stages: Stages
    budget_ms: float
    token: str
    page: bool

    def recommender(self, remote: InstanceClient, executor: Executor, ids: ServiceIds) -> FleetRecommender:
        if self.retriever is None:
            return Forwarding(remote, budget_ms=self.budget_ms)
        stages = LocalCandidateStages(self.retriever, executor, ids, self.rules)
        return Cascade(remote, stages, self.stages, has_prefixes=self.kind == "ranker")


def _run_fleet(plan: _FleetPlan) -> int:
    place, histories = plan.place, plan.histories
    with (
        ThreadPoolExecutor(2, thread_name_prefix="retrieval") as executor,
        bind(place.host, place.port) as public,
        bind(place.admin_host, place.admin_port) as private,
    ):

        async def body() -> None:
            remote, fleet = InstanceClient(Members(place.members()), make_client()), Fleet(plan.workers)
            ids = ServiceIds(lambda: histories.sequences, histories.living)
            gateway = Gateway(
                plan.recommender(remote, executor, ids),
                kind=plan.kind,
                probe=lambda: probe_of(histories, ids),
                shared_log=True,
            )
            page = OperatorPage(histories, ids, gateway.metric_texts).routes() if plan.page else []
            await fleet.start()
            tasks = (remote.watch(), keep_fresh(histories), _say_ready(gateway, place, page=plan.page))
            watches = [asyncio.create_task(one) for one in tasks]

            def stopping() -> None:
                print(STOPPING, file=sys.stderr, flush=True)

            try:
                apps = [(gateway.app(*page), public), (admin_app(remote, plan.token), private)]
                await run_apps(apps, on_stop=stopping, started=lambda: None)
            finally:
                for one in watches:
                    one.cancel()
                await asyncio.gather(*watches, return_exceptions=True)
                await remote.close()
                await fleet.stop()

        asyncio.run(body())
    return 0


def probe_of(histories: UserHistories, ids: ServiceIds) -> RecommendRequest:
    """A request of a user with a history, but a short one: nothing would be left to rank for who has had every item."""
    own = histories.sequences
    lengths = np.diff(own.offsets[: _PROBED_USERS + 1])
    row = int(np.argmin(np.where(lengths > 0, lengths, lengths.max(initial=0) + 1)))
    return RecommendRequest(user=ids.own_users(own.users[row : row + 1])[0], k=1)


def fleet_retriever(
    run: Run, histories: UserHistories, *, keeps_seen: bool = False, step: int | None = None
) -> Retriever:
    """Vector search from the current histories of users; `keeps_seen` as the ranker was evaluated."""

    def past_of(user: int) -> PastEvents:
        histories.refresh()
        found = histories.of(user)
        return PastEvents(found.items, found.times)

    ranks = kind_of(run) in ("ranker", "pointwise")
    found = known_items(run, run.load_model(step)).search().retriever if ranks else retriever_of(run, step=step)
    return replace(found, past_of=past_of, popularity=training_counts(run.sequences, run.split), keeps_seen=keeps_seen)


async def keep_fresh(histories: UserHistories, *, every_s: float = 1.0) -> None:
    """Drops users that were forgotten, also while no request arrives."""
    while True:
        try:
            await asyncio.to_thread(histories.refresh)
        except Exception:
            _log.exception("the event log or the sequence folder could not be read; the gateway retries")
        await asyncio.sleep(every_s)


async def _say_ready(gateway: Gateway, place: FleetAddresses, *, page: bool) -> None:
    while True:
        ready, problem = await gateway.readiness()
        if all(ready.values()) and not problem:
            break
        await asyncio.sleep(_READY_S)
    where = f"; open http://{place.host}:{place.port}/ in a browser" if page else ""
    print(f"gateway with {place.num_instances} instances on http://{place.host}:{place.port}{where}", flush=True)
