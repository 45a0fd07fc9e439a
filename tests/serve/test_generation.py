"""Generation as a service: exact answers by every path, instructions from the store, no language model in reach."""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

import nestpipe
from nestpipe.cli import main
from nestpipe.cli.forget import forget
from nestpipe.cli.think import RunFeed
from nestpipe.client import AsyncClient, Client, ServiceError
from nestpipe.data.erase_user import forget_user
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError, PrefixError
from nestpipe.generative import llm_provider
from nestpipe.generative.allowed_pools import AllowedPools
from nestpipe.generative.instruction_store import ANY, SqliteStore, StoredInstruction
from nestpipe.generative.nearline_job import JobLedger, ledger_of
from nestpipe.generative.prompt_builder import CoVisits
from nestpipe.generative.scenarios import Scenario
from nestpipe.serve.admin import Admin
from nestpipe.serve.config import EngineConfig, Limits
from nestpipe.serve.generation_api import GenerativeInstance
from nestpipe.serve.generation_model import Steering, open_generative
from nestpipe.serve.latency_model import GenerationCosts, choose
from nestpipe.serve.open_service import open_generator
from nestpipe.serve.requests import BusyError, FailedError, LateError
from nestpipe.training.run_folder import Run
from tests.gateway.fake_instances import Served as Server
from tests.serve.openapi_requests import check_answers
from tests.serve.small_generative import MAX_LEN, NUM_ITEMS, answer, make_generator, make_ids, make_run, submit
from tests.serve.small_rankers import Clock

EXACT = 1e-5  # of log-probabilities of order one in 32 bits
USER = 11  # with more events than the model reads


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("generative"))


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    return open_generative(run, folder=tmp_path_factory.mktemp("tables"))


@pytest.fixture
def generator(run, served, tmp_path):
    return make_generator(run, tmp_path, served=served)


def instruction(served, user, *, text="red lamp", scenario=ANY, **fields):
    found = StoredInstruction(
        user=user,
        scenario=scenario,
        text=text,
        vector=np.random.default_rng(len(text)).normal(size=512).astype(np.float32),
        provenance="template/1",
        version=served.instruction_version,
        request="r",
        written_s=1000.0,
        ttl_s=5000.0,
    )
    return replace(found, **fields)


def put(tmp_path, *instructions):
    store = SqliteStore(tmp_path / "instructions.sqlite")
    store.put(instructions)
    store.close()


def same(a, b):
    return a.items == b.items and np.allclose(a.log_probabilities, b.log_probabilities, atol=EXACT, rtol=0)


# What is answered.


def test_the_answer_is_that_of_the_training_world(run, generator):
    """The same items and log-probabilities as the scorer of the checkpoint, whose rows never were in files."""
    scorer = run.predictor()
    for user in (0, 5, USER, 39):
        expected, found = scorer.recommend(user, 5), answer(generator, user)
        assert found.items == expected.items
        assert found.log_probabilities == pytest.approx(expected.scores, abs=EXACT)
        assert found.instruction.source == "default"


def test_kept_memories_answer_exactly_and_only_decode(generator, monkeypatch):
    first = answer(generator, USER)
    assert (first.path, first.num_events, first.beam) == ("full", MAX_LEN, 16)
    encoded = []
    encode = generator.versions.main.served.encode
    monkeypatch.setattr(generator.versions.main.served, "encode", lambda asked: encoded.append(asked) or encode(asked))
    second = answer(generator, USER, scenario="cart")
    assert second.path == "hit_device"
    assert same(first, answer(generator, USER))
    while generator.step():
        pass
    third = answer(generator, USER)
    assert third.path == "hit_host"
    assert same(first, third)
    assert not encoded
    alone = generator.versions.main.served
    asked = alone.prepare(generator.histories.of(USER))
    fresh = alone.generate([asked], [encode(asked)], [Steering(scenario=1)], width=16, k=[5])[0]
    assert second.items == fresh.items
    assert second.log_probabilities == pytest.approx(fresh.log_probabilities, abs=EXACT)


