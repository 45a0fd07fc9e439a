"""Demo steps: a fleet, the same ranking with and without the relay, and a clean shutdown."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nestpipe.cli.demo_stage import DemoStage, check, listening
from nestpipe.data.sequences import Sequences

if TYPE_CHECKING:
    from nestpipe.client import Client, RankedItems  # they need an optional package

_SPLIT = "2023-12-08"  # four fifths of the generated clicks are older
_NUM_USERS, _NUM_CANDIDATES, _NUM_ROUNDS = 8, 64, 3
_LEAD_S = 0.1  # stands for retrieval, during which the KV prefix is computed
_TOLERANCE = 1e-5  # 32 bits; docs/how-to/serve.md
_MODEL = ("--model.features", "category", "tags", "price", "segment", "--model.num-blocks", "3", "--model.dim", "64")


def serve(demo: DemoStage) -> str:
    """Trains a ranker on long histories and serves it by two instances behind a gateway."""
    clicks, run = demo.out / "clicks", demo.out / "ranking"
    num_events, max_len, steps = ("4000", "128", "5") if demo.quick else ("40000", "1024", "20")
    demo.command(
        "data", "clicks", "--num-users", "40", "--num-items", "200", "--num-events", num_events, "--out", str(clicks)
    )
    data = ["--data.path", str(clicks), "--data.split-time", _SPLIT, "--data.max-len", max_len]
    data += ["--data.windows", "last", "--data.batch-size", "4"]
    demo.command("train", "ml1m_ranking", "--run", str(run), *data, *_MODEL, "--train.steps", steps)
    started = time.monotonic()
    service = demo.serve("gateway", *_fleet(run), says="gateway with")
    return f"a gateway and two instances, ready after {time.monotonic() - started:.1f} s: {service.url}"


def _fleet(run: Path) -> tuple[str, ...]:
    """The demo sends a prefill hint for every user, and must not time out on a busy machine."""
    trigger = ("--trigger.mode", "always", "--trigger.burst-ms", "60000")
    return (str(run), "--instances", "2", *trigger, "--stages.rank-ms", "5000")


@dataclass(slots=True)
class _Seen:
    """Paths and latencies of one kind of request."""

    paths: set[str] = field(default_factory=set)
    times_ms: list[float] = field(default_factory=list)

    def rank(self, client: Client, user: int, items: list[int], *, ticket: str | None, asked: int) -> RankedItems:
        start = time.perf_counter()
        found = client.rank(
            user, items, request=f"demo-{user}", ticket=ticket, k=10, query_time=asked, deadline_ms=30_000
        )
        self.times_ms.append(1000 * (time.perf_counter() - start))
        self.paths.add(found.path)
        return found

    def text(self) -> str:
        return f"{'/'.join(sorted(self.paths))} {statistics.median(self.times_ms):.0f} ms"


def relay(demo: DemoStage) -> str:
    """Ranks users in full, then after a prefill hint: same items and scores, from the KV prefix."""
    from nestpipe.client import Client

    log, url = Sequences.open(demo.out / "clicks"), demo.services["gateway"].url
    assert log.times is not None
    users = log.users[np.argsort(-np.diff(log.offsets), kind="stable")[:_NUM_USERS]].tolist()
    items, asked = log.catalogue[:_NUM_CANDIDATES].tolist(), int(log.times.max() // 1000) + 60
    demo.say(f"POST {url}/v1/rank                   {_NUM_CANDIDATES} candidates, no prefill hint")
    demo.say(f"POST {url}/v1/prefill, then /v1/rank with its ticket, {_LEAD_S * 1000:.0f} ms later")
    full, prefix, gap = _Seen(), _Seen(), 0.0
    with Client(url, timeout_s=30.0) as client:
        for user in users * (1 if demo.quick else _NUM_ROUNDS):
            plain = full.rank(client, user, items, ticket=None, asked=asked)
            signal = client.prefill(user, request=f"demo-{user}", candidates=len(items), query_time=asked)
            check(signal.ticket is not None, f"no prefix was computed for user {user}: {signal.reason}")
            time.sleep(_LEAD_S)
            ahead = prefix.rank(client, user, items, ticket=signal.ticket, asked=asked)
            client.invalidate(user)  # the next round starts without a prefix
            check(plain.items == ahead.items, f"user {user}: {plain.items} without a prefix, {ahead.items} with it")
            lengths = plain.prefix_len, ahead.prefix_len
            check(not lengths[0] and lengths[1] > 0, f"user {user}: prefixes of {lengths} events")
            gap = max(gap, float(np.abs(np.subtract(plain.scores, ahead.scores)).max()))
    check(full.paths == {"full"} and prefix.paths <= {"hit_device", "join"}, f"paths {full.paths}, {prefix.paths}")
    check(gap <= _TOLERANCE, f"scores differ by {gap:.1e}")
    scores = f"scores within {gap:.0e}" if gap else "bitwise identical scores"
    return f"{len(users)} users, the same items, {scores}; median {full.text()}, {prefix.text()}"


def shut_down(demo: DemoStage) -> str:
    """Sends Ctrl-C to every service; no process is left, and no port answers."""
    pids = demo.processes.left()
    ports = listening(pids)
    for service in demo.services.values():
        demo.stop(service)
    left = demo.processes.left()
    check(not left, f"processes {left} still run")
    answering = [port for port in sorted(ports) if _answers(port)]
    check(not answering, f"ports {answering} still answer")
    return f"{len(pids)} processes and {len(ports)} ports before, none after"


def _answers(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0
