"""The calls of an instance, a generative instance and a gateway, with their limits, and the OpenAPI documents made of them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nestpipe.data.schema import Schema
from nestpipe.serve import schemas
from nestpipe.serve.config import MAX_TICKET_CHARS, GatewayLimits, Limits
from nestpipe.serve.rule_schema import add_rule_fields
from nestpipe.serve.schemas import limited
from nestpipe.serve.state_openapi import KINDS, NAMED, add_state_paths
from nestpipe.serve.state_schemas import EventsReply, posted_events

JsonSchema = dict[str, Any]
Calls = dict[str, tuple[type[Any], type[Any]]]
"""The request and the answer of each call."""
ServiceKind = Literal["ranker", "pointwise", "next_item", "generative"]
"""The kind of run behind a gateway."""
_MOST = Limits().events
_REFUSALS = {
    "400": "The body cannot be read, or names something that does not exist.",
    "403": "The ticket is not one of this process.",
    "408": "The body took too long.",
    "413": "The body is too large, or has too many elements.",
    "429": "Too many requests wait.",
    "503": "The instance is stopping, the deadline has passed, or a part of it failed.",
}
_GATEWAY_REFUSALS = {
    **_REFUSALS,
    "422": "Retrieval cannot use what the request brought.",
    "503": "No instance gave an answer in time, or a stage failed.",
}


def instance_calls(limits: Limits) -> Calls:
    """The calls of an instance that ranks with KV prefixes."""
    ticket = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_TICKET_CHARS}
    # An invalid ticket is counted, never an error.
    rank = _rank(limits, ticket=(Annotated[Any, Meta(extra_json_schema=ticket)], None))
    prefill = limited(schemas.PrefillRequest, candidates=limits.candidates, history=limits.history)
    return {
        "prefill": (prefill, schemas.InstancePrefillReply),
        "rank": (rank, schemas.RankedItems),
        "release": (schemas.ReleaseRequest, schemas.ReleaseReply),
        **next_item_calls(limits),
    }


def pointwise_calls(limits: Limits) -> Calls:
    """The calls of an instance that ranks without histories. It takes no tickets: it has no KV prefixes."""
    return {"rank": (_rank(limits), schemas.RankedItems), **next_item_calls(limits)}


def _rank(limits: Limits, **more: Any) -> type[schemas.RankRequest]:
    return limited(
        schemas.RankRequest,
        candidates=limits.candidates,
        k=limits.candidates,
        history=limits.history,
        deadline_ms=limits.deadline_ms,
        **more,
    )


def next_item_calls(limits: Limits) -> Calls:
    """The calls of an instance that recommends from the whole catalogue, which every instance has."""
    return {
        "recommend": (_recommend(limits, schemas.InstanceRecommendRequest), schemas.RecommendedItems),
        "similar": (
            limited(schemas.SimilarRequest, k=limits.items, exclude=limits.candidates),
            schemas.SimilarItems,
        ),
        **_writes(limits),
    }


def _recommend(limits: Limits, kind: type[schemas.RecommendRequest], **more: Any) -> type[schemas.RecommendRequest]:
    return limited(
        kind,
        k=limits.items,
        history=limits.history,
        exclude=limits.candidates,
        deadline_ms=limits.deadline_ms,
        **more,
    )


def generative_calls(limits: Limits, *, beam: int, scenarios: Sequence[str]) -> Calls:
    """The calls of an instance that generates."""
    known = Meta(extra_json_schema={"enum": list(scenarios)} if scenarios else {})
    generate = limited(
        schemas.GenerateRequest,
        k=(Annotated[int, Meta(ge=1, le=beam)], min(10, beam)),
        exclude=limits.candidates,
        history=limits.history,
        deadline_ms=limits.deadline_ms,
        scenario=known,
    )
    recommend = _recommend(limits, schemas.SteeredRecommendRequest, scenario=known)
    return {
        "generate": (generate, schemas.GeneratedItems),
        **next_item_calls(limits),
        "recommend": (recommend, schemas.RecommendedItems),
    }


def gateway_calls(limits: GatewayLimits, kind: ServiceKind) -> Calls:
    """The calls of a gateway. A request without an id gets one."""
    request = (schemas.Name, msgspec.field(default_factory=lambda: uuid.uuid4().hex))
    k, history, candidates = limits.max_k, limits.max_history, limits.max_candidates
    recommend = limited(
        schemas.SteeredRecommendRequest if kind == "generative" else schemas.InstanceRecommendRequest,
        k=k,
        history=history,
        exclude=candidates,
        deadline_ms=limits.deadline_ms,
        request=request,
    )
    prefill = limited(schemas.PrefillRequest, candidates=candidates, history=history, request=request)
    rank = limited(
        schemas.RankRequest,
        candidates=candidates,
        k=k,
        history=history,
        deadline_ms=limits.deadline_ms,
        request=request,
    )
    generate = limited(
        schemas.GenerateRequest, k=k, history=history, exclude=candidates, deadline_ms=limits.deadline_ms
    )
    of_kind: dict[ServiceKind, Calls] = {
        "ranker": {
            "prefill": (prefill, schemas.PrefillReply),
            "rank": (rank, schemas.RankedItems),
            "release": (schemas.ReleaseRequest, schemas.ReleaseReply),
        },
        "pointwise": {"rank": (rank, schemas.RankedItems)},
        "next_item": {},
        "generative": {"generate": (generate, schemas.GeneratedItems)},
    }
    return {
        "recommend": (recommend, schemas.RecommendedItems),
        "similar": (limited(schemas.SimilarRequest, k=k, exclude=candidates), schemas.SimilarItems),
        **of_kind[kind],
        "events": (posted_events(limits.max_events), EventsReply),
        "invalidate": (schemas.InvalidateRequest, schemas.InstancesReply),
    }


def _writes(limits: Limits) -> Calls:
    return {
        "events": (posted_events(limits.events), EventsReply),
        "invalidate": (schemas.InvalidateRequest, schemas.InvalidateReply),
    }


def document(title: str, calls: Calls, schema: Schema, *, max_elements: int = _MOST) -> JsonSchema:
    """Of an instance, whose events, items and users have the features of its log."""
    return _document(title, calls, _REFUSALS, schema, max_elements)


def _from_address(post: JsonSchema) -> JsonSchema:
    """GET /v1/recommend/{user}?k=10: the number fields of the POST, and its answers."""
    fields = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    user = {"type": "string", "minLength": 1, "maxLength": 512}
    parameters: list[JsonSchema] = [{"name": "user", "in": "path", "required": True, "schema": user}]
    parameters += [
        {"name": name, "in": "query", "schema": _required(fields[name])} for name in ("k", "query_time", "rules")
    ]
    return {
        "operationId": "recommend_user",
        "summary": "Recommends items to a user, whose id is percent-encoded in the address.",
        "parameters": parameters,
        "responses": post["responses"],
    }


def _required(schema: JsonSchema) -> JsonSchema:
    """What a field may be besides null."""
    return next(one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")


def gateway_document(kind: ServiceKind, limits: GatewayLimits | None = None) -> JsonSchema:
    """A gateway leaves the features of events to its instances, so its document does not name them."""
    limits = limits or GatewayLimits()
    return _document("A gateway of nestpipe", gateway_calls(limits, kind), _GATEWAY_REFUSALS, None, limits.max_events)


def _document(
    title: str, calls: Calls, refusals: Mapping[str, str], log: Schema | None, max_elements: int
) -> JsonSchema:
    kinds = [
        *(kind for pair in calls.values() for kind in pair),
        schemas.HistoryEvent,
        schemas.PostedEvent,
        schemas.ErrorReply,
    ]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    named = dict(zip(kinds, (one["$ref"].rpartition("/")[2] for one in references), strict=True))
    events = {
        "history": components.pop(named[schemas.HistoryEvent]),
        "events": components.pop(named[schemas.PostedEvent]),
    }
    for event in events.values():
        _add_features(event, log)
    error = {"$ref": f"#/components/schemas/{named[schemas.ErrorReply]}"}
    paths: JsonSchema = {}
    for name, (request, answer) in calls.items():
        taken, given = (components[named[kind]] for kind in (request, answer))
        if log is not None:
            add_rule_fields(taken, log)
        for field, event in events.items():
            if (own := taken["properties"].get(field)) is not None:
                next(one for one in own.get("anyOf", [own]) if one.get("type") == "array")["items"] = event
        # Services send every field of an answer and no other.
        given |= {"required": list(given["properties"]), "additionalProperties": False}
        paths[f"/v1/{name}"] = {
            "post": {
                "operationId": name,
                "summary": taken["description"],
                "requestBody": {"required": True, "content": _json(taken)},
                "responses": {
                    "200": _response("Done.", given),
                    **{code: _response(text, error) for code, text in refusals.items()},
                },
            }
        }
    paths["/v1/recommend/{user}"] = {"get": _from_address(paths["/v1/recommend"]["post"])}
    for name, text in (("healthz", "The process is alive."), ("readyz", "It takes requests.")):
        responses = {"200": _response(text, {"type": "object"}), "503": _response("It does not.", {"type": "object"})}
        paths[f"/{name}"] = {"get": {"operationId": name, "summary": text, "responses": responses}}
    inlined = {named[kind] for pair in calls.values() for kind in pair}
    components = {name: one for name, one in components.items() if name not in inlined}
    add_state_paths(paths, components, log, refusals=refusals, max_elements=max_elements)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": "Times are seconds since 1970."},
        "paths": paths,
        "components": {"schemas": components},
    }


def _add_features(event: JsonSchema, log: Schema | None) -> None:
    """The fields that the events of a log have besides item and time."""
    if log is None:
        return
    if log.time:
        event["required"] = [*event["required"], "time"]
    else:
        del event["properties"]["time"]
    for feature in log.of_scope("event"):
        is_named = feature.kind in {"id", "ids"} and feature.encoding != "int64"
        event["properties"][feature.name] = (NAMED if is_named else KINDS)[feature.kind]
        if feature.weights is not None:
            event["properties"][f"{feature.name}.weights"] = KINDS["vector"]
    event["additionalProperties"] = False


def _json(schema: JsonSchema) -> JsonSchema:
    return {"application/json": {"schema": schema}}


def _response(text: str, schema: JsonSchema) -> JsonSchema:
    return {"description": text, "content": _json(schema)}
