"""Instructions in requests: as steering as stored ones, refused where they would steer nothing, and said in the answer."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch

from nestpipe.cli import main
from nestpipe.client import Client, ServiceError
from nestpipe.gateway.forwarding import Forwarding
from nestpipe.gateway.gateway import Gateway
from nestpipe.gateway.instance_client import InstanceClient, make_client
from nestpipe.gateway.router import InstanceAddress, Members
from nestpipe.generative.instruction_store import ANY, SqliteStore, StoredInstruction
from nestpipe.generative.text_encoder import hashed_words
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.generation_api import GenerativeInstance
from nestpipe.serve.open_service import generative_version, open_generator
from nestpipe.serve.operator_page import OperatorPage
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_instruction import UNTRAINED, RequestTexts
from nestpipe.serve.schemas import RecommendRequest
from tests.gateway.fake_instances import Served
from tests.serve.small_generative import make_run
from tests.serve.test_operator_page import wait_for

USER, TEXT = 11, "a round table for the kitchen"
EXACT = 1e-5  # of log-probabilities of order one in 32 bits


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("instructed"))


@pytest.fixture(scope="module")
def generator(run):
    generator = open_generator(run, run.folder / "serve" / "events.log", config=EngineConfig())
    generator.start()
    yield generator
    generator.stop()


@pytest.fixture(scope="module")
def url(generator):
    server = Served(GenerativeInstance(generator, name="one", budget_ms=30_000).app())
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def client(url):
    with Client(url, timeout_s=60) as client:
        yield client


@pytest.fixture
def gateway(url, generator):
    """A gateway in front of the instance, with the operator's page."""
    remote = InstanceClient(Members([InstanceAddress(name="one", url=url)]), make_client())
    probe = RecommendRequest(user=USER, request="probe")
    gateway = Gateway(Forwarding(remote, budget_ms=30_000), kind="generative", probe=lambda: probe, shared_log=True)
    ids = ServiceIds(lambda: generator.histories.sequences)
    page = OperatorPage(generator.histories, ids, gateway.metric_texts)
    server = Served(gateway.app(*page.routes()))
    yield server.url
    server.close()


def put(run, version, text, scenario=ANY):
    store = SqliteStore(run.folder / "serve" / "instructions.sqlite")
    one = StoredInstruction(
        user=USER,
        scenario=scenario,
        text=text,
        vector=hashed_words([text])[0].numpy(),
        provenance="model/tiny",
        version=version,
        request="r",
        written_s=4e9,
        ttl_s=100.0,
    )
    store.put([one])
    return store


def test_a_text_steers_like_a_stored_one(client, generator, run):
    plain = client.generate(USER, 5, scenario="1")
    given = client.generate(USER, 5, scenario="1", instruction=f"  {TEXT} ")
    version = generator.versions.main.served.instruction_version
    store = put(run, version, TEXT)
    try:
        stored = client.generate(USER, 5, scenario="1")
        other = client.generate(USER, 5, scenario="1", instruction="wool carpet")
        recommended = client.recommend(USER, 5, scenario="1")
    finally:
        store.forget(USER)
        store.close()
    assert given.items == stored.items != plain.items or given.log_probabilities != plain.log_probabilities
    np.testing.assert_allclose(given.log_probabilities, stored.log_probabilities, atol=EXACT, rtol=0)
    assert not np.allclose(plain.log_probabilities, given.log_probabilities, atol=EXACT, rtol=0)
    assert not np.allclose(other.log_probabilities, given.log_probabilities, atol=EXACT, rtol=0)
    said = [
        (one.instruction.source, one.instruction.kind, one.instruction.text) for one in (plain, given, stored, other)
    ]
    assert said == [
        ("default", "none", ""),
        ("request", "request", TEXT),
        ("any", "model", TEXT),
        ("request", "request", "wool carpet"),
    ]
    assert given.instruction.version == stored.instruction.version == version
    assert recommended.instruction == stored.instruction


def test_recommendations_carry_all_that_steers(client):
    steering = {"scenario": "1", "trigger": 4, "instruction": TEXT}
    generated = client.generate(USER, 5, **steering)
    recommended = client.recommend(USER, 5, **steering, explain=True, deadline_ms=30_000)
    assert recommended.items == generated.items
    np.testing.assert_allclose(recommended.scores, generated.log_probabilities, atol=EXACT, rtol=0)
    assert recommended.instruction == generated.instruction
    assert len(recommended.because) == 5
    assert client.recommend(USER, 5, scenario="1").scores != recommended.scores
    assert client.recommend(999, 5, instruction=TEXT).instruction is None, "popular items are not steered"


