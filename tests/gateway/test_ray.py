"""`nestpipe serve RUN --ray 2`: the affinity of our own router on a real Ray, its limits, a replica that is killed, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from nestpipe.client import Client
from tests.loopback_only import LoopbackOnly
from tests.serve.small_rankers import ASKED, NUM_ITEMS, evaluated, histories_of

USERS, ITEMS = range(16), list(range(NUM_ITEMS))
EXACT = 1e-5  # of scores of order one in 32 bits: the contract's tolerance
SLOW_MS = 60_000  # the machine may be busy
MET = {"hit_device", "join", "hit_host"}  # whoever computed the prefix ranked
CLOUD = (
    "169.254.169.254",
    "metadata.google.internal",
)  # Ray asks every machine whether it is a cloud's; docs/project/security.md
LISTENS, LOOPBACK = "0A", {"0100007F", "0000000000000000FFFF00000100007F"}  # as the kernel writes them


class Ray:
    """The command, and the processes of its Ray: known by a folder that is in their environment alone."""

    def __init__(self, run: Path, folder: str, guard: LoopbackOnly):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._folder, self.url = folder.encode(), f"http://127.0.0.1:{port}"
        own = {"OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}
        flags = ["--ray", "2", "--port", str(port), "--trigger.mode", "always", "--engine.device-ttl-s", "120"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nestpipe.cli", "serve", str(run), *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=guard.environment({**os.environ, **own}),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert f"2 replicas under Ray Serve on {self.url}" in line, line

    def processes(self) -> dict[int, str]:
        """Who belongs to it, and what it is called."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if self._folder in (place / "environ").read_bytes():
                    found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended, or belongs to somebody else
                continue
        return found

    def replicas(self) -> list[int]:
        return [pid for pid, name in self.processes().items() if "ServeReplica" in name]

    def listening(self) -> dict[int, tuple[str, str]]:
        """Ports that are open, each with its address (as the kernel writes it) and who opened it."""
        owners = {}
        for pid, name in self.processes().items():
            with suppress(FileNotFoundError):  # it has ended
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(FileNotFoundError):  # closed meanwhile, so nobody listens there
                        owners[str(link.readlink())] = name
        found = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTENS and (owner := owners.get(f"socket:[{inode}]")):
                    address, port = local.split(":")
                    found[int(port, 16)] = (address, owner)
        return found


@pytest.fixture
def guard(tmp_path: Path) -> LoopbackOnly:
    return LoopbackOnly(tmp_path / "guard")


@pytest.fixture
def service(runs, guard) -> Iterator[Ray]:
    if find_spec("ray") is None:
        pytest.skip("needs: pip install nestpipe[ray]")
    # Ray puts sockets there, whose names may have about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        found = Ray(runs("hstu").folder, folder, guard)
        try:
            yield found
        finally:
            for pid in found.processes():
                os.kill(pid, signal.SIGKILL)
            found.process.communicate(timeout=30)


class World:
    """What is asked of the service, each answer compared with what the run's own evaluation says."""

    def __init__(self, client: Client, truth):
        self._client, self._truth = client, truth

    def signals(self, request):
        """The answer to the signal of every user."""
        return {
            user: self._client.prefill(user, request=request, candidates=NUM_ITEMS, query_time=ASKED) for user in USERS
        }

    def ranks(self, request, signals):
        """The paths of the rankings that follow, by the replica that answered the signal."""
        paths = defaultdict(set)
        for user, one in signals.items():
            found = self._client.rank(
                user, ITEMS, request=request, ticket=one.ticket, query_time=ASKED, deadline_ms=SLOW_MS
            )
            assert np.allclose(found.scores, self._truth[user][found.items], rtol=0, atol=EXACT)
            assert not found.degraded
            paths[one.instance].add(found.path)
        return dict(paths)


@pytest.fixture
def world(service, runs, served, tmp_path):
    scorer, known = runs("hstu").predictor(), histories_of(runs("hstu"), tmp_path)
    truth = {user: evaluated(scorer, served().prepare(known.of(user), ASKED).history) for user in USERS}
    with Client(service.url, timeout_s=60) as client:
        yield World(client, truth)


def test_a_users_signal_and_ranking_meet_at_one_replica_until_that_is_killed(service, world, guard):
    first = world.signals("a")
    assert all(one.ticket for one in first.values())
    paths = world.ranks("a", first)
    assert len(paths) == 2, "users are spread over both replicas"
    assert set().union(*paths.values()) <= MET, paths
    second = world.signals("b")
    assert {user: one.instance for user, one in second.items()} == {user: one.instance for user, one in first.items()}

    check_recommendations(service.url)
    with httpx.Client(base_url=service.url, timeout=60) as stranger:
        check_those_who_do_not_say_where_they_belong(stranger, second)
        check_limits(stranger)
        check_invalidation(stranger, second)
    check_ports(service)

    third = world.signals("c")
    os.kill(service.replicas()[0], signal.SIGKILL)
    alive, dead = sorted(world.ranks("c", third).values(), key=lambda found: found == {"full"})
    assert alive <= MET
    assert dead == {"full"}

    assert guard.num_processes() >= 5
    strangers = [line for line in guard.refused() if not any(name in line for name in CLOUD)]
    assert not strangers, "Ray's processes talk to this machine alone"
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(60) == 0
    assert not service.processes(), "nothing of Ray is left"


def check_those_who_do_not_say_where_they_belong(stranger, signals):
    """They are answered all the same, but meet their prefix only by luck."""
    paths = []
    for user, one in signals.items():
        body = {"user": user, "request": "b", "candidates": ITEMS, "ticket": one.ticket, "deadline_ms": SLOW_MS}
        paths.append(stranger.post("/v1/rank", json=body).raise_for_status().json()["path"])
    assert "full" in paths, f"some met a replica without their prefix: {paths}"


def check_recommendations(url):
    """A replica recommends by itself, and a user's recommendations come from one replica."""
    with Client(url, timeout_s=60) as client:
        found = {user: client.recommend(user, k=5, query_time=ASKED, deadline_ms=SLOW_MS) for user in USERS}
        assert len({one.instance for one in found.values()}) == 2
        for user, one in found.items():
            again = client.recommend(user, k=5, query_time=ASKED, deadline_ms=SLOW_MS)
            assert (again.items, again.instance, again.degraded) == (one.items, one.instance, False)
        assert len(client.similar(3, k=4).items) == 4


def check_limits(stranger):
    refused = stranger.post("/v1/rank", content=b" " * (2 << 20))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
    refused = stranger.post("/v1/rank", json={"user": 1, "request": "r", "candidates": []})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_candidates")
    assert stranger.post("/state").status_code == 404, "administration is not for everybody"


def check_invalidation(stranger, signals):
    """Wherever the call arrives, the replica that has the user's prefix drops it."""
    for user in (0, 1, 2, 3):
        assert stranger.post("/v1/invalidate", json={"user": user}).json() == {"entries": 1}, signals[user]
        assert stranger.post("/v1/invalidate", json={"user": user}).json() == {"entries": 0}


def check_ports(service):
    """All on loopback but the inner port of a replica, which wants Ray's token."""
    inner = [port for port, (address, owner) in service.listening().items() if address not in LOOPBACK]
    assert len(inner) == 2, service.listening()
    assert all("ServeReplica" in service.listening()[port][1] for port in inner)
    with grpc.insecure_channel(f"127.0.0.1:{inner[0]}") as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            call(b"", timeout=30)
