"""Guards the calls of a service: limits on requests in flight and on the size and time of bodies, then parsing.

Everything is checked before a request is queued. Every error becomes an answer with a code and a message.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from nestpipe.errors import NestPipeError
from nestpipe.serve.request_errors import BadRequestError, explained, wrong_field
from nestpipe.serve.schemas import ErrorReply, HistoryEvent, Problem, Request, members

_log = logging.getLogger("nestpipe.serve")
Handler = Callable[[HttpRequest], Awaitable[Response]]
Refuse = Callable[[NestPipeError], tuple[int, str] | None]
Run = Callable[[Any], Awaitable[msgspec.Struct]]


async def read_json(http: HttpRequest, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as a JSON object; raises BadRequestError for one that is too large, too slow, or something else."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in http.stream():
                size += len(chunk)
                if size > max_bytes:
                    message = f"the body has more than {max_bytes:,} bytes; send fewer events or items."
                    raise BadRequestError(message, status=413, code="too_large")
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body was not complete after {timeout_s:g} s."
        raise BadRequestError(message, status=408, code="too_slow") from None
    except ClientDisconnect:
        raise BadRequestError("the client disconnected before its body was complete.", code="disconnected") from None
    try:
        content = msgspec.json.decode(b"".join(chunks))
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON ({str(error)[:80]}).", code="not_json") from None
    if not isinstance(content, dict):
        raise BadRequestError(
            f"the body is a JSON {type(content).__name__}; an object is expected.", code="not_an_object"
        )
    return content


def parse(body: Mapping[str, Any], kind: type[Request]) -> Request:
    """The request in a JSON object; raises BadRequestError that names the field, what was seen and what is wanted."""
    if unknown := sorted(body.keys() - set(kind.__struct_fields__)):
        known = ", ".join(sorted(kind.__struct_fields__))
        raise BadRequestError(f"unknown field {unknown[0][:40]!r}; there are: {known}.", code="unknown_field")
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise explained(str(error), body, kind) from None
    _check_texts(request)
    if events := getattr(request, "history", None):  # posted events are read one by one, by `StateWriter`
        try:
            msgspec.convert(events, list[HistoryEvent])
        except msgspec.ValidationError as error:
            raise explained(str(error), events, list[HistoryEvent], "history") from None
    return request


def _check_texts(request: msgspec.Struct) -> None:
    for name in _text_fields(type(request)):
        value = getattr(request, name)
        if isinstance(value, str) and not value.isprintable():
            raise wrong_field(name, value, "a printable text")


@cache
def _text_fields(kind: type[msgspec.Struct]) -> list[str]:
    """Fields of texts alone: own ids, which may be numbers too, are whatever the log has."""
    return [
        one.name for one in msgspec.structs.fields(kind) if str in (own := set(members(one.type))) and int not in own
    ]


class RequestGuard:
    """Limits the requests in flight, and the size and time of their bodies."""

    def __init__(self, *, max_in_flight: int, max_bytes: int, body_s: float):
        self._max_in_flight, self._max_bytes, self._body_s = max_in_flight, max_bytes, body_s
        self.num_in_flight = 0

    def handler(
        self,
        kind: type[Any],
        run: Run,
        *,
        refuse: Refuse,
        counted: Callable[[int], object],
        fields_of: Callable[[HttpRequest], Mapping[str, Any]] | None = None,
        body_as: str = "",
    ) -> Handler:
        """Answers requests of a kind with what `run` returns, or with its error, whose status and code `refuse` knows.

        The fields are those of the body, or what `fields_of` finds in the address; the whole body may be one more field.
        """

        async def answer(http: HttpRequest) -> tuple[int, msgspec.Struct]:
            try:
                return 200, await self._run(http, kind, run, fields_of, body_as)
            except BadRequestError as error:
                return refusal(error.status, error.code, str(error))
            except NestPipeError as error:
                if (known := refuse(error)) is not None:
                    return refusal(*known, str(error))
                _log.exception("a call failed")
            except Exception:
                _log.exception("a call failed")
            return refusal(503, "failed", "the call failed unexpectedly; the service's log has the traceback.")

        async def handle(http: HttpRequest) -> Response:
            status, content = await answer(http)
            counted(status)
            return json_response(content, status)

        return handle

    async def _run(
        self,
        http: HttpRequest,
        kind: type[Any],
        run: Run,
        fields_of: Callable[[HttpRequest], Mapping[str, Any]] | None,
        body_as: str,
    ) -> msgspec.Struct:
        if self.num_in_flight >= self._max_in_flight:
            message = f"{self._max_in_flight} requests are in flight; try again in a second."
            raise BadRequestError(message, status=429, code="overloaded")
        self.num_in_flight += 1
        try:
            if fields_of is not None and not body_as:
                return await run(parse(fields_of(http), kind))
            body = await read_json(http, max_bytes=self._max_bytes, timeout_s=self._body_s)
            if fields_of is not None:
                body = {**fields_of(http), body_as: body}
            return await _unless_disconnected(http, run(parse(body, kind)))
        finally:
            self.num_in_flight -= 1


def user_route(name: str, handler: Handler) -> Route:
    """GET /v1/NAME/{user}, where a user may be any text, also one with slashes or line breaks."""
    route = Route(f"/v1/{name}/{{user:path}}", handler, methods=["GET"])
    route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return route


def user_and_numbers(http: HttpRequest) -> dict[str, Any]:
    """The fields of GET /v1/NAME/{user}?k=10: the user from the path, percent-decoded, and whole numbers."""
    numbers = {
        name: int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text
        for name, text in http.query_params.items()
    }
    return {**numbers, "user": http.path_params["user"]}


async def _unless_disconnected(http: HttpRequest, work: Awaitable[msgspec.Struct]) -> msgspec.Struct:
    """The result of some work, which is cancelled when the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_disconnect(http))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise BadRequestError("the client disconnected.", status=499, code="disconnected")
        return task.result()
    finally:
        for one in (task, disconnect):
            one.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def lacks_token(http: HttpRequest, token: str) -> Response | None:
    """The refusal of a caller without the token."""
    sent = http.headers.get("authorization", "").removeprefix("Bearer ")
    if token and hmac.compare_digest(sent.encode(), token.encode()):
        return None
    return refuse_with(401, "unauthorized", "send the token: 'Authorization: Bearer TOKEN'.")


async def http_refusal(http: HttpRequest, error: Exception) -> Response:
    """The answer to an unknown path or method."""
    status = int(getattr(error, "status_code", 404))
    what = {404: "there is no such path", 405: "this path wants another method"}.get(status, "refused")
    return refuse_with(status, what.split()[-1], f"{http.method} {http.url.path[:80]}: {what}.")


def refuse_with(status: int, code: str, message: str) -> Response:
    return json_response(refusal(status, code, message)[1], status)


def refusal(status: int, code: str, message: str) -> tuple[int, ErrorReply]:
    return status, ErrorReply(Problem(code, message))


def json_response(content: Any, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
