"""`nestpipe report`: one HTML file about a run."""

from __future__ import annotations

from pathlib import Path

from nestpipe.atomic_files import replace_file
from nestpipe.cli.arguments import ReportArguments
from nestpipe.errors import ConfigError
from nestpipe.report.inputs import read_facts
from nestpipe.report.page import page

REPORT = "report.html"  # in the run's folder


def main(arguments: ReportArguments) -> int:
    print(write_report(arguments.run, arguments.out))
    return 0


def write_report(run: Path, out: Path | None = None) -> Path:
    """The file with the report of a run; raises ConfigError if there is no run or no place for it."""
    path = out or run / REPORT
    facts = read_facts(run)
    if path.is_dir():
        raise ConfigError(f"--out is {path}, a folder; name a file, such as {path / REPORT}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page(facts).encode("utf-8", "replace"))  # a lone surrogate in a name is no reason to fail
    return path
