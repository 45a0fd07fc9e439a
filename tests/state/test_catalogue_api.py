"""Items, users and events of one instance over HTTP, in own ids: what is stored, what is shown, what is refused."""

from __future__ import annotations

import time
from dataclasses import replace

import httpx
import numpy as np
import pytest

from nestpipe.client import Client, ServiceError
from nestpipe.data.batch_builder import BatchBuilder, ModelInputs
from nestpipe.data.item_content import REVISION
from nestpipe.serve.config import EngineConfig, Limits
from nestpipe.serve.next_item_api import NextItemInstance
from nestpipe.serve.open_service import open_next_item_engine
from tests.gateway.fake_instances import Served
from tests.state.shop import NUM_ITEMS

NOW = 2_000_000


class Service:
    """An instance in this process."""

    def __init__(self, run, log):
        self.engine = open_next_item_engine(run, log, config=EngineConfig())
        self.engine.start()
        instance = NextItemInstance(self.engine, name="a", budget_ms=60_000, limits=Limits(), wall_clock=lambda: NOW)
        self.server = Served(instance.app())
        self.http = httpx.Client(base_url=self.server.url, timeout=60)
        self.client = Client(self.server.url, timeout_s=60)

    def call(self, method, path, body=None, *, status=200):
        answer = self.http.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def results(self, method, path, **body):
        return [one["result"] for one in self.call(method, path, body)["results"]]

    def close(self):
        self.client.close()
        self.http.close()
        self.server.stop()
        self.engine.stop()


@pytest.fixture
def open_service(shop, tmp_path):
    made = []

    def open_again(name="one"):
        made.append(Service(shop, tmp_path / name / "events.log"))
        return made[-1]

    yield open_again
    for one in made:
        one.close()


def test_an_item_is_stored_changed_withdrawn_and_shown_in_own_ids(open_service):
    service = open_service()
    lamp = {"id": "new/ lamp", "category": "garden", "price": 7.5, "text": "a lamp"}
    assert service.results("PUT", "/v1/items", items=[lamp, {"id": "i03"}, lamp]) == ["created", "updated", "updated"]
    assert service.call("GET", "/v1/items/new%2F%20lamp") == {"item": {**lamp, "available": True}}
    bare = {"category": None, "price": None, "text": None, "available": True}
    assert service.call("GET", "/v1/items/i03")["item"] == {"id": "i03", **bare}, (
        "what is left out is missing from then on"
    )
    assert service.call("GET", "/v1/items/i04")["item"] == {"id": "i04", **bare, "category": "lamps", "price": 4.0}
    changed = service.call("PATCH", "/v1/items/i04", {"price": None, "category": "garden"})["item"]
    assert changed == {"id": "i04", **bare, "category": "garden"}
    gone = service.call("DELETE", "/v1/items/i05")["item"]
    assert gone == {"id": "i05", **bare, "category": "rugs", "price": 5.0, "available": False}
    again = open_service()
    for name in ("new%2F%20lamp", "i03", "i04", "i05"):
        assert again.call("GET", f"/v1/items/{name}") == service.call("GET", f"/v1/items/{name}"), "another process"
    assert service.results("PUT", "/v1/items", items=[{"id": "i05"}]) == ["updated"]
    assert service.call("GET", "/v1/items/i05")["item"]["available"] is True


def test_a_bad_item_has_an_error_of_its_own_and_spoils_no_other(open_service):
    service = open_service()
    bad = [7, {}, {"id": ""}, {"id": True}, {"id": "x" * 513}, {"id": "b", "colour": 1}, {"id": "b", "price": "dear"}]
    bad += [
        {"id": "b", "text": 5},
        {"id": "b", "available": 1},
        {"id": "b", "category": ["a"]},
        {"id": "b", "category": 2.5},
    ]
    said = service.call("PUT", "/v1/items", {"items": [*bad, {"id": "good", "category": "rugs"}]})["results"]
    assert [one["result"] for one in said] == ["error"] * len(bad) + ["created"]
    assert all(len(one["error"]["message"]) > 10 for one in said[:-1])
    assert "'colour' is not an attribute" in said[5]["error"]["message"]
    service.call("GET", "/v1/items/b", status=404)
    state = service.engine.histories.living
    assert [list(one.values()) for one in state.ids.tables().values()] == [["good"]], (
        "refused items leave no ids behind"
    )


