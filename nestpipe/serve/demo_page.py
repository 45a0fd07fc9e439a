"""A demo page: a user's history, recommendations, the path of the ranking and the time of each stage.

It is not for the public: it shows the history of any user.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import resources

import numpy as np
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nestpipe.data.sequences import Sequences
from nestpipe.gateway.candidates import PastEvents
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import parse, read_json, refuse_with
from nestpipe.serve.schemas import ItemNamesRequest

_SHOWN_EVENTS = 20
_SHOWN_USERS = 50
_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
)


class DemoPage:
    """The page and the calls that it makes."""

    def __init__(self, sequences: Callable[[], Sequences], past_of: Callable[[int], PastEvents]):
        self._sequences, self._past_of = sequences, past_of  # called each time: users may be forgotten

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/demo/users", self._users),
            Route("/demo/history", self._history),
            Route("/demo/names", self._names, methods=["POST"]),
        ]

    async def _page(self, http: Request) -> Response:
        text = resources.files("nestpipe.serve").joinpath("demo.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _POLICY, "x-content-type-options": "nosniff"})

    async def _users(self, http: Request) -> Response:
        """Some users with long histories, as texts: numbers of browsers have 53 bits."""
        own = self._sequences()
        lengths = np.diff(own.offsets)
        rows = np.argsort(-lengths, kind="stable")[: _SHOWN_USERS * 20 : 20]
        return JSONResponse({"users": [str(user) for user in own.users[rows].tolist()]})

    async def _history(self, http: Request) -> Response:
        text = http.query_params.get("user", "")
        if not text.removeprefix("-").isdecimal() or not text.isascii() or not -(2**63) <= int(text[:20]) < 2**63:
            return _refuse(BadRequestError(f"'{text[:40]}' is no user id: write a whole number.", code="bad_user"))
        past = self._past_of(int(text))
        if not len(past.items):
            return _refuse(BadRequestError(f"user {text} has no events here.", status=404, code="unknown_user"))
        times = past.times_ms
        last = range(len(past.items) - 1, max(len(past.items) - 1 - _SHOWN_EVENTS, -1), -1)
        events = [
            {"item": int(past.items[one]), "time": None if times is None else int(times[one] // 1000)} for one in last
        ]
        return JSONResponse({"num_events": len(past.items), "events": events})

    async def _names(self, http: Request) -> Response:
        try:
            body = await read_json(http, max_bytes=1 << 16, timeout_s=5.0)
            items = parse(body, ItemNamesRequest).items
        except BadRequestError as error:
            return _refuse(error)
        return JSONResponse({str(item): self._texts[item] for item in items if item in self._texts})

    @cached_property
    def _texts(self) -> dict[int, str]:
        frame = self._sequences().texts("item")
        return {} if frame is None else dict(zip(frame["id"].to_list(), frame["text"].to_list(), strict=True))


def _refuse(error: BadRequestError) -> Response:
    return refuse_with(error.status, error.code, str(error))
