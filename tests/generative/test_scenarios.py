"""Scenario records: what is wrong is said, all of it at once."""

from __future__ import annotations

import pytest

from nestpipe.cli import main
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.scenarios import Scenario, Scenarios, scenario_numbers

THREE = Scenarios(
    [
        Scenario(name="feed", trigger="none", reward_weights={"ranking": 1.0, "diversity": 0.5}),
        Scenario(name="detail", trigger="given", beam=20, latency_ms=50.0),
        Scenario(name="cart", trigger="last", pool="in stock", behaviour_weights=(1.0, 2.0, 4.0)),
    ]
)


def test_records_survive_their_file(tmp_path):
    (tmp_path / "scenarios.json").write_text(THREE.to_json())
    found = Scenarios.load(tmp_path / "scenarios.json")
    assert list(found) == list(THREE)
    assert found.digest == THREE.digest
    assert [one.name for one in found.by_number({"cart": 0, "feed": 2, "detail": 1}, "log")] == [
        "cart",
        "detail",
        "feed",
    ]
    with pytest.raises(DataError, match=r"no scenario 'home'; there are feed, detail, cart"):
        found["home"]
    with pytest.raises(ConfigError, match="scenario 'cart' is not in log, which has feed, detail"):
        found.by_number({"feed": 0, "detail": 1}, "log")
    with pytest.raises(ConfigError, match=r'log has the scenario \'home\', but no record.*"name": "home"'):
        found.by_number({"feed": 0, "detail": 1, "cart": 2, "home": 3}, "log")
    with pytest.raises(ConfigError, match=r"3 scenarios .* but log has none"):
        found.by_number({}, "log")


def test_the_trigger_follows_its_rule():
    assert THREE["feed"].trigger_of(None, [1, 2]) is None
    assert [Scenario(name="any").trigger_of(one, [1, 2]) for one in (None, 7)] == [None, 7]
    assert THREE["detail"].trigger_of(7, [1, 2]) == 7
    assert THREE["cart"].trigger_of(None, [1, 2]) == 2
    assert THREE["cart"].trigger_of(None, []) is None
    with pytest.raises(DataError, match="needs a trigger item, but the request has none"):
        THREE["detail"].trigger_of(None, [1])
    with pytest.raises(DataError, match="accepts no trigger item, but the request has item 3"):
        THREE["feed"].trigger_of(3, [1])


def test_every_problem_is_named():
    bad = Scenario(name="*", pool="", behaviour_weights=(0.0,), reward_weights={"fame": -1.0}, beam=0, latency_ms=-1)
    with pytest.raises(ConfigError) as caught:
        Scenarios([bad, Scenario(name="feed"), Scenario(name="feed"), Scenario(name="x", reward_weights={"format": 0})])
    for word in ("name is", "pool is", "behaviour_weights", "fame", "beam is 0", "latency_ms", "several", "one must"):
        assert word in str(caught.value), word
    with pytest.raises(ConfigError, match="there is no scenario"):
        Scenarios([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", 'must be an object {"version": 1'),
        ("[]", 'must be an object {"version": 1'),
        ('{"version": 2, "scenarios": []}', "version 2; this nestpipe reads 1"),
        ('{"version": 1, "scenarios": {}}', "must be a list"),
        ('{"version": 1, "scenarios": [{"beam": 3}]}', "object with a name"),
        (
            '{"version": 1, "scenarios": [{"name": "a", "bream": 3}]}',
            "unknown config key 'a.bream'; did you mean 'a.beam'",
        ),
        ('{"version": 1, "scenarios": [{"name": "a", "beam": "wide"}]}', "'a.beam' has the value 'wide'; expected int"),
        ('{"version": 1, "scenarios": [{"name": "a", "beam": true}]}', "'a.beam' has the value True; expected int"),
        ('{"version": 1, "scenarios": [{"name": "a", "reward_weights": {"format": "x"}}]}', "reward_weights"),
        ('{"version": 1, "scenarios": [{"name": "a", "trigger": "any"}]}', "one of optional, none, given, last"),
    ],
)
def test_files_that_are_no_scenarios_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Scenarios.from_json(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        Scenarios.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: the scenarios are not JSON"):
        Scenarios.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("feature", "wanted"),
    [
        ([], {"0": 0, "1": 1}),
        (["--feature", "scenario:id:event:encoding=dictionary"], {"cart": 0, "home": 1}),
    ],
)
def test_requests_name_scenarios_as_the_log_does(tmp_path, feature, wanted):
    (tmp_path / "log.csv").write_text("user,item,time,scenario\n1,5,1,home\n1,6,2,cart\n1,7,3,search\n")
    command = ["data", "ingest", str(tmp_path / "log.csv"), *feature, "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert scenario_numbers(Sequences.open(tmp_path / "out"), 2) == wanted
