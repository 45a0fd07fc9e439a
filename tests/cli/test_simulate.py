"""`nestpipe simulate` as a user meets it."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from nestpipe.cli import main, simulate
from nestpipe.simulate.cases import CASES
from tests.profiling.made_up_traces import ranks
from tests.simulate.test_published import PAGE


def run(capsys, *arguments):
    code = main(["simulate", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_it_prints_and_draws_and_says_model(capsys, tmp_path):
    code, out, _ = run(capsys, "--workers", 1536, "--out", tmp_path / "a.svg", "--save", tmp_path / "c.json")
    assert code == 0
    assert out.startswith("model, not measured: 1,536 workers")
    rows = {line[:16].strip(): line[16:].split() for line in out.splitlines()}
    assert rows["TorchRec-like"] == ["5,793.8", "1,715.0", "2,871.0", "1,207.9", "0.0", "44.3%"]
    assert float(rows["nested"][0].replace(",", "")) < 2000
    drawing = (tmp_path / "a.svg").read_text()
    root = ET.fromstring(drawing)
    assert root.attrib["aria-label"].startswith("model of ")
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("model, not measured") for text in texts)
    assert {"8", "4,096", *(case.title for case in CASES)} <= set(texts)
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert [len(line.attrib["points"].split()) for line in lines] == [10] * 2 * len(CASES)
    assert not re.search(r"nan|inf|href", drawing.partition("</style>")[2])


def test_constants_of_a_run_are_used_and_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "DRAWN", (8, 64))  # the other test draws all
    (one,) = ranks(1, "serial", num_steps=6)
    for rank in (0, 1):
        replace(one, rank=rank, world_size=2).save(tmp_path / "run")
    out_and_micro_batches = ["--out", tmp_path / "b.svg", "--micro-batches", 2, "--workers", 16]
    code, out, _ = run(capsys, "--from", tmp_path / "run", "--save", tmp_path / "c.json", *out_and_micro_batches)
    assert code == 0
    assert f"constants of trace of {tmp_path / 'run'}" in out
    code, again, _ = run(capsys, "--constants", tmp_path / "c.json", *out_and_micro_batches)
    assert code == 0
    assert again == out
    code, _, err = run(capsys, "--from", tmp_path / "run", "--constants", tmp_path / "c.json")
    assert code == 2
    assert "both name constants" in err


def test_published_prints_each_error(capsys):
    code, out, _ = run(capsys, "--published")
    assert code == 0
    assert out.partition("\n\n")[0] in PAGE.read_text()  # which test_published.py compares with the model


def test_mistakes_are_one_message(capsys, tmp_path):
    for arguments, message in (
        (["--from", tmp_path / "nowhere"], "there is no folder"),
        (["--workers", 0], "must be at least 1"),
        (["--duplicates", 0.5], "used at least once"),
    ):
        code, _, err = run(capsys, *arguments, "--out", tmp_path / "x.svg")
        assert code == 2
        assert message in err
    assert not (tmp_path / "x.svg").exists()
