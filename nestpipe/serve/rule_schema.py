"""The types of rules in requests, with their JSON schemas. The client imports this file, so it must need neither torch nor starlette.

Whether rules name what exists depends on the log, so nestpipe.rules checks what is inside of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

_VALUE = {"type": ["string", "number", "boolean"]}
_RANGE = {"type": "object", "properties": {"gte": {"type": "number"}, "lte": {"type": "number"}}}
_FILTER = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [
            _VALUE,
            {"type": "array", "items": _VALUE, "minItems": 1},
            {**_RANGE, "minProperties": 1, "additionalProperties": False},
        ]
    },
}
_BOOST = {
    "type": "object",
    "properties": {"filter": _FILTER, "add": {"type": "number"}},
    "required": ["filter", "add"],
    "additionalProperties": False,
}
Filter = Annotated[Mapping[str, Any], Meta(extra_json_schema=_FILTER)]
Boosts = Annotated[Sequence[Any], Meta(max_length=32, extra_json_schema={"items": _BOOST})]
MaxPer = Annotated[
    Mapping[str, Any],
    Meta(extra_json_schema={"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}),
]
Share = Annotated[float, Meta(ge=0, le=1)]
