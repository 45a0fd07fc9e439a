"""The operator's page: what it asks for, and what a person sees in a real browser, also when the service breaks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from nestpipe.gateway.candidates import ExactIndex, PastReader, Retriever, mean_encoder
from nestpipe.gateway.cascade import Cascade, LocalCandidateStages
from nestpipe.gateway.gateway import Gateway
from nestpipe.gateway.instance_client import InstanceClient, make_client
from nestpipe.gateway.router import Members
from nestpipe.serve.config import Stages
from nestpipe.serve.operator_page import OperatorPage
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.page_figures import RecentSamples, figures, quantile, samples_of
from nestpipe.serve.schemas import RecommendRequest
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from tests.gateway.fake_instances import FakeInstance, Served, true_ranking
from tests.gateway.test_cascade import TLS
from tests.serve.small_services import serving
from tests.small_runs import write_log

STAGES = Stages(
    retrieval_ms=5000, prerank_ms=5000, rank_ms=5000, prefill_hint_ms=1000, num_retrieved=60, num_candidates=40
)


@dataclass
class World:
    url: str
    instance: FakeInstance
    gateway: Served


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    log = write_log(tmp_path / "log", {user: list(range(user, user + 5 + user)) for user in range(30)})
    items = np.array(log.catalogue)
    vectors = np.random.default_rng(0).standard_normal((len(items), 4), dtype=np.float32)
    instance, ids = FakeInstance("a"), ServiceIds(lambda: log)
    histories = UserHistories(log, FileState(tmp_path / "events.log"))
    retriever = Retriever(
        items=items,
        vectors=vectors,
        index=ExactIndex(vectors),
        encode=mean_encoder(items, vectors),
        past_of=PastReader(log),
    )
    with ThreadPoolExecutor(1) as executor:
        remote = InstanceClient(Members([instance.member]), make_client())
        cascade = Cascade(remote, LocalCandidateStages(retriever, executor, ids), STAGES)
        whole = Gateway(cascade, probe=lambda: RecommendRequest(user=1))
        gateway = Served(whole.app(*OperatorPage(histories, ids, whole.metric_texts).routes()))
        yield World(gateway.url, instance, gateway)
        gateway.close()
        instance.stop()


def test_the_page_asks_for_users_and_histories(world):
    with httpx.Client(base_url=world.url, verify=TLS) as client:
        page = client.get("/")
        assert "script-src 'unsafe-inline'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        users = client.get("/page/users").json()["users"]
        assert users[0] == "15", "a usual user comes first"
        assert {"0", "29"} <= set(users), "histories of all lengths"
        found = client.get("/page/history", params={"user": "29"}).json()
        assert (found["num_events"], len(found["events"]), found["events"][0]["item"]) == (34, 20, "62")
        assert client.get("/page/history", params={"user": "999"}).json()["error"]["code"] == "unknown_user"
        for stranger in ("", "x", "1.5", "9" * 30, "\u0663"):
            assert client.get("/page/history", params={"user": stranger}).json()["error"]["code"] == "unknown_user"


def test_percentiles_rates_and_shares_are_those_of_the_window():
    assert quantile({0.01: 50, 0.02: 100, math.inf: 100}, 0.5) == 10
    assert quantile({0.01: 50, 0.02: 100, math.inf: 100}, 0.75) == 15
    assert quantile({0.01: 50, 0.02: 50, math.inf: 100}, 0.99) == 20, "of the last bucket only the lower bound is known"
    before = samples_of(['nestpipe_answers_total{call="rank",status="200"} 5\n'])
    texts = [
        'nestpipe_answers_total{call="rank",status="200"} 15\nnestpipe_answers_total{call="rank",status="429"} 6\n'
        'nestpipe_path_total{path="full"} 6\nnestpipe_path_total{path="hit_host"} 3\n',
        'nestpipe_path_total{path="fallback"} 1\nnestpipe_ranked_total{model="m",path="full"} 10\n'
        'nestpipe_cache_used_bytes{tier="host"} 7\nnestpipe_rank_seconds_bucket{le="0.01",model="m"} 4\n'
        'nestpipe_rank_seconds_bucket{le="+Inf",model="m"} 4\nnestpipe_events_total 8\n',
    ]
    found = figures(before, samples_of(texts), seconds=4)
    assert (found["requests_per_s"], found["refused_per_s"], found["events_per_s"]) == (4, 1.5, 2)
    assert (found["degraded"], found["cache_hits"], found["cache_bytes"]) == (0.1, 0.3, {"host": 7})
    assert (found["models"], found["paths"]["full"]) == ({"m": 1.0}, 0.6)
    assert found["stages"] == {"rank": {"p50_ms": 5.0, "p99_ms": 9.9, "count": 4}}
    now = [0.0]
    recent = RecentSamples(lambda: now[0])
    for at, wanted in ((0.0, 0.0), (2.0, 3.0), (40.0, 0.0)):
        now[0] = at
        count = min(at, 2.0) * 3
        assert recent.add(samples_of([f'nestpipe_answers_total{{status="200"}} {count}\n']))["requests_per_s"] == wanted


@pytest.mark.parametrize("kind", ["ranker", "dcn"])
def test_an_instance_has_the_page_if_asked(runs_of, tmp_path, kind):
    with serving(kind, runs_of, tmp_path) as service:
        assert service.http.get("/").status_code == 404, "off unless asked for"
        service.instance.has_page = True
        server = Served(service.instance.app())
        own = service.run.sequences
        user, item = int(own.users[0]), int(own.catalogue[3])
        service.recommend(user=user, k=2)
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert "<title>NestPipe service" in client.get("/").text
            found = client.get("/page/figures").json()
            assert (found["catalogue"], found["users"]) == (len(own.catalogue), len(own.users))
            assert list(found["models"].values()) == [1.0]
            assert found["stages"]["recommend"]["count"] == 1
            attributes = client.get("/page/item", params={"item": item}).json()["attributes"]
            assert set(attributes) == {one.name for one in own.schema.of_scope("item") if one.kind != "vector"}
            assert client.get("/page/item", params={"item": "no such"}).json()["error"]["code"] == "unknown_item"
            assert client.post("/page/figures").status_code == 405, "the page changes nothing"
            new = {"id": 10**6, "price": 4.5, "category": 3}
            service.http.put("/v1/items", json={"items": [new]}).raise_for_status()
            attributes = client.get("/page/item", params={"item": 10**6}).json()["attributes"]
            assert (attributes["price"], attributes["category"]) == (4.5, 3), "a new item has its own"
            service.http.patch(f"/v1/items/{item}", json={"price": 9.5}).raise_for_status()
            assert client.get("/page/item", params={"item": item}).json()["attributes"]["price"] == 9.5, "as it is now"
            assert client.get("/page/figures").json()["catalogue"] == len(own.catalogue) + 1
            service.http.delete(f"/v1/items/{item}").raise_for_status()
            assert client.get("/page/item", params={"item": item}).json()["attributes"]["withdrawn"]
            assert client.get("/page/figures").json()["catalogue"] == len(own.catalogue)
        server.stop()


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_person_picks_a_user_reads_the_answer_and_later_the_error(world, driver):
    def text(selector: str) -> str:
        return str(driver.execute_script("return document.querySelector(arguments[0]).textContent", selector))

    def rows() -> list[list[str]]:
        script = "return [...document.querySelectorAll('#items tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
        return driver.execute_script(script)

    def ask(user: str) -> None:
        from selenium.webdriver.common.by import By

        field = driver.find_element(By.ID, "user")
        field.clear()
        field.send_keys(user)
        driver.find_element(By.CSS_SELECTOR, "button").click()

    driver.get(world.url)
    wait_for(lambda: driver.execute_script("return document.getElementById('user').value") == "15")
    wait_for(lambda: len(rows()) == 10)  # something is there before the first click
    assert "of 20 events" in text("#past")
    driver.execute_script("document.getElementById('another').click()")
    wait_for(lambda: "of 20 events" not in text("#past"))
    ask("7")
    wait_for(lambda: "of 12 events" in text("#past"))
    with httpx.Client(base_url=world.url, verify=TLS) as client:
        answer = client.post("/v1/recommend", json={"user": 7}).json()
    assert (
        [int(row[1].split("because")[0]) for row in rows()] == answer["items"] == true_ranking(7, answer["items"], 10)
    )
    assert text("#path") == "hit_device"
    assert text("#prefix") == "7 events"
    assert "the last 12 of 12 events" in text("#past")
    assert all(name in text("#stages") for name in ("retrieval", "prerank", "rank", "together"))
    shown = "return getComputedStyle(document.querySelector(arguments[0])).display !== 'none'"
    assert not driver.execute_script(shown, "#error")
    world.instance.status["rank"] = 422
    ask("7")
    wait_for(lambda: driver.execute_script(shown, "#error"))
    assert "injected" in text("#error")
    assert not driver.execute_script(shown, "#result"), "an old answer must not stand beside an error"
    world.gateway.close()
    ask("7")
    wait_for(lambda: "cannot be reached" in text("#error"))
