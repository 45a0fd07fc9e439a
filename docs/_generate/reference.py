"""Pages of the reference that are made from the code when the site is built: commands, configuration, HTTP, Python, file formats.

A hook of mkdocs (`hooks:` in mkdocs.yml). What is generated cannot go stale, and nobody edits it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import nestpipe
from nestpipe.cli import SECTIONS, main
from nestpipe.config import Config
from nestpipe.registry import own_kinds

# Modules whose docstrings define a file format, and the constants with their versions.
FORMATS = {
    "Sequence folder": ("nestpipe.data.sequences", ("nestpipe.data.sequences:VERSION",)),
    "Run folder": ("nestpipe.training.run_folder", ()),
    "Checkpoint": ("nestpipe.checkpoint.manifest", ("nestpipe.checkpoint.manifest:FORMAT",)),
    "Trace of steps": ("nestpipe.profiling.recorder", ("nestpipe.profiling.recorder:_VERSION",)),
    "Semantic ids": ("nestpipe.generative.semantic_ids", ("nestpipe.generative.semantic_ids:FORMAT_VERSION",)),
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages to those of the folder."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """All generated pages by name."""
    return {
        "cli": commands(),
        "configuration": configuration(),
        "http": http(),
        "python": python_api(),
        "file-formats": file_formats(),
    }


def commands() -> str:
    """The help of every command, as it prints it."""
    parts = [
        "# Commands\n\nWhat `--help` prints. Every command ends with exit code 2 and one message for a mistake of its user.\n"
    ]
    for title, commands in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [f"### nestpipe {name}\n\n{_block(_help(*name.split()))}" for name in commands]
        if "train" in commands:
            parts.append(f"### nestpipe train tiny\n\n{_block(_help('train', 'tiny'))}")
    return "\n".join(parts)


def _help(*words: str) -> str:
    shown = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return shown.getvalue()


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def configuration() -> str:
    """Every setting of a run with its type, default and meaning."""
    parts = [
        "# Configuration\n\nA run is a `nestpipe.Config`; recipes return one, flags override single values: the setting "
        "`train.epochs` is the flag `--train.epochs`. The whole configuration stands in `RUN/config.json`.\n"
    ]
    default = Config()
    for field in dataclasses.fields(Config):
        value = getattr(default, field.name)
        if field.name != "model" and dataclasses.is_dataclass(value):
            parts.append(_section(f"{field.name}", type(value), f"{field.name}."))
    for kind, settings in own_kinds().items():
        parts.append(_section(f"model: {kind}", settings, "model."))
    return "\n".join(parts)


def _section(title: str, kind: type[Any], prefix: str) -> str:
    rows = [f"## {title}\n\n{inspect.getdoc(kind)}\n", "| setting | default | meaning |", "|---|---|---|"]
    texts = dict(_explained(kind))
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        shown = f"`{default!r}`".replace("|", "\\|")
        rows.append(f"| `{prefix}{field.name}` | {shown} | {texts.get(field.name, '')} |")
    return "\n".join(rows) + "\n"


def _explained(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """The texts that stand below the fields of a dataclass, of its bases too."""
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for statement, following in pairwise(statements):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield name, " ".join(text.split()).replace("|", "\\|")


def http() -> str:
    """The calls of the services, from the OpenAPI documents that they serve."""
    from nestpipe.data.schema import Schema
    from nestpipe.serve.config import Limits
    from nestpipe.serve.openapi import gateway_document, instance_document

    parts = ["# HTTP\n\nEach service also serves its OpenAPI document at `/openapi.json`.\n"]
    for title, document in (
        ("An instance", instance_document(Schema(), Limits())),
        ("The gateway", gateway_document()),
    ):
        parts.append(f"## {title}\n")
        for path, calls in document["paths"].items():
            for method, call in calls.items():
                parts.append(f"### {method.upper()} {path}\n\n{call.get('summary', '')}\n")
                if body := call.get("requestBody"):
                    schema = json.dumps(next(iter(body["content"].values()))["schema"], indent=2)
                    parts.append(f"```json\n{schema}\n```\n")
    return "\n".join(parts)


def python_api() -> str:
    """The public names of `nestpipe`, with their docstrings."""
    parts = [
        "# Python\n\nWhat `import nestpipe` offers; `nestpipe.recipes` holds the named runs, `nestpipe.client` the clients.\n"
    ]
    for name in nestpipe.__all__:
        if name != "recipes":
            parts.append(f"::: nestpipe.{nestpipe._MODULES[name]}.{name}\n")
    parts.append("## Recipes\n\n::: nestpipe.recipes\n")
    parts.append("## Clients\n\n::: nestpipe.client\n")
    return "\n".join(parts)


def file_formats() -> str:
    """What is in the files that nestpipe writes, from the modules that write them."""
    parts = [
        "# File formats\n\nA file of another version is refused with both versions in the message. Weights are safetensors, everything "
        "else is JSON, JSONL, Parquet, SQLite or plain arrays; nothing that is read runs code.\n"
    ]
    for title, (module, constants) in FORMATS.items():
        versions = [
            f"version {getattr(importlib.import_module(one.split(':')[0]), one.split(':')[1])}" for one in constants
        ]
        text = inspect.getdoc(importlib.import_module(module)) or ""
        where = Path(*module.split(".")).with_suffix(".py")
        parts.append(f"## {title}\n\n{', '.join(versions)} (`{where}`)\n\n{_block(text)}")
    return "\n".join(parts)
