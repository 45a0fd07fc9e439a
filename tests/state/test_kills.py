"""Items, users and events while instances are killed, with both backends: acknowledged is there, once, and withdrawn is gone."""

from __future__ import annotations

import threading
import time
from collections import Counter

import httpx
import pytest

from nestpipe.state.service_state import open_state
from tests.state.shop import InstanceProcess
from tests.state.test_contract import Reader

SEEN_S = 1.0  # within which every instance knows what one has acknowledged
NOW = 2_000_000


@pytest.fixture(params=["files", "postgres"])
def pair(request, shop, tmp_path):
    """Two instances with one state."""
    log = shop.folder / "serve" / "events.log"
    for one in log.parent.glob("*.log"):
        one.unlink()
    url = "" if request.param == "files" else request.getfixturevalue("server").empty()
    flags = ("--state", url) if url else ()
    instances = [InstanceProcess(shop.folder, tmp_path, name, *flags) for name in ("a", "b")]
    for one in instances:
        one.wait_ready()
    yield instances, lambda: open_state(url, log)
    for one in instances:
        one.close()


class Writer(threading.Thread):
    """Writes numbered items, users and events, to one instance after the other, until each is acknowledged."""

    def __init__(self, instances, name):
        super().__init__()
        self._urls, self._own = [one.url for one in instances], name
        self.num_written, self.withdrawn, self.errors = 0, {}, []
        self._stopping = threading.Event()
        self.start()

    def run(self):
        with httpx.Client(timeout=30) as http:
            while all(self._send(http, *call) for call in self._calls(f"{self._own}{self.num_written}")):
                if gone := self._withdrawing():
                    self.withdrawn[gone] = time.monotonic()
                self.num_written += 1

    def _calls(self, own):
        items = [{"id": f"{own}.{part}", "price": float(self.num_written)} for part in range(2)]
        yield "PUT", "/v1/items", {"items": items}
        yield "PUT", "/v1/users", {"users": [{"id": f"user {own}", "city": f"city {own}"}]}
        event = {"user": f"user {own}", "item": f"{own}.0", "time": NOW}
        yield "POST", "/v1/events", {"events": [{**event, "id": f"{own}/{part}"} for part in range(3)]}
        if gone := self._withdrawing():
            yield "DELETE", f"/v1/items/{gone}", None

    def _withdrawing(self):
        """The item of the shop that is withdrawn now, if any: some for each writer."""
        turn, rest = divmod(self.num_written, 3)
        return f"i{turn + (8 if self._own == 'y' else 0):02}" if rest == 0 and turn < 8 else ""

    def _send(self, http, method, path, body):
        """Sends the same again until it is acknowledged."""
        place = self.num_written
        while not self._stopping.is_set():
            try:
                answer = http.request(method, self._urls[place % 2] + path, json=body)
                if answer.status_code == 200:
                    self.errors += [one for one in answer.json().get("results", []) if one["result"] == "error"]
                    return True
            except httpx.HTTPError:
                pass  # it was killed
            place += 1
            time.sleep(0.02)
        return False

    def stop(self):
        self._stopping.set()
        self.join()


class Asker(threading.Thread):
    """Asks for recommendations all the time; notes items that were shown too long after their withdrawal."""

    def __init__(self, instances, writers):
        super().__init__()
        self._urls, self._writers = [one.url for one in instances], writers
        self.num_answers, self.wrong = 0, []
        self.is_stopping = False
        self.start()

    def run(self):
        with httpx.Client(timeout=30) as http:
            while not self.is_stopping:
                asked, number = time.monotonic(), self.num_answers
                gone = {own for one in self._writers for own, at in dict(one.withdrawn).items() if at + SEEN_S < asked}
                user = "nobody" if number % 3 == 0 else f"u{number % 12:02}"
                try:
                    answer = http.post(f"{self._urls[number % 2]}/v1/recommend", json={"user": user, "k": 20})
                except httpx.HTTPError:
                    time.sleep(0.02)
                    self.num_answers += 1
                    continue
                if answer.status_code == 200:
                    self.wrong += [(own, user) for own in answer.json()["items"] if own in gone]
                self.num_answers += 1

    def stop(self):
        self.is_stopping = True
        self.join()


