"""Requests are defined once: what is parsed, documented and sent by the client has the same fields and limits."""

from __future__ import annotations

import inspect
import subprocess
import sys

import msgspec
import pytest

from nestpipe.client import Client
from nestpipe.data.schema import Schema
from nestpipe.serve.config import GatewayLimits, Limits
from nestpipe.serve.openapi import document, gateway_calls, gateway_document, generative_calls, instance_calls
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import parse
from nestpipe.serve.schemas import CompareRequest, MemberRequest, RankRequest

LIMITS = Limits(candidates=3, history=2, events=2, deadline_ms=50.0)
RANK = {"user": 1, "request": "r", "candidates": [1]}
OWN_ID = (
    "an integer in -9,223,372,036,854,775,808 .. 9,223,372,036,854,775,807, or a printable text of 1 .. 512 characters"
)


def test_the_client_needs_neither_torch_nor_starlette():
    program = (
        "import sys, nestpipe.client; print([one for one in ('torch', 'starlette', 'numpy') if one in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ({"user": 1.5}, "bad_user", f"field 'user' is 1.5; it must be {OWN_ID}."),
        ({"candidates": [1, None]}, "bad_candidates", f"field 'candidates[1]' is None; it must be {OWN_ID}."),
        (
            {"candidates": []},
            "bad_candidates",
            "field 'candidates' is list of 0; it must be a list of 1 .. 3 ids.",
        ),
        ({"k": 4}, "bad_k", "field 'k' is 4; it must be an integer in 1 .. 3."),
        ({"deadline_ms": 0}, "bad_deadline_ms", "field 'deadline_ms' is 0; it must be a number above 0, at most 50."),
        ({"request": "a\n"}, "bad_request", "field 'request' is 'a\\n'; it must be a printable text."),
        ({"history": 5}, "bad_history", "field 'history' is 5; it must be a list of 0 .. 2 objects."),
        ({"history": [{}]}, "bad_item", f"field 'history[0].item' is missing; it must be {OWN_ID}."),
        (
            {"history": [{"item": 1}, {"item": 1, "time": -1}]},
            "bad_time",
            "field 'history[1].time' is -1; it must be an integer in 0 .. 8,796,093,022,207.",
        ),
        (
            {"usr": 1},
            "unknown_field",
            "unknown field 'usr'; there are: candidates, deadline_ms, explain, history, k, query_time, ",
        ),
        ({" - at `$.zz`": 1}, "unknown_field", "unknown field ' - at `$.zz`'; there are: "),
    ],
)
def test_a_refusal_names_the_field_what_was_seen_and_what_is_wanted(more, code, message):
    with pytest.raises(BadRequestError) as caught:
        parse(RANK | more, instance_calls(LIMITS)["rank"][0])
    assert (caught.value.code, str(caught.value)[: len(message)]) == (code, message)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (CompareRequest, {"share": 1.01}, "field 'share' is 1.01; it must be a number in 0 .. 1."),
        (MemberRequest, {"name": "a", "action": "x"}, "field 'action' is 'x'; it must be one of drain, join, leave."),
        (MemberRequest, {"name": "a"}, "field 'action' is missing; it must be one of drain, join, leave."),
        (RankRequest, RANK | {"k": 0}, "field 'k' is 0; it must be an integer of 1 or more."),
    ],
)
def test_requests_without_limits_of_a_service_are_explained_too(kind, body, message):
    with pytest.raises(BadRequestError, match="^" + message.replace(".", r"\.") + "$"):
        parse(body, kind)


def test_limits_are_taken_exactly_and_events_keep_all_their_fields():
    history = [{"item": 1, "time": 2**43 - 1, "dwell": 2.5}, {"item": -(2**63), "tags": [1, 2]}]
    largest = RANK | {"candidates": [1, 2, 3], "k": 3, "history": history, "deadline_ms": 50, "request": "r" * 128}
    request = parse(largest, instance_calls(LIMITS)["rank"][0])
    assert isinstance(request, RankRequest)
    assert (request.k, request.deadline_ms, request.history) == (3, 50.0, history)
    for more in ({"candidates": [1] * 4}, {"k": 4}, {"history": [{"item": 1}] * 3}, {"deadline_ms": 50.001}):
        with pytest.raises(BadRequestError):
            parse(largest | more, instance_calls(LIMITS)["rank"][0])
    with pytest.raises(BadRequestError):
        parse(largest | {"request": "r" * 129}, instance_calls(LIMITS)["rank"][0])


def test_a_gateway_names_requests_that_have_no_name():
    kind = gateway_calls(GatewayLimits(), "ranker")["rank"][0]
    first, second = (parse({"user": 1, "candidates": [1]}, kind) for _ in range(2))
    assert len(first.request) == 32
    assert first.request != second.request
    assert b'"request"' in msgspec.json.encode(first), "instances are told the name"


def test_the_client_sends_the_fields_that_are_documented():
    sent = {
        "prefill": Client.prefill,
        "rank": Client.rank,
        "events": Client.send_events,
        "invalidate": Client.invalidate,
    }
    both = {"recommend": Client.recommend, "similar": Client.similar}
    generative = both | {"generate": Client.generate}
    for described, calls in (
        (document("An instance", instance_calls(Limits()), Schema()), sent),
        (document("A generative one", generative_calls(Limits(), beam=4, scenarios=[]), Schema()), generative),
        (gateway_document("ranker"), sent | both),
        (gateway_document("next_item"), both),
        (gateway_document("generative"), generative),
    ):
        for name, call in calls.items():
            body = described["paths"][f"/v1/{name}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            is_steered = "scenario" in body["properties"]
            steering = set() if is_steered else {"scenario", "trigger", "instruction"}  # of generative runs alone
            assert set(inspect.signature(call).parameters) - steering == set(body["properties"])
