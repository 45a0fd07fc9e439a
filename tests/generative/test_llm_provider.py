"""Who writes instructions: the template by its rules, and a model behind a real server that fails in every way."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import jsonschema
import pytest

from nestpipe.cli.think_progress import model_state
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative import llm_provider
from nestpipe.generative.fitted_size import FittedSize
from nestpipe.generative.instruction_template import template_problem
from nestpipe.generative.llm_provider import EndpointConfig, OpenAICompatibleProvider, TemplateProvider
from nestpipe.generative.prompt_builder import Action, InstructionRequest
from tests.generative.llm_endpoint import Refusal, answer_with, drip, honest, serve_endpoint, shoppers_of

TEMPLATE = TemplateProvider()


def actions(*texts):
    return tuple(Action(text=text) for text in texts)


def text_of(*texts, **fields):
    return TEMPLATE.text(InstructionRequest(user=1, actions=actions(*texts), **fields))


def test_late_and_strong_actions_weigh_more():
    assert text_of("blue socks", "warm coat").startswith("interested in coat, warm, blue, socks")
    ordered = (Action(text="blue socks", level=2, weight=2.0), Action(text="warm coat"))
    text = TEMPLATE.text(InstructionRequest(user=1, actions=ordered))
    assert text.startswith("interested in blue, socks, coat, warm")


def test_somebody_compares_until_one_is_taken():
    assert "compares red lamp with green lamp" in text_of("green lamp", "chair", "red lamp")
    bought = (*actions("green lamp", "red lamp"), Action(text="lamp shade", level=2))
    assert "compares" not in TEMPLATE.text(InstructionRequest(user=1, actions=bought))
    assert "compares" not in text_of("green lamp", *["chair"] * 6, "red lamp")


def test_complements_and_season_are_named():
    said = text_of("phone", trigger="phone", complements=("case", "cable"), season="winter")
    assert said.endswith("case, cable may go with phone; season winter")
    assert text_of() == "nothing is known yet"


def test_the_template_says_the_same_for_the_same_request():
    request = InstructionRequest(user=1, actions=actions("a b", "c d", "red lamp", "big lamp"), season="spring")
    assert TEMPLATE.generate([request]) == TEMPLATE.generate([replace(request, user=2)])
    assert request.digest == replace(request, user=2).digest
    assert request.digest != replace(request, scenario="1").digest


REQUESTS = [InstructionRequest(user=1000 + n, actions=actions(f"lamp {n}", "chair")) for n in range(5)]


@pytest.fixture(scope="module")
def endpoint():
    with serve_endpoint() as found:
        yield found


@pytest.fixture
def ask(endpoint, monkeypatch):
    """A provider with small limits; no pauses between attempts."""
    monkeypatch.setattr(llm_provider, "_BACKOFF_S", 0.001)
    endpoint.calls.clear()
    endpoint.headers.clear()
    endpoint.behave, endpoint.most_under_way = honest, 0

    def of(behave=honest, **settings):
        endpoint.behave = behave
        base = EndpointConfig(
            url=endpoint.url, model="m", timeout_s=30.0, retries=1, requests_per_call=2, max_bytes=5000
        )
        return OpenAICompatibleProvider(replace(base, **settings), api_key="k")

    return of


def is_template(results):
    return results == TEMPLATE.generate(REQUESTS)


def test_texts_of_the_model_come_home_in_order(ask, endpoint):
    provider = ask()
    results = provider.generate(REQUESTS)
    assert [one.text for one in results] == [f"wants lamp {n}" for n in range(5)]
    assert {one.provenance for one in results} == {"model/m"} == {provider.provenance}
    assert +provider.counts == {"accepted": 5}
    body = endpoint.calls[0]
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["results"]
    assert endpoint.headers[0]["authorization"] == "Bearer k"


def test_no_user_leaves_the_process(ask, endpoint):
    ask().generate(REQUESTS)
    assert "100" not in json.dumps([call["messages"] for call in endpoint.calls])


def test_calls_at_a_time_are_bounded(ask, endpoint):
    def slow(body):
        time.sleep(0.03)
        return honest(body)

    ask(slow, concurrency=2, requests_per_call=1).generate(REQUESTS)
    assert (len(endpoint.calls), endpoint.most_under_way) == (5, 2)


WRONG = {
    "invalid_json": lambda body: answer_with("{results: wrong"),
    "no json at all": lambda body: b"<html>",
    "deep": lambda body: answer_with("[" * 2000),
    "wrong_schema": lambda body: answer_with('{"texts": []}'),
    "null": lambda body: b'{"choices": null}',
    "no choices": lambda body: b'{"choices": []}',
    "a list": lambda body: answer_with("[1, 2]"),
    "oversize": lambda body: b"x" * 6000,
    "status_400": lambda body: 400,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_counted_replaced_and_not_asked_for_again(ask, endpoint, name):
    provider = ask(WRONG[name])
    assert is_template(provider.generate(REQUESTS))
    assert len(endpoint.calls) == 3
    assert provider.counts.pop("replaced") == 5
    assert provider.counts.pop("accepted") == 0
    (reason, count), *_ = provider.counts.items()
    assert count == 3
    if name in {"invalid_json", "wrong_schema", "oversize", "status_400"}:
        assert reason == name


def test_an_endless_answer_ends_at_the_size_limit(ask):
    def endless(body):
        while True:
            yield b" " * 1000

    assert is_template(ask(endless).generate(REQUESTS))


@pytest.mark.parametrize("fault", ["status_500", "status_429", "silent", "slow stream"])
def test_no_answer_is_tried_again_so_often_and_then_replaced(ask, endpoint, fault):
    faults = {"silent": endpoint.silent, "slow stream": lambda body: drip(answer_with(" " * 1000), 0.1)}
    status = 0 if fault in faults else int(fault[-3:])
    provider = ask(faults.get(fault, lambda body: status), max_failures=100, timeout_s=30.0 if status else 0.2)
    began = time.monotonic()
    assert is_template(provider.generate(REQUESTS))
    assert time.monotonic() - began < 20  # both would take a minute
    assert provider.counts[fault if status else "timeout"] == 6
    assert len(endpoint.calls) == 6 or not status


def test_a_second_attempt_may_succeed(ask, endpoint):
    provider = ask(lambda body: 503 if len(endpoint.calls) % 2 else honest(body), concurrency=1)
    assert {one.provenance for one in provider.generate(REQUESTS)} == {"model/m"}
    assert +provider.counts == {"accepted": 5, "status_503": 3}


def test_an_endpoint_that_is_not_there_is_left_alone_after_a_while(ask, endpoint):
    now = [0.0]
    provider = ask(lambda body: 500, concurrency=1, retries=0, max_failures=2, requests_per_call=1)
    provider._clock = lambda: now[0]
    assert is_template(provider.generate(REQUESTS))
    assert len(endpoint.calls) == 2
    assert provider.counts["circuit_open"] == 3
    now[0], endpoint.behave = 60.0, honest
    assert not is_template(provider.generate(REQUESTS))
    gone = ask(url="http://127.0.0.1:9", retries=0)
    assert is_template(gone.generate(REQUESTS))
    assert gone.counts["unreachable"] == 3


def test_fewer_results_than_requests_replace_only_what_is_missing(ask):
    provider = ask(lambda body: honest(body)[:1], requests_per_call=5)
    results = provider.generate(REQUESTS)
    assert [one.provenance for one in results] == ["model/m", *["template/1"] * 4]
    assert results[1:] == TEMPLATE.generate(REQUESTS)[1:]
    assert provider.counts["missing"] == 4


@pytest.mark.parametrize(
    "result",
    [
        {"id": 1, "text": ""},
        {"id": 1, "text": "x" * 301},
        {"id": 1, "text": "bell \x07"},
        {"id": 1, "text": "half a pair \ud800"},
        {"id": 1, "text": 5},
        {"id": True, "text": "a flag"},
        {"id": 7, "text": "nobody"},
        {"id": 0, "text": "twice"},
        "words",
    ],
    ids=str,
)
def test_a_bad_text_is_not_taken_and_its_neighbours_are(ask, result):
    provider = ask(lambda body: [honest(body)[0], result, *honest(body)[2:]], requests_per_call=5)
    results = provider.generate(REQUESTS)
    assert results[1] == TEMPLATE.generate(REQUESTS)[1]
    assert [one.provenance for one in results[2:]] == ["model/m"] * 3
    is_twice = isinstance(result, dict) and result["id"] == 0 and type(result["id"]) is int
    assert provider.counts["replaced"] == (2 if is_twice else 1)
    assert all(one.text.isprintable() for one in results)


def test_the_schema_is_bounded_and_legal(ask, endpoint):
    ask(requests_per_call=3).generate(REQUESTS)
    schemas = [call["response_format"]["json_schema"]["schema"] for call in endpoint.calls]  # in any order
    (schema,) = [one for one in schemas if one["properties"]["results"]["minItems"] == 3]
    jsonschema.Draft202012Validator.check_schema(schema)
    answer = {"results": [{"id": place, "text": "x" * 300} for place in range(3)]}
    jsonschema.validate(answer, schema)
    for wrong in (answer["results"][:2], [*answer["results"], {"id": 3, "text": "x"}], answer["results"][::-1]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"results": wrong}, schema)
    for text in ("", "x" * 301):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"results": [*answer["results"][:2], {"id": 2, "text": text}]}, schema)


def test_an_endpoint_that_refuses_the_bounds_gets_a_plain_schema(ask, endpoint):
    def old(body):
        schema = body["response_format"]["json_schema"]["schema"]["properties"]["results"]
        return (
            Refusal(400, b'{"error": "Invalid schema: prefixItems is not permitted"}')
            if "prefixItems" in schema
            else honest(body)
        )

    provider = ask(old, concurrency=2)
    assert {one.provenance for one in provider.generate(REQUESTS)} == {"model/m"}
    assert provider.counts["schema_refused"] in {1, 2}
    assert provider.counts["replaced"] == 0


def test_a_cut_answer_is_counted_as_such(ask):
    def cut(body):
        return json.dumps({"choices": [{"finish_reason": "length", "message": {"content": '{"results": ['}}]}).encode()

    provider = ask(cut)
    assert is_template(provider.generate(REQUESTS))
    assert provider.counts["truncated"] == 3


def test_waiting_for_a_model_that_comes_back(ask, endpoint, monkeypatch, caplog):
    """Failures beyond every bound of the default, then bad texts, then good ones: no template."""
    monkeypatch.setattr(llm_provider, "_LONGEST_WAIT_S", 0.001)

    def waking(body):
        if len(endpoint.calls) < 12:
            return 503
        return honest(body) if len(endpoint.calls) > 15 else answer_with("{results: wrong")

    provider = ask(waking, wait=True, max_failures=2, retries=2, concurrency=1, requests_per_call=5)
    assert {one.provenance for one in provider.generate(REQUESTS)} == {"model/m"}
    assert provider.counts["status_503"] == 11
    assert caplog.text.count("does not answer (status_503); waiting for it") == 1
    assert provider.counts["invalid_json"] == 4
    assert [len(shoppers_of(call)) for call in endpoint.calls] == [5] * 12 + [1] * 8
    assert endpoint.calls[-1]["temperature"] > 0 == endpoint.calls[0]["temperature"]


def test_waiting_ends_where_it_would_not_help(ask):
    provider = ask(lambda body: Refusal(401, b'{"error": "no such key"}'), wait=True)
    with pytest.raises(DataError, match=r"refuses a call with status 401: .*no such key.*--api-key-file"):
        provider.generate(REQUESTS)
    hopeless = ask(lambda body: answer_with("never"), wait=True, retries=1)
    assert is_template(hopeless.generate(REQUESTS))
    assert hopeless.counts["replaced"] == 5


def test_a_slow_model_that_is_waited_for_gets_time(ask, endpoint):
    def slow(body):
        time.sleep(0.25)
        return honest(body)

    provider = ask(slow, wait=True, timeout_s=0.05, concurrency=1, requests_per_call=5)
    assert {one.provenance for one in provider.generate(REQUESTS)} == {"model/m"}
    assert provider.counts["timeout"] >= 2


def test_calls_grow_with_a_fast_model(ask, endpoint):
    many = [replace(REQUESTS[0], user=user) for user in range(40)]
    provider = ask(requests_per_call=0, concurrency=1)
    provider.generate(many)
    assert [len(shoppers_of(call)) for call in endpoint.calls] == [1, 2, 4, 8, 8, 8, 8, 1]


def test_sizes_follow_the_speed():
    size = FittedSize(target_s=10.0, most=64, first=8)
    size.add(8, 0.01)
    assert size.value == 16
    size.add(16, 64.0)  # 4 s each, 2 s on average with before
    assert size.value == 4
    size.halve()
    assert size.value == 2
    size.add(2, 100.0)
    assert size.value == 1
    assert FittedSize(target_s=1.0, most=8, least=8).value == 8


def test_a_prompt_has_the_latest_actions_and_nothing_empty(ask, endpoint):
    long = InstructionRequest(user=7, actions=actions(*(f"lamp {n}" for n in range(60))))
    strong = replace(long, actions=(*long.actions, Action(text="chair", level=2, weight=2.0)), scenario="cart")
    ask(max_actions=3, requests_per_call=2).generate([long, strong])
    first, second = shoppers_of(endpoint.calls[0])
    assert first == {"id": 0, "actions": [{"text": f"lamp {n}"} for n in (57, 58, 59)]}
    assert second["scenario"] == "cart"
    assert second["actions"][-1] == {"text": "chair", "level": 2, "weight": 2.0}


def test_the_cost_is_counted(ask):
    def counted(body):
        answer = json.loads(answer_with(json.dumps({"results": honest(body)})))
        return json.dumps({**answer, "usage": {"prompt_tokens": 100, "completion_tokens": 20}}).encode()

    provider = ask(counted)
    provider.generate(REQUESTS)
    used = provider.usage
    assert (used.texts, used.prompt_tokens, used.completion_tokens) == (5, 300, 60)
    assert used.texts_per_s == pytest.approx(5 / used.seconds)
    assert "5" in model_state(provider)[0]
    assert "300 + 60 tokens" in model_state(provider)[1]


def test_a_scenario_may_have_a_template(ask):
    own = TemplateProvider({"cart": "what goes with {trigger}; {complements}; season {season}"})
    request = InstructionRequest(user=1, scenario="cart", trigger="phone", season="winter", actions=actions("phone"))
    assert own.text(request) == "what goes with phone; season winter"
    assert own.text(replace(request, scenario="home")) == TEMPLATE.text(request)
    assert own.text(replace(request, trigger="", season="")) == "nothing is known yet"
    assert own.provenance.startswith("template/1+")
    assert own.provenance != TemplateProvider({"cart": "other"}).provenance
    assert template_problem("{trigger} and {size}") == (
        "has the field {size}; there are {interests}, {compared}, {trigger}, {complements}, {season}, {scenario}"
    )
    assert "is no template" in template_problem("{trigger")
    assert template_problem("for {season}") is None


def test_json_inside_of_a_text_is_cut_off(ask):
    texts = ["face cream 15}, {", "  a lamp:  warm,\n", "}", "size [M], red"]
    provider = ask(lambda body: [{"id": place, "text": text} for place, text in enumerate(texts)], requests_per_call=5)
    found = provider.generate(REQUESTS[:4])
    assert [one.text for one in found] == ["face cream 15", "a lamp: warm", TEMPLATE.text(REQUESTS[2]), "size [M], red"]
    assert provider.counts["bad_text"] == 1


def test_an_endpoint_needs_a_place_and_a_model():
    with pytest.raises(ConfigError, match=r"url is 'ftp://x'.*model is not given"):
        OpenAICompatibleProvider(EndpointConfig(url="ftp://x"))
