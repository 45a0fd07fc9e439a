"""The routes of items and users, for instances and gateways; nestpipe.serve.state_schemas defines the calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import Refuse, RequestGuard, Run
from nestpipe.serve.state_schemas import STATE_CALLS, any_elements


def state_routes(
    handlers: Mapping[str, Run],
    *,
    reads: RequestGuard,
    writes: RequestGuard,
    refuse: Refuse,
    counted: Callable[[str, int], object],
    max_elements: int,
) -> list[Route]:
    """One route per call of STATE_CALLS; `handlers` has what answers each."""
    routes = []
    for name, call in STATE_CALLS.items():
        guard = reads if call.method == "GET" else writes
        is_list = call.method == "PUT"
        kind = (
            any_elements(call.request, call.request.__struct_fields__[0], most=max_elements)
            if is_list
            else call.request
        )
        options: dict[str, Any] = {"counted": _counter(counted, name), "refuse": refuse}
        if not is_list:
            options["fields_of"] = _address(call.in_path)
        if call.method == "PATCH":
            options["body_as"] = "change"
        run = _at_most(max_elements, handlers[name]) if is_list else handlers[name]
        path = f"{call.path}/{{{call.in_path}:path}}" if call.in_path else call.path
        route = Route(path, guard.handler(kind, run, **options), methods=[call.method])
        route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)  # an id may have line breaks
        routes.append(route)
    return routes


def check_count(elements: Any, most: int) -> None:
    """Raises BadRequestError (413) for too many elements."""
    if len(elements) > most:
        message = f"{len(elements):,} elements are too many for one call; send at most {most:,}."
        raise BadRequestError(message, status=413, code="too_many")


def _at_most(most: int, run: Run) -> Run:
    async def checked(request: Any) -> Any:
        check_count(getattr(request, request.__struct_fields__[0]), most)
        return await run(request)

    return checked


def _counter(counted: Callable[[str, int], object], name: str) -> Callable[[int], object]:
    return lambda status: counted(name, status)


def _address(in_path: str) -> Callable[[HttpRequest], Mapping[str, Any]]:
    """The fields in an address: an id in the path, percent-decoded, or what follows the question mark."""

    def fields(http: HttpRequest) -> dict[str, Any]:
        asked = dict[str, Any](http.query_params)
        if (limit := asked.get("limit")) is not None and limit.isascii() and limit.isdecimal() and len(limit) < 9:
            asked["limit"] = int(limit)
        return {**asked, in_path: http.path_params[in_path]} if in_path else asked

    return fields
