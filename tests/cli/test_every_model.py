"""docs/get-started/every-model.md as a new user follows it: one log, a run of every kind, and all of them answer in its ids.

The commands of the page are run here instead of in test_docs.py, because the services need runs that were trained once.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import polars as pl
import pytest

import nestpipe
from nestpipe.cli import main
from nestpipe.client import Client, ServiceError
from tests.test_docs import ROOT, RUN_ELSEWHERE, blocks_of
from tests.warm_program import warm_program

PAGE = ROOT / "docs" / "get-started" / "every-model.md"
RUNS = ("run", "hstu", "ranker", "dcn", "generative")
USERS = ("käufer 0", "käufer 7", "nobody/ß")


def commands(block) -> list[list[str]]:
    """The words of each command of a block."""
    return [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The page's folder after its commands; it is the working folder."""
    folder = tmp_path_factory.mktemp("every-model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks_of(PAGE.read_text()):
            if block.needs is None and block.language == "python":
                exec(compile(block.text, str(PAGE), "exec"), {})
            elif block.needs is None:
                for words in commands(block):
                    assert main(words[1:]) == 0, words
        yield folder / "shop"


@pytest.fixture(scope="module")
def served(shop, tmp_path_factory):
    """Starts the services that the page starts; the address of each run's."""
    lines = [words for block in blocks_of(PAGE.read_text()) for words in commands(block) if words[1:2] == ["serve"]]
    assert [Path(words[2]).name for words in lines] == list(RUNS[1:])
    patient = ["--stages.retrieval-ms", "60000", "--stages.rank-ms", "60000", "--trigger.budget-ms", "60000"]
    with warm_program(tmp_path_factory.mktemp("warm")) as programs:
        processes = {}
        for words in lines:
            own = [*words[1 : words.index("--port")], "--port", "0", "--admin-port", "0", *patient]
            command = [str(programs / "nestpipe"), *own]
            processes[Path(words[2]).name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield {name: address_of(process) for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.send_signal(signal.SIGINT)
            codes = {name: process.wait(timeout=60) for name, process in processes.items()}
            for process in processes.values():
                process.stdout.close()
    assert not any(codes.values()), codes


def address_of(process) -> str:
    """What a service prints when it is ready."""
    for line in process.stdout:
        if found := re.match(r"(?:serving|gateway with) .* on (http://[^\s,;]+)", line):
            return found[1]
    raise AssertionError("the service ended before it was ready")


def last_time(user: str) -> int | None:
    """Seconds of the user's last event, at which commands ask."""
    own = nestpipe.load("shop/run").run.sequences
    number = own.vocabulary("user").number_of(user)
    if number is None:
        return None
    return int(own.times[own.offsets[int(np.searchsorted(own.users, number)) + 1] - 1] // 1000)


def test_the_page_is_left_to_this_test():
    assert {PAGE} == RUN_ELSEWHERE


@pytest.mark.parametrize("name", RUNS)
def test_python_and_commands_answer_in_own_ids(shop, name, capsys, tmp_path):
    run = nestpipe.load(f"shop/{name}")
    users, items = set(run.users), set(run.items)
    assert "käufer 7" in users
    assert items == {f"p{number}" for number in range(24)}
    wanted = run.recommend(list(USERS), k=3)
    assert wanted["user"].unique(maintain_order=True).to_list() == list(USERS)
    assert set(wanted["item"]) <= items
    assert wanted.filter(pl.col("user") == USERS[-1])["path"].unique().to_list() == ["popular"]
    assert main(["recommend", f"shop/{name}", "--user", *USERS, "--k", "3", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item for one in said for item in one["items"]] == wanted["item"].to_list()
    alike = run.similar("p7", k=3)["item"].to_list()
    assert main(["similar", f"shop/{name}", "--item", "p7", "--k", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == alike
    copy = run.save(tmp_path / "copy")
    assert copy.recommend(list(USERS), k=3).equals(wanted)
    assert copy.evaluate().to_json() == run.evaluate().to_json()


@pytest.mark.parametrize("name", RUNS[1:])
def test_http_and_client_answer_what_offline_scoring_does(shop, served, name):
    offline, url = nestpipe.load(f"shop/{name}"), served[name]
    with Client(url, timeout_s=60) as client:
        deadline = time.monotonic() + 60
        while not client.is_ready():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for user in USERS:
            wanted, asked = offline.recommend(user, k=3), last_time(user)
            found = client.recommend(user, 3, query_time=asked)
            assert (found.items, found.path == "popular") == (wanted["item"].to_list(), wanted["path"][0] == "popular")
            np.testing.assert_allclose(found.scores, wanted["score"], atol=1e-4)  # other batch sizes, 32 bits
            if asked is None:
                got = httpx.get(f"{url}/v1/recommend/nobody%2F%C3%9F", params={"k": 3}, timeout=60).json()
                assert (got["items"], got["path"]) == (found.items, "popular")
        assert client.similar("p7", k=3).items == offline.similar("p7", k=3)["item"].to_list()
        with pytest.raises(ServiceError, match="rug"):
            client.similar("rug", k=3)


def test_scenarios_and_categories_have_the_names_of_the_log(shop, served):
    event = {"item": "p7", "time": 1_772_359_200, "scenario": "detail", "rating": 4}
    with Client(served["generative"], timeout_s=60) as client:
        found = [client.generate("käufer 7", 3, scenario=one, deadline_ms=60_000) for one in ("home", "detail", "cart")]
        assert len({tuple(one.log_probabilities) for one in found}) == 3
        with pytest.raises(ServiceError, match="there is no scenario 'search'; there are: cart, detail, home"):
            client.generate("käufer 7", 3, scenario="search")
        assert client.generate("käufer 7", 3, history=[event]).num_events == 1
        with pytest.raises(ServiceError, match="scenario 'search' is not among the 3 values of the log"):
            client.generate("käufer 7", 3, history=[{**event, "scenario": "search"}])
        client.send_events([{**event, "id": "e1", "user": "käufer 7"}])
        asked = {"user": "käufer 7", "k": 3, "scenario": "cart"}
        wanted = client.generate("käufer 7", 3, scenario="cart", deadline_ms=60_000).items
    url = f"{served['generative']}/v1/recommend"
    assert httpx.post(url, json=asked, timeout=60).json()["items"] == wanted
    assert httpx.post(url, json={**asked, "scenario": "search"}, timeout=60).json()["error"]["code"] == "bad_scenario"
    document = httpx.get(f"{served['generative']}/openapi.json", timeout=60).json()
    generate = document["paths"]["/v1/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "cart" in json.dumps(generate["properties"]["scenario"])