def test_the_command_recommends_like_the_service(client, run, capsys):
    steering = {"scenario": "1", "trigger": 4, "instruction": TEXT}
    flags = [word for name, value in steering.items() for word in (f"--{name}", str(value))]
    assert main(["recommend", str(run.folder), "--user", str(USER), "5", "--k", "5", "--json", *flags]) == 0
    for user, line in zip((USER, 5), capsys.readouterr().out.splitlines(), strict=True):
        found, generated = json.loads(line), client.generate(user, 5, **steering)
        assert found["items"] == generated.items
        np.testing.assert_allclose(found["scores"], generated.log_probabilities, atol=EXACT, rtol=0)
    for wrong, message in [
        (["--scenario", "attic"], "there is no scenario 'attic'"),
        (["--trigger", "999"], "has no item '999'"),
    ]:
        assert main(["recommend", str(run.folder), "--user", "5", *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_gateway_passes_on_what_steers_and_what_steered(client, gateway):
    steering = {"scenario": "1", "trigger": 4, "instruction": TEXT}
    with Client(gateway, timeout_s=60) as fleet:
        for call in ("generate", "recommend"):
            found, expected = (getattr(one, call)(USER, 5, **steering) for one in (fleet, client))
            assert (found.items, found.instruction) == (expected.items, expected.instruction)
        with pytest.raises(ServiceError, match="printable text"):
            fleet.generate(USER, instruction="  ")


def test_the_page_takes_an_instruction_and_shows_who_wrote_it(client, gateway, driver):
    def get(script):
        return driver.execute_script(f"return {script}")

    driver.get(gateway)
    wait_for(lambda: get("!document.getElementById('result').hidden"))
    assert get("document.getElementById('provenance').textContent") == "none · absent"
    assert get("getComputedStyle(document.querySelector('.steering')).display") == "grid"
    fill = "document.getElementById(arguments[0]).value = arguments[1]"
    for name, value in (("user", str(USER)), ("scenario", "1"), ("instruction", TEXT)):
        driver.execute_script(fill, name, value)
    driver.execute_script("document.getElementById('ask').requestSubmit()")
    wait_for(lambda: get("document.getElementById('text').textContent") == TEXT)
    assert get("document.getElementById('provenance').textContent").startswith("request · ")
    shown = get(
        "[...document.querySelectorAll('#items tbody tr')].map(row => Number(row.cells[1].querySelector('button').textContent))"
    )
    assert shown == client.recommend(USER, 10, scenario="1", instruction=TEXT).items


@pytest.mark.parametrize("text", ["   ", "bell \x07"])
def test_what_is_no_text_is_refused(client, text):
    with pytest.raises(ServiceError, match="printable text") as error:
        client.generate(USER, instruction=text)
    assert (error.value.status, error.value.code) == (400, "bad_instruction")
    with pytest.raises(ServiceError, match="instruction"):
        client.generate(USER, instruction="x" * 501)


def test_an_untrained_run_says_so_at_the_start_and_in_requests(run, generator, tmp_path, caplog, capsys):
    untrained = make_run(run.folder.parent, name="untrained", instructions="")
    with caplog.at_level(logging.WARNING, logger="nestpipe.serve"):
        version = generative_version(untrained, generator.histories, tmp_path)
        assert not caplog.records, "without a store there is nothing to warn of"
        (tmp_path / "instructions.sqlite").touch()
        version = generative_version(untrained, generator.histories, tmp_path)
    assert "instructions.sqlite is not used: " in caplog.text
    assert "nestpipe train scenarios --data.path" in caplog.text
    with pytest.raises(BadRequestError, match="nestpipe think DATA --for-training") as error:
        version.texts.of(TEXT)
    assert error.value.code == "bad_instruction"
    assert main(["recommend", str(untrained.folder), "--user", "5", "--instruction", TEXT]) == 2
    assert "never saw an instruction in training" in capsys.readouterr().err


def test_they_can_be_switched_off(run, generator, tmp_path):
    off = generative_version(run, generator.histories, tmp_path, request_instructions=False)
    with pytest.raises(BadRequestError, match="switched off here"):
        off.texts.of(TEXT)
    assert off.instructions is not None, "stored ones are read"


def test_texts_without_an_encoder_or_of_another_width_are_refused():
    for encoder, message in [
        ("own-vectors", "an encoder that nestpipe does not have"),
        ("hashed-words-512", "width 512"),
    ]:
        with pytest.raises(BadRequestError, match=message):
            RequestTexts.open(encoder, dim=24).of(TEXT)
    texts = RequestTexts.open("hashed-words-512", dim=512)
    assert torch.equal(texts.of(f" {TEXT} ").vector, hashed_words([TEXT])[0])
    with pytest.raises(BadRequestError, match="never saw an instruction"):
        RequestTexts(None, refusal=UNTRAINED).of(TEXT)
