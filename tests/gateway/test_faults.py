"""Faults under load: real models, engines and servers behind a cascade; no answer is wrong, none fails, nothing stays pinned."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from nestpipe.client import Client
from nestpipe.gateway.candidates import ExactIndex, PastReader, Retriever, mean_encoder
from nestpipe.gateway.cascade import Cascade, LocalCandidateStages
from nestpipe.gateway.gateway import Gateway
from nestpipe.gateway.instance_client import InstanceClient, InstanceReply, PrefillOutcome, make_client
from nestpipe.gateway.router import InstanceAddress as Member
from nestpipe.gateway.router import Members, _decode, sign
from nestpipe.serve.api import Instance, _holder
from nestpipe.serve.config import MAX_TICKET_S, Stages, TriggerConfig
from nestpipe.serve.model_versions import load_version
from nestpipe.serve.schemas import PrefillRequest, RankedItems, RankRequest, RecommendedItems, RecommendRequest
from nestpipe.serve.versioned_worker import ModelVersions
from tests.gateway.fake_instances import Served
from tests.serve.small_rankers import ASKED, make_engine

SECRET = b"the secret of the fleet"
USERS = list(range(24))
EXACT = 1e-5  # of scores of order one in 32 bits: the contract's tolerance
# The machine may be busy; what is tested is that nothing is wrong, not that it is fast.
STAGES = Stages(
    retrieval_ms=60_000, prerank_ms=60_000, rank_ms=60_000, prefill_hint_ms=5000, num_retrieved=30, num_candidates=12
)


class Loopless(uvicorn.Server):
    """A server in the loop of the test, which leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Node:
    """One instance that can be killed and started again on its port."""

    def __init__(self, name: str, run: Any, served: Any, folder: Any, **config: Any):
        self.name, self._run, self._served, self._folder, self._config = name, run, served, folder, config
        self.clock_s = 0.0
        self.port = 0
        self.start()

    def start(self) -> None:
        self.engine = make_engine(self._run, self._folder / self.name, served=self._served, **self._config)
        self.engine.start()
        instance = Instance(
            self.engine, name=self.name, secret=SECRET, wall_clock=lambda: 1_800_000_000.0 + self.clock_s
        )
        self._server = Served(instance.app(), port=self.port)
        self.port = self._server.port

    def kill(self) -> None:
        self._server.stop()
        self.engine.stop()

    def load(self, folder: Path) -> Any:
        """Another model as the administration loads it, while this one serves."""
        tables = self._folder / "tables"
        return load_version(self.engine.histories, folder, step=None, label="", tables=tables, chunk=8)

    def swap(self, folder: Path) -> None:
        self.engine.use(ModelVersions(self.load(folder)))

    def compare(self, folder: Path) -> None:
        self.engine.use(ModelVersions(self.engine.versions.main, self.load(folder), 0.5))

    @property
    def member(self) -> Member:
        return Member(name=self.name, url=f"http://127.0.0.1:{self.port}")


class Crossing:
    """Where requests are whose clients are about to leave: such a request stays in its stage until its client is gone."""

    NAMES = ("signal", "retrieval", "prerank", "rank", "ranked")

    def __init__(self) -> None:
        self.reached = {name: asyncio.Event() for name in self.NAMES}

    async def enter(self, name: str, request: str) -> None:
        if request.startswith(f"leaves-{name}-"):
            self.reached[name].set()
            await asyncio.sleep(3600)


class Meddling(InstanceClient):
    """Damages every third ticket on its way, and brings every fourth too late."""

    num_signals = 0

    def __init__(self, stages: Crossing, *arguments: Any, **fields: Any):
        super().__init__(*arguments, **fields)
        self._stages = stages
        self.damaged: set[str] = set()  # who a prefix is held for whose ticket nobody can bring back

    async def prefill(self, asked: PrefillRequest, instance: Member, *, timeout_s: float) -> PrefillOutcome:
        if asked.request.startswith("leaves-signal-"):
            self._stages.reached["signal"].set()
        found = await super().prefill(asked, instance, timeout_s=timeout_s)
        self.num_signals += 1
        if found.ticket is None or (self.num_signals % 3 and self.num_signals % 4):
            return found
        self.damaged.add(_holder(asked.user, asked.request))
        version, content, tail = found.ticket.split(".")
        if self.num_signals % 3 == 0:
            return replace(found, ticket=f"{version}.{content}.{tail[::-1]}")
        late = replace(_decode(content), expiry=1_800_000_000.0 - 2 * 3600)  # whatever its clock says
        return replace(found, ticket=sign(late, SECRET))

    async def rank(self, asked: RankRequest, *arguments: Any, **fields: Any) -> InstanceReply[RankedItems]:
        await self._stages.enter("rank", asked.request)
        found = await super().rank(asked, *arguments, **fields)
        await self._stages.enter("ranked", asked.request)
        return found


