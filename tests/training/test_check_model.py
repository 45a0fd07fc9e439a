"""`nestpipe check-model`: classes that keep the contracts pass, and each planted fault is named with what breaks it."""

import json
from pathlib import Path

import pytest

from nestpipe.cli import main

PATH = "tests.training.outside_models"

_SOURCE = Path(__file__).with_name("outside_models.py").read_text().splitlines()
_INDEXED = 'history = rows["history"].unique[rows["history"].index]'
_LINE = next(number for number, line in enumerate(_SOURCE, start=1) if line.strip() == _INDEXED)
_INDEXING = f"outside_models.py, line {_LINE}: `{_INDEXED}`"
_COUPLING = "UndeclaredCoupling has coupling 'none', but its loss mixes samples"
# class, contract that must be reported, and what the message must name
FAULTS = [
    ("OverTheBatch", "samples are independent", "submodule 'backbone.norm' of Retrieval mixes the samples of a batch"),
    (
        "CentredOverTheBatch",
        "samples are independent",
        "submodule 'backbone' of Retrieval mixes the samples of a batch",
    ),
    ("GlobalGenerator", "randomness comes from rng", "submodule 'backbone.drop' of Retrieval draws from a global"),
    ("IndexedRows", "no gradient through tensor[index]", _INDEXING),
    ("UndeclaredCoupling", "loss is a sum, coupling is declared", _COUPLING),
    ("WrongWeight", "weight is a sum over samples", "WrongWeight.weight gives 1 for a batch and 8 for its 8 samples"),
    ("UnsavedBuffer", "a resume changes nothing", "'backbone.num_calls' changes in training and is not saved"),
    ("MeanLoss", "loss is a sum, coupling is declared", "MeanLoss.forward returns a mean"),
]


def findings_of(name, capsys):
    code = main(["check-model", f"{PATH}:{name}", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["Mean", "Pairs"])
def test_classes_that_keep_the_contracts_pass(name, capsys):
    code, found = findings_of(name, capsys)
    assert code == 0, found
    assert len(found) == 10
    assert all(one["holds"] and not one["cause"] for one in found)


@pytest.mark.parametrize(("name", "contract", "cause"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_planted_fault_is_named(name, contract, cause, capsys):
    code, found = findings_of(name, capsys)
    assert code == 1
    broken = {one["contract"]: one["cause"] for one in found if not one["holds"]}
    assert cause in broken[contract], broken


def test_settings_are_flags_and_the_text_counts_what_holds(capsys):
    assert main(["check-model", f"{PATH}:Mean", "--model.dim", "4"]) == 0
    out = capsys.readouterr().out
    assert f"{PATH}:Mean: 10 of 10 contracts hold." in out
    with pytest.raises(SystemExit):
        main(["check-model", f"{PATH}:Mean", "--model.width", "4"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mean", "there is no module 'no_such_module'"),
        (f"{PATH}:Meen", "has no 'Meen'"),
        (f"{PATH}:mean_so_far", "is not registered as a model"),
        ("hstuu", "did you mean 'hstu'?"),
    ],
)
def test_what_is_no_model_is_said(name, message, capsys):
    assert main(["check-model", name]) == 2
    assert message in capsys.readouterr().err