def test_a_changed_history_finds_no_memory_and_invalidation_forgets_it(generator):
    before = answer(generator, USER)
    generator.histories.add(
        [{"id": "e", "user": USER, "item": 3, "time": 2_000_000}], generator.versions.main.served.prepare
    )
    after = answer(generator, USER)
    assert after.path == "full"
    assert not same(before, after)
    assert generator.cache.invalidate(USER) == 1
    again = answer(generator, USER)
    assert again.path == "full"
    assert same(again, after)


def test_a_memory_of_another_history_is_refused(generator):
    served = generator.versions.main.served
    one, other = (served.prepare(generator.histories.of(user)) for user in (USER, 13))
    with pytest.raises(PrefixError, match="another user"):
        served.generate([one], [served.encode(other)], [Steering()], width=4, k=[1])
    shorter = served.shorter(one, 2)
    with pytest.raises(PrefixError, match="length"):
        served.generate([one], [served.encode(shorter)], [Steering()], width=4, k=[1])


def test_batches_of_several_requests_are_those_of_each(generator):
    asked = [(USER, {"scenario": "home"}), (3, {"trigger": 4}), (5, {}), (USER, {"trigger": 1, "k": 2}), (777, {})]
    alone = [answer(generator, user, **fields) for user, fields in asked]
    jobs = [submit(generator, user, **fields) for user, fields in asked]
    generator.step()
    for one, job in zip(alone, jobs, strict=True):
        assert same(one, job.reply.result(0))


def test_a_user_that_nobody_knows_gets_an_answer_too(generator):
    found = answer(generator, 777)
    assert (len(found.items), found.num_events) == (5, 0)


def test_the_scenario_file_decides_trigger_beam_and_pool(generator, served, monkeypatch):
    """Pools are by the number of the scenario: home may show everything, the cart even items."""
    records = [
        Scenario(name="home", trigger="given", beam=4),
        Scenario(name="cart", trigger="last", beam=99, pool="stock"),
    ]
    monkeypatch.setattr(generator, "records", {one.name: one for one in records})
    asked = {"scenario": "cart"}
    last = int(generator.histories.of(USER).items[-1])
    monkeypatch.setattr(generator, "records", {})
    by_hand = answer(generator, USER, trigger=last, **asked)
    monkeypatch.setattr(generator, "records", {one.name: one for one in records})
    by_rule = answer(generator, USER, **asked)
    assert same(by_hand, by_rule)
    assert by_rule.beam == 16  # not more than the model's
    assert answer(generator, USER, scenario="home", trigger=3, k=3).beam == 4
    with pytest.raises(DataError, match="'home' needs a trigger item"):
        answer(generator, USER, scenario="home")
    with pytest.raises(DataError, match="'cart' accepts no trigger item"):
        answer(generator, USER, scenario="cart", trigger=3)
    allowed = torch.ones(2, len(served.trie.items), dtype=torch.bool)
    allowed[1, 1::2] = False
    monkeypatch.setattr(served, "_pools", AllowedPools(served.trie, allowed))
    assert {item % 2 for item in answer(generator, USER, **asked).items} == {0}
    assert {item % 2 for item in by_rule.items} == {0, 1}
    assert answer(generator, USER, scenario="home", trigger=3, k=3).items


def test_a_history_of_the_caller_is_used(generator):
    events = [{"item": item, "time": 60 * item} for item in (3, 10, 17)]
    found = answer(generator, 1, history=generator.histories.given(1, events))
    assert found.num_events == 3
    assert not set(found.items) & {3, 10, 17}


