"""`nestpipe trace` as a user meets it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nestpipe.cli import main
from nestpipe.profiling.perfetto import to_perfetto
from nestpipe.profiling.trace_file import STREAMS, load
from tests.profiling.made_up_traces import made_up, ranks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(tmp_path):
    """A run of two ranks with 9 batches, 8 parts each."""
    for one in ranks(2, num_steps=9, num_micro_batches=8, compute_ms=30):
        one.save(tmp_path / "run")
    return tmp_path / "run"


def call(capsys, *arguments):
    code = main(["trace", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def drawing(run):
    return ElementTree.parse(run / "trace" / "timeline.svg").getroot()


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as done:
        main(["trace", "--help"])
    assert done.value.code == 0
    assert "xample: nestpipe trace" in " ".join(capsys.readouterr().out.split())


def test_the_tables_say_where_the_time_went(capsys, monkeypatch, run):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, run)
    assert code == 0
    assert "8 steps, batches 1 to 8" in out
    assert "…" not in out, "nothing is cut off on a narrow terminal"
    result = json.loads(call(capsys, run, "--json")[1])
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[:1] == "│"]
    slowest, own = cells[:5], cells[5:]
    assert [row[0] for row in slowest] == ["step", "busy", "exposed lookup", "exposed communication", "bubbles"]
    for row, cause in zip(slowest[1:], ("busy", "lookup", "communication", "bubble"), strict=True):
        spread = result["slowest"]["ms"][cause]
        assert row[1:3] == [f"{spread['median']:.2f}", f"{spread['low']:.2f} - {spread['high']:.2f}"]
    assert [row[0] for row in own] == ["0", "1"]
    assert [row[6] for row in own] == [f"{100 * share:.1f} %" for share in result["waited_for_others"].values()]
    for shares in ([row[3] for row in slowest[1:]], *(row[2:6] for row in own)):
        numbers = [float(share.removesuffix(" %")) for share in shares]
        assert len(numbers) == 4
        assert sum(numbers) == pytest.approx(100, abs=0.2)  # four numbers rounded to a tenth
    assert "rows sent / unique keys: rows 1.000, grads 1.000" in out
    assert "keys 16,000, rows 256,000, grads 256,000, dense sum 100,000" in " ".join(out.split())
    assert "upper bounds" in out
    assert "dropped" not in out


def test_json_is_one_object(capsys, run):
    code, out, _ = call(capsys, run, "--json", "--steps", "3:6")
    assert code == 0
    result = json.loads(out)
    assert (result["first_batch"], result["last_batch"], result["num_steps"]) == (3, 5, 3)
    assert set(result["ranks"]) == {"0", "1"}


def test_exposure_against_a_sequential_run(capsys, run, tmp_path):
    for one in ranks(2, num_steps=5, num_micro_batches=8, compute_ms=30, message_ms=20):
        one.save(tmp_path / "sequential")
    code, out, _ = call(capsys, run, "--sequential", tmp_path / "sequential", "--json")
    assert code == 0
    beside = json.loads(out)["exposed_communication"]
    alone = json.loads(call(capsys, run, "--json")[1])["exposed_communication"]
    assert 0 < beside < 0.5 * alone
    assert "upper bounds" not in call(capsys, run, "--sequential", tmp_path / "sequential")[1]


def test_the_drawing_shows_three_steps_unless_asked(capsys, run):
    assert call(capsys, run)[0] == 0
    heads = [text for text in texts(drawing(run)) if text.startswith("t=")]
    assert [head.split(" · ")[0] for head in heads] == ["t=3", "t=4", "t=5"] * 2
    assert all("busy 8" in head or "busy 9" in head for head in heads)
    assert call(capsys, run, "--steps", "7:", "--rank", "1")[0] == 0
    root = drawing(run)
    assert [text.split(" · ")[0] for text in texts(root) if text.startswith("t=")] == ["t=7", "t=8"]
    assert "rank 1" in texts(root)
    assert "rank 0" not in texts(root)


def test_the_drawing_is_whole_and_nothing_leaves_it(capsys, run):
    call(capsys, run, "--steps", "4:6")
    root = drawing(run)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    assert width == 1200
    for element in root.iter(f"{SVG}rect"):
        if element.get("x"):
            assert float(element.get("x")) >= 0
            assert float(element.get("x")) + float(element.get("width")) <= width
            assert float(element.get("y")) + float(element.get("height")) <= height
    names = Counter(texts(root))
    assert all(names[f"C{micro_batch}"] == 4 for micro_batch in range(1, 9)), "two steps on two ranks"
    assert names["R t=6"] == 2  # retrieved ahead, while batch 4 computes
    content = (run / "trace" / "timeline.svg").read_text()
    assert "prefers-color-scheme:dark" in content
    assert not re.search(r"(href|src|@import|url\((?!#))", content), "no asset from elsewhere"


def test_texts_of_the_drawing_do_not_run_into_each_other(capsys, run):
    call(capsys, run)
    places = {}
    for element in drawing(run).iter(f"{SVG}text"):
        wide = 5.6 * len(element.text)  # a little less than a letter takes on average
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor")]
        left = float(element.get("x")) - shift * wide
        places.setdefault(element.get("y"), []).append((left, left + wide, element.text))
    assert len(places) > 10
    for row in places.values():
        for (_, end, one), (begin, _, other) in zip(sorted(row), sorted(row)[1:], strict=False):
            assert end <= begin, f"{one!r} runs into {other!r}"


def test_the_perfetto_file_names_ranks_streams_and_events(capsys, run):
    call(capsys, run)
    content = json.loads((run / "trace" / "trace.perfetto.json").read_text())
    events = content["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0]
    assert processes == ["rank 0", "rank 1"]
    assert threads == [*STREAMS, "steps"]
    chunks = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"] == "C 2/8 (t=5)" for event in chunks) == 2
    assert sum(event["name"] == "R (t=5)" for event in chunks) == 2
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in chunks)
    spans = [span for trace in load(run) for span in trace.spans]
    assert sum(event["cat"] not in {"idle", "wait", "step"} for event in chunks) == len(spans)
    (step,) = (event for event in chunks if event["name"] == "step 4" and event["pid"] == 1)
    assert sum(step["args"].values()) == pytest.approx(step["dur"] / 1e3)


def test_an_arrow_comes_from_the_rank_that_sent_last():
    early, late = ranks(2, num_steps=2, num_micro_batches=2)
    later = tuple(
        replace(span, begin_ns=span.begin_ns + 50, end_ns=span.end_ns + 50) if span.kind == "rows" else span
        for span in early.spans
    )
    events = json.loads(to_perfetto([early, replace(late, spans=later)], []))["traceEvents"]
    arrows = [event for event in events if event.get("cat") == "message"]
    starts, ends = ([event for event in arrows if event["ph"] == kind] for kind in "sf")
    assert [event["id"] for event in starts] == [event["id"] for event in ends] == list(range(1, len(starts) + 1))
    to_rows = [start for start in starts if start["name"] == "rows"]
    assert len(to_rows) == 2 * 2 * 2  # parts, batches, ranks
    assert {start["pid"] for start in to_rows} == {1}
    assert all(start["ts"] <= end["ts"] + 50 for start, end in zip(starts, ends, strict=True))


def test_dropped_spans_are_said(capsys, tmp_path):
    replace(made_up(num_steps=6), num_dropped={"compute": 1234}).save(tmp_path)
    code, out, _ = call(capsys, tmp_path)
    assert code == 0
    assert "1,234 older spans were dropped" in out


def test_mistakes_get_one_message(capsys, run, tmp_path):
    (tmp_path / "untraced").mkdir()
    for arguments, message in [
        ([tmp_path / "nowhere"], "there is no folder"),
        ([tmp_path / "untraced"], "has no trace"),
        ([tmp_path / "untraced"], "--pipeline.advanced.trace-steps N"),
        ([run, "--steps", "3"], "it must be A:B"),
        ([run, "--steps", "5:5"], "which holds no step"),
        (
            [run, "--steps", "90:"],
            "no step of batches 90: was recorded completely by all ranks; there are 8, from 1 to 8",
        ),
        ([run, "--rank", "2"], "there is no rank 2"),
        ([run, "--rank", "-1"], "there is no rank -1"),
        ([run, "--sequential", tmp_path / "untraced"], "has no trace"),
    ]:
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (2, "")
        assert message in err
    assert not (run / "trace" / "timeline.svg").exists(), "a refused command must leave nothing behind"
    replace(made_up(run="other", rank=1), world_size=2).save(run)
    assert "mixes two runs" in call(capsys, run)[2]
    path = run / "trace" / "rank-000.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = call(capsys, run)
    assert code == 2
    assert "rank-000.jsonl is damaged" in err
