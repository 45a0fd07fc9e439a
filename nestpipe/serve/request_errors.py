"""What is wrong with a request, in words: the field, what was seen there and what is wanted."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from nestpipe.errors import NestPipeError


class BadRequestError(NestPipeError):
    """The request is invalid: the message names the field, and `status` and `code` are answered."""

    def __init__(self, message: str, *, status: int = 400, code: str = "bad_request"):
        super().__init__(message)
        self.status, self.code = status, code


_SERVER_PATH = re.compile(r"(?<![\w/.:])/(?:[^\s/'\",;:()]+/)+([^\s/'\",;:()]*)")


def without_paths(message: str) -> str:
    """A message for callers: of folders and files of the server, whose addresses are none of their business, only the name."""
    return _SERVER_PATH.sub(r"\1", message)


def explained(problem: str, value: Any, kind: Any, name: str = "") -> BadRequestError:
    """msgspec names the place and the type; callers also need the value that was seen and what is wanted there."""
    text, _, place = problem.partition(" - at `$")
    document = msgspec.json.schema(kind)
    wanted = _resolved(document, document)
    for field, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
        name += f".{field}" if field and name else field or f"[{index}]"
        value = value[field or int(index)]
        inner = _member(document, wanted, "properties" if field else "items")
        wanted = _resolved(document, inner[field] if field else inner)
    if text.startswith("Object missing required field"):
        field = text.split("`")[1]
        name = f"{name}.{field}" if name else field
        expected = _description(_resolved(document, wanted["properties"][field]))
        return BadRequestError(f"field {name!r} is missing; it must be {expected}.", code=_code(name))
    return wrong_field(name, value, _description(wanted))


def wrong_field(name: str, value: Any, expected: str) -> BadRequestError:
    seen = f"{type(value).__name__} of {len(value):,}" if isinstance(value, list | dict) else repr(value)[:60]
    return BadRequestError(f"field {name!r} is {seen}; it must be {expected}.", code=_code(name))


def _member(document: dict[str, Any], schema: dict[str, Any], key: str) -> dict[str, Any]:
    """What is inside the one of several types that has something inside."""
    several = (_resolved(document, one) for one in _resolved(document, schema).get("anyOf", [schema]))
    found: dict[str, Any] = next(one for one in several if key in one)[key]
    return found


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without a reference; of a nullable one what it may be besides null."""
    if "anyOf" in schema:
        several = [one for one in schema["anyOf"] if one.get("type") != "null"]
        schema = several[0] if len(several) == 1 else {"anyOf": several}
    return document["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _description(schema: dict[str, Any]) -> str:
    """What a JSON schema takes, in words."""
    return ", or ".join(_describe_one(one) for one in schema.get("anyOf", [schema]))


def _describe_one(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "integer":
            return f"an integer of {low:,} or more" if high is None else f"an integer in {low:,} .. {high:,}"
        case "number":
            if low is not None:
                return f"a number in {low:g} .. {high:g}"
            return f"a number above {schema['exclusiveMinimum']:g}" + (f", at most {high:,.0f}" if high else "")
        case "string":
            return f"a printable text of 1 .. {schema['maxLength']:,} characters"
        case "array":
            most = f" .. {schema['maxItems']:,}" if "maxItems" in schema else " or more"
            what = "ids" if "anyOf" in schema["items"] else "objects"
            return f"a list of {schema.get('minItems', 0)}{most} {what}"
    return f"one of {', '.join(schema['enum'])}" if "enum" in schema else "an object"


def _code(name: str) -> str:
    """Of the innermost field: 'history[3].item' is 'bad_item'."""
    return "bad_" + name.rpartition(".")[2].partition("[")[0]
