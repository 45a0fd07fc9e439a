"""Whatever a client sends, legal or not by the served OpenAPI documents: no crash, no 5xx, and answers as documented."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe.serve.cascade import Cascade, LocalUpstream
from nestpipe.serve.config import Limits, Stages, TriggerConfig
from nestpipe.serve.gateway import Gateway
from nestpipe.serve.http import Instance
from nestpipe.serve.remote import Remote
from nestpipe.serve.retrieval import retriever_of
from nestpipe.serve.router import Instance as Member
from nestpipe.serve.router import Members
from tests.serve.instances import Served as Server
from tests.serve.test_cascade import TLS
from tests.serve.world import make_engine

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
        remote = Remote(members, httpx.AsyncClient(timeout=None, verify=TLS))
        upstream = LocalUpstream(retriever_of(runs("hstu")), executor)
        gateway = Server(Gateway(Cascade(remote, upstream, stages)).app())
        yield {"instance": instance.url, "gateway": gateway.url}
        gateway.close()
    instance.close()
    engine.stop()


@pytest.mark.parametrize("which", ["instance", "gateway"])
def test_every_answer_is_as_documented(urls, scale, which):
    """Of the 5xx only one is an answer: the deadline that the request itself names has passed."""
    modes, checks = schemathesis.GenerationMode, schemathesis.checks
    documented = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{urls[which]}/openapi.json")
    operations = [one.ok() for one in schema.get_all_operations()]
    assert len(operations) == {"instance": 7, "gateway": 8}[which]
    statuses = set[int]()
    with requests.Session() as session:
        for operation in operations:
            cases = st.one_of(
                [operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE)]
            )

            @given(case=cases)
            @settings(max_examples=scale(10, 500), suppress_health_check=list(HealthCheck), deadline=None)
            def check(case: Any) -> None:
                answer = case.call(session=session)
                statuses.add(answer.status_code)
                late = answer.status_code == 503 and answer.json()["error"]["code"] == "deadline"
                assert answer.status_code < 500 or (late and "deadline_ms" in case.body), (case.body, answer.text)
                if case.method != "TRACE":
                    case.validate_response(answer, checks=documented)

            check()
        assert {200, 400} <= statuses
        assert session.get(f"{urls[which]}/healthz").json() == {"alive": True}
        body = {"user": 3, "request": "r", "candidates": [1, 2], "deadline_ms": SLOW_MS}
        assert session.post(f"{urls[which]}/v1/rank", json=body).json()["degraded"] is False
