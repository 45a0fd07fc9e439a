"""Ready means that one real recommendation went through every stage; what is broken is said, and never a 500."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from nestpipe.serve.requests import BusyError
from tests.serve.small_services import serving

FAILED = (503, "failed")


class BrokenIndex:
    """An index whose file is gone."""

    def search(self, query, k):
        raise RuntimeError("no index")


class EmptyIndex:
    """An index without vectors."""

    def search(self, query, k):
        return np.empty(0, np.int64)


def asked(service, **body):
    answer = service.http.post("/v1/recommend", json={"user": int(service.run.sequences.users[0]), **body})
    return answer.status_code, answer.json().get("error", {}).get("code", answer.json().get("path"))


def is_ready(service):
    answer = service.http.get("/readyz")
    assert answer.json() == {"ready": answer.status_code == 200}
    return answer.status_code == 200


@pytest.mark.parametrize("kind", ["ranker", "ranker with retrieval", "dcn"])
def test_a_broken_index_makes_an_instance_not_ready(runs_of, tmp_path, kind):
    with serving(kind, runs_of, tmp_path) as service:
        assert is_ready(service)
        search = service.instance._search or service.instance._known().search()
        whole = search.retriever
        search.retriever = replace(whole, index=BrokenIndex())
        assert not is_ready(service)
        assert asked(service) == FAILED
        assert asked(service, user=10**9) == (200, "popular")
        search.retriever = replace(whole, index=EmptyIndex())
        assert not is_ready(service)
        search.retriever = whole
        assert is_ready(service)
        assert asked(service)[0] == 200


CALLS = {"next item": "recommend", "ranker": "scores", "dcn": "scores", "generative": "generate"}


@pytest.mark.parametrize("kind", CALLS)
def test_a_broken_model_makes_an_instance_not_ready(runs_of, tmp_path, kind):
    with serving(kind, runs_of, tmp_path) as service:
        assert is_ready(service)
        served = service.worker.versions.main if kind == "ranker" else service.worker.served

        def broken(*_, **__):
            raise RuntimeError("no weights")

        setattr(served, CALLS[kind], broken)
        if kind == "ranker":
            served.scores_and_prefixes = broken
        assert not is_ready(service)
        # A ranker keeps the order of retrieval and says so; the others have no order without their model.
        assert asked(service) == ((200, "fallback") if kind == "ranker" else FAILED)
        assert asked(service, explain=True)[0] in (200, 400, 503)
        for name in (CALLS[kind], "scores_and_prefixes"):
            served.__dict__.pop(name, None)
        assert is_ready(service)


@pytest.mark.parametrize("kind", CALLS)
def test_a_full_instance_that_answers_stays_ready(runs_of, tmp_path, kind):
    with serving(kind, runs_of, tmp_path) as service:

        def full(job):
            raise BusyError("256 requests wait already; try again later, or another instance.")

        usual = service.worker.submit
        service.worker.submit = full
        assert not is_ready(service)  # nothing has been answered yet
        assert asked(service) == (429, "overloaded")
        service.worker.submit = usual
        assert asked(service)[0] == 200
        service.worker.submit = full
        assert is_ready(service)
        service.instance._proven_at -= 60
        assert not is_ready(service)
        service.worker.submit = usual
        service.instance.is_draining = True
        assert not is_ready(service)


@pytest.mark.parametrize("kind", CALLS)
def test_a_stopped_instance_refuses_by_name(runs_of, tmp_path, kind):
    with serving(kind, runs_of, tmp_path) as service:
        assert asked(service, deadline_ms=0.001)[0] in (200, 503)
        assert asked(service)[0] == 200
        service.worker.stop()
        assert asked(service) == (503, "stopping")
        assert not is_ready(service)


def test_late_explanations_are_refused(runs_of, tmp_path):
    with serving("ranker", runs_of, tmp_path) as service:
        served, usual = service.worker.versions.main, service.worker.versions.main.scores

        def slow(*args):
            time.sleep(0.4)
            return usual(*args)

        served.scores = slow
        assert asked(service, explain=True, deadline_ms=700) == (503, "deadline")
