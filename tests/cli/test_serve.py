"""`nestpipe serve` as a user meets it: mistakes in one message, an instance that answers, Ctrl-C that drains."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from starlette.applications import Starlette

from nestpipe.cli import main
from nestpipe.errors import ConfigError
from nestpipe.serve.server import bind, run_apps
from nestpipe.serve.service_folder import kept_secret
from tests.loopback_only import LoopbackOnly
from tests.serve.small_rankers import ASKED
from tests.small_runs import small_config, small_log


def refused(capsys, *arguments):
    assert main(["serve", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_mistakes_are_one_message(runs, capsys, tmp_path):
    from nestpipe import train

    folder = runs("hstu").folder
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused(capsys, folder, "--port", port)
    free = ("--port", 0, "--admin-port", 0)
    assert "a run folder?" in refused(capsys, tmp_path / "nowhere", *free)
    assert "engine.chunk is 0; it must be at least 1" in refused(capsys, folder, *free, "--engine.chunk", 0)
    assert "no label 'liked' to order by; it has ['clicked', 'dwelled']" in refused(
        capsys, folder, *free, "--label", "liked"
    )
    assert "no complete checkpoint of step 7" in refused(capsys, folder, *free, "--step", 7)
    small_log(tmp_path / "log", num_users=8)
    train(small_config(tmp_path / "log", epochs=1), tmp_path / "retrieval", quiet=True)
    for flags in ((), ("--instances", 2), ("--ray", 2)):
        message = refused(capsys, tmp_path / "retrieval", *free, *flags, "--retrieval", folder)
        assert "finds items itself, and --retrieval is for runs that rank" in message
        message = refused(capsys, tmp_path / "retrieval", *free, *flags, "--label", "clicked")
        assert "has no labels to order by, and --label is for runs that rank" in message
    message = refused(capsys, tmp_path / "retrieval", *free, "--compare", folder)
    assert "was trained on the sequence folder" in message
    for flags in ((), ("--instances", 2)):
        message = refused(capsys, folder, *free, *flags, "--retrieval", tmp_path / "retrieval")
        assert "whose items are not those of" in message


def test_a_damaged_table_is_not_served(runs, capsys, tmp_path):
    import shutil

    from nestpipe.checkpoint.folders import checkpoint_folder
    from nestpipe.checkpoint.manifest import Manifest

    shutil.copytree(runs("hstu").folder, tmp_path / "run")
    folder = checkpoint_folder(tmp_path / "run" / "checkpoints")
    blob = next(Manifest.read(folder).blobs_of("item", "rows"))
    data = bytearray((folder / blob.file).read_bytes())
    data[blob.offset + blob.num_bytes - 1] ^= 1
    (folder / blob.file).write_bytes(data)
    assert f"{blob.file} is not what was saved" in refused(capsys, tmp_path / "run", "--port", 0, "--admin-port", 0)


def test_secrets_are_made_once_and_for_their_owner_alone(tmp_path):
    first = kept_secret(tmp_path / "serve" / "secret")
    assert len(first) == 64
    assert kept_secret(tmp_path / "serve" / "secret") == first
    (tmp_path / "serve" / "secret").write_text("")
    with pytest.raises(ConfigError, match="has 0 characters, so it was truncated or changed"):
        kept_secret(tmp_path / "serve" / "secret")
    assert (tmp_path / "serve" / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "serve").iterdir()] == ["secret"]


def test_answers_do_not_wait_for_the_acknowledgement_of_their_first_part():
    """Nagle's algorithm would hold back the body of every answer for 40 ms."""

    async def body() -> int:
        found = asyncio.get_running_loop().create_future()
        listening = bind("127.0.0.1", 0)
        server = await asyncio.start_server(lambda _, writer: found.set_result(writer), sock=listening)
        async with server:
            with socket.create_connection(listening.getsockname()):
                writer = await found
                value: int = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                writer.close()
        return value

    assert asyncio.run(body()) == 1