def test_events_that_the_instruction_chooses_are_part_of_the_key(run, tmp_path):
    """With IGR another instruction may read other events: then it finds no memory, and its answer is its own."""
    settings = {"igr": "query", "queries": "last", "igr_recent": 2, "igr_related": 2, "igr_dim": 4}
    chooses = make_run(run.folder.parent, name="igr", **settings)
    served = open_generative(chooses, folder=tmp_path / "tables")
    generator = make_generator(chooses, tmp_path, served=served)
    assert int(served.model.igr.version) == int(chooses.predictor()._model.igr.version)
    expected, plain = chooses.predictor().recommend(USER, 5), answer(generator, USER)
    assert (plain.items, plain.num_events, plain.path) == (expected.items, 4, "full")
    assert plain.log_probabilities == pytest.approx(expected.scores, abs=EXACT)
    keys = {}
    for seed in range(20):
        vector = torch.from_numpy(np.random.default_rng(seed).normal(size=512).astype(np.float32))
        asked = served.prepare(generator.histories.of(USER), Steering(vector=vector))
        keys.setdefault(asked.key.digest, (vector, asked))
    assert len(keys) > 1
    (one, first), (other, second) = list(keys.values())[:2]
    found = served.generate([first], [served.encode(first)], [Steering(vector=one)], width=16, k=[5])[0]
    put(tmp_path, instruction(served, USER, vector=one.numpy()))
    assert answer(generator, USER).items == found.items
    assert answer(generator, USER).path == "hit_device"
    put(tmp_path, instruction(served, USER, vector=other.numpy(), written_s=1001.0))
    assert answer(generator, USER).path == "full"
    with pytest.raises(PrefixError, match="digest"):
        served.generate([second], [served.encode(first)], [Steering(vector=other)], width=16, k=[5])


# Instructions.


def test_an_instruction_steers_and_says_where_it_is_from(generator, served, tmp_path):
    plain = answer(generator, USER, scenario="home")
    put(tmp_path, instruction(served, USER))
    steered = answer(generator, USER, scenario="home")
    assert (steered.instruction.source, steered.instruction.written_by) == ("any", "template/1")
    assert (steered.instruction.written_s, steered.path) == (1000.0, "hit_device")
    assert not same(plain, steered)
    put(tmp_path, instruction(served, USER, scenario="home", text="oak chair"))
    own = answer(generator, USER, scenario="home")
    assert own.instruction.source == "scenario"
    assert not same(own, steered)
    assert same(steered, answer(generator, USER, scenario="cart")) is False
    assert answer(generator, 13).instruction.reason == "absent"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": "other/words"}, "version"),
        ({"ttl_s": 1.0}, "expired"),
        ({"vector": np.ones(3, np.float32)}, "width"),
    ],
)
def test_an_instruction_that_must_not_be_used_is_the_default(generator, served, tmp_path, fields, reason):
    plain = answer(generator, USER)
    put(tmp_path, instruction(served, USER, **fields))
    found = answer(generator, USER)
    assert (found.instruction.source, found.instruction.reason) == ("default", reason)
    assert same(plain, found)
    assert generator.counts["instruction", reason] == 1


def test_a_damaged_store_is_the_default_and_no_error(generator, tmp_path):
    (tmp_path / "instructions.sqlite").write_bytes(b"rubbish" * 1000)
    assert answer(generator, USER).instruction.reason == "unreadable"


def test_the_request_path_has_no_way_to_a_language_model(generator):
    """No module that serves imports a provider, by whatever way; no object of the generator is one."""
    root = Path(nestpipe.__file__).parent
    todo, seen = sorted((root / "serve").glob("*.py")), set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{one.name}" for one in node.names] + [str(node.module)]
            for name in names:
                found = root.parent.joinpath(*name.split(".")).with_suffix(".py")
                todo += [found] if name.startswith("nestpipe.") and found.exists() else []
    assert len(seen) > 60
    assert root / "generative" / "instruction_store.py" in seen
    assert root / "generative" / "llm_provider.py" not in seen
    assert root / "cli" / "think.py" not in seen
    answer(generator, USER)
    reached, frontier = {id(generator)}, [generator]
    while frontier:
        for one in gc.get_referents(frontier.pop()):
            if (id(one) not in reached and type(one).__module__.startswith("nestpipe")) or (
                id(one) not in reached and isinstance(one, dict | list | tuple)
            ):
                reached.add(id(one))
                frontier.append(one)
            assert not isinstance(one, llm_provider.TemplateProvider | llm_provider.OpenAICompatibleProvider)
    assert len(reached) > 50


# Deadlines.

SLOW = GenerationCosts(encode_ms=1.0, encode_event_ms=1.0, decode_ms=2.0, decode_beam_ms=1.0)


@pytest.mark.parametrize(
    ("slack_ms", "path", "num_events", "width"),
    [(27, "full", 8, 16), (26, "shorter", 7, 16), (20, "shorter", 1, 16), (19, "narrow", 1, 4), (8, "narrow", 1, 4)],
)
def test_the_first_path_that_fits_is_taken(slack_ms, path, num_events, width):
    found = choose(SLOW, state=None, slack_ms=slack_ms, num_events=8, beam=16, k=3, block=1)
    assert (found.path, found.num_events, found.width) == (path, num_events, width)
    assert found.cost_ms <= slack_ms


