"""Guards the calls of a service: limits on requests in flight and on the size and time of bodies, admission, then parsing.

Everything is checked before a request is queued. Every error becomes an answer with a code and a message. A closed loop turns each
refusal at once into the next request, so refusals for overload (429) are held for a moment, unless a gateway waits for them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from nestpipe.errors import NestPipeError
from nestpipe.serve.admission import ARRIVAL, Arrival, age_s, note_arrival
from nestpipe.serve.request_errors import BadRequestError, explained, without_paths, wrong_field
from nestpipe.serve.requests import BusyError
from nestpipe.serve.route_headers import FORWARDED_HEADER, RETRY_LATER
from nestpipe.serve.schemas import (
    ErrorReply,
    HistoryEvent,
    Problem,
    Request,
    members,
)

_log = logging.getLogger("nestpipe.serve")
Refuse = Callable[[NestPipeError], tuple[int, str] | None]
Run = Callable[[Any], Awaitable[msgspec.Struct]]
Admit = Callable[[float | None], None]
"""Raises an error for a request with this deadline (ms) that would wait too long."""
_FORWARDED = FORWARDED_HEADER.lower().encode()
_HOLD_S, _MAX_HELD = 0.1, 1024
_JSON, _RETRY = (b"content-type", b"application/json"), (b"retry-after", b"1")


async def read_json(http: HttpRequest, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as a JSON object; raises BadRequestError for one that is too large, too slow, or something else."""
    return _json_object(await read_body(http.receive, max_bytes=max_bytes, timeout_s=timeout_s))


