"""Processes that are kept: restarts, stops, and nobody left behind. The workers are shells, which start at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from nestpipe.serve.fleet import Fleet, Worker


def run(act: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(act(), 60))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    path = Path(f"/proc/{pid}/stat")
    try:
        return path.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shell(name: str, script: str) -> Worker:
    return Worker(name=name, command=("sh", "-c", script))


def test_one_that_is_killed_is_started_again_and_the_others_stay(caplog):
    async def act() -> None:
        fleet = Fleet([shell("a", "exec sleep 60"), shell("b", "exec sleep 60")])
        await fleet.start()
        await until(lambda: len(fleet.pids) == 2)
        first = dict(fleet.pids)
        os.kill(first["a"], signal.SIGKILL)
        await until(lambda: fleet.pids.get("a", first["a"]) != first["a"])
        assert fleet.pids["b"] == first["b"]
        assert fleet.num_starts == {"a": 2, "b": 1}
        last = list(fleet.pids.values())
        await fleet.stop()
        assert not any(map(alive, [*first.values(), *last]))

    run(act)
    assert "instance a ended by signal 9; it is started again in 0.4 s" in caplog.text


def test_one_that_fails_at_once_is_tried_later_each_time(caplog):
    async def act() -> None:
        fleet = Fleet([shell("a", "exit 3")])
        await fleet.start()
        await until(lambda: fleet.num_starts["a"] == 2)
        await until(lambda: "0.8 s" in caplog.text)
        await fleet.stop()

    run(act)
    assert "instance a ended with code 3" in caplog.text


def test_one_that_does_not_listen_is_ended_all_the_same(tmp_path):
    async def act() -> None:
        fleet = Fleet([shell("a", f"trap '' TERM; touch {tmp_path}/on; while :; do sleep 0.05; done")], grace_s=0.2)
        await fleet.start()
        await until((tmp_path / "on").exists)
        pid = fleet.pids["a"]
        await fleet.stop()
        assert not alive(pid)

    run(act)
