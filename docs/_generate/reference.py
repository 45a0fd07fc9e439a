"""Reference pages, generated from the code when the site is built: commands, configuration, HTTP, Python API, file formats.

A hook of mkdocs (`hooks:` in mkdocs.yml). It also copies CONTRIBUTING.md and CHANGELOG.md of the repository into the site.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import nestpipe
from nestpipe.cli import SECTIONS, main
from nestpipe.config import Config
from nestpipe.registry import own_kinds

ROOT = Path(__file__).resolve().parents[2]
# Modules whose docstrings define a file format, and the constants with their versions.
FORMATS = {
    "Sequence folder": ("nestpipe.data.sequences", "VERSION"),
    "Quarantine": ("nestpipe.data.quarantine", ""),
    "Run folder": ("nestpipe.training.run_folder", ""),
    "Metrics": ("nestpipe.training.trackers", ""),
    "Checkpoint": ("nestpipe.checkpoint.manifest", "FORMAT"),
    "Trace of steps": ("nestpipe.profiling.trace_file", "_VERSION"),
    "Semantic ids": ("nestpipe.generative.semantic_ids", "FORMAT_VERSION"),
    "Instructions": ("nestpipe.generative.instruction_store", "_FORMAT"),
    "Event log": ("nestpipe.serve.event_log", ""),
    "Prefix store": ("nestpipe.serve.prefix_store", ""),
    "Stored KV prefix": ("nestpipe.serve.prefix_file", ""),
    "State of a service": ("nestpipe.state.service_state", ""),
}
PYTHON = {
    "From a log to recommendations": ("fit", "load", "TrainedRun"),
    "Train and use a run": ("train", "Run", "Config"),
    "Bring a model": ("register_backbone", "register_model", "Backbone", "Model", "Recommender", "ModelData", "Output"),
    "Rows and randomness": ("TableSpec", "Lookup", "Rows", "Rng"),
    "Data": ("Schema", "Feature", "Sequences", "Batch", "Jagged", "Cursor"),
    "The pipeline without a run folder": (
        *("build_state", "train_batches", "PipelineConfig", "EmbeddingConfig", "DenseConfig"),
    ),
    "Errors": ("NestPipeError",),
}
COPIED = {"project/contributing.md": "CONTRIBUTING.md", "project/changelog.md": "CHANGELOG.md"}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages to those of the folder."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    return files


def commands() -> str:
    """The help of every command."""
    parts = [
        "# Command line\n\nWhat `--help` prints. A mistake on the command line ends with one message and exit code 2.\n"
    ]
    for title, commands in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [f"### nestpipe {name}\n\n{_block(_help(*name.split()))}" for name in commands]
        if "train" in commands:
            parts.append("Settings of a recipe: [Configuration](configuration.md).\n")
    return "\n".join(parts)


def _help(*words: str) -> str:
    """What a command prints, without the frames that tyro draws."""
    shown, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    if columns is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = columns
    lines, framed = [], False
    for line in shown.getvalue().splitlines():
        bare = line.strip("╭─╮│ ").rstrip()
        if re.fullmatch(r"╭─ .* ─*╮| \w.*options *| (options|subcommands|positional arguments) *", line):
            lines += ["", f"{bare}:"]
            framed = True
        elif not re.fullmatch(r"[ │╰─╯-]*", line) or not line:
            inside = line.startswith("│") or (framed and line.startswith("  "))
            lines += [line.strip("│").rstrip()] if inside else _wrapped(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _wrapped(line: str) -> list[str]:
    indent = " " * 12 if line.startswith(("usage", "  ")) else ""
    return textwrap.wrap(line, 86, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


def configuration() -> str:
    """Every setting of a run with its type, default and meaning."""
    parts = [
        "# Configuration\n\nA run is a `nestpipe.Config`. A recipe returns one, and flags override single values: the setting "
        "`train.epochs` is the flag `--train.epochs`. `RUN/config.json` records the whole configuration. The defaults here are "
        "those of `Config()`; `nestpipe train RECIPE --help` shows those of a recipe.\n"
    ]
    default = Config()
    parts.append(_section("Top level", Config, "", only=("seed",)))
    for field in dataclasses.fields(Config):
        value = getattr(default, field.name)
        if field.name != "model" and dataclasses.is_dataclass(value):
            parts.append(_section(field.name, type(value), f"{field.name}."))
    for kind, settings in own_kinds().items():
        parts.append(_section(f"model: {kind}", settings, "model."))
    return "\n".join(parts)


def _section(title: str, kind: type[Any], prefix: str, *, only: tuple[str, ...] = ()) -> str:
    rows = [f"## {title}\n\n{inspect.getdoc(kind)}\n", "| setting | type | default | meaning |", "|---|---|---|---|"]
    texts, inner = dict(_field_docs(kind)), list[str]()
    for field in dataclasses.fields(kind):
        if only and field.name not in only:
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if not only and dataclasses.is_dataclass(default):  # a section of its own, below
            inner.append(_section(f"{title}.{field.name}", type(default), f"{prefix}{field.name}."))
            continue
        value = "" if default is dataclasses.MISSING else f"`{default!r}`"
        cells = (f"`{prefix}{field.name}`", _type(str(field.type)), value, texts.get(field.name, ""))
        rows.append(f"| {' | '.join(cell.replace('|', 'or') for cell in cells)} |")
    return "\n".join([*rows, "", *inner]) if inner else "\n".join(rows) + "\n"


def _type(annotation: str) -> str:
    """'Literal["a", "b"]' -> 'a, b'."""
    choices = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if choices:
        return ", ".join(f"`{one.strip()[1:-1]}`" for one in choices[1].split(","))
    return f"`{re.sub(r'[a-z_]+[.]', '', annotation)}`"


def _field_docs(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """The docstrings below the fields of a dataclass and of its bases."""
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for statement, following in pairwise(statements):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield name, " ".join(text.split())


def http() -> str:
    """The calls of the services, from the OpenAPI documents that they serve."""
    from nestpipe.data.schema import Schema
    from nestpipe.serve import openapi
    from nestpipe.serve.config import Limits

    limits = Limits()
    instances = {
        "Ranking instance": openapi.instance_calls(limits),
        "Next-item instance": openapi.next_item_calls(limits),
        "DCN instance": openapi.pointwise_calls(limits),
        "Generative instance": openapi.generative_calls(limits, beam=64, scenarios=("feed", "cart")),
    }
    documents = {title: openapi.document(title, calls, Schema()) for title, calls in instances.items()}
    kinds: dict[str, openapi.ServiceKind] = {
        "a ranker": "ranker",
        "a DCN": "pointwise",
        "a next-item model": "next_item",
        "a generative model": "generative",
    }
    documents |= {f"Gateway of {name}": openapi.gateway_document(kind) for name, kind in kinds.items()}
    parts = [
        "# HTTP\n\nEach service serves its OpenAPI document at `/openapi.json` and its metrics at `/metrics`. Bodies are JSON. "
        'An error is `{"error": {"code": …, "message": …}}`. The tables show the fields of a log without features and the '
        "default limits; events have one more field per feature of the log's schema.\n"
    ]
    for title, document in documents.items():
        parts.append(f"## {title}\n")
        refusals: dict[str, str] = {}
        for path, calls in document["paths"].items():
            for method, call in calls.items():
                parts.append(f"### {method.upper()} {path}\n\n{call.get('summary', '')}\n")
                if body := call.get("requestBody"):
                    parts.append(_fields("request", _schema(body), document))
                    parts.append(_fields("response", _schema(call["responses"]["200"]), document))
                    refusals |= {code: each["description"] for code, each in call["responses"].items() if code != "200"}
        rows = [f"| {code} | {text} |" for code, text in sorted(refusals.items())]
        parts.append("\n".join(["### Refusals\n", "| status | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _schema(content: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(iter(content["content"].values()))["schema"]
    return found


def _resolve(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one that its $ref names."""
    while "$ref" in schema:
        found: Any = document
        for word in schema["$ref"].removeprefix("#/").split("/"):
            found = found[word]
        schema = found
    return schema


