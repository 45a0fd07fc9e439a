"""Help and refused flags: they are fast, and every example parses; where the data can be had cheaply it runs.

An example is taken from what `--help` prints and handed to the command itself, whose parser is the real one; only what would
happen after parsing is left out. So a flag that is renamed breaks its example here.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from nestpipe.cli import COMMANDS, GROUPS, SECTIONS, main
from tests.small_runs import small_log

# What the flags of a command depend on.
OPERAND = {"train": "tiny", "tune pipeline": "tiny", "tune balance": "tiny", "check-model": "sasrec"}
HELPS = [(), *((group,) for group in GROUPS), *(tuple(name.split()) for name in COMMANDS)]
HELPS += [(*name.split(), operand) for name, operand in OPERAND.items()]
REFUSED = [[*name.split(), *([OPERAND[name]] if name in OPERAND else []), "--no-such-flag"] for name in COMMANDS]
REFUSED += [["trian"], ["data", "ingst"], ["tune", "pipelin"], ["train", "tinny"], ["tune", "pipeline", "tinny"]]
REFUSED += [["eval"], ["eval", "runs/a", "--step", "one"], ["train", "tiny", "--train.epochs", "one"]]
REFUSED += [["serve", "runs/a", "--share", "2"], ["check-model", "no_such_model"], ["sid", "build", "data/a"]]
# Examples that run in a folder with data/tiny, data/ml1m and the runs tiny, a and b.
RUN = [
    ("data", "inspect"),
    ("data", "verify"),
    ("eval",),
    ("report",),
    ("trace",),
    ("checkpoint", "inspect"),
    ("checkpoint", "verify"),
]
_TORCH_FREE = """
import contextlib, io, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in {"torch", "polars", "starlette", "faiss", "ray"}, f"imports {name}"
sys.meta_path.insert(0, Blocker())
from nestpipe.cli import main
for code, commands in (0, HELPS), (2, REFUSED):
    for words in commands:
        shown = io.StringIO()
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                done = main([*words, *(["--help"] if code == 0 else [])])
        except SystemExit as stop:
            done = stop.code
        assert done == code, f"{words}: exit code {done}, {shown.getvalue()}"
"""


class Parsed(BaseException):
    """Raised where a command would begin to work."""


def examples_of(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> list[list[str]]:
    """The arguments behind `nestpipe` in each example that a command's help shows."""
    try:
        code: Any = main([*command, "--help"])
    except SystemExit as done:
        code = done.code
    shown = capsys.readouterr().out
    assert code == 0, shown
    lines = re.findall(r"Example: nestpipe (.+)", shown)
    assert lines, f"'nestpipe {' '.join(command)} --help' has no example line:\n{shown}"
    return [shlex.split(line) for line in lines]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help on lines that are not broken."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser raises Parsed in the place of returning."""
    parse = tyro.cli

    def stopping(*arguments: Any, **named: Any) -> Any:
        raise Parsed(parse(*arguments, **named))

    monkeypatch.setattr(tyro, "cli", stopping)


def test_help_and_refused_flags_import_nothing_heavy() -> None:
    code = f"HELPS, REFUSED = {HELPS!r}, {REFUSED!r}\n{_TORCH_FREE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_every_help_has_an_example_that_parses(
    capsys: pytest.CaptureFixture[str], wide: None, parse_only: None, command: tuple[str, ...]
) -> None:
    (example,) = examples_of(capsys, command)
    assert tuple(example[: len(command)]) == command, f"'{' '.join(command)} --help' shows another command's example"
    with pytest.raises(Parsed):
        main(example)


def test_an_example_with_a_flag_that_does_not_exist_is_noticed(
    capsys: pytest.CaptureFixture[str], parse_only: None
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["eval", "runs/a", "--comparee", "runs/b"])
    assert done.value.code == 2
    assert main(["train", "tiny", "--train.minute", "15"]) == 2
    assert "did you mean 'train.minutes'?" in capsys.readouterr().err


def test_the_table_names_what_exists() -> None:
    from nestpipe.cli import _load

    for name, command in COMMANDS.items():
        assert callable(_load(command.work)), name
    assert [name for section in SECTIONS.values() for name in section] == list(COMMANDS)
    assert {name.split()[0] for name in COMMANDS if " " in name} == set(GROUPS)


def test_examples_run(
    capsys: pytest.CaptureFixture[str], wide: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small_log(tmp_path / "data" / "tiny")
    flags = [
        "--train.steps",
        "16",
        "--train.num-threads",
        "1",
        "--data.batch-size",
        "16",
        "--pipeline.advanced.trace-steps",
        "10",
    ]
    assert main(["train", "tiny", *flags]) == 0
    (tmp_path / "data" / "ml1m").symlink_to("tiny")
    for name in ("a", "b"):
        (tmp_path / "runs" / name).symlink_to("tiny")
    for command in RUN:
        (example,) = examples_of(capsys, command)
        assert main(example) == 0, capsys.readouterr().err
