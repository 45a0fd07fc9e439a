"""What others build on, as plain data: public names, commands and flags, settings, file formats, calls, metrics.

`python -m tests.public_snapshot` writes it to tests/snapshots/public.json, which test_public_snapshot.py compares with the code.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import nestpipe
from nestpipe import client, errors
from nestpipe.checkpoint import manifest as checkpoint_manifest
from nestpipe.cli import COMMANDS
from nestpipe.cli.check_model import CheckModelArguments
from nestpipe.cli.train import TrainArguments
from nestpipe.cli.tune import TuneBalanceArguments, TunePipelineArguments
from nestpipe.config import Config, keys
from nestpipe.data import array_files, sequences
from nestpipe.data.schema import Schema
from nestpipe.generative import semantic_ids
from nestpipe.profiling import trace_file
from nestpipe.recipes import RECIPES
from nestpipe.registry import own_kinds
from nestpipe.serve.config import Limits
from nestpipe.serve.openapi import document, instance_calls
from nestpipe.serve.serve_flags import ServeArguments

SNAPSHOT = Path(__file__).parent / "snapshots" / "public.json"
_PACKAGE = Path(nestpipe.__file__).parent
PARSED_BY_COMMAND = {
    "check-model": CheckModelArguments,
    "serve": ServeArguments,
    "train": TrainArguments,
    "tune balance": TuneBalanceArguments,
    "tune pipeline": TunePipelineArguments,
}


def public() -> dict[str, Any]:
    """Everything that docs/project/stability.md promises."""
    return {
        "names": {name: _shape(getattr(nestpipe, name)) for name in nestpipe.__all__ if name != "recipes"},
        "client": {
            name: _shape(getattr(client, name)) for name in client.__all__ if inspect.isclass(getattr(client, name))
        },
        "errors": {name: _bases(getattr(errors, name)) for name in dir(errors) if _is_own(errors, name)},
        "recipes": sorted(RECIPES),
        "commands": _commands(),
        "settings": {
            "run": sorted(key for key in keys(Config()) if not key.startswith("model.")),
            "model": {name: sorted(keys(model())) for name, model in own_kinds().items()},
        },
        "formats": {
            "checkpoint": checkpoint_manifest.FORMAT,
            "manifest": sorted(field.name for field in dataclasses.fields(checkpoint_manifest.Manifest)),
            "sequences": [array_files.FORMAT, sequences.VERSION],
            "semantic ids": [semantic_ids.FORMAT, semantic_ids.FORMAT_VERSION],
            "trace": [trace_file._FORMAT, trace_file._VERSION],
        },
        "calls": {
            path.removeprefix("/v1/"): _body(calls["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path, calls in document("", instance_calls(Limits()), Schema())["paths"].items()
            if "post" in calls
        },
        "metrics": sorted(
            {
                name
                for part in ("serve", "gateway")
                for path in (_PACKAGE / part).glob("*.py")
                for name in re.findall(r'"(nestpipe_[\w{}]+)"', path.read_text())
            }
        ),
    }


def _is_own(module: Any, name: str) -> bool:
    value = getattr(module, name)
    return inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"fields": sorted(schema["properties"]), "needed": sorted(schema["required"])}


def _bases(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__[1:-1]]


def _shape(value: Any) -> Any:
    """The parameters of a function; of a class its fields and the parameters of its public methods."""
    if not inspect.isclass(value):
        return _parameters(value)
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    fields |= set(getattr(value, "__struct_fields__", ()))
    found: dict[str, Any] = {"fields": sorted(fields)} if fields else {}
    for name, member in inspect.getmembers(value):
        if name.startswith("_") or name in fields or name in dir(Exception):
            continue
        found[name] = _parameters(member) if callable(member) else "value"
    return found


def _parameters(function: Any) -> list[str]:
    """Names as they are written in a call; '=' behind those that may be left out."""
    shown = []
    for name, one in inspect.signature(function).parameters.items():
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        shown.append(f"{star}{name}{'' if one.default is one.empty else '='}")
    return shown


def _commands() -> dict[str, list[str]]:
    """The flags of every command; those of a run's settings stand under 'settings'."""
    found = {name: _flags(flags) for name, flags in PARSED_BY_COMMAND.items()}
    for name in COMMANDS.keys() - PARSED_BY_COMMAND.keys():
        module, _, flags = COMMANDS[name].parser.partition(":")
        found[name] = _flags(getattr(importlib.import_module(f"nestpipe.cli.{module}"), flags))
    return dict(sorted(found.items()))


def _flags(kind: Any, prefix: str = "") -> list[str]:
    found = []
    for field in dataclasses.fields(kind):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(made):
            found += _flags(made, prefix if field.name == "config" else f"{prefix}{field.name}.")
        elif field.name != "config":
            found.append(prefix + field.name)
    return sorted(found)


def written(content: dict[str, Any]) -> str:
    """JSON with one line for each entry of a section, so that a change is one line of a diff."""
    sections = []
    for name, section in content.items():
        entries = section.items() if isinstance(section, dict) else enumerate(section)
        lines = (
            f"  {json.dumps(key)}: {json.dumps(one)}" if isinstance(key, str) else f"  {json.dumps(one)}"
            for key, one in entries
        )
        opening, closing = "{}" if isinstance(section, dict) else "[]"
        sections.append(f" {json.dumps(name)}: {opening}\n" + ",\n".join(lines) + f"\n {closing}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    SNAPSHOT.parent.mkdir(exist_ok=True)
    SNAPSHOT.write_text(written(public()))
    print(f"wrote {SNAPSHOT}")
