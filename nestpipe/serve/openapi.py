"""What instances and a gateway take and give, as OpenAPI documents. The names of fields here are those that are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nestpipe.data.schema import Schema
from nestpipe.gateway.router import MAX_TICKET_CHARS
from nestpipe.serve.config import GatewayLimits, Limits
from nestpipe.serve.schemas import MAX_REQUEST_CHARS

Properties = dict[str, Any]
_INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_SECONDS = {"type": "integer", "minimum": 0, "maximum": 2**43 - 1}
_NUMBER = {"type": "number"}
_TEXT = {"type": "string"}
_KINDS = {
    "number": {"type": ["number", "null"]},
    "id": {"type": ["integer", "null"]},
    "ids": {"type": ["array", "null"], "items": {"type": "integer"}},
    "vector": {"type": ["array", "null"], "items": {"type": "number"}},
}


def event_properties(schema: Schema) -> Properties:
    """The fields of one event of the log."""
    own: Properties = {"item": _INT64, **({"time": _SECONDS} if schema.time else {})}
    for feature in schema.of_scope("event"):
        own[feature.name] = _KINDS[feature.kind]
        if feature.weights is not None:
            own[f"{feature.name}.weights"] = _KINDS["vector"]
    return own


def bodies(schema: Schema, limits: Limits) -> dict[str, tuple[Properties, list[str]]]:
    """The fields of each call's body, and which it must have."""
    request = {"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_CHARS}
    ticket = {"type": "string", "minLength": 1, "maxLength": MAX_TICKET_CHARS}
    asked = {
        "user": _INT64,
        "request": request,
        "query_time": {**_SECONDS, "type": ["integer", "null"]},
        "history": _history(schema, limits),
    }
    items = {**_list(_INT64, limits.candidates), "minItems": 1}
    given = {"type": ["integer", "null"], "minimum": 1, "maximum": limits.candidates}
    count = {"type": "integer", "minimum": 1, "maximum": limits.candidates}
    rank = {**asked, "candidates": items, "k": given, "ticket": {**ticket, "type": ["string", "null"]}}
    return {
        "prefill": ({**asked, "candidates": count}, ["user", "request", "candidates"]),
        "rank": ({**rank, "deadline_ms": _deadline(limits)}, ["user", "request", "candidates"]),
        "release": ({"ticket": ticket}, ["ticket"]),
        **_writes(schema, limits),
    }


def generative_bodies(
    schema: Schema, limits: Limits, *, beam: int, scenarios: Sequence[str]
) -> dict[str, tuple[Properties, list[str]]]:
    """The same of an instance that generates."""
    generate = {
        "user": _INT64,
        "k": {"type": "integer", "minimum": 1, "maximum": beam},
        "scenario": {"enum": [*scenarios, None]},
        "trigger": {**_INT64, "type": ["integer", "null"]},
        "deadline_ms": _deadline(limits),
        "history": _history(schema, limits),
    }
    return {"generate": (generate, ["user"]), **_writes(schema, limits)}


def _writes(schema: Schema, limits: Limits) -> dict[str, tuple[Properties, list[str]]]:
    own = {"id": {"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_CHARS}, "user": _INT64}
    posted = _object({**own, **event_properties(schema)}, ["id", "user", *_needed(schema)])
    return {
        "events": ({"events": _list(posted, limits.events)}, ["events"]),
        "invalidate": ({"user": _INT64}, ["user"]),
    }


def _history(schema: Schema, limits: Limits) -> Properties:
    event = _object(event_properties(schema), _needed(schema))
    return {**_list(event, limits.history), "type": ["array", "null"]}


def _needed(schema: Schema) -> list[str]:
    return ["item", *(["time"] if schema.time else [])]


def _deadline(limits: Limits) -> Properties:
    return {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": limits.deadline_ms}


_ANSWERS: dict[str, tuple[str, Properties]] = {
    "prefill": (
        "Says ahead that a ranking will follow, so that its prefix may be computed meanwhile.",
        {
            "ticket": {"type": ["string", "null"]},
            "admitted": {"type": "boolean"},
            "reason": _TEXT,
            "instance": _TEXT,
            "epoch": _TEXT,
            "quiet_s": _NUMBER,
        },
    ),
    "rank": (
        "Orders candidates, best first.",
        {
            "items": {"type": "array", "items": _INT64},
            "scores": {"type": "array", "items": _NUMBER},
            "path": _TEXT,
            "prefix_len": {"type": "integer"},
            "degraded": {"type": "boolean"},
            "model": _TEXT,
            "times_ms": {"type": "object", "additionalProperties": _NUMBER},
        },
    ),
    "generate": (
        "Generates items, best first.",
        {
            "items": {"type": "array", "items": _INT64},
            "log_probabilities": {"type": "array", "items": _NUMBER},
            "path": _TEXT,
            "degraded": {"type": "boolean"},
            "instruction": {"type": "object"},
            "num_events": {"type": "integer"},
            "beam": {"type": "integer"},
            "model": _TEXT,
            "semantic_ids": _TEXT,
            "times_ms": {"type": "object", "additionalProperties": _NUMBER},
        },
    ),
    "release": ("Gives back a prefix that no ranking will use.", {"released": {"type": "boolean"}}),
    "events": (
        "Adds events to histories, each id once.",
        {"accepted": {"type": "integer"}, "duplicates": {"type": "integer"}},
    ),
    "invalidate": ("Takes everything computed for a user out of memory.", {"entries": {"type": "integer"}}),
}
_REFUSALS = {
    "400": "The body cannot be read, or asks for something that is not there.",
    "403": "The ticket is not one of this process.",
    "408": "The body took too long.",
    "413": "The body is too large.",
    "429": "Too many requests wait.",
    "503": "The instance is stopping, or the deadline has passed.",
}


def document(schema: Schema, limits: Limits) -> dict[str, Any]:
    """The document of an instance."""
    return _whole("An instance of nestpipe", bodies(schema, limits), _ANSWERS, _REFUSALS)


def generative_document(calls: dict[str, tuple[Properties, list[str]]]) -> dict[str, Any]:
    """The document of an instance that generates, from its `generative_bodies`."""
    return _whole("A generative instance of nestpipe", calls, _ANSWERS, _REFUSALS)


def gateway_bodies(limits: GatewayLimits) -> dict[str, tuple[Properties, list[str]]]:
    """The fields of each call's body at a gateway, which leaves the features of events to the instances."""
    request = {"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_CHARS}
    ticket = {"type": "string", "minLength": 1, "maxLength": MAX_TICKET_CHARS}
    event = {"type": "object", "properties": {"item": _INT64, "time": _SECONDS}, "required": ["item"]}
    asked = {
        "user": _INT64,
        "request": request,
        "query_time": {**_SECONDS, "type": ["integer", "null"]},
        "history": {**_list(event, limits.max_history), "type": ["array", "null"]},
    }
    count = {"type": "integer", "minimum": 1, "maximum": limits.max_k}
    items = _list(_INT64, limits.max_candidates)
    rank = {
        **asked,
        "candidates": {**items, "minItems": 1},
        "k": {**count, "type": ["integer", "null"]},
        "ticket": {**ticket, "type": ["string", "null"]},
        "deadline_ms": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": limits.deadline_ms},
    }
    return {
        "recommend": ({**asked, "k": count, "exclude": items}, ["user"]),
        "prefill": ({**asked, "candidates": {**count, "maximum": limits.max_candidates}}, ["user", "candidates"]),
        "rank": (rank, ["user", "candidates"]),
        "release": ({"ticket": ticket}, ["ticket"]),
        "events": ({"events": _list({"type": "object"}, limits.max_events)}, ["events"]),
        "invalidate": ({"user": _INT64}, ["user"]),
    }


def gateway_document(limits: GatewayLimits) -> dict[str, Any]:
    """The document of a gateway."""
    said = {"instances": {"type": "array", "items": _TEXT}}
    texts = {
        name: {"type": kind}
        for name, kind in (("request", "string"), ("prefill_hint", "string"), ("problem", "string"))
    }
    more = {"instance": {"type": ["string", "null"]}, "attempts": {"type": "integer"}, "stages": {"type": "object"}}
    text, said_ahead = _ANSWERS["prefill"]
    answers = {
        **_ANSWERS,
        "prefill": (text, {name: one for name, one in said_ahead.items() if name != "quiet_s"}),
        "recommend": ("Recommends items through the whole cascade.", {**_ANSWERS["rank"][1], **texts, **more}),
        "events": (_ANSWERS["events"][0], said),
        "invalidate": (_ANSWERS["invalidate"][0], said),
    }
    refusals = {
        **_REFUSALS,
        "422": "Retrieval cannot use what the request brought.",
        "502": "An instance gave no answer that can be used.",
        "504": "An instance gave no answer in time.",
    }
    return _whole("A gateway of nestpipe", gateway_bodies(limits), answers, refusals)


def _whole(
    title: str,
    calls: dict[str, tuple[Properties, list[str]]],
    answers: dict[str, tuple[str, Properties]],
    refusals: dict[str, str],
) -> dict[str, Any]:
    error = _object({"error": _object({"code": _TEXT, "message": _TEXT}, ["code", "message"])}, ["error"])
    paths: dict[str, Any] = {}
    for name, (properties, needed) in calls.items():
        text, answer = answers[name]
        paths[f"/v1/{name}"] = {
            "post": {
                "operationId": name,
                "summary": text,
                "requestBody": {"required": True, "content": _json(_object(properties, needed))},
                "responses": {
                    "200": _response("Done.", _object(answer, list(answer))),
                    **{code: _response(what, error) for code, what in refusals.items()},
                },
            }
        }
    for name, text in (("healthz", "The process is alive."), ("readyz", "It takes requests.")):
        said = {"200": _response(text, {"type": "object"}), "503": _response("It does not.", {"type": "object"})}
        paths[f"/{name}"] = {"get": {"operationId": name, "summary": text, "responses": said}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": "Times are seconds since 1970."},
        "paths": paths,
    }


def _object(properties: Properties, needed: list[str]) -> Properties:
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def _list(of: Properties, most: int) -> Properties:
    return {"type": "array", "items": of, "maxItems": most}


def _json(schema: Properties) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _response(text: str, schema: Properties) -> dict[str, Any]:
    return {"description": text, "content": _json(schema)}
