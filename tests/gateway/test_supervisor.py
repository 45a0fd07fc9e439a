"""Processes that are kept: restarts, stops, and nobody left behind. The workers are shells, which start at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nestpipe.cli import main
from nestpipe.cli.serve_fleet import FleetAddresses, flags_of
from nestpipe.gateway.supervisor import Fleet, Worker
from nestpipe.serve.config import TriggerConfig
from nestpipe.serve.server import PortError, bind


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


def test_the_interrupt_of_a_terminal_does_not_reach_the_processes():
    async def act() -> None:
        fleet = Fleet([shell("a", "exec sleep 60")])
        await fleet.start()
        await until(lambda: len(fleet.pids) == 1)
        assert os.getpgid(fleet.pids["a"]) != os.getpgid(0)
        await fleet.stop()

    run(act)


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


def test_the_command_prints_an_nginx_configuration_for_the_instances_it_would_start(capsys):
    assert main(["serve", "--print-nginx", "--instances", "2", "--port", "9000", "--admin-port", "9100"]) == 0
    out = capsys.readouterr().out
    assert "server 127.0.0.1:9001 max_fails=1" in out
    assert "server 127.0.0.1:9002 max_fails=1" in out
    assert "listen 127.0.0.1:9000;" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--instances", "2"], "name the folder of a run"),
        (["--instances", "2", "--port", "8750"], "are too near for 2 instances"),
        (["--instances", "2", "--port", "65534"], "leaves no room for 2 instances"),
        (["--instances", "-1"], "instances is -1"),
        (["--ray", "-1"], "ray is -1"),
        (["--ray", "2", "--instances", "2"], "instances is for a gateway"),
        (["--ray", "2"], "name the folder of a run"),
        (["--instances", "1", "--stages.rank-ms", "0"], "stages.rank_ms is 0.0"),
        (["--instances", "1", "--stages.num-candidates", "513"], "num_candidates is 513 of num_retrieved 512"),
        ([], "name the folder of a run"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_in_words(capsys, flags, message):
    assert main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err


def test_instances_are_started_with_the_settings_of_the_command():
    place = FleetAddresses(host="127.0.0.1", port=9000, admin_host="127.0.0.2", admin_port=9100, num_instances=2)
    first, second = place.workers(Path("runs/r"), flags_of("trigger", TriggerConfig(mode="off")))
    assert (first.name, second.name) == ("i1", "i2")
    for words in (
        ("serve", "runs/r"),
        ("--port", "9001"),
        ("--admin-host", "127.0.0.2"),
        ("--admin-port", "9101"),
        ("--notes", "runs/r/serve/i1-9001.notes.json"),
        ("--trigger.mode", "off"),
    ):
        place_of = first.command.index(words[0])
        assert first.command[place_of : place_of + 2] == words


def test_ports_that_nobody_named_are_free_ones_beside_each_other(monkeypatch):
    from nestpipe.cli import serve_fleet

    place = FleetAddresses(host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0, num_instances=2)
    settled = place.settled()
    settled.check()
    assert settled.settled() == settled
    with bind("127.0.0.1", settled.port + 4):  # one of the six is taken
        first = iter([settled.port - 10_000, 77])
        monkeypatch.setattr(serve_fleet.secrets, "randbelow", lambda most: next(first))
        again = place.settled()
    assert (again.port, again.admin_port) == (10_077, 10_080)


def test_a_machine_without_free_ports_is_named():
    with bind("127.0.0.1", 0) as taken, pytest.MonkeyPatch.context() as patch:
        from nestpipe.cli import serve_fleet

        port = taken.getsockname()[1]
        patch.setattr(serve_fleet, "_FREE_PORTS", range(port, port + 2))
        with pytest.raises(PortError, match=r"127\.0\.0\.1 has no 1 consecutive free ports"):
            serve_fleet.free_ports("127.0.0.1", 1)
