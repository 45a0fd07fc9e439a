"""Rules over HTTP, for every kind of run: what offline scoring under the same rules gives, and errors that name the field."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from nestpipe.cli.serve_fleet import fleet_retriever
from nestpipe.errors import ConfigError
from nestpipe.gateway.cascade import Cascade, LocalCandidateStages
from nestpipe.gateway.gateway import Gateway
from nestpipe.gateway.instance_client import InstanceClient, make_client
from nestpipe.gateway.router import InstanceAddress, Members
from nestpipe.rules.compiled_rules import RuleCompiler
from nestpipe.rules.item_attributes import FolderSource
from nestpipe.rules.rule_book import RuleBook
from nestpipe.rules.rule_set import parse_rules
from nestpipe.rules.selection import best_by_vector
from nestpipe.serve.config import Stages
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.schemas import RecommendRequest
from tests.gateway.fake_instances import Served
from tests.serve.small_services import KINDS, NOW, SLOW_MS, serving

CLICKS = [
    {"filter": {"category": 3}},
    {"filter": {"price": {"gte": 5, "lte": 60}}, "max_per": {"category": 1}},
    {"filter": {"tags": [1, 2, 5]}, "boost": [{"filter": {"price": {"lte": 20}}, "add": 0.25}]},
    {"max_per": {"category": 1, "tags": 2}, "pin": [7, 3, 7], "exclude": [3]},
    {"diversity": 0.5, "filter": {"price": {"gte": 0}}},
    {"unseen": False, "exclude": [1, 2]},
    {"unseen": True, "filter": {"category": [0, 1, 2, 3, 4, 5, 6]}},
]
SHELVES = [
    {"filter": {"kind": "oak chair"}},
    {"filter": {"shelf": {"gte": 3}}, "max_per": {"kind": 1}},
    {"filter": {"kind": ["red lamp", "tall shelf"]}, "boost": [{"filter": {"shelf": 2}, "add": 0.5}]},
    {"max_per": {"kind": 2}, "pin": [7, 3, 7], "exclude": [3]},
    {"diversity": 0.5},
    {"unseen": False, "exclude": [1, 2]},
]


@pytest.fixture(scope="module")
def services(runs_of, tmp_path_factory):
    """Started when they are first asked for."""
    found, opened = {}, []

    def of(kind):
        if kind not in found:
            opened.append(serving(kind, runs_of, tmp_path_factory.mktemp("service")))
            found[kind] = opened[-1].__enter__()
        return found[kind]

    yield of
    for one in opened:
        one.__exit__(None, None, None)


@pytest.fixture(params=KINDS)
def service(request, services):
    return services(request.param)


def offline(service, user, k, rules):
    seconds = None if service.kind == "generative" else NOW * 1000
    return service.run.predictor().recommend(user, k, request_ms=seconds, rules=rules)


def test_lists_are_those_of_offline_scoring(service):
    for rules in SHELVES if service.kind == "generative" else CLICKS:
        if service.kind == "ranker with retrieval" and "diversity" in rules:
            continue  # it compares the vectors of retrieval, which the ranker alone has not
        for user in [*service.run.sequences.users[[0, 7]].tolist(), 10**9]:
            found, wanted = service.recommend(user=user, k=6, **rules), offline(service, user, 6, rules)
            assert found["items"] == wanted.items, (user, rules)
            np.testing.assert_allclose(found["scores"], wanted.scores, rtol=1e-4, atol=1e-5)  # another order of sums
            assert found["allowed"] == wanted.allowed, (user, rules)
            assert (found["path"] == "popular") == (wanted.path == "popular") == (user == 10**9)
    assert service.recommend(user=user, k=2)["allowed"] is None


def test_a_filter_that_leaves_few_says_so(service):
    field, value = ("kind", "oak chair") if service.kind == "generative" else ("category", 3)
    found = service.recommend(user=10**9, k=30, filter={field: value})
    assert len(found["items"]) == found["allowed"] < 30
    none = service.recommend(
        user=int(service.run.sequences.users[0]), k=3, filter={field: value}, exclude=found["items"]
    )
    assert (none["items"], none["allowed"]) == ([], 0)
    pinned = service.recommend(
        user=int(service.run.sequences.users[0]), k=3, filter={field: value}, exclude=found["items"][1:], pin=[9, "no"]
    )
    assert pinned["items"][0] == 9
    assert pinned["unknown"] == ["no"]


def test_named_sets(service):
    rules = (SHELVES if service.kind == "generative" else CLICKS)[1]
    book = service.instance.rules
    service.instance.rules = RuleBook(
        FolderSource(lambda: service.run.sequences), {"front_page": parse_rules({**rules, "exclude": [5]})}
    )
    try:
        user = int(service.run.sequences.users[7])
        wanted = offline(service, user, 4, {**rules, "exclude": [5]})
        assert service.recommend(user=user, k=4, rules="front_page")["items"] == wanted.items
        assert service.http.get(f"/v1/recommend/{user}?k=4&rules=front_page").json()["items"] == wanted.items
        more = {**rules, "exclude": [5, wanted.items[0]]}
        both = service.recommend(user=user, k=4, rules="front_page", exclude=wanted.items[:1])
        assert both["items"] == offline(service, user, 4, more).items
        refused = service.http.get(f"/v1/recommend/{user}?rules=7")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_rules")
        assert refused.json()["error"]["message"] == "rules is '7', which is no named set; there are: front_page."
    finally:
        service.instance.rules = book


def test_similar_items_under_rules(service):
    item = int(service.run.sequences.catalogue[5])
    for rules in SHELVES[:4] if service.kind == "generative" else CLICKS[:5]:
        answer = service.http.post("/v1/similar", json={"item": item, "k": 4, **rules}).json()
        wanted = service.run.predictor().similar(item, 4, rules=rules)
        assert (answer["items"], answer["allowed"]) == (wanted.items, wanted.allowed)
        np.testing.assert_allclose(answer["scores"], wanted.scores, atol=1e-5)


def test_generation_under_rules(services):
    service, user = services("generative"), 7
    for rules in SHELVES:
        answer = service.http.post("/v1/generate", json={"user": user, "k": 4, **rules}).json()
        recommended = service.recommend(user=user, k=4, **rules)
        assert (answer["items"], answer["allowed"]) == (recommended["items"], recommended["allowed"])


BAD = [
    ({"filter": {"colour": 1}}, "bad_filter", "filter.colour is no field of items; there are: category, tags, price."),
    ({"filter": {"price": "low"}}, "bad_filter", "filter.price is 'low', but the field holds numbers."),
    ({"filter": {"category": {"gte": 1}}}, "bad_filter", "filter.category is a range, but the field holds ids"),
    ({"filter": {"category": "lamp"}}, "bad_filter", "filter.category is 'lamp', but the field holds whole numbers."),
    ({"filter": {"price": {"gt": 1}}}, "bad_filter", "filter.price has ['gt']; a range has"),
    ({"filter": {"price": []}}, "bad_filter", "filter.price is an empty list"),
    ({"filter": 3}, "bad_filter", "field 'filter' is 3; it must be an object."),
    ({"max_per": {"category": 0}}, "bad_max_per", "max_per.category is 0; it must be an integer of 1 or more."),
    ({"max_per": {"colour": 1}}, "bad_max_per", "max_per.colour is no field of items"),
    ({"boost": [{"add": 1}]}, "bad_boost", "boost[0] is an object of 1 fields"),
    ({"boost": [{"filter": {"x": 1}, "add": 1}]}, "bad_boost", "boost[0].filter.x is no field of items"),
    ({"diversity": 2}, "bad_diversity", "field 'diversity' is 2; it must be a number in 0 .. 1."),
    ({"pin": [1.5]}, "bad_pin", "field 'pin[0]' is 1.5"),
    ({"unseen": 3}, "bad_unseen", "field 'unseen' is 3"),
    ({"rules": "x"}, "bad_rules", "rules is 'x', which is no named set; there are: none."),
]


@pytest.mark.parametrize(("body", "code", "message"), BAD)
def test_errors_name_the_field_and_what_is_known(services, body, code, message):
    refused = services("next item").http.post("/v1/recommend", json={"user": 3, **body})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, code), refused.text
    assert message in refused.json()["error"]["message"]


def test_values_of_the_log_are_listed(services):
    refused = services("generative").http.post("/v1/recommend", json={"user": 3, "filter": {"kind": "lamp"}})
    assert "is not among the 5 values of the log: oak chair, red lamp" in refused.json()["error"]["message"]


def test_a_file_of_named_sets_is_checked_when_a_service_starts(services, tmp_path):
    source, path = FolderSource(lambda: services("next item").run.sequences), tmp_path / "rules.json"
    for content, message in [
        ({"a": {"filter": {"colour": 1}}}, "filter.colour is no field of items"),
        ({"a": {"fliter": {}}}, "fliter is no rule; there are: filter, exclude"),
        ({"a": 3}, "must hold an object of named sets"),
    ]:
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message) as error:
            RuleBook.open(source, path)
        assert str(path) in str(error.value)
    with pytest.raises(ConfigError, match="does not exist"):
        RuleBook.open(source, tmp_path / "none.json")


def test_the_order_of_retrieval_obeys_rules_too(services):
    """No instance answers, so what was retrieved is the answer."""
    histories = services("ranker").worker.histories
    retriever, k = fleet_retriever(services("ranker").run, histories), 4
    rules = {"filter": {"price": {"gte": 1}}, "max_per": {"category": 1}, "pin": [7]}

    async def ask():
        with ThreadPoolExecutor(1) as executor:
            book = RuleBook(FolderSource(lambda: histories.sequences))
            remote = InstanceClient(Members([InstanceAddress(name="a", url="http://127.0.0.1:9")]), make_client())
            ids = ServiceIds(lambda: histories.sequences)
            cascade = Cascade(remote, LocalCandidateStages(retriever, executor, ids, book))
            try:
                return await cascade.recommend(RecommendRequest(user=3, k=k, deadline_ms=SLOW_MS, **rules))
            finally:
                await remote.close()

    answer, compiler = asyncio.run(ask()), RuleCompiler(FolderSource(lambda: histories.sequences))
    compiled, past = compiler.compile(parse_rules(rules), retriever.items), retriever.past_of(3)
    found = retriever.retrieve(past, 128, compiled)
    best = best_by_vector(retriever.vectors, found.query, compiled, k, removed=found.removed)
    assert (answer.path, answer.degraded, answer.allowed) == ("fallback", True, best.num_left)
    assert answer.items == retriever.items[best.positions].tolist()


@pytest.mark.parametrize("kind", ["ranker", "ranker with retrieval", "dcn"])
def test_a_gateway_lists_what_an_instance_lists(services, kind):
    """Retrieval and rules at the gateway, ranking at the instance."""
    service = services(kind)
    run, histories = service.retrieval or service.run, service.worker.histories
    ids = ServiceIds(lambda: histories.sequences)
    book = RuleBook(FolderSource(lambda: histories.sequences), {"own": parse_rules({"max_per": {"category": 1}})})
    stages = Stages(retrieval_ms=SLOW_MS, prerank_ms=SLOW_MS, rank_ms=SLOW_MS)
    with ThreadPoolExecutor(1) as executor:
        members = Members([InstanceAddress(name="a", url=str(service.http.base_url))])
        remote = InstanceClient(members, make_client())
        upstream = LocalCandidateStages(fleet_retriever(run, histories), executor, ids, book)
        cascade = Cascade(remote, upstream, stages, has_prefixes=kind != "dcn")
        gateway = Served(Gateway(cascade, probe=lambda: RecommendRequest(user=1), kind="ranker").app())
        try:
            with httpx.Client(base_url=gateway.url, timeout=60) as http:
                for user in [*service.run.sequences.users[[0, 7]].tolist(), 10**9]:
                    for rules in CLICKS:
                        body = {"user": user, "k": 5, "query_time": NOW, **rules}
                        found, wanted = http.post("/v1/recommend", json=body).json(), service.recommend(**body)
                        assert found["items"] == wanted["items"], (user, rules, found)
                        assert (found["allowed"], found["unknown"]) == (wanted["allowed"], wanted["unknown"])
                named = http.post("/v1/recommend", json={"user": 7, "k": 5, "query_time": NOW, "rules": "own"}).json()
                alone = service.recommend(user=7, k=5, query_time=NOW, max_per={"category": 1})
                assert named["items"] == alone["items"]
                refused = http.post("/v1/recommend", json={"user": 7, "filter": {"colour": 1}})
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_filter")
        finally:
            gateway.close()
