"""The demonstration page: what it asks for, and what a person sees in a real browser, also when the service breaks."""

from __future__ import annotations

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
from nestpipe.gateway.instance_client import InstanceClient
from nestpipe.gateway.router import Members
from nestpipe.serve.config import Stages
from nestpipe.serve.demo_page import DemoPage
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.schemas import RecommendRequest
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from tests.gateway.fake_instances import FakeInstance, Served, true_ranking
from tests.gateway.test_cascade import TLS
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
        remote = InstanceClient(Members([instance.member]), httpx.AsyncClient(timeout=None, verify=TLS))
        cascade = Cascade(remote, LocalCandidateStages(retriever, executor, ids), STAGES)
        gateway = Served(
            Gateway(cascade, probe=lambda: RecommendRequest(user=1)).app(*DemoPage(histories, ids).routes())
        )
        yield World(gateway.url, instance, gateway)
        gateway.close()
        instance.stop()


def test_the_page_asks_for_users_and_histories(world):
    with httpx.Client(base_url=world.url, verify=TLS) as client:
        page = client.get("/")
        assert "script-src 'unsafe-inline'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        users = client.get("/demo/users").json()["users"]
        assert users[0] == "15", "a usual user comes first"
        assert {"0", "29"} <= set(users), "histories of all lengths"
        found = client.get("/demo/history", params={"user": "29"}).json()
        assert (found["num_events"], len(found["events"]), found["events"][0]["item"]) == (34, 20, "62")
        assert client.get("/demo/history", params={"user": "999"}).json()["error"]["code"] == "unknown_user"
        for stranger in ("", "x", "1.5", "9" * 30, "\u0663"):
            assert client.get("/demo/history", params={"user": stranger}).json()["error"]["code"] == "unknown_user"


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
    assert [int(row[1]) for row in rows()] == answer["items"] == true_ranking(7, answer["items"], 10)
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