def test_nothing_that_fits_is_late_and_what_is_refused_is_forgiven():
    assert choose(SLOW, state=None, slack_ms=7.9, num_events=8, beam=16, k=3, block=1) is None
    estimates = replace(SLOW, slowness=3.0)
    for _ in range(100):
        estimates.relax()
    assert estimates.slowness < 0.5
    estimates.observe(took_ms=40.0, expected_ms=20.0)
    assert estimates.slowness == pytest.approx(2 * 3.0 * 0.98**100)


def test_degraded_answers_say_so_and_do_not_fill_the_cache(run, served, tmp_path):
    clock = Clock()
    generator = make_generator(run, tmp_path, served=served, clock=clock, estimates=SLOW)
    for slack_ms, path, num_events in ((22.5, "shorter", 3), (9.5, "narrow", 1)):
        generator.versions.main.costs = replace(SLOW)
        found = answer(generator, USER, slack_s=slack_ms / 1000, k=2)
        assert (found.path, found.num_events, found.degraded) == (path, num_events, True)
        seen = run.sequences.items[slice(*run.sequences.offsets[USER : USER + 2])]
        assert not set(found.items) & set(seen.tolist())
    assert len(generator.cache) == 0
    with pytest.raises(LateError):
        answer(generator, USER, slack_s=0.001)


def test_a_memory_makes_room_for_the_whole_search(run, served, tmp_path):
    clock = Clock()
    generator = make_generator(run, tmp_path, served=served, clock=clock, estimates=SLOW)
    answer(generator, USER)
    generator.versions.main.costs = replace(SLOW)
    found = answer(generator, USER, slack_s=0.0185)
    assert (found.path, found.num_events, found.degraded) == ("hit_device", MAX_LEN, False)


