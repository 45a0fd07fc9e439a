"""The types of rules in requests, with their JSON schemas. The client imports this file, so it must need neither torch nor starlette.

Whether rules name what exists depends on the log, so nestpipe.rules checks what is inside of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from nestpipe.data.schema import Feature, Schema

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


def add_rule_fields(request: dict[str, Any], log: Schema) -> None:
    """Names the item features of a log in the JSON schema of a request that takes rules."""
    own = request["properties"]
    if "filter" not in own:
        return
    known = {one.name: one for one in log.of_scope("item") if one.kind != "vector"}
    filters = {
        "type": "object",
        "properties": {name: _filter_of(one) for name, one in known.items()},
        "additionalProperties": False,
    }
    own["filter"] = {**filters, "default": {}}
    own["boost"] = {**own["boost"], "items": {**_BOOST, "properties": {"filter": filters, "add": {"type": "number"}}}}
    most = {"type": "integer", "minimum": 1}
    own["max_per"] = {
        "type": "object",
        "properties": dict.fromkeys(known, most),
        "additionalProperties": False,
        "default": {},
    }


def _filter_of(feature: Feature) -> dict[str, Any]:
    """What a filter may ask of a field."""
    is_number = feature.kind == "number"
    value = {"type": ["number", "boolean"]} if is_number else {"type": ["string", "integer"]}
    several = {"type": "array", "items": value, "minItems": 1}
    return {"anyOf": [value, several, {**_RANGE, "minProperties": 1, "additionalProperties": False}][: 2 + is_number]}