class Staged(LocalCandidateStages):
    """Retrieval and pre-rank in which clients leave."""

    def __init__(self, stages: Crossing, *arguments: Any):
        super().__init__(*arguments)
        self._stages = stages

    async def retrieve(self, request: RecommendRequest, count: int) -> Any:
        await self._stages.enter("retrieval", request.request)
        return await super().retrieve(request, count)

    async def prerank(self, request: RecommendRequest, found: Any, count: int) -> Any:
        await self._stages.enter("prerank", request.request)
        return await super().prerank(request, found, count)


def upstream(run: Any, executor: ThreadPoolExecutor, stages: Crossing) -> LocalCandidateStages:
    items = np.array(run.sequences.catalogue)
    vectors = np.random.default_rng(0).standard_normal((len(items), 4), dtype=np.float32)
    retriever = Retriever(
        items=items,
        vectors=vectors,
        index=ExactIndex(vectors),
        encode=mean_encoder(items, vectors),
        past_of=PastReader(run.sequences),
    )
    return Staged(stages, retriever, executor)


async def recommend(cascade: Cascade, user: int, request: str) -> RecommendedItems:
    return await cascade.recommend(RecommendRequest(user=user, request=request, k=12, query_time=ASKED))


def assert_same(answer: RecommendedItems, truth: RecommendedItems) -> None:
    """The same items with the same scores; items whose scores are nearer than the tolerance may change places."""
    assert not answer.degraded, (answer.path, answer.problem)
    found, wanted = (dict(zip(one.items, one.scores, strict=True)) for one in (answer, truth))
    assert found.keys() == wanted.keys()
    assert max(abs(found[item] - wanted[item]) for item in wanted) <= EXACT
    assert answer.scores == sorted(answer.scores, reverse=True)


async def leave(port: int, stages: Crossing, name: str, number: int) -> None:
    """A client over HTTP whose process is killed while its request is in a stage: the kernel resets its connection."""
    stages.reached[name].clear()
    body = json.dumps({"user": number % len(USERS), "request": f"leaves-{name}-{number}", "query_time": ASKED}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await stages.reached[name].wait()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


class Load:
    """Users that ask again and again, some of whom leave in the middle, until it is stopped."""

    def __init__(self, cascade: Cascade, truth: dict[str, dict[int, RecommendedItems]]):
        self._cascade, self._truth = cascade, truth
        self.models: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.num_left = 0
        self._stop = False
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(4)]

    async def _ask(self, number: int) -> None:
        random = np.random.default_rng(number)
        count = 0
        while not self._stop:
            count += 1
            user = int(random.choice(USERS))
            work = asyncio.create_task(recommend(self._cascade, user, f"{number}-{count}"))
            if count % 7 == 0:  # this client is killed, in whatever stage that is
                await asyncio.wait({work}, timeout=float(random.uniform(0, 0.02)))
                if work.cancel():
                    self.num_left += 1
                    with suppress(asyncio.CancelledError):
                        await work
                    continue
            answer = await work
            model = answer.model.split("/")[0]
            assert_same(answer, self._truth[model][user])
            self.paths[answer.path] += 1
            self.models[model] += 1

    async def more(self, count: int) -> None:
        """Waits for so many further answers."""
        wanted = self.paths.total() + count
        while self.paths.total() < wanted:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)


def test_no_answer_is_wrong_and_none_fails_whatever_happens_to_the_fleet(runs, served, tmp_path, scale):
    run, count = runs("hstu"), scale(5, 2000)
    # One has hardly any room for prefixes, one none on the host.
    sizes = {
        "a": {},
        "b": {"device_bytes": 9000, "host_bytes": 4000, "device_ttl_s": MAX_TICKET_S},
        "c": {"host_bytes": 0},
    }
    nodes = {name: Node(name, run, served("hstu"), tmp_path, **size) for name, size in sizes.items()}

    async def body() -> tuple[Load, set[str]]:
        stages = Crossing()
        with ThreadPoolExecutor(1) as executor, socket.create_server(("127.0.0.1", 0)) as listening:
            own = upstream(run, executor, stages)
            truth = {name: await _truth(runs(name), served(name), tmp_path, own) for name in ("hstu", "fuxi")}
            members = Members(one.member for one in nodes.values())
            remote = Meddling(stages, members, make_client(), suspect_s=0.1)
            cascade = Cascade(remote, own, STAGES)
            config = uvicorn.Config(
                Gateway(cascade, probe=lambda: RecommendRequest(user=1)).app(),
                log_level="critical",
                ws="none",
                lifespan="off",
            )
            server, load = Loopless(config), Load(cascade, truth)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            for number, fault in enumerate(faults(nodes, members, runs("fuxi").folder)):
                name, port = Crossing.NAMES[number % len(Crossing.NAMES)], listening.getsockname()[1]
                await asyncio.gather(load.more(count), leave(port, stages, name, number))
                await fault()
            await load.more(count)
            await load.stop()
            server.should_exit = True
            await serving
            await remote.close()
            return load, remote.damaged

    try:
        load, damaged = asyncio.run(body())
        for node in nodes.values():
            _assert_nothing_is_held(node, except_for=damaged)
    finally:
        for node in nodes.values():
            node.kill()
    paths = load.paths
    assert load.num_left > 0
    assert paths["full"] > 0
    assert paths.total() - paths["full"] > 0, f"some were served from prefixes: {paths}"
    assert len(load.models) == 2, f"before the swaps one model, then both: {load.models}"