def test_a_shorter_history_is_degraded_also_if_its_memory_is_there(run, served, tmp_path):
    generator = make_generator(run, tmp_path, served=served, clock=Clock(), estimates=SLOW)
    events = generator.histories.of(USER)
    kept = [
        {"item": int(item), "time": int(ms) // 1000}
        for item, ms in zip(events.items[-3:], events.times[-3:], strict=True)
    ]
    answer(generator, USER, history=generator.histories.given(USER, kept))
    generator.versions.main.costs = replace(SLOW)
    found = answer(generator, USER, slack_s=0.0225)
    assert (found.path, found.num_events, found.degraded) == ("shorter", 3, True)


def test_nobody_is_late_because_of_who_came_after(run, served, tmp_path, monkeypatch):
    """Steps that take exactly what is expected: a batch ends where its first deadline would be missed."""
    clock = Clock()
    generator = make_generator(run, tmp_path, served=served, clock=clock, estimates=SLOW)
    encode, search = served.encode, served.generate

    def slow_encode(asked):
        clock.now += SLOW.encode(asked.num_events) / 1000
        return encode(asked)

    def slow_search(asked, *rest, width, k):
        clock.now += len(asked) * SLOW.decode(width) / 1000
        return search(asked, *rest, width=width, k=k)

    monkeypatch.setattr(served, "encode", slow_encode)
    monkeypatch.setattr(served, "generate", slow_search)
    monkeypatch.setattr(GenerationCosts, "observe", lambda *args: None)
    jobs = {user: submit(generator, user, slack_s=slack_s) for user, slack_s in ((USER, 0.030), (12, 0.2), (25, 0.2))}
    while not all(job.reply.done() for job in jobs.values()):
        generator.step()
    took_ms = {user: job.reply.result(0).times_ms["total"] for user, job in jobs.items()}
    assert took_ms[USER] <= 30
    assert took_ms[12] == took_ms[25] <= 81 + EXACT, "the others together, and none of them paid twice"
    assert all(job.reply.result(0).path == "full" for job in jobs.values())


def test_under_steady_load_memories_reach_the_host_and_nothing_piles_up(run, served, tmp_path):
    generator = make_generator(run, tmp_path, served=served, max_batch=2)
    for turn in range(30):
        submit(generator, turn % 20)
        assert generator.step()
    assert len(generator._evictable) <= 2
    assert generator.cache.host.copies >= 18


def test_without_room_in_the_cache_everything_is_computed(run, served, tmp_path):
    generator = make_generator(run, tmp_path, served=served, device_bytes=10)
    first, second = answer(generator, USER), answer(generator, USER)
    assert (first.path, second.path) == ("full", "full")
    assert same(first, second)


# Faults.


def test_one_bad_request_spoils_no_other(generator):
    jobs = [submit(generator, USER), submit(generator, 3, trigger=10**6), submit(generator, 5)]
    generator.step()
    assert jobs[0].reply.result(0).items
    assert jobs[2].reply.result(0).items
    with pytest.raises(DataError, match="item 1000000 has no semantic id"):
        jobs[1].reply.result(0)


def test_a_model_that_fails_for_some_answers_the_others(generator, monkeypatch):
    search = generator.versions.main.served.generate

    def failing(asked, *arguments, **named):
        if any(one.key.user == 3 for one in asked):
            raise RuntimeError("no")
        return search(asked, *arguments, **named)

    monkeypatch.setattr(generator.versions.main.served, "generate", failing)
    jobs = [submit(generator, USER), submit(generator, 3)]
    generator.step()
    assert jobs[0].reply.result(0).items
    with pytest.raises(FailedError):
        jobs[1].reply.result(0)
    monkeypatch.setattr(generator.versions.main.served, "encode", lambda asked: 1 / 0)
    with pytest.raises(FailedError):
        answer(generator, 21)
    assert generator.cache.device.reserved == 0


def test_too_many_and_cancelled_requests(run, served, tmp_path):
    generator = make_generator(run, tmp_path, served=served, max_queue=2)
    jobs = [submit(generator, USER), submit(generator, 3)]
    with pytest.raises(BusyError):
        submit(generator, 5)
    jobs[0].reply.cancel()
    while generator.step():
        pass
    assert jobs[1].reply.result(0).items
    assert generator.counts["path", "full"] == 1


def test_other_ids_are_refused(run, tmp_path):
    """The checkpoint says which ids it was trained with, and the folder of ids has others now."""
    make_ids(run.sequences, tmp_path / "other", seed=9)
    model = replace(run.config.model, ids=str(tmp_path / "other"))
    other = Run(run.folder, replace(run.config, model=model), run.origin)
    with pytest.raises(DataError, match="belongs to semantic ids of version"):
        open_generative(other, folder=tmp_path / "tables")


# Over HTTP, with the near-line job beside it.


@pytest.fixture(scope="module")
def service(run):
    generator = open_generator(run, run.folder / "serve" / "events.log", config=EngineConfig())
    instance = GenerativeInstance(generator, name="one", budget_ms=30_000, limits=Limits(body_bytes=5000, events=3))
    generator.start()
    admin = Admin(instance, generator, token="the token", load=lambda *_: 1 / 0)
    servers = [Server(instance.app()), Server(admin.app())]
    with httpx.Client(base_url=servers[0].url, timeout=60) as http:
        yield instance, http, servers[1].url
    for server in servers:
        server.close()
    generator.stop()


def post(service, call, body):
    return service[1].post(f"/v1/{call}", json=body)


def test_generate_over_http(service):
    found = post(service, "generate", {"user": USER, "scenario": "1", "trigger": 4, "k": 3, "deadline_ms": 30_000})
    assert found.status_code == 200, found.text
    body = found.json()
    assert len(body["items"]) == len(body["log_probabilities"]) == 3
    assert body["log_probabilities"] == sorted(body["log_probabilities"], reverse=True)
    assert (body["path"], body["degraded"], body["beam"]) == ("full", False, 16)
    assert body["instruction"]["source"] == "default"
    assert body["semantic_ids"] == service[0].generator.versions.main.served.trie.version
    assert set(body["times_ms"]) == {"queue", "encode", "instruction", "decode", "total"}
    assert post(service, "generate", {"user": USER}).json()["path"] in {"hit_device", "hit_host"}
    text = service[1].get("/metrics").text
    assert 'nestpipe_generated_total{path="full"}' in text
    spent_s = float(text.partition("nestpipe_generate_seconds_sum ")[2].split()[0])
    assert body["times_ms"]["total"] / 1e3 <= spent_s + 1e-6 < 30, "in seconds"
    assert service[1].get("/readyz").json() == {"ready": True}
    state = httpx.get(f"{service[2]}/state", headers={"authorization": "Bearer the token"}).json()
    assert state["scenarios"] == ["0", "1"]
    assert httpx.get(f"{service[2]}/state").status_code == 401


def test_the_clients_generate(service):
    url = str(service[1].base_url)
    with Client(url, timeout_s=60) as client:
        found = client.generate(USER, 3, scenario="1", trigger=4, deadline_ms=30_000)
        with pytest.raises(ServiceError, match="there is no scenario 'attic'"):
            client.generate(USER, scenario="attic")

    async def ask():
        async with AsyncClient(url, timeout_s=60) as client:
            return await client.generate(USER, 3, scenario="1", trigger=4, deadline_ms=30_000)

    assert asyncio.run(ask()).items == found.items
    assert (len(found.items), found.instruction.source, found.beam) == (3, "default", 16)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "bad_user"),
        ({"user": 1, "k": 17}, 400, "bad_k"),
        ({"user": 1, "scenario": "attic"}, 400, "bad_scenario"),
        ({"user": 1, "trigger": "x"}, 400, "bad_data"),
        ({"user": 1, "trigger": 1.5}, 400, "bad_trigger"),
        ({"user": 1, "trigger": NUM_ITEMS}, 400, "bad_data"),
        ({"user": 1, "history": [{"item": "x", "time": 1}]}, 400, "bad_data"),
        ({"user": 1, "prompt": "ignore all"}, 400, "unknown_field"),
        ({"user": 1, "deadline_ms": 0.0001}, 503, "deadline"),
        ({"user": 1, "history": [{"item": 1, "time": 1}] * 500}, 413, "too_large"),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_refusals(service, body, status, code):
    found = post(service, "generate", body)
    assert (found.status_code, found.json()["error"]["code"]) == (status, code)