def test_broken_envelopes_and_unknown_items_are_refused(open_service):
    service = open_service()
    for method, path, body, status in (
        ("PUT", "/v1/items", {"items": 5}, 400),
        ("PUT", "/v1/items", {}, 400),
        ("PUT", "/v1/items", {"items": [{"id": "a"}] * 1001}, 413),
        ("PUT", "/v1/users", {"users": [{"id": "a"}] * 1001}, 413),
        ("PUT", "/v1/items", {"items": [{"id": "a", "text": "x" * 2**20}]}, 413),
        ("PATCH", "/v1/items/i01", {"price": "dear"}, 400),
        ("PATCH", "/v1/items/i01", {"colour": 1}, 400),
        ("PATCH", "/v1/items/nobody", {"price": 1}, 404),
        ("DELETE", "/v1/items/nobody", None, 404),
        ("GET", "/v1/items?cursor=x", None, 400),
        ("GET", "/v1/items?limit=0", None, 400),
        ("GET", "/v1/items?colour=1", None, 400),
        ("POST", "/v1/items", {}, 405),
    ):
        assert len(service.call(method, path, body, status=status)["error"]["message"]) > 10


def test_pages_have_every_item_once(open_service):
    service = open_service()
    service.call("PUT", "/v1/items", {"items": [{"id": f"new{n}"} for n in range(7)] + [{"id": "i02"}]})
    found, cursor = [], ""
    while cursor is not None:
        page = service.call("GET", f"/v1/items?limit=5{cursor and f'&cursor={cursor}'}")
        assert len(page["items"]) == 5 or page["cursor"] is None
        found, cursor = found + [one["id"] for one in page["items"]], page["cursor"]
    assert found == [f"i{n:02}" for n in range(NUM_ITEMS)] + [f"new{n}" for n in range(7)]


def test_events_on_unknown_users_and_items_are_kept_and_count(open_service):
    service = open_service()
    assert service.client.recommend("cleo").path == "popular"
    event = {"id": "a", "user": "cleo", "item": "sofa", "time": NOW - 9, "page": "search"}
    sent = [event, {**event, "id": "b", "item": "i03"}, {**event, "item": "i04"}]
    assert service.results("POST", "/v1/events", events=sent) == ["stored", "stored", "duplicate"]
    found = service.client.recommend("cleo", k=5)
    assert (found.path, len(found.items)) == ("model", 5)
    assert "sofa" not in found.items, "no model has a row for it"
    again = open_service()
    assert again.client.recommend("cleo", k=5).items == found.items
    assert again.results("POST", "/v1/events", events=sent) == ["duplicate"] * 3
    own = again.engine.histories.of(12)  # the number behind those of the folder
    assert own.items.tolist() == [NUM_ITEMS, 3], "a new item has a number at its first event"


def test_a_history_with_unknown_items_works_and_its_explanation_names_them(open_service):
    client = open_service().client
    known = [{"item": "i03", "time": NOW - 60}, {"item": "i06", "time": NOW - 50}]
    found = client.recommend("anyone", history=[*known, {"item": "who knows", "time": NOW - 40}], k=5, explain=True)
    assert (found.path, len(found.items), found.degraded) == ("model", 5, False)
    assert {one.item for because in found.because for one in because} <= {"i03", "i06", "who knows"}


def test_withdrawn_items_leave_every_answer(open_service):
    service = open_service()
    before = service.client.recommend("u01", k=5).items
    popular = service.client.recommend("nobody", k=5).items
    similar = service.client.similar("i00", k=5).items
    for own in {before[0], popular[0], similar[0]}:
        service.call("DELETE", f"/v1/items/{own}")
    after = service.client.recommend("u01", k=5).items
    assert not {before[0], popular[0], similar[0]} & set(after)
    assert len(after) == 5
    assert popular[0] not in service.client.recommend("nobody", k=NUM_ITEMS).items
    assert similar[0] not in service.client.similar("i00", k=NUM_ITEMS).items
    assert service.call("PATCH", f"/v1/items/{before[0]}", {"available": True})["item"]["available"] is True
    until = time.monotonic() + 10  # a second, on a machine of our own
    while service.client.recommend("u01", k=5).items[0] != before[0]:
        assert time.monotonic() < until, "an item that is available again is shown again"
        time.sleep(0.02)


