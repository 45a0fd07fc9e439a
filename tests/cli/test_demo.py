"""`nestpipe demo`: every step holds, and whatever ends it, nothing is left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from nestpipe.cli import demo, main
from nestpipe.cli.demo_stage import check
from nestpipe.data.synthetic_sequences import SyntheticConfig, ingest_synthetic
from tests.loopback_only import LoopbackOnly
from tests.serve.small_rankers import make_log, make_run
from tests.warm_program import warm_program


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """Whom the processes of these tests talk to."""
    guard = LoopbackOnly(tmp_path_factory.mktemp("demo") / "guard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", guard.environment()["PYTHONPATH"])
        yield guard


@pytest.fixture(scope="module")
def programs(guard, tmp_path_factory):
    """What one process runs starts without the seconds that torch takes."""
    with warm_program(tmp_path_factory.mktemp("warm")) as programs:
        yield programs


def run(capsys, *arguments):
    code = main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_every_step_holds(capsys, tmp_path, monkeypatch, programs, guard):
    from nestpipe.cli import demo_stage

    original, out = demo_stage._nestpipe, tmp_path / "a demo"
    monkeypatch.setattr(
        demo_stage, "_nestpipe", lambda ranks: [str(programs / "nestpipe")] if ranks == 1 else original(ranks)
    )
    code, said, _ = run(capsys, "demo", "--quick", "--out", str(out))
    assert code == 0, said
    assert guard.num_processes() > 4, "the warm process, torchrun and its ranks, instances"
    assert not guard.refused(), "the demo talks to this machine alone"
    assert str(out / "run" / "report.html") in said.replace("\n", "").rpartition("steps passed")[2]
    assert (out / "run" / "report.html").exists()
    assert not (out / "scratch").exists()
    assert str(out) not in tempfile.gettempdir()


def test_a_folder_that_is_not_its_own_is_refused(capsys, tmp_path):
    (tmp_path / "thesis.tex").touch()
    code, _, err = run(capsys, "demo", "--quick", "--out", str(tmp_path))
    assert code == 2
    assert "was not made by the demo" in err
    assert (tmp_path / "thesis.tex").exists()


def test_it_exits_with_1_when_a_step_does_not_hold(capsys, tmp_path, monkeypatch):
    def lie(stage):
        check(False, "it was a lie")
        return "nobody gets here"

    monkeypatch.setattr(demo, "STEPS", [("lie", lie)])
    code, out, _ = run(capsys, "demo", "--quick", "--out", str(tmp_path / "demo"))
    assert code == 1
    assert "it was a lie" in out
    assert "a step that failed" in out


SCRIPT = """
import shutil, sys
from nestpipe.cli import demo, demo_serving, demo_stage
from nestpipe.cli import main

cold = demo_stage._nestpipe
demo_stage._nestpipe = lambda ranks: [{program!r}] if ranks == 1 else cold(ranks)

def put(stage):
    shutil.copytree({source!r}, stage.out / {name!r})
    return "there"

def serve(stage):
    stage.serve("gateway", *demo_serving._fleet(stage.out / "ranking"), says="something that it never says")
    return "nobody gets here"

demo.STEPS[:] = [("put", put), {step}]
sys.exit(main(["demo", "--out", {out!r}]))
"""


def processes_of(out: Path) -> list[int]:
    """Those whose scratch files go to the folder of a demo."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={out}/scratch/tmp".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def interrupted(programs, out: Path, number: int, *, when, **script: str) -> str:
    """Starts a demo, sends a signal when something holds, and returns its last words."""
    with subprocess.Popen(
        [str(programs / "warm-python")],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        process.stdin.write(SCRIPT.format(program=str(programs / "nestpipe"), out=str(out), **script))
        process.stdin.close()
        deadline = time.monotonic() + 60
        while not when() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(processes_of(out)) == 3, process.stderr.read() if process.poll() is not None else "it stalled"
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(60) == 128 + number, said
    assert not processes_of(out)
    assert not (out / "scratch").exists()
    return said


def test_ctrl_c_in_training_leaves_no_rank(programs, tmp_path):
    out, source = tmp_path / "demo", tmp_path / "log"
    ingest_synthetic(source, SyntheticConfig(num_users=300))
    script = {"source": str(source), "name": "data", "step": '("train", demo.train_nested)'}
    said = interrupted(programs, out, signal.SIGINT, when=(out / "run" / "metrics.jsonl").exists, **script)
    assert "SIGINT in step 'train'; its processes have ended" in said
    assert not (out / "run" / "report.html").exists()


def test_sigterm_in_serving_leaves_no_instance_and_no_port(programs, tmp_path):
    out = tmp_path / "demo"
    run = make_run(make_log(tmp_path), tmp_path / "ranking", "hstu").folder
    script, log = {"source": str(run), "name": "ranking", "step": '("serve", serve)'}, out / "gateway.log"

    def is_ready() -> bool:
        return log.exists() and "gateway with" in log.read_text()

    said = interrupted(programs, out, signal.SIGTERM, when=is_ready, **script)
    assert "SIGTERM in step 'serve'; its processes have ended" in said
    ports = [int(line.rpartition(":")[2].split(",")[0]) for line in log.read_text().splitlines() if " on http:" in line]
    assert len(ports) == 3
    for port in ports:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0


def test_a_service_that_does_not_start_is_a_step_that_does_not_hold(capsys, tmp_path, monkeypatch):
    from nestpipe.cli import demo_stage

    monkeypatch.setattr(demo_stage, "_nestpipe", lambda ranks: ["sh", "-c", "echo no such run >&2; exit 2"])
    monkeypatch.setattr(demo, "STEPS", [("serve", lambda stage: stage.serve("x", "nowhere", says="serving").url)])
    code, out, _ = run(capsys, "demo", "--out", str(tmp_path / "demo"))
    assert code == 1
    assert "the service did not start; it said" in out
    assert "no such run" in out