def test_thinking_beside_serving_and_forgetting(service, run, capsys):
    """`nestpipe think` on the run: instructions appear, new events make new ones, and a forgotten user leaves none."""
    folder = run.folder / "serve"
    assert main(["think", str(run.folder), "--think.min-interval-s", "0"]) == 0
    assert "40 written" in capsys.readouterr().err
    first = post(service, "generate", {"user": USER, "scenario": "0"}).json()
    assert (first["instruction"]["source"], first["instruction"]["written_by"]) == ("any", "template/1")
    assert main(["think", str(run.folder), "--think.min-interval-s", "0"]) == 0
    assert "0 written · 0 users unchanged · 0 pending" in capsys.readouterr().err
    events = [{"id": str(n), "user": user, "item": 7, "time": 2_000_000} for n, user in enumerate((USER, 555))]
    assert post(service, "events", {"events": events}).json()["accepted"] == 2
    unknown = {
        **events[0],
        "id": "x",
        "item": 99,
        "time": 2_000_001,
    }  # it has no text, and the model has no semantic id for it
    assert post(service, "events", {"events": [unknown]}).json()["accepted"] == 1
    assert main(["think", str(run.folder), "--think.min-interval-s", "0"]) == 0
    assert "2 written" in capsys.readouterr().err
    store = SqliteStore(folder / "instructions.sqlite")
    assert "round table number7" in store.get(USER, ANY).text
    assert "looked at item 99" in store.get(USER, ANY).text
    assert store.get(555, ANY).text.startswith("interested in")
    second = post(service, "generate", {"user": USER, "scenario": "0"}).json()
    assert second["instruction"]["written_s"] > first["instruction"]["written_s"]
    ledger = JobLedger(ledger_of(folder / "instructions.sqlite"))
    ledger.enqueue([(555, 1)], ledger.cursor)
    forget([run.folder], 555)
    assert store.get(555, ANY) is None
    assert ledger.num_pending == 0
    ledger.close()
    store.close()
    assert main(["think", str(run.folder), "--think.min-interval-s", "0"]) == 0
    assert "0 written" in capsys.readouterr().err
    assert len(Sequences.open(run.sequences.path).users) == 40