def _fields(title: str, schema: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    schema = _resolve(schema, document)
    if not schema.get("properties"):
        return f"The {title} has no fields.\n"
    needed = schema.get("required", ())
    rows = [f"| {title} | type | |", "|---|---|---|"]
    for name, one in schema["properties"].items():
        kind, limits = _kind(one, document)
        notes = ["required"] * (name in needed and title == "request") + limits
        rows.append(f"| `{name}` | {kind} | {', '.join(notes)} |")
    return "\n".join(rows) + "\n"


def _kind(schema: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The type of a field in words, and its limits."""
    schema = _resolve(schema, document)
    if "anyOf" in schema:
        kinds = [_kind(one, document) for one in schema["anyOf"]]
        return " or ".join(kind for kind, _ in kinds), [limit for _, limits in kinds for limit in limits]
    if "enum" in schema:
        return "one of " + ", ".join("null" if one is None else f"`{one}`" for one in schema["enum"]), []
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    limits = []
    for key, text in (
        ("minimum", "≥ {}"),
        ("exclusiveMinimum", "> {}"),
        ("maximum", "≤ {:,.15g}"),
        ("maxLength", "≤ {:,} characters"),
    ):
        if key in schema and abs(schema[key]) < 2**40:
            limits.append(text.format(schema[key]))
    if "maxItems" in schema:
        limits.append(f"≤ {schema['maxItems']:,} entries")
    if "array" in kinds and "items" in schema:
        inner = _resolve(schema["items"], document)
        names = ", ".join(f"`{name}`" for name in inner.get("properties", ()))
        kinds[kinds.index("array")] = f"list of {_kind(inner, document)[0]}" + f" ({names})" * bool(names)
    return " or ".join(kinds), limits


def python_api() -> str:
    """The public names of `nestpipe`, with their docstrings."""
    parts = [
        "# Python API\n\nThe names of `import nestpipe`, the recipes and the HTTP clients. Everything else is internal "
        "([stability](../project/stability.md)).\n"
    ]
    grouped = {name for names in PYTHON.values() for name in names}
    rest = tuple(name for name in nestpipe.__all__ if name not in grouped and name != "recipes")
    for title, names in {**PYTHON, "Other": rest}.items():
        found = [name for name in names if name in nestpipe.__all__]
        parts += [f"## {title}\n"] * bool(found)
        parts += [
            f"::: nestpipe.{nestpipe._MODULES[name]}.{name}\n    options: {{heading_level: 3}}\n" for name in found
        ]
    bare = "heading_level: 3, show_root_heading: false, show_root_toc_entry: false"
    recipes = ", ".join(nestpipe.recipes.RECIPES)
    parts.append(f"## Recipes\n\n::: nestpipe.recipes\n    options: {{{bare}, members: [{recipes}]}}\n")
    parts.append(f"## HTTP clients\n\n::: nestpipe.client\n    options: {{{bare}}}\n")
    return "\n".join(parts)


def file_formats() -> str:
    """What is in the files that nestpipe writes, from the modules that write them."""
    parts = [
        "# File formats\n\nA file of another version is refused, with both versions in the message. Weights are safetensors; "
        "everything else is JSON, JSONL, Parquet, SQLite or plain arrays. Reading never executes code.\n"
    ]
    for title, (module, constant) in FORMATS.items():
        loaded = importlib.import_module(module)
        version = f"Version {getattr(loaded, constant)}. " if constant else ""
        where = Path(*module.split(".")).with_suffix(".py")
        parts.append(f"## {title}\n\n{version}Defined in `{where}`.\n\n{_block(inspect.getdoc(loaded) or '')}")
    return "\n".join(parts)


def copied(name: str) -> str:
    """A page of the repository's root, with links as they are inside the site."""
    text = re.sub(r"\]\(docs/", "](../", (ROOT / name).read_text())
    for page, source in COPIED.items():
        text = text.replace(f"]({source})", f"]({Path(page).name})")
    return text


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": commands,
    "reference/configuration.md": configuration,
    "reference/http.md": http,
    "reference/python.md": python_api,
    "reference/file-formats.md": file_formats,
    **{page: (lambda name=name: copied(name)) for page, name in COPIED.items()},
}