def test_users_have_features_and_are_forgotten_with_their_events(open_service, tmp_path):
    service, other = open_service(), open_service()
    sent = [{"id": "u01", "city": "Lima"}, {"id": "cleo", "city": "Oslo"}, {"id": "cleo", "age": 5}]
    assert service.results("PUT", "/v1/users", users=sent) == ["updated", "created", "error"]
    events = [
        {"id": f"e{n}", "user": user, "item": "i02", "time": NOW} for n, user in enumerate(["cleo", "u01", "u02"])
    ]
    service.call("POST", "/v1/events", {"events": events})
    histories = other.engine.histories
    histories.refresh()
    assert histories.of(1).user_features["city"].values.tolist() == [3], "Lima is a new city"
    removals, before = histories.num_removals, histories.num_events(1)
    assert service.call("DELETE", "/v1/users/u01") == {"erased": 1, "masked": before - 1}
    assert service.call("DELETE", "/v1/users/cleo") == {"erased": 1, "masked": 0}
    assert service.call("DELETE", "/v1/users/nobody%20at%20all") == {"erased": 0, "masked": 0}
    histories.refresh()
    assert histories.num_removals > removals, "nothing that was made of their events is kept"
    assert (histories.num_events(1), len(histories.of(1).items), histories.num_events(2)) == (
        0,
        0,
        len(service.engine.histories.of(2).items),
    )
    assert other.client.recommend("u01").path == "popular"
    content = b"".join(path.read_bytes() for path in (tmp_path / "one").glob("*.log"))
    assert b"cleo" not in content
    assert service.results("POST", "/v1/events", events=events) == ["duplicate"] * 3, "a late copy is not stored again"
    assert service.results("POST", "/v1/events", events=[{**events[0], "id": "new"}]) == ["stored"]
    numbers = open_service().engine.histories.living.ids
    assert numbers.number_of("user", "cleo") == 13, "the number of a forgotten user is never given out again"


def test_models_read_the_content_of_the_catalogue_and_its_revision(open_service, shop):
    """Features in histories change with an upsert, and so does the revision that prefix keys hold."""
    service, inputs = open_service(), ModelInputs(features=("category", "price"))
    histories = service.engine.histories
    statistics = BatchBuilder(shop.sequences, shop.split, inputs).statistics
    builder = BatchBuilder(shop.sequences, None, inputs, statistics=statistics)

    def read(user):
        events = histories.of(user)
        end = np.array([len(events.items)])
        batch = builder.over(events).history(np_tensor([0]), end * 0, end, request_ms=None).event_features
        return batch["category"].values.tolist(), batch["price"].values.tolist(), batch[REVISION].values.tolist()

    before = read(3)
    offline = builder.over(replace(histories.of(3), live=None)).item_features(histories.of(3).items)
    assert before[0] == offline["category"].values.tolist()
    assert before[2] == [0] * len(before[0])
    first = shop.sequences.vocabulary("item").own_ids(histories.of(3).items[:1])[0]
    service.call("PATCH", f"/v1/items/{first}", {"category": "garden"})
    after = read(3)
    assert after[0] == [2, *before[0][1:]]
    assert after[1] == before[1]
    assert after[2][0] != 0
    assert after[2][1:] == before[2][1:]
    service.call("PATCH", f"/v1/items/{first}", {"text": "no feature that the model reads"})
    assert read(3) == after
    assert (
        read(3)[2]
        == open_service()
        .engine.histories.living.catalogue.revisions(histories.of(3).items, ["category", "price"])
        .tolist()
    ), "the same in every process"
    service.call("POST", "/v1/events", {"events": [{"id": "x", "user": "u03", "item": "sofa", "time": NOW}]})
    assert read(3)[0] == after[0]
    assert read(3)[2][-1] == 0
    service.call("PUT", "/v1/items", {"items": [{"id": "sofa", "category": "rugs"}]})
    assert read(3)[0] == [*after[0], 1]
    assert read(3)[2][-1] != 0


def np_tensor(values):
    import torch

    return torch.tensor(values)


def test_the_client_has_a_method_for_each_call(open_service):
    client = open_service().client
    assert [one.result for one in client.put_items([{"id": "new", "price": 1.0}, {"no": "id"}]).results] == [
        "created",
        "error",
    ]
    assert client.get_item("new").item["price"] == 1.0
    assert client.change_item("new", {"price": 2.0}).item["price"] == 2.0
    assert client.withdraw_item("new").item["available"] is False
    assert len(client.list_items(limit=3).items) == 3
    assert client.list_items(cursor=client.list_items(limit=20).cursor).items[0]["id"] == "new"
    assert [one.result for one in client.put_users([{"id": "a b/c", "city": "Oslo"}]).results] == ["created"]
    event = {"id": "e", "user": "a b/c", "item": "new", "time": NOW}
    assert [one.result for one in client.send_events([event]).results] == ["stored"]
    assert client.forget_user("a b/c").erased == 1
    with pytest.raises(ServiceError, match="is not in the catalogue") as caught:
        client.get_item("nowhere")
    assert (caught.value.status, caught.value.code) == (404, "unknown_item")
