"""A demo page: a user's history, recommendations, the path of the ranking and the time of each stage.

It is not for the public: it shows the history of any user.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nestpipe.data.sequences import Sequences
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import refuse_with
from nestpipe.serve.user_history import UserHistories

_SHOWN_EVENTS = 20
_SHOWN_USERS = 50
_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
)


class DemoPage:
    """The page and the calls that it makes."""

    def __init__(self, histories: UserHistories, ids: ServiceIds):
        self._histories, self._ids = histories, ids

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/demo/users", self._users),
            Route("/demo/history", self._history),
        ]

    async def _page(self, http: Request) -> Response:
        text = resources.files("nestpipe.serve").joinpath("demo.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _POLICY, "x-content-type-options": "nosniff"})

    async def _users(self, http: Request) -> Response:
        """Users with histories of all lengths, a usual one first, as texts: numbers of browsers have 53 bits."""
        own = self._histories.sequences
        lengths = np.diff(own.offsets)
        order = np.argsort(lengths, kind="stable")[int((lengths == 0).sum()) :]
        places = np.unique(np.linspace(0, len(order) - 1, _SHOWN_USERS).astype(np.int64)) if len(order) else order
        rows = order[places[np.argsort(np.abs(places - len(order) // 2), kind="stable")]]
        return JSONResponse({"users": [str(user) for user in self._ids.own_users(own.users[rows])]})

    async def _history(self, http: Request) -> Response:
        text = http.query_params.get("user", "")
        past = await run_in_threadpool(self._history_of, self._ids.user(text))
        if not len(past.items):
            return _refuse(BadRequestError(f"user {text[:80]!r} has no events here.", status=404, code="unknown_user"))
        times = past.times
        last = range(len(past.items) - 1, max(len(past.items) - 1 - _SHOWN_EVENTS, -1), -1)
        names = self._ids.own_items(past.items[list(last)])
        events = [
            {"item": str(name), "time": None if times is None else int(times[one] // 1000)}
            for name, one in zip(names, last, strict=True)
        ]
        return JSONResponse({"num_events": len(past.items), "events": events})

    def _history_of(self, user: int) -> Sequences:
        self._histories.refresh()
        return self._histories.of(user)


def _refuse(error: BadRequestError) -> Response:
    return refuse_with(error.status, error.code, str(error))