def test_following_goes_on_until_it_is_interrupted(run, tmp_path, monkeypatch, capsys):
    """Events that come between two looks are taken in by the second; a window that is not over defers them."""
    run_folder, naps = run.folder, []
    generator = open_generator(run, run_folder / "serve" / "events.log", config=EngineConfig())

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt
        event = {"id": f"late{len(naps)}", "user": 600, "item": len(naps), "time": 2_000_000 + len(naps)}
        generator.histories.add([event], generator.versions.main.served.prepare)

    monkeypatch.setattr("nestpipe.cli.think.time.sleep", nap)
    store = tmp_path / "store.sqlite"
    command = ["think", str(run_folder), "--store", str(store), "--follow", "--every-s", "0.5"]
    assert main(command) == 130
    assert naps == [0.5] * 3
    said = capsys.readouterr().err
    assert "41 written" in said
    assert "1 pending" in said


def test_who_is_forgotten_leaves_what_following_knows_of_everybody(run, tmp_path, monkeypatch):
    folder, naps, read = tmp_path / "log", [], []
    shutil.copytree(run.sequences.path, folder)

    class Watched(CoVisits):
        def __init__(self, sequences):
            read.append(len(sequences.users))
            super().__init__(sequences)

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt
        if len(naps) == 1:
            forget_user(Sequences.open(folder), USER, announce=lambda digest: None)

    monkeypatch.setattr("nestpipe.cli.think.CoVisits", Watched)
    monkeypatch.setattr("nestpipe.cli.think.time.sleep", nap)
    command = ["think", str(folder), "--ids", run.config.model.ids, "--store", str(tmp_path / "s.sqlite"), "--follow"]
    assert main([*command, "--quiet"]) == 130
    assert read == [40, 39], "read again when the folder is another, and only then"


def test_the_mark_of_a_run_names_no_event(run, generator, tmp_path):
    """It outlives the events, also those of users that are forgotten."""
    generator.histories.add(
        [{"id": "a wish", "user": 7, "item": 3, "time": 2_000_000}], generator.versions.main.served.prepare
    )
    feed = RunFeed(run, tmp_path / "events.log")
    _, cursor = feed.changed_users("")
    assert "a wish" not in cursor
    assert feed.changed_users(cursor)[0] == []
    generator.histories.add(
        [{"id": "more", "user": 8, "item": 3, "time": 2_000_000}], generator.versions.main.served.prepare
    )
    assert feed.changed_users(cursor)[0] == [8]


def test_thinking_about_a_folder_needs_ids_and_a_store(run, tmp_path, capsys):
    assert main(["think", str(run.sequences.path)]) == 2
    assert "name --store FILE and --ids FOLDER" in capsys.readouterr().err
    ids, store = run.config.model.ids, tmp_path / "made" / "store.sqlite"
    command = ["think", str(run.sequences.path), "--ids", ids, "--store", str(store), "--think.scenarios", "0", "1"]
    assert main(command) == 0
    assert "80 written" in capsys.readouterr().err
    kept = SqliteStore(store)
    assert kept.get(3, "1").text.startswith("interested in")
    kept.close()
    with pytest.raises(SystemExit):
        main(["think", "--help"])
    assert "Example: nestpipe think" in " ".join(capsys.readouterr().out.split())


def test_many_threads_get_their_own_answers(service):
    expected = {user: post(service, "generate", {"user": user}).json()["items"] for user in range(8)}
    wrong = []

    def ask(seed):
        for step in range(6):
            user = (seed * 3 + step) % 8
            found = post(service, "generate", {"user": user}).json()
            wrong.extend([] if found.get("items") == expected[user] else [(user, json.dumps(found))])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_every_answer_is_as_documented(generator, scale):
    instance = GenerativeInstance(generator, name="one", budget_ms=60_000, limits=Limits(history=40, events=20))
    generator.start()
    server = Server(instance.app())
    try:
        with Client(server.url, timeout_s=60) as client:
            before = client.generate(USER, 5)
            check_answers(server.url, num_operations=15, num_examples=scale(10, 500))
            client.invalidate(USER)
            assert client.generate(USER, 5).log_probabilities == pytest.approx(before.log_probabilities, abs=EXACT)
    finally:
        server.close()
        generator.stop()
