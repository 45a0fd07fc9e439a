"""Whatever a client sends, legal or not by the served OpenAPI documents: no crash, no 5xx, and answers as documented."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe.gateway.candidates import retriever_of
from nestpipe.gateway.cascade import Cascade, LocalCandidateStages
from nestpipe.gateway.forwarding import Forwarding
from nestpipe.gateway.gateway import Gateway
from nestpipe.gateway.gateway import admin_app as members_app
from nestpipe.gateway.instance_client import InstanceClient, make_client
from nestpipe.gateway.router import InstanceAddress as Member
from nestpipe.gateway.router import Members
from nestpipe.serve.admin import Admin
from nestpipe.serve.api import Instance
from nestpipe.serve.config import Limits, Stages, TriggerConfig
from nestpipe.serve.model_versions import load_version
from nestpipe.serve.schemas import RecommendRequest
from tests.gateway.fake_instances import Served as Server
from tests.gateway.test_cascade import TLS
from tests.serve.openapi_requests import check_answers
from tests.serve.small_rankers import make_engine
from tests.serve.small_services import serving

LIMITS = Limits(candidates=50, history=40, events=20)
SLOW_MS = 60_000  # the machine may be busy


@pytest.fixture(scope="module")
def urls(runs, served, tmp_path_factory):
    """A real instance, and a gateway in front of it."""
    trigger = TriggerConfig(mode="always", burst_ms=1e9, budget_ms=SLOW_MS)
    engine = make_engine(runs("hstu"), tmp_path_factory.mktemp("fuzz"), served=served(), trigger=trigger)
    engine.start()
    instance = Server(Instance(engine, name="one", secret=b"the secret of the tests", limits=LIMITS).app())
    stages = Stages(retrieval_ms=SLOW_MS, prerank_ms=SLOW_MS, rank_ms=SLOW_MS, num_retrieved=20, num_candidates=10)
    with ThreadPoolExecutor(1) as executor:
        members = Members([Member(name="one", url=instance.url)])
        remote = InstanceClient(members, make_client())
        upstream = LocalCandidateStages(retriever_of(runs("hstu")), executor)
        gateway = Server(Gateway(Cascade(remote, upstream, stages), probe=lambda: RecommendRequest(user=1)).app())
        yield {"instance": instance.url, "gateway": gateway.url}
        gateway.close()
    instance.close()
    engine.stop()


@pytest.mark.parametrize("which", ["instance", "gateway"])
def test_every_answer_is_as_documented(urls, scale, which):
    check_answers(urls[which], num_operations=17, num_examples=scale(10, 500))
    body = {"user": 3, "request": "r", "candidates": [1, 2], "deadline_ms": SLOW_MS}
    assert httpx.post(f"{urls[which]}/v1/rank", json=body, timeout=60).json()["degraded"] is False


@pytest.mark.parametrize(("kind", "num_operations"), [("next_item", 14), ("generative", 15)])
def test_a_gateway_of_every_kind_answers_as_documented(runs_of, tmp_path, scale, kind, num_operations):
    with serving(kind.replace("_", " "), runs_of, tmp_path, limits=LIMITS) as service:
        members = Members([Member(name="a", url=str(service.http.base_url))])
        remote = InstanceClient(members, make_client())
        probe = RecommendRequest(user=int(service.run.sequences.users[0]), k=1)
        recommender = Forwarding(remote, budget_ms=SLOW_MS)
        gateway = Server(Gateway(recommender, kind=kind, probe=lambda: probe, shared_log=True).app())
        try:
            check_answers(gateway.url, num_operations=num_operations, num_examples=scale(10, 500))
            assert httpx.get(f"{gateway.url}/readyz").status_code == 200
        finally:
            gateway.close()


@pytest.mark.parametrize(("kind", "num_operations"), [("next item", 14), ("dcn", 15)])
def test_every_kind_of_run_answers_as_documented(runs_of, tmp_path, scale, kind, num_operations):
    with serving(kind, runs_of, tmp_path, limits=LIMITS) as service:
        url = str(service.http.base_url)
        check_answers(url, num_operations=num_operations, num_examples=scale(10, 500))
        user = int(service.run.sequences.users[0])
        assert service.recommend(user=user, k=2)["degraded"] is False
        assert service.http.get("/readyz").json() == {"ready": True}


ANY = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("x" * 2000)
FIELDS = st.sampled_from(["run", "step", "share", "name", "action", "url", "x"])
OBJECTS = st.dictionaries(FIELDS, ANY, max_size=4).filter(lambda one: one.get("share") != 0)
BODIES = st.binary(max_size=60) | (OBJECTS | ANY | st.lists(ANY, max_size=3)).map(lambda one: json.dumps(one).encode())


def test_the_operators_page_and_administration_answer_whatever_is_sent(runs_of, tmp_path, scale):
    """They are not in the OpenAPI document. Nothing crashes, and every refusal says why."""
    with serving("ranker", runs_of, tmp_path, limits=LIMITS) as service:
        engine, instance = service.worker, service.instance
        instance.has_page = True
        remote = InstanceClient(Members([]), make_client())
        load = partial(load_version, engine.histories, label="", tables=tmp_path, chunk=16)
        admin = Admin(instance, engine, token="t", load=lambda run, step: load(run, step=step))
        apps = {"page": instance.app(), "admin": admin.app(), "members": members_app(remote, token="t")}
        servers = {name: Server(app) for name, app in apps.items()}
        held, before = httpx.Client(headers={"authorization": "Bearer t"}, timeout=60, verify=TLS), engine.versions

        @given(st.sampled_from(["users", "history", "item", "figures"]), st.text(max_size=20) | st.integers().map(str))
        @settings(max_examples=scale(20, 500), suppress_health_check=list(HealthCheck), deadline=None)
        def look(name, text):
            answer = held.get(f"{servers['page'].url}/page/{name}", params={"user": text, "item": text})
            assert answer.status_code in {200, 404}, (name, text, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"]

        @given(st.sampled_from(["admin/swap", "admin/compare", "members/members"]), BODIES)
        @settings(max_examples=scale(30, 500), suppress_health_check=list(HealthCheck), deadline=None)
        def change(path, body):
            server, _, name = path.partition("/")
            answer = held.post(f"{servers[server].url}/{name}", content=body)
            assert answer.status_code in {200, 400, 404, 413}, (path, body, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"]

        look()
        change()
        assert engine.versions == before
        assert held.get(f"{servers['admin'].url}/state", headers={"authorization": ""}).status_code == 401
        held.close()
        for server in servers.values():
            server.close()
