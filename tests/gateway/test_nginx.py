"""The printed nginx configuration under a real nginx: affinity by the user's header, retries, limits."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nestpipe.client import Client
from nestpipe.errors import ConfigError
from nestpipe.gateway.nginx import HEADER, nginx_config
from tests.gateway.fake_instances import CATALOGUE, FakeInstance, true_ranking

BODY = {"request": "r", "candidates": [1, 2, 3], "k": 3, "ticket": None, "query_time": None, "deadline_ms": 100.0}


@pytest.fixture
def fleet() -> Iterator[list[FakeInstance]]:
    found = [FakeInstance(name) for name in ("a", "b", "c")]
    yield found
    for one in found:
        one.stop()


@pytest.fixture
def url(fleet: list[FakeInstance], tmp_path: Path) -> Iterator[str]:
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    path = tmp_path / "nginx.conf"
    # A server of the system would keep its files where only root may write.
    own = f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\ndaemon off;\n"
    temporary = "".join(
        f"    {one}_temp_path {tmp_path}/{one};\n" for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = nginx_config([one.url for one in fleet], listen=listen, timeout_ms=20_000).replace(
        "http {\n", f"http {{\n{temporary}"
    )
    path.write_text(own + text)
    process = subprocess.Popen([nginx, "-c", str(path), "-e", str(tmp_path / "log")], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                httpx.get(f"http://{listen}/readyz")
                break
            except httpx.ConnectError:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                assert time.monotonic() < deadline
                time.sleep(0.01)
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.communicate(timeout=10)


def rank(client: httpx.Client, url: str, user: int) -> httpx.Response:
    return client.post(f"{url}/v1/rank", json=BODY | {"user": user}, headers={HEADER: str(user)})


def test_a_users_signal_and_ranking_meet_at_one_instance_and_move_only_if_it_is_gone(fleet, url):
    with httpx.Client() as client:
        for user in range(60):
            signal = {"user": user, "request": "r", "candidates": 3, "query_time": None}
            client.post(f"{url}/v1/prefill", json=signal, headers={HEADER: str(user)}).raise_for_status()
            answer = rank(client, url, user).json()
            assert answer["items"] == true_ranking(user, [1, 2, 3], 3)
        with Client(url) as own:  # which sends the header, also with a ticket
            ticket = own.prefill(7, request="r", candidates=3, query_time=1).ticket
            assert own.rank(7, [1, 2, 3], request="r", ticket=ticket, k=3, query_time=1).path == "hit_device"
            unused = own.prefill(7, request="s", candidates=3, query_time=1).ticket
            own.release(unused, user=7)
            assert not any(unused in one.pinned for one in fleet)
        met = [{body["user"] for name, body in one.calls if name != "release"} for one in fleet]
        assert sorted(set().union(*met)) == list(range(60))
        assert sum(map(len, met)) == 60, "no user was seen by two instances"
        assert all(met), "users are spread over all instances"
        for one in fleet:
            one.calls.clear()
        fleet[0].stop()
        try:
            for user in range(60):
                assert rank(client, url, user).json()["items"] == true_ranking(user, [1, 2, 3], 3)
            for one, before in zip(fleet[1:], met[1:], strict=True):
                assert before <= {body["user"] for _, body in one.calls}, "others keep their users"
        finally:
            fleet[0].start()


def test_runs_that_find_items_themselves_are_routed_too(fleet, url):
    with Client(url) as client, httpx.Client() as http:
        for user in range(30):
            assert client.recommend(user, k=3, request="r").items == true_ranking(user, CATALOGUE, 3)
            assert client.generate(user, k=3).items == true_ranking(user, CATALOGUE, 3)
            assert http.get(f"{url}/v1/recommend/{user}?k=3").json()["items"] == true_ranking(user, CATALOGUE, 3)
        met = [{int(body["user"]) for _, body in one.calls} for one in fleet]
        assert sum(map(len, met)) == 30, "no user was seen by two instances, whether in a header or in the address"
        assert all(met)
        client.send_events([{"id": "x", "user": 3, "item": 100, "time": 1}])
        assert sum(one.paths().count("events") for one in fleet) == 1, "they share their log"
        fleet[0].stop()
        try:
            for user in range(30):
                assert client.recommend(user, k=3, request="r").items == true_ranking(user, CATALOGUE, 3)
                assert client.similar(7).items == [8]
        finally:
            for one in fleet[1:]:
                one.stop()
            gone = http.post(f"{url}/v1/recommend", json={"user": 1}, headers={HEADER: "1"})
            for one in fleet:
                one.start()
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "unreachable")


def test_requests_that_nginx_cannot_place_are_refused(fleet, url):
    answer = httpx.post(f"{url}/v1/rank", json=BODY | {"user": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_user_header")
    assert httpx.post(f"{url}/v1/recommend", json={"user": 1}).json()["error"]["code"] == "no_user_header"
    assert httpx.post(f"{url}/v1/invalidate", json={"user": 1}).json()["error"]["code"] == "not_routed"
    assert httpx.post(f"{url}/v1/rank", content=b" " * (2 << 20), headers={HEADER: "1"}).status_code == 413
    assert not any(one.calls for one in fleet)


@pytest.mark.parametrize("urls", [[], ["https://a:1"], ["http://a"], ["http://a:b"], ["http://a;b:1"], ["a:1"]])
def test_addresses_that_would_break_the_file_are_refused(urls):
    with pytest.raises(ConfigError, match=r"http://HOST:PORT"):
        nginx_config(urls)
