"""The OpenAPI paths of items and users, made of the definitions that parse their requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nestpipe.data.schema import Schema, Scope
from nestpipe.serve import schemas
from nestpipe.serve.state_schemas import STATE_CALLS, StateCall, any_elements

JsonSchema = dict[str, Any]
_ID = {"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 1, "maxLength": 512}]}
_ITEM_FIELDS: JsonSchema = {"text": {"type": ["string", "null"], "maxLength": 20_000}, "available": {"type": "boolean"}}
KINDS: dict[str, JsonSchema] = {
    "number": {"type": ["number", "null"]},
    "id": {"type": ["integer", "null"]},
    "ids": {"type": ["array", "null"], "items": {"type": "integer"}},
    "vector": {"type": ["array", "null"], "items": {"type": "number"}},
}
NAMED: dict[str, JsonSchema] = {  # ids that are texts in the log
    "id": {"type": ["string", "integer", "null"]},
    "ids": {"type": ["array", "null"], "items": {"type": ["string", "integer"]}},
}


def add_state_paths(
    paths: JsonSchema, components: JsonSchema, log: Schema | None, *, refusals: Mapping[str, str], max_elements: int
) -> None:
    """Adds the calls of STATE_CALLS to a document. A gateway leaves attributes to its instances, so it has no `log`."""
    error = {"$ref": "#/components/schemas/ErrorReply"}
    for name, call in STATE_CALLS.items():
        body, given = _schemas(call, components, log, max_elements)
        answers = {**refusals, **({"404": "The catalogue does not have this item."} if call.in_path == "item" else {})}
        operation: JsonSchema = {
            "operationId": name,
            "summary": (call.request.__doc__ or "").split("\n")[0],
            "responses": {
                "200": _response("Done.", given),
                **{code: _response(text, error) for code, text in sorted(answers.items())},
            },
        }
        if call.in_path:
            own = {"type": "string", "minLength": 1, "maxLength": 512}
            operation["parameters"] = [{"name": call.in_path, "in": "path", "required": True, "schema": own}]
        elif call.method == "GET":
            fields = msgspec.json.schema(call.request)["$defs"][call.request.__name__]["properties"]
            operation["parameters"] = [
                {"name": field, "in": "query", "schema": _not_null(schema)} for field, schema in fields.items()
            ]
        if call.has_body:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        path = f"{call.path}/{{{call.in_path}}}" if call.in_path else call.path
        paths.setdefault(path, {})[call.method.lower()] = operation


def _schemas(
    call: StateCall, components: JsonSchema, log: Schema | None, max_elements: int
) -> tuple[JsonSchema, JsonSchema]:
    """The body of a call and its answer; what they refer to goes to the components."""
    field, scope = call.request.__struct_fields__[0], _scope(call)
    kind = any_elements(call.request, field, most=max_elements) if call.method == "PUT" else call.request
    references, found = msgspec.json.schema_components(
        [kind, call.answer, schemas.ErrorReply], ref_template="#/components/schemas/{name}"
    )
    body, given = (found.pop(one["$ref"].rpartition("/")[2]) for one in references[:2])
    components |= found
    record = _record(log, scope)
    if call.method == "PUT":
        body["properties"][field]["items"] = {**record, "required": ["id"]}
    elif call.method == "PATCH":
        body = {**record, "properties": {k: v for k, v in record["properties"].items() if k != "id"}}
    if "item" in given["properties"]:
        given["properties"]["item"] = record
    elif scope == "item" and "items" in given["properties"]:
        given["properties"]["items"]["items"] = record
    return body, given | {"required": list(given["properties"]), "additionalProperties": False}


def _scope(call: StateCall) -> Scope:
    return "item" if call.path == "/v1/items" else "user"


def _record(log: Schema | None, scope: Scope) -> JsonSchema:
    """An item or a user with the attributes of the log."""
    fields: JsonSchema = {"id": _ID, **(_ITEM_FIELDS if scope == "item" else {})}
    if log is None:
        return {"type": "object", "properties": fields}
    for feature in log.of_scope(scope):
        is_named = feature.kind in {"id", "ids"} and feature.encoding != "int64"
        fields[feature.name] = (NAMED if is_named else KINDS)[feature.kind]
        if feature.weights is not None:
            fields[f"{feature.name}.weights"] = KINDS["vector"]
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _not_null(schema: JsonSchema) -> JsonSchema:
    return next(one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")


def _response(text: str, schema: JsonSchema) -> JsonSchema:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
