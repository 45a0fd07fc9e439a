"""What the instances of all kinds of runs share: limits, events, readiness, metrics, the OpenAPI document.

    POST /v1/events /v1/invalidate      GET /healthz /readyz /metrics /openapi.json
    PUT /v1/items /v1/users             GET, PATCH, DELETE /v1/items/{id}      DELETE /v1/users/{id}      (state_api.py)

Administration is in admin.py. An instance of a kind adds its calls. Requests are parsed and limits are applied before anything
is queued.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.data.sequences import Sequences
from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import DataError, NestPipeError
from nestpipe.serve.admission import age_s
from nestpipe.serve.config import Limits
from nestpipe.serve.disk_watch import DiskWatch
from nestpipe.serve.openapi import Calls, document
from nestpipe.serve.operator_page import OperatorPage
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.prometheus import InstanceMetrics, status_counter
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import Admit, CallEndpoint, RequestGuard, Run, ServiceApp
from nestpipe.serve.request_rules import refuse_rules
from nestpipe.serve.requests import refuse_busy
from nestpipe.serve.schemas import Event, InvalidateReply, InvalidateRequest, NearlineRequest
from nestpipe.serve.state_api import StateApi, refuse_away
from nestpipe.serve.state_routes import state_routes
from nestpipe.serve.state_schemas import STATE_CALLS
from nestpipe.serve.state_writer import StateWriter
from nestpipe.serve.worker_thread import WorkerThread

_WRITES = frozenset({"events"})
_FEW_EVENTS = 64  # of a history, which are read faster than handed to a thread
_NO_STORE = (
    "this instance stores no KV prefixes: it serves no ranker, or --prefix-store-bytes is 0, or --trigger.mode is off."
)
_MAX_WRITES, _NUM_WRITERS = 64, 2  # writes in flight, and threads for them


class HttpInstance(ABC):
    """The handlers of one process that every kind of run has."""

    title = "An instance of nestpipe"

    def __init__(
        self,
        worker: WorkerThread,
        metrics: InstanceMetrics,
        *,
        name: str,
        calls: Calls,
        limits: Limits,
        wall_clock: Callable[[], float] = time.time,
    ):
        """`calls` are the request and the answer of each call; `metrics` counts the answers of `worker`."""
        self._worker, self._answers, self.name = worker, metrics, name
        self._calls, self._limits, self._wall_clock = calls, limits, wall_clock
        self._ids = ServiceIds(lambda: worker.histories.sequences, worker.histories.living)
        # As many as the queue and one batch hold: further bodies would be read and parsed for nothing.
        self._guard = self._limit(worker.config.max_queue + worker.config.max_batch)
        # Writes wait for the disk, so they have their own limit and threads: other requests are not delayed.
        self._writes = self._limit(_MAX_WRITES)
        threads = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="state")
        self._state = StateApi(
            StateWriter(worker.histories, self._ids),
            threads,
            check=self._check,
            forgotten=self.invalidate,
            stored=metrics.events.inc,
            max_events=limits.events,
        )
        self.disk = DiskWatch(worker.histories.state.folder)
        self.is_draining = False
        self.has_page = False  # set before `app`
        self.broadcast: Callable[[OwnId], Awaitable[int]] | None = None  # invalidates a user at all instances

    @abstractmethod
    def _handlers(self) -> dict[str, Run]:
        """The calls of this kind, POST /v1/NAME."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state of the process, for /state; it names no user."""

    @abstractmethod
    def _check(self, events: Sequences) -> None:
        """Raises DataError for events that a model cannot read: they would fail every later request of their user."""

    @abstractmethod
    def _forget_inputs(self, user: int) -> int:
        """Drops what is cached of a user's history; says how many entries."""

    def prefill_users(self, request: NearlineRequest) -> None:
        """Stores the KV prefixes of users, near-line; raises BadRequestError without a store."""
        raise BadRequestError(_NO_STORE, code="no_store")

    def prefill_version(self, model: Any, rate_ms_per_s: float) -> None:
        """Stores the KV prefixes of a model before it is used, and blocks; raises BadRequestError without a store."""
        raise BadRequestError(_NO_STORE, code="no_store")

    def _more_routes(self) -> Sequence[Route]:
        """Routes besides POST /v1/NAME."""
        return ()

    def _refuse(self, error: NestPipeError) -> tuple[int, str] | None:
        """The status and code of an error."""
        if (refused := refuse_rules(error)) is not None:
            return refused
        return (400, "bad_data") if isinstance(error, DataError) else refuse_busy(error) or refuse_away(error)

    @abstractmethod
    async def _works(self) -> bool:
        """Whether requests are answered, for /readyz."""

    def app(self) -> Starlette:
        """The ASGI application."""
        calls: dict[str, Run] = {**self._handlers(), "events": self._state.events, "invalidate": self._invalidate}
        gets = {"healthz": self._alive, "readyz": self._ready, "metrics": self._metrics, "openapi.json": self._document}
        routes = state_routes(
            {name: self._guarding(name, run) for name, run in self._state.handlers().items()},
            reads=self._guard,
            writes=self._writes,
            refuse=self._refuse,
            counted=lambda name, status: self._answers.answers.labels(name, str(status)).inc(),
            max_elements=self._limits.events,
        )
        page = OperatorPage(self._worker.histories, self._ids, self._metric_texts).routes() if self.has_page else []
        routes += [*self._more_routes(), *page, *(Route(f"/{name}", handler) for name, handler in gets.items())]
        return ServiceApp({name: self._handler(name, call) for name, call in calls.items()}, routes)

    def _handler(
        self, name: str, run: Run, *, fields_of: Callable[[HttpRequest], Mapping[str, Any]] | None = None
    ) -> CallEndpoint:
        is_write, (kind, _) = name in _WRITES, self._calls[name]
        guard = self._writes if is_write else self._guard
        return guard.handler(
            kind,
            self.disk.guarding(run) if is_write else run,
            refuse=self._refuse,
            counted=status_counter(self._answers.answers, name),
            fields_of=fields_of,
            admit=self._admission(name),
        )

    def _admission(self, name: str) -> Admit | None:
        """What refuses requests of a call that would wait too long; None for calls that do not wait for the worker."""
        return None

    def _arrived(self) -> float:
        """When the current request arrived, by the worker's clock."""
        return self._worker.clock() - age_s()

    def _guarding(self, name: str, run: Run) -> Run:
        """A call of items or users, with an answer for a full disk if it writes."""
        return run if STATE_CALLS[name].method == "GET" else self.disk.guarding(run)

    def _limit(self, max_in_flight: int) -> RequestGuard:
        return RequestGuard(max_in_flight=max_in_flight, max_bytes=self._limits.body_bytes, body_s=self._limits.body_s)

    async def _invalidate(self, request: InvalidateRequest) -> InvalidateReply:
        if self.broadcast is not None:
            return InvalidateReply(await self.broadcast(request.user))
        return InvalidateReply(self.invalidate(request.user))

    def invalidate(self, user: OwnId) -> int:
        """Drops what is cached of a user's history; says how many entries."""
        return self._forget_inputs(self._ids.user(user))

    async def _history(self, user: int, events: Sequence[Event] | None) -> Sequences | None:
        """The history that a request brings."""
        if events is None:
            return None
        given = partial(self._worker.histories.given, user, [self._ids.event(one) for one in events])
        return given() if len(events) <= _FEW_EVENTS else await run_in_threadpool(given)

    def _now(self) -> int:
        return int(self._wall_clock())

    async def _alive(self, http: HttpRequest) -> Response:
        return JSONResponse({"alive": True})

    async def _ready(self, http: HttpRequest) -> Response:
        is_ready = not self.is_draining and not self._worker.is_stopping
        is_ready = is_ready and await run_in_threadpool(self.disk.check) and await self._works()
        problem = self._worker.histories.state.problem()  # recommendations continue from what is known; writes do not
        answer = {"ready": is_ready and not problem, **({"problem": problem} if problem else {})}
        return JSONResponse(answer, 200 if answer["ready"] else 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(self._answers.text(), media_type="text/plain; version=0.0.4")

    async def _metric_texts(self) -> list[str]:
        return [self._answers.text().decode()]

    async def _document(self, http: HttpRequest) -> Response:
        schema, most = self._worker.histories.sequences.schema, self._limits.events
        return JSONResponse(document(self.title, self._calls, schema, max_elements=most))