async def read_body(receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """The body; raises BadRequestError for one that is too large or too slow."""
    chunks, size, has_more = [], 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    text = "the client disconnected before its body was complete."
                    raise BadRequestError(text, code="disconnected")
                size += len(chunk := message.get("body", b""))
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
                has_more = message.get("more_body", False)
    except TimeoutError:
        text = f"the body was not complete after {timeout_s:g} s."
        raise BadRequestError(text, status=408, code="too_slow") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> BadRequestError:
    text = f"the body has more than {max_bytes:,} bytes; send fewer events or items."
    return BadRequestError(text, status=413, code="too_large")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(body)
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
    return _checked(request)


def body_parser(kind: type[Request]) -> Callable[[bytes], Request]:
    """`parse` of a JSON body: decoded into the request at once; a body that fails is decoded again, to say why."""
    decode = msgspec.json.Decoder(kind).decode
    assert kind.__struct_config__.forbid_unknown_fields, f"{kind.__name__} would take unknown fields"

    def parsed(body: bytes) -> Request:
        try:
            request = decode(body)
        except (ValueError, RecursionError):
            return parse(_json_object(body), kind)
        return _checked(request)

    return parsed


class _Deadline(msgspec.Struct, gc=False):
    """What admission reads of a body."""

    deadline_ms: float | None = None


_DEADLINE = msgspec.json.Decoder(_Deadline)


def _checked(request: Request) -> Request:
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
    """Limits the requests in flight, and the size and time of their bodies; holds refusals."""

    def __init__(self, *, max_in_flight: int, max_bytes: int, body_s: float):
        self.max_in_flight, self.max_bytes, self.body_s = max_in_flight, max_bytes, body_s
        self.num_in_flight = self.num_held = 0

    def handler(
        self,
        kind: type[Any],
        run: Run,
        *,
        refuse: Refuse,
        counted: Callable[[int], object],
        fields_of: Callable[[HttpRequest], Mapping[str, Any]] | None = None,
        body_as: str = "",
        admit: Admit | None = None,
    ) -> CallEndpoint:
        """Answers requests of a kind with what `run` returns, or with its error, whose status and code `refuse` knows.

        The fields are those of the body, or what `fields_of` finds in the address; the whole body may be one more field.
        `admit` raises an error for a request that would wait too long; it is called before anything but the deadline is read.
        """
        fields = AddressFields(fields_of, body_as) if fields_of is not None else None
        return CallEndpoint(self, kind, run, refuse=refuse, counted=counted, address=fields, admit=admit)

    async def hold(self, scope: Scope, left_s: float) -> None:
        """Delays a refusal, never so long that the caller cannot ask another; only so many at a time."""
        is_forwarded = any(name == _FORWARDED for name, _ in scope["headers"])
        if self.num_held < _MAX_HELD and left_s > 0 and not is_forwarded:
            self.num_held += 1
            try:
                await asyncio.sleep(min(_HOLD_S, left_s / 2))
            finally:
                self.num_held -= 1


@dataclass(frozen=True, slots=True)
class AddressFields:
    """Fields of a request in its address; the whole body, if it is named, is one more."""

    fields_of: Callable[[HttpRequest], Mapping[str, Any]]
    body_as: str = ""

    def of(self, scope: Scope, body: bytes) -> dict[str, Any]:
        more = {self.body_as: _json_object(body)} if self.body_as else {}
        return {**self.fields_of(HttpRequest(scope)), **more}


class CallEndpoint:
    """One call, as an ASGI application."""

    def __init__(
        self,
        guard: RequestGuard,
        kind: type[Any],
        run: Run,
        *,
        refuse: Refuse,
        counted: Callable[[int], object],
        address: AddressFields | None,
        admit: Admit | None,
    ):
        self._guard, self._kind, self._parse, self._run = guard, kind, body_parser(kind), run
        self._refuse, self._counted, self._address, self._admit = refuse, counted, address, admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival: Arrival | None = scope.get(ARRIVAL)
        began, deadline_ms = time.monotonic(), None
        if arrival is not None:
            arrival.connection.running = asyncio.current_task()
        try:
            self._enter()
            try:
                address, body = self._address, b""
                if address is None or address.body_as:
                    body = await self._body(arrival, receive)
                    deadline_ms = _peek_deadline(body)
                note_arrival(began if arrival is None or arrival.at is None else arrival.at)
                if self._admit is not None:
                    await self._admitted(self._admit, deadline_ms, scope)
                request = self._parse(body) if address is None else parse(address.of(scope, body), self._kind)
                work = self._run(request)
                content = await (work if arrival is not None else _unless_disconnected(receive, work))
                status = 200
            finally:
                self._guard.num_in_flight -= 1
        except asyncio.CancelledError:
            if arrival is None or not arrival.connection.is_lost:
                raise
            status, content = _DISCONNECTED
        except Exception as error:
            status, content = self._problem(error)
            error.__traceback__ = None  # its frames refer to the request, and the request's future to the error
        finally:
            if arrival is not None:
                arrival.connection.running = None
        self._counted(status)
        if status == 429 and self._admit is None:
            await self._guard.hold(scope, math.inf)
        encoded = msgspec.json.encode(content)
        if arrival is None or not arrival.answer(status, encoded):
            await _send(send, encoded, status)

    async def _body(self, arrival: Arrival | None, receive: Receive) -> bytes:
        guard = self._guard
        body = None if arrival is None else arrival.take_body()
        if body is None:
            return await read_body(receive, max_bytes=guard.max_bytes, timeout_s=guard.body_s)
        if len(body) > guard.max_bytes:
            raise _too_large(guard.max_bytes)
        return body

    async def _admitted(self, admit: Admit, deadline_ms: float | None, scope: Scope) -> None:
        """Raises the refusal of a request that would wait too long, also after it was held for a moment."""
        try:
            admit(deadline_ms)
        except BusyError:
            self._guard.num_in_flight -= 1
            try:
                await self._guard.hold(scope, math.inf if deadline_ms is None else deadline_ms / 1e3 - age_s())
            finally:
                self._guard.num_in_flight += 1
            admit(deadline_ms)

    def _enter(self) -> None:
        guard = self._guard
        guard.num_in_flight += 1
        if guard.num_in_flight > guard.max_in_flight:
            guard.num_in_flight -= 1
            message = f"{guard.max_in_flight} requests are in flight; try again in a second."
            raise BadRequestError(message, status=429, code="overloaded")

    def _problem(self, error: Exception) -> tuple[int, msgspec.Struct]:
        """The answer to what was raised."""
        if isinstance(error, BadRequestError):
            return refusal(error.status, error.code, str(error))
        if isinstance(error, NestPipeError) and (known := self._refuse(error)) is not None:
            return refusal(*known, without_paths(str(error)))
        _log.error("a call failed", exc_info=error)
        return refusal(503, "failed", "the call failed unexpectedly; the service's log has the traceback.")


class ServiceApp(Starlette):
    """Starlette with calls that are found by their path, before its routes are tried one by one."""

    def __init__(self, calls: Mapping[str, CallEndpoint], routes: Sequence[BaseRoute], **options: Any):
        """`calls` are POST /v1/NAME."""
        self._calls = {f"/v1/{name}": call for name, call in calls.items()}
        own = [Route(path, call, methods=["POST"]) for path, call in self._calls.items()]
        super().__init__(routes=[*own, *routes], exception_handlers={404: http_refusal, 405: http_refusal}, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._calls.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        await (super().__call__ if call is None else call)(scope, receive, send)


def user_route(name: str, handler: CallEndpoint) -> Route:
    """GET /v1/NAME/{user}, where a user may be any text, also one with slashes or line breaks."""
    route = Route(f"/v1/{name}/{{user:path}}", handler, methods=["GET"])
    route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return route


def user_and_numbers(http: HttpRequest) -> dict[str, Any]:
    """The fields of GET /v1/NAME/{user}?k=10: the user from the path, percent-decoded, whole numbers, a set of rules."""
    numbers = {
        name: int(text) if name != "rules" and text.isascii() and text.isdecimal() and len(text) < 20 else text
        for name, text in http.query_params.items()
    }
    return {**numbers, "user": http.path_params["user"]}


def _peek_deadline(body: bytes) -> float | None:
    """The deadline in a body, of which nothing else is read; None if there is none, or a wrong one, which parsing reports."""
    try:
        found = _DEADLINE.decode(body).deadline_ms
    except (ValueError, RecursionError):
        return None
    return found if found is not None and found > 0 else None


async def _unless_disconnected(receive: Receive, work: Awaitable[msgspec.Struct]) -> msgspec.Struct:
    """The result of some work, which is cancelled when the client disconnects; for servers other than ours."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise BadRequestError("the client disconnected.", status=499, code="disconnected")
        return task.result()
    finally:
        for one in (task, disconnect):
            one.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
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
    headers = {"retry-after": "1"} if status in RETRY_LATER else None
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def _send(send: Send, body: bytes, status: int) -> None:
    """`json_response`, without its cost."""
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    if status in RETRY_LATER:
        headers.append(_RETRY)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_DISCONNECTED = refusal(499, "disconnected", "the client disconnected.")