async def _truth(run: Any, served: Any, folder: Any, own: LocalCandidateStages) -> dict[int, RecommendedItems]:
    """What full inference says about every user."""
    node = Node(f"truth-{run.folder.name}", run, served, folder, trigger=TriggerConfig(mode="off"))
    remote = InstanceClient(Members([node.member]), make_client())
    try:
        found = {user: await recommend(Cascade(remote, own, STAGES), user, f"truth-{user}") for user in USERS}
    finally:
        await remote.close()
        node.kill()
    assert {one.path for one in found.values()} == {"full"}
    return found


def faults(nodes: dict[str, Node], members: Members, other: Path) -> list[Callable[[], Awaitable[None]]]:
    """What happens to the fleet, one after the other."""

    def at_once(act: Callable[..., Any], *arguments: Any) -> Callable[[], Awaitable[None]]:
        async def happen() -> None:
            act(*arguments)

        return happen

    def shift(seconds: float) -> None:
        nodes["a"].clock_s = seconds

    return [
        lambda: asyncio.to_thread(nodes["a"].kill),
        lambda: asyncio.to_thread(nodes["a"].start),
        at_once(shift, 3600.0),
        at_once(shift, -3600.0),
        lambda: asyncio.to_thread(nodes["a"].swap, other),
        lambda: asyncio.to_thread(nodes["b"].swap, other),
        lambda: asyncio.to_thread(nodes["c"].compare, other),
        at_once(members.drain, "c"),
        at_once(members.leave, "c"),
        at_once(members.join, "c", nodes["c"].member.url),
        at_once(lambda: [node.engine.cache.invalidate() for node in nodes.values()]),
        lambda: asyncio.to_thread(nodes["b"].kill),
        lambda: asyncio.to_thread(nodes["b"].start),
    ]


def _assert_nothing_is_held(node: Node, *, except_for: set[str]) -> None:
    """At once where pins last long ('b', which has neither a clock that jumps nor left); elsewhere they run out."""
    engine, deadline = node.engine, time.monotonic() + 30

    def held() -> set[Any]:
        return {holder for entry in list(engine.cache._entries.values()) for holder in entry.pins} | set(engine._pinned)

    while held() - except_for or engine.num_waiting:
        assert time.monotonic() < deadline, held()
        engine.cache.sweep()
        time.sleep(0.01)
    engine.cache.check()


def is_open(host: str, port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(20_000 + os.getpid() % 10_000, 32_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def test_one_command_starts_a_fleet_that_survives_the_kill_of_an_instance(runs, tmp_path):
    run, first = runs("hstu"), free_ports(8)
    flags = ["--host", "127.0.0.2", "--port", str(first), "--admin-port", str(first + 4)]
    flags += ["--instances", "2", "--trigger.mode", "always"]
    for stage in ("retrieval", "prerank", "rank"):
        flags += [f"--stages.{stage}-ms", "30000"]
    flags += ["--stages.num-retrieved", "40", "--stages.num-candidates", "20"]
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-m", "nestpipe.cli", "serve", str(run.folder), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            with Client(f"http://127.0.0.2:{first}", timeout_s=60) as client:
                _wait(lambda: "gateway with 2 instances" in (tmp_path / "log").read_text(), process)
                ports = range(first + 4, first + 7)
                found = {host: [is_open(host, port) for port in ports] for host in ("127.0.0.1", "127.0.0.2")}
                assert found == {"127.0.0.1": [True] * 3, "127.0.0.2": [False] * 3}, "--host is not for admin ports"
                # An instance that misses a probe on a busy machine is not asked until the next one.
                before = {}

                def both_answer() -> bool:
                    before.update({user: client.recommend(user, query_time=ASKED) for user in USERS[:8]})
                    return {one.instance for one in before.values()} == {"i1", "i2"}

                _wait(both_answer, process)
                client.send_events([{"id": "x", "user": 99, "item": 3, "time": ASKED, "click": 1}])
                pids = {int(line) for line in _children(process.pid)}
                os.kill(min(pids), signal.SIGKILL)
                for user, was in before.items():
                    now = client.recommend(user, query_time=ASKED)
                    assert (now.items, now.degraded) == (was.items, False)
                    np.testing.assert_allclose(now.scores, was.scores, atol=EXACT)
                _wait(lambda: len(_children(process.pid)) == 2, process)
                stranger = client.recommend("three", k=23, exclude=[0])
                assert (stranger.path, stranger.degraded, stranger.instance) == ("popular", False, None)
                assert stranger.scores == sorted(stranger.scores, reverse=True)
                assert sorted(stranger.items) == list(range(1, 24)), "the whole catalogue but what is excluded"
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert process.returncode == 0
    assert "ended by signal 9; it is started again" in (tmp_path / "log").read_text()
    assert not any(map(_is_alive, pids)), "no instance outlives its gateway"


def _wait(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return file.read().split()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
