"""The example line of every command's help: it is there, it parses, and where the data can be had cheaply it runs.

An example is taken from what `--help` prints and handed to the command itself, whose parser is the real one; only what would
happen after parsing is left out. So a flag that is renamed breaks its example here.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from nestpipe.cli import COMMANDS, main
from nestpipe.cli.checkpoint import _TASKS
from nestpipe.cli.tune import TUNERS
from tests.small_runs import small_log

PARTS = {
    "data": ("ingest", "movielens", "kuairand", "amazon", "synthetic", "clicks", "inspect", "verify"),
    "sid": ("build", "extend", "inspect"),
    "checkpoint": tuple(_TASKS),
    "train": ("tiny", "ml1m_ranking"),  # all recipes share one help
    "tune": tuple(TUNERS),
}
HELPS = [(), *((name,) for name in COMMANDS), *((name, part) for name, parts in PARTS.items() for part in parts)]
GROUPS = [("data",), ("sid",)]  # their help shows that of every part
HELPS += [("tune", what, "tiny") for what in TUNERS]
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


class Parsed(BaseException):
    """Raised where a command would begin to work."""


def examples_of(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> list[list[str]]:
    """The arguments behind `nestpipe` in each example that a command's help shows; a group shows those of its parts."""
    try:
        code: Any = main([*command, "--help"])
    except SystemExit as done:
        code = done.code
    shown = capsys.readouterr().out
    assert code == 0, shown
    lines = re.findall(r"Example: nestpipe (.+(?:\n\s*--[a-z].+)*)", shown)
    assert lines, f"'nestpipe {' '.join(command)} --help' has no example line:\n{shown}"
    return [shlex.split(line) for line in lines]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help on lines that are not broken."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers raise Parsed in the place of returning."""

    def stopping(parser: Any) -> Any:
        def parse(*arguments: Any, **named: Any) -> Any:
            raise Parsed(parser(*arguments, **named))

        return parse

    monkeypatch.setattr(tyro, "cli", stopping(tyro.cli))
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", stopping(tyro.extras.subcommand_cli_from_dict))


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_every_help_has_an_example_that_parses(
    capsys: pytest.CaptureFixture[str], wide: None, parse_only: None, command: tuple[str, ...]
) -> None:
    examples = examples_of(capsys, command)
    assert len(examples) == (len(PARTS[command[0]]) if command in GROUPS else 1)
    for example in examples:
        assert tuple(example[: len(command)]) == command, (
            f"'{' '.join(command)} --help' shows another command's example"
        )
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


def test_every_part_of_a_command_is_listed_here(capsys: pytest.CaptureFixture[str], wide: None) -> None:
    for name in ("data", "sid"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        shown = re.search(r"\{([\w,]+)\}", capsys.readouterr().out)
        assert shown is not None
        assert tuple(shown[1].split(",")) == PARTS[name]


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
        "--pipeline.trace-steps",
        "10",
    ]
    assert main(["train", "tiny", *flags]) == 0
    (tmp_path / "data" / "ml1m").symlink_to("tiny")
    for name in ("a", "b"):
        (tmp_path / "runs" / name).symlink_to("tiny")
    for command in RUN:
        (example,) = examples_of(capsys, command)
        assert main(example) == 0, capsys.readouterr().err
