"""Bodies of requests: read inside limits of size and time, and checked field by field before anything is queued."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from nestpipe.errors import NestPipeError

_log = logging.getLogger("nestpipe.serve")
_INT64 = (-(2**63), 2**63 - 1)
MAX_REQUEST_CHARS = 128


class BadRequestError(NestPipeError):
    """The client's mistake, with the status and code to answer."""

    def __init__(self, message: str, *, status: int = 400, code: str = "bad_request"):
        super().__init__(message)
        self.status, self.code = status, code


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as a JSON object; raises BadRequestError for one that is too large, too slow, or something else."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    message = f"the body has more than {max_bytes:,} bytes; send fewer events or items."
                    raise BadRequestError(message, status=413, code="too_large")
                parts.append(part)
    except TimeoutError:
        message = f"the body was not complete after {timeout_s:g} s."
        raise BadRequestError(message, status=408, code="too_slow") from None
    except ClientDisconnect:
        raise BadRequestError("the client left before its body was complete.", code="disconnected") from None
    try:
        text = b"".join(parts).decode()
        content = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text:  # half of a pair may be written so, which nobody could send on
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON ({str(error)[:80]}).", code="not_json") from None
    if not isinstance(content, dict):
        raise BadRequestError(
            f"the body is a JSON {type(content).__name__}; an object is expected.", code="not_an_object"
        )
    return content


class RequestFields:
    """Reads the fields of a body; raises BadRequestError that names the field, what was seen and what is expected."""

    def __init__(self, body: Mapping[str, Any], known: frozenset[str]):
        self._body = body
        if unknown := sorted(set(body) - known):
            raise BadRequestError(
                f"unknown field {unknown[0][:40]!r}; there are: {', '.join(sorted(known))}.", code="unknown_field"
            )

    def integer(self, name: str, low: int = _INT64[0], high: int = _INT64[1], default: int | None = None) -> int:
        value = self._body.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise _wrong(name, value, f"an integer in {low:,} .. {high:,}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._body.get(name) is None else self.integer(name)

    def integers(self, name: str, *, most: int, least: int = 0) -> list[int]:
        value = self._body.get(name, [])
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _wrong(name, value, f"a list of {least} .. {most:,} integers")
        for one in value:
            if type(one) is not int or not _INT64[0] <= one <= _INT64[1]:
                raise _wrong(name, one, "a list of 64-bit integers")
        return value

    def text(self, name: str, default: str | None = None, *, most: int = MAX_REQUEST_CHARS) -> str:
        value = self._body.get(name, default)
        if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
            raise _wrong(name, value, f"a printable text of at most {most:,} characters")
        return value

    def deadline_ms(self, *, most: float, default: float) -> float:
        value = self._body.get("deadline_ms")
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value <= most:
            raise _wrong("deadline_ms", value, f"a number above 0, at most {most:,.0f}")
        return float(value)

    def share(self, name: str) -> float:
        value: Any = self._body.get(name)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise _wrong(name, value, "a number in 0 .. 1")
        return float(value)

    def history(self, *, most: int) -> list[Any] | None:
        """Events with item and, if the log has times, time; the instances check the rest."""
        value = self._body.get("history")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > most:
            raise _wrong("history", value, f"a list of at most {most:,} events")
        for event in value:
            if not isinstance(event, dict):
                raise _wrong("history", event, "a list of objects with item and time")
            RequestFields(event, frozenset(event)).integer("item")
            if "time" in event:
                RequestFields(event, frozenset(event)).integer("time", low=-(2**52), high=2**52)
        return value


def posted_events(body: Mapping[str, Any], *, most: int) -> list[dict[str, Any]]:
    """The events of a body, each with an id and a user; raises BadRequestError. The rest of them is the log's to check."""
    RequestFields(body, frozenset({"events"}))
    events = body.get("events")
    if not isinstance(events, list) or len(events) > most:
        raise BadRequestError(f"field 'events' must be a list of at most {most:,}.", code="bad_events")
    for event in events:
        if not isinstance(event, dict):
            raise BadRequestError("each event must be an object with id, user, item and time.", code="bad_events")
        own = RequestFields(event, frozenset(event))
        own.text("id")
        own.integer("user")
    return events


Call = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Handler = Callable[[Request], Awaitable[Response]]
Refuse = Callable[[NestPipeError], tuple[int, str] | None]


class RequestGuard:
    """What stands before the calls of a service: a limit to requests in flight, then to the size and time of a body."""

    def __init__(self, *, max_in_flight: int, max_bytes: int, body_s: float):
        self._max_in_flight, self._max_bytes, self._body_s = max_in_flight, max_bytes, body_s
        self.num_in_flight = 0

    def handler(self, call: Call, *, refuse: Refuse, counted: Callable[[int], object]) -> Handler:
        """Answers with what a call gives. Errors become answers too: `refuse` says the status and code of those it knows."""

        async def answer(http: Request) -> tuple[int, dict[str, Any]]:
            try:
                return 200, await self.run(http, call)
            except BadRequestError as error:
                return refusal(error.status, error.code, str(error))
            except NestPipeError as error:
                if (known := refuse(error)) is not None:
                    return refusal(*known, str(error))
                _log.exception("a call failed")
            except Exception:
                _log.exception("a call failed")
            return refusal(500, "failed", "this should not have happened; the log says what did.")

        async def handle(http: Request) -> Response:
            status, content = await answer(http)
            counted(status)
            return answer_of(status, content)

        return handle

    async def run(self, http: Request, call: Call) -> dict[str, Any]:
        """The answer of a call, which ends when the client leaves; raises BadRequestError and what the call raises."""
        if self.num_in_flight >= self._max_in_flight:
            message = f"{self._max_in_flight} requests are in flight; try again in a second."
            raise BadRequestError(message, status=429, code="overloaded")
        self.num_in_flight += 1
        try:
            body = await read_json(http, max_bytes=self._max_bytes, timeout_s=self._body_s)
            return await unless_gone(http, call(body))
        finally:
            self.num_in_flight -= 1


def lacks_token(http: Request, token: str) -> Response | None:
    """What to answer to who does not know the token."""
    said = http.headers.get("authorization", "").removeprefix("Bearer ")
    if token and hmac.compare_digest(said.encode(), token.encode()):
        return None
    return answer_of(*refusal(401, "unauthorized", "send the token: 'Authorization: Bearer TOKEN'."))


def answer_of(status: int, content: dict[str, Any]) -> Response:
    return JSONResponse(content, status, {"retry-after": "1"} if status in (429, 503) else None)


async def unless_gone(http: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The result of some work, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_disconnect(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise BadRequestError("the client left.", status=499, code="disconnected")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def http_refusal(http: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    what = {404: "there is no such path", 405: "this path wants another method"}.get(status, "refused")
    return JSONResponse(refusal(status, what.split()[-1], f"{http.method} {http.url.path[:80]}: {what}.")[1], status)


def refusal(status: int, code: str, message: str) -> tuple[int, dict[str, Any]]:
    """A status and the body that says why."""
    return status, {"error": {"code": code, "message": message}}


def _wrong(name: str, value: Any, expected: str) -> BadRequestError:
    seen = f"{type(value).__name__} of {len(value):,}" if isinstance(value, list | dict) else repr(value)[:60]
    return BadRequestError(f"field {name!r} is {seen}; it must be {expected}.", code=f"bad_{name}")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text[:20])