def test_a_process_that_still_loads_cannot_be_connected_to():
    with bind("127.0.0.1", 0) as waiting, socket.socket() as client:
        assert client.connect_ex(waiting.getsockname()) == errno.ECONNREFUSED


@pytest.fixture
def guard(tmp_path):
    return LoopbackOnly(tmp_path / "guard")


@pytest.fixture
def process(runs, runs_of, guard):
    command = [
        sys.executable,
        "-m",
        "nestpipe.cli",
        "serve",
        str(runs("hstu").folder),
        "--retrieval",
        str(runs_of("next item").folder),
        "--host",
        "127.0.0.2",
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    environment = guard.environment({**os.environ, "OMP_NUM_THREADS": "1"})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        yield started
        if started.poll() is None:
            started.kill()


def _by_item(answer):
    return dict(zip(answer["items"], answer["scores"], strict=True))


def test_it_answers_and_ctrl_c_drains(process, guard, runs):
    line = process.stdout.readline()
    found = re.search(r"serving hstu/step-\d+/\w+ as \S+ on (http://\S+), admin on port (\d+)", line)
    assert found, line + process.stderr.read()
    url, admin = found[1], f"http://127.0.0.1:{found[2]}"
    with socket.socket() as stranger:
        assert stranger.connect_ex(("127.0.0.2", int(found[2]))) == errno.ECONNREFUSED, (
            "--host is not for the admin port"
        )
    body = {"user": 7, "request": "r", "candidates": list(range(20)), "query_time": ASKED, "deadline_ms": 60_000}
    with httpx.Client(timeout=60) as http:
        assert http.get(f"{url}/readyz").status_code == 200
        first = http.post(f"{url}/v1/rank", json=body).json()
        assert (first["path"], first["degraded"]) == ("full", False)
        wanted = runs("hstu").predictor().recommend(7, 24, request_ms=ASKED * 1000)
        asked = {"user": 7, "k": 24, "query_time": ASKED, "deadline_ms": 60_000}
        found = http.post(f"{url}/v1/recommend", json=asked).json()
        assert (found["items"], found["degraded"]) == (wanted.items, False)
        assert found["stages"]["retrieval"]["count"] == len(wanted.items)
        token = (runs("hstu").folder / "serve" / "token").read_text()
        state = http.get(f"{admin}/state", headers={"authorization": f"Bearer {token}"}).json()
        (costs,) = [one["costs"] for one in state["models"].values()]
        assert all(any(one["constants"]) for one in costs.values()), "measured at the start"
        answers = []

        def ask():
            try:
                answers.append(http.post(f"{url}/v1/rank", json=body))
            except httpx.ConnectError:
                answers.append(None)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        process.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join(60)
    assert len(answers) == 6, "no request was cut off in the middle"
    assert all(one is None or one.status_code in {200, 503} for one in answers)
    for one in (one.json() for one in answers if one is not None and one.status_code == 200):
        assert not one["degraded"]
        assert _by_item(one) == pytest.approx(_by_item(first), rel=0, abs=1e-5), "the rows of a product round together"
    assert process.wait(30) == 0
    assert "requests in flight are answered first" in process.stderr.read()
    assert guard.num_processes() >= 1
    assert not guard.refused(), "an instance talks to nobody but those who ask it"


def test_the_collector_leaves_alone_what_was_loaded_before_the_first_request() -> None:
    async def serve() -> tuple[int, int]:
        found: list[tuple[int, int]] = []

        def started() -> None:
            found.append((gc.get_freeze_count(), len(gc.get_objects())))
            os.kill(os.getpid(), signal.SIGTERM)

        await run_apps([(Starlette(), bind("127.0.0.1", 0))], on_stop=lambda: None, started=started)
        return found[0]

    try:
        num_spared, num_looked_at = asyncio.run(serve())
        assert num_spared > 10_000, "a process with torch has many more"
        assert num_looked_at < num_spared / 10
    finally:
        gc.unfreeze()
