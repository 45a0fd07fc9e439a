"""The operator's page: what the service does now, and what it knows about a user or an item. It changes nothing.

    GET /                        the page, without external assets
    GET /page/figures            rates, latencies, paths, cache, models, catalogue
    GET /page/users              some users, to begin with
    GET /page/history?user=      a user's last events
    GET /page/item?item=         an item's attributes

It is not for the public: it shows the history of any user.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nestpipe.data.folder_merge import is_among
from nestpipe.data.sequences import Sequences
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.page_figures import RecentSamples, samples_of
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import refuse_with
from nestpipe.serve.state_writer import StateWriter
from nestpipe.serve.user_history import UserHistories

MetricTexts = Callable[[], Awaitable[Sequence[str]]]
"""The /metrics of the processes that the page is about."""
_SHOWN_EVENTS = 20
_SHOWN_USERS = 50
_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "frame-ancestors 'none'; form-action 'none'"
)


class OperatorPage:
    """The page and the calls that it makes."""

    def __init__(self, histories: UserHistories, ids: ServiceIds, metrics: MetricTexts):
        self._histories, self._ids, self._metrics = histories, ids, metrics
        self._recent, self._state = RecentSamples(), StateWriter(histories, ids)

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/page/figures", self._figures),
            Route("/page/users", self._users),
            Route("/page/history", self._history),
            Route("/page/item", self._item),
        ]

    async def _page(self, http: Request) -> Response:
        text = resources.files("nestpipe.serve").joinpath("operator.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _POLICY, "x-content-type-options": "nosniff"})

    async def _figures(self, http: Request) -> Response:
        own = self._histories.sequences
        found = self._recent.add(samples_of(await self._metrics()))
        return JSONResponse({**found, "catalogue": self._num_items(own), "users": len(own.users)})

    def _num_items(self, own: Sequences) -> int:
        """Items that may be shown."""
        living = self._histories.living.catalogue
        num_new = int((~is_among(living.changed(), own.catalogue)).sum())
        return len(own.catalogue) + num_new - len(living.withdrawn())

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
            return refuse_with(404, "unknown_user", f"user {text[:80]!r} has no events here.")
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

    async def _item(self, http: Request) -> Response:
        text = http.query_params.get("item", "")
        try:
            record = await run_in_threadpool(self._record_of, text)
        except BadRequestError as error:
            return refuse_with(error.status, error.code, str(error))
        return JSONResponse({"item": text, "attributes": self._attributes(record)})

    def _record_of(self, item: str) -> dict[str, Any]:
        """An item as it is now; raises BadRequestError for an unknown one."""
        self._histories.refresh()
        return self._state.item(item)

    def _attributes(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of an item that a person can read, in the values of the log."""
        found: dict[str, Any] = {}
        for feature in self._histories.sequences.schema.of_scope("item"):
            if feature.kind != "vector":
                value = record.get(feature.name)
                found[feature.name] = ", ".join(map(str, value)) or None if isinstance(value, list) else value
        return found if record["available"] else {**found, "withdrawn": True}
