"""docs/how-to/instructions.md with kills: think, train and align die by SIGKILL, go on, and end as if nothing had happened.

The commands are those of the page. What the page serves at its end, and every request that it makes, is made here of the run
that was killed three times.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import sqlite3
import subprocess
from pathlib import Path

import pytest

from nestpipe.cli.demo import differing_tensors
from tests.test_docs import ROOT, Block, blocks_of, run
from tests.warm_program import warm_program

PAGE = ROOT / "docs" / "how-to" / "instructions.md"
# Smaller parts than by default, so that there is a middle to be killed in.
MORE = {"think": "", "train": " --train.save-steps 2", "align": " --batch-size 16 --save-steps 2"}
KILLED = """
import os, signal, sys
from nestpipe.cli import main
from nestpipe.generative import training_instructions
from nestpipe.training import loop, rollouts
training_instructions._BATCH = 16
owner, name, count = {owner}, {name!r}, {count}
original, calls = getattr(owner, name), 0
def dying(*arguments, **named):
    global calls
    found, calls = original(*arguments, **named), calls + 1
    if calls == count:
        print("killed in", name, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(owner, name, dying)
sys.exit(main({arguments!r}))
"""
DEATHS = {
    "think": [("training_instructions.TrainingInstructions", "add", 2)],
    "train": [("loop._Loop", "_after_step", 3)],
    "align": [("rollouts.RolloutStore", "write", 1), ("loop._Loop", "_after_step", 5)],
}


def commands(name: str) -> str:
    """The first command of the page that begins with a name, on one line."""
    text = "\n".join(block.commands() for block in blocks_of(PAGE.read_text()) if block.needs is None)
    line, *_ = re.findall(rf"^nestpipe {name}.*$", text.replace("\\\n", " "), re.MULTILINE)
    return str(line) + MORE[name.split(maxsplit=1)[0]]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    with warm_program(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


def shell(text: str, folder: Path, warm: Path) -> str:
    done = run(Block("bash", text, 0), folder, warm)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def die(line: str, death: tuple[str, str, int], folder: Path, warm: Path) -> None:
    owner, name, count = death
    script = KILLED.format(owner=owner, name=name, count=count, arguments=shlex.split(line)[1:])
    ended = subprocess.run(
        [warm / "warm-python"], input=script, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert f"killed in {name}" in ended.stderr, ended.stderr[-3000:]
    assert ended.returncode != 0


def texts_of(store: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(store) as opened:
        return opened.execute("SELECT event, text, author, vector FROM targets JOIN texts USING (digest)").fetchall()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.timeout(900)
def test_the_page_ends_the_same_after_kills_in_think_train_and_align(tmp_path, warm):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    blocks = [block.text for block in blocks_of(PAGE.read_text()) if block.needs is None]
    shell(blocks[0] + blocks[1], calm, warm)  # the log, semantic ids, the scenario file
    shutil.copytree(calm / "shop", killed / "shop")
    lines = {name: commands(name) for name in ("think shop/data", "train", "align")}
    for line in lines.values():
        shell(line, calm, warm)
    for name, line in lines.items():
        kind = name.split()[0]
        again = line if kind == "think" else f"{line} --resume"
        for death in DEATHS[kind]:
            die(again, death, killed, warm)
        shell(again, killed, warm)
    assert texts_of(calm / "shop" / "for-training.sqlite") == texts_of(killed / "shop" / "for-training.sqlite")
    for name in ("shop", "shop-aligned"):
        assert not differing_tensors(calm / "runs" / name, killed / "runs" / name)
    reports = [json.loads((folder / "runs" / "shop-aligned" / "align.json").read_text()) for folder in (calm, killed)]
    assert reports[0] == reports[1]
    found = json.loads(shell("nestpipe eval runs/shop-aligned --json", killed, warm))
    assert set(found["scenarios"]["metrics"]) == {"home", "cart"}
    assert set(found["instructions"]["effects"]) == {"all", "home", "cart"}
    shell("nestpipe think runs/shop-aligned", killed, warm)
    # The last block of the section on serving: requests by scenario, with what the page adds to them.
    (serve,) = [text for text in blocks if text.startswith("nestpipe serve")]
    ports = {"8702": str(free_port()), "8752": str(free_port())}
    answered = shell(re.sub("8702|8752", lambda one: ports[one[0]], serve), killed, warm)
    assert '"items"' in answered
