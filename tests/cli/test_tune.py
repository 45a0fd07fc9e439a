"""`nestpipe tune`: what it prints; tests of autotune and of load balance measure."""

import json

from nestpipe.cli import tune_balance
from nestpipe.data.load_balance import SampleCost
from nestpipe.recipes import RECIPES


def test_balance_prints_flags_that_train_takes(run, monkeypatch):
    seen = []

    def tuned(config, *, num_events):
        seen.append((config.data.path, num_events))
        return tune_balance.Fitted(SampleCost(linear=2.5, square=0.125), 0.004, 0.03)

    monkeypatch.setattr(tune_balance, "tuned", tuned)
    code, shown, _ = run("tune", "balance", "tiny", "--events", "64", "--data.path", "data/mine")
    assert code == 0
    assert seen == [("data/mine", 64)]
    flags = "--data.balance --data.cost-linear 2.5 --data.cost-square 0.125"
    assert flags in shown
    code, shown, _ = run("tune", "balance", "tiny", "--json")
    assert json.loads(shown)["flags"] == flags


def test_help_without_a_recipe_lists_them(run):
    for what in ("pipeline", "balance"):
        code, shown, _ = run("tune", what)
        assert code == 0
        assert all(name in shown for name in RECIPES)
