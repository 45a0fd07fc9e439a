"""`nestpipe check-model`: does a class keep the contracts that exact training rests on?"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nestpipe.errors import ConfigError
from nestpipe.recipes import tiny
from nestpipe.registry import entry_named

if TYPE_CHECKING:
    from nestpipe.training.model_contracts import Finding

_NUM_USERS, _NUM_ITEMS = 24, 18  # of the generated log: three batches of eight users with 3 to 11 events


@dataclass(frozen=True, kw_only=True)
class CheckModelArguments:
    """Runs the contracts of exact training on a model: batch independence, micro-batches, ranks, resume, determinism, gradients.

    Names the contract that is broken, and the submodule, parameter or line that breaks it; exit code 1 then. The model's
    own settings are --model.FIELD.

    Example: nestpipe check-model sasrec --model.dim 16

    Next: nestpipe train tiny --model my_package.gru:GRU
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PACKAGE.MODULE:CLASS")]
    """The class, registered with nestpipe.register_backbone or nestpipe.register_model; or a model of nestpipe ('hstu')."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Sequence folder to take batches from [default: a small generated log]; for a model that reads features."""
    json: bool = False
    """Print the findings as JSON."""


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    from nestpipe.data.sequences import Sequences
    from nestpipe.training.model_contracts import check_model

    base = tiny()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.data or _generated(Path(scratch) / "log")
        data = replace(base.data, path=str(folder), max_len=8, batch_size=8)
        config = replace(base, model=arguments.model, data=data)
        config.validate()
        say: Callable[[str], None] = (lambda text: None) if arguments.json else _show_progress
        findings = check_model(config, Sequences.open(folder), say)
    _show(arguments.name, findings, as_json=arguments.json)
    return 0 if all(finding.holds for finding in findings) else 1


def _parse(argv: list[str]) -> Any:
    """The flags, with those of the settings of the class that is named."""
    named = next((word for word in argv if not word.startswith("-")), None)
    kind: type[Any] = CheckModelArguments
    if named is not None:
        entry = entry_named(named)
        if entry.config.__name__ == "EncDecConfig":
            raise ConfigError(
                "encdec generates semantic ids and needs a catalogue that has them; its contracts are checked by the tests."
            )
        settings = [("model", entry.config, field(default_factory=entry.config))]
        own_help = {"__doc__": kind.__doc__}
        kind = make_dataclass(kind.__name__, settings, bases=(kind,), namespace=own_help, frozen=True, kw_only=True)
    return tyro.cli(kind, prog="nestpipe check-model", args=argv, config=(tyro.conf.FlagCreatePairsOff,))


def _generated(out: Path) -> Path:
    import polars as pl

    from nestpipe.data.ingest import write_sequences
    from nestpipe.data.schema import Schema

    rows = [
        (user, (3 * user + 5 * place * place) % _NUM_ITEMS, 1_000_000 + 3600 * place)
        for user in range(_NUM_USERS)
        for place in range(3 + user % 9)
    ]
    write_sequences(out, schema=Schema(), log=pl.DataFrame(rows, schema=["user", "item", "time"], orient="row"))
    return out


def _show_progress(contract: str) -> None:
    print(f"checking: {contract}", file=sys.stderr)


def _show(name: str, findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{**asdict(finding), "holds": finding.holds} for finding in findings], indent=2))
        return
    for finding in findings:
        print(f"{'ok  ' if finding.holds else 'FAIL'}  {finding.contract}")
        if finding.cause:
            print(f"      {finding.cause}")
    num_held = sum(finding.holds for finding in findings)
    print(f"{name}: {num_held} of {len(findings)} contracts hold.")