def wait_until(holds, *, seconds=240):
    """A process that starts on a busy machine takes minutes."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.timeout(3600)  # 20 kills in a soak; each wait has its own limit
def test_nothing_acknowledged_is_lost_or_there_twice_though_instances_are_killed(pair, scale):
    instances, open_again = pair
    writers = [Writer(instances, name) for name in "xy"]
    asker = Asker(instances, writers)
    try:
        for turn in range(scale(3, 20)):
            done = [one.num_written for one in writers]
            wait_until(
                lambda done=done: all(one.num_written > before + 1 for one, before in zip(writers, done, strict=True))
            )
            instances[turn % 2].kill()
            instances[turn % 2].start()
            wait_until(instances[turn % 2].is_ready)
    finally:
        for one in (*writers, asker):
            one.stop()
    counts = {"x": writers[0].num_written, "y": writers[1].num_written}
    check_answers(instances, writers, asker, counts)
    check_state(open_again(), counts)


def check_answers(instances, writers, asker, counts):
    assert [one.errors for one in writers] == [[], []]
    assert asker.wrong == []
    assert asker.num_answers > 20
    time.sleep(SEEN_S)
    gone = {own for one in writers for own in one.withdrawn}
    for instance in instances:
        for name, count in counts.items():
            for own in (f"{name}{count - 1}.{part}" for part in range(2)):
                assert instance.ask("GET", f"/v1/items/{own}")["item"]["price"] == count - 1
            found = instance.ask("POST", "/v1/recommend", user=f"user {name}{count - 1}", k=5)
            assert found["path"] == "model", "their events are known everywhere"
        assert not gone & set(instance.ask("POST", "/v1/recommend", user="u01", k=20)["items"])
        assert not gone & set(instance.ask("POST", "/v1/recommend", user="nobody", k=20)["items"])


def check_state(state, counts):
    """Every event once, every own id with one number, on which all that names it agrees."""
    events, changes = Reader(state).all()
    state.close()
    numbers = {(one["of"], one["text"]): one["number"] for one in changes if "of" in one}
    assert len(numbers) == sum("of" in one for one in changes), "an own id has one number"
    assert len({(of, number) for (of, _), number in numbers.items()}) == len(numbers), "a number has one own id"
    found = Counter(one["id"] for one in events)
    assert set(found.values()) == {1}
    for name, count in counts.items():
        for number in range(count):
            own = f"{name}{number}"
            assert all(f"{own}/{part}" in found for part in range(3))
            assert ("item", f"{own}.1") in numbers
    by_id = {one["id"]: one for one in events}
    for id_, event in by_id.items():
        own = id_.partition("/")[0]
        assert event["user"] == numbers["user", f"user {own}"]
        assert event["item"] == numbers["item", f"{own}.0"]


@pytest.mark.timeout(200)
def test_while_the_database_is_away_instances_answer_from_what_they_know(shop, own_server, tmp_path):
    """Writes get 503, readiness says so, and everything recovers without help."""
    instance = InstanceProcess(shop.folder, tmp_path, "a", "--state", own_server.url())
    try:
        instance.wait_ready()
        instance.ask("PUT", "/v1/items", items=[{"id": "lamp", "price": 1.0}])
        instance.ask("DELETE", "/v1/items/i03")
        instance.ask("POST", "/v1/events", events=[{"id": "e", "user": "cleo", "item": "lamp", "time": NOW}])
        before = instance.ask("POST", "/v1/recommend", user="cleo", k=20)
        own_server.kill()
        refused = instance.http.put("/v1/items", json={"items": [{"id": "rug"}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_away")
        assert refused.headers["retry-after"]
        wait_until(lambda: not instance.is_ready())
        said = instance.http.get("/readyz")
        assert (said.status_code, said.json()) == (
            503,
            {"ready": False, "problem": "the database of the state is away"},
        )
        after = instance.ask("POST", "/v1/recommend", user="cleo", k=20)
        assert (after["items"], after["path"]) == (before["items"], "model")
        assert instance.ask("GET", "/v1/items/lamp")["item"]["price"] == 1.0
        own_server.start()
        instance.wait_ready()
        assert instance.ask("PUT", "/v1/items", items=[{"id": "rug"}])["results"] == [
            {"result": "created", "error": None}
        ]
        said = instance.ask("POST", "/v1/events", events=[{"id": "e", "user": "cleo", "item": "lamp", "time": NOW}])
        assert said["results"][0]["result"] == "duplicate"
    finally:
        instance.close()
