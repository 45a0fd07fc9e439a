"""For users of the service: a synchronous and an asynchronous client with typed answers.

    with Client("http://127.0.0.1:8700") as client:
        for item, score in client.recommend(42, k=10).pairs():
            ...

Every call has a deadline. A refusal is a `ServiceError` with the service's own code and words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx

from nestpipe.errors import NestPipeError
from nestpipe.gateway.router import SESSION_HEADER, USER_HEADER, session_of

Event = Mapping[str, Any]
Result = TypeVar("Result")


class ServiceError(NestPipeError):
    """The service refused, or could not be reached (status 0)."""

    def __init__(self, message: str, *, status: int, code: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedItems:
    """Items with scores, best first; `path` says how they were ranked, `degraded` whether less was done than asked."""

    items: list[int]
    scores: list[float]
    path: str
    prefix_len: int
    degraded: bool
    model: str
    times_ms: dict[str, float] = field(default_factory=dict)

    def pairs(self) -> list[tuple[int, float]]:
        return list(zip(self.items, self.scores, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedItems(RankedItems):
    """A ranking by the cascade: `stages` has the time, deadline and number of items of each stage."""

    request: str
    instance: str | None
    attempts: int
    prefill_hint: str
    problem: str
    stages: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedItems:
    """Items with the log-probabilities of their ids, best first; `instruction` says what steered them."""

    items: list[int]
    log_probabilities: list[float]
    path: str
    degraded: bool
    instruction: dict[str, Any]
    num_events: int
    beam: int
    model: str
    semantic_ids: str
    times_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReply:
    """What became of a signal; hand the ticket to `rank`."""

    ticket: str | None
    admitted: bool
    reason: str
    instance: str
    epoch: str


@dataclass(frozen=True, slots=True)
class _Call(Generic[Result]):
    """A path, its body, and what its answer is read as."""

    path: str
    body: dict[str, Any]
    read: Callable[[dict[str, Any]], Result]
    headers: dict[str, str] = field(default_factory=dict)


def _recommend(user: int, k: int, options: Mapping[str, Any]) -> _Call[RecommendedItems]:
    return _Call("/v1/recommend", {"user": user, "k": k, **_given(options)}, _reader(RecommendedItems))


def _prefill(user: int, request: str, candidates: int, options: Mapping[str, Any]) -> _Call[PrefillReply]:
    body = {"user": user, "request": request, "candidates": candidates, **_given(options)}
    return _Call("/v1/prefill", body, _reader(PrefillReply), _place(user))


def _rank(user: int, request: str, candidates: Sequence[int], options: Mapping[str, Any]) -> _Call[RankedItems]:
    body = {"user": user, "request": request, "candidates": list(candidates), **_given(options)}
    return _Call("/v1/rank", body, _reader(RankedItems), _place(user, body.get("ticket")))


def _generate(user: int, k: int, options: Mapping[str, Any]) -> _Call[GeneratedItems]:
    return _Call("/v1/generate", {"user": user, "k": k, **_given(options)}, _reader(GeneratedItems))


def _release(ticket: str, user: int | None) -> _Call[None]:
    return _Call("/v1/release", {"ticket": ticket}, lambda answer: None, _place(user, ticket))


def _nothing(path: str, body: dict[str, Any]) -> _Call[None]:
    return _Call(path, body, lambda answer: None)


def _place(user: int | None, ticket: str | None = None) -> dict[str, str]:
    """What nginx and Ray Serve route by, since they do not read bodies; a gateway and an instance do not look at it."""
    user = user if isinstance(user, int) else None  # else it is for the service to refuse
    named = {} if user is None else {USER_HEADER: str(user)}
    return {SESSION_HEADER: session_of(user, ticket), **named}


class Client:
    """Calls that wait for their answer. Use it as a context manager, or `close` it; threads may share it."""

    def __init__(self, url: str, *, timeout_s: float = 2.0):
        self._http = httpx.Client(base_url=url, timeout=timeout_s)

    def recommend(
        self,
        user: int,
        k: int = 10,
        *,
        history: Sequence[Event] | None = None,
        exclude: Sequence[int] | None = None,
        query_time: int | None = None,
        request: str | None = None,
    ) -> RecommendedItems:
        """The best k items for a user; `history` replaces the one on file, `exclude` names items not to show."""
        options = {"history": history, "exclude": exclude, "query_time": query_time, "request": request}
        return self._send(_recommend(user, k, options))

    def prefill(
        self,
        user: int,
        *,
        request: str,
        candidates: int,
        history: Sequence[Event] | None = None,
        query_time: int | None = None,
    ) -> PrefillReply:
        """Says ahead that a ranking of so many candidates will follow; its ticket goes to `rank`."""
        return self._send(_prefill(user, request, candidates, {"history": history, "query_time": query_time}))

    def rank(
        self,
        user: int,
        candidates: Sequence[int],
        *,
        request: str,
        ticket: str | None = None,
        k: int | None = None,
        history: Sequence[Event] | None = None,
        query_time: int | None = None,
        deadline_ms: float | None = None,
    ) -> RankedItems:
        """The candidates in order, the best k of them or all."""
        options = {"ticket": ticket, "k": k, "history": history, "query_time": query_time, "deadline_ms": deadline_ms}
        return self._send(_rank(user, request, candidates, options))

    def generate(
        self,
        user: int,
        k: int = 10,
        *,
        scenario: str | None = None,
        trigger: int | None = None,
        history: Sequence[Event] | None = None,
        deadline_ms: float | None = None,
    ) -> GeneratedItems:
        """The best k items of a generative run; `scenario` and `trigger` (an item) steer it."""
        options = {"scenario": scenario, "trigger": trigger, "history": history, "deadline_ms": deadline_ms}
        return self._send(_generate(user, k, options))

    def release(self, ticket: str, *, user: int | None = None) -> None:
        """Gives back a prefix that no ranking will follow. Behind nginx, which routes by the user, say whose it is."""
        self._send(_release(ticket, user))

    def send_events(self, events: Sequence[Event]) -> None:
        """Adds events (id, user, item, time, features) to histories; sending the same id again changes nothing."""
        self._send(_nothing("/v1/events", {"events": list(events)}))

    def invalidate(self, user: int) -> None:
        """Forgets every prefix of a user."""
        self._send(_nothing("/v1/invalidate", {"user": user}))

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, call: _Call[Result]) -> Result:
        try:
            return _read(self._http.post(call.path, json=call.body, headers=call.headers), call)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, call.path, error) from error


class AsyncClient:
    """The same calls, awaited."""

    def __init__(self, url: str, *, timeout_s: float = 2.0):
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s)

    async def recommend(
        self,
        user: int,
        k: int = 10,
        *,
        history: Sequence[Event] | None = None,
        exclude: Sequence[int] | None = None,
        query_time: int | None = None,
        request: str | None = None,
    ) -> RecommendedItems:
        """See `Client.recommend`."""
        options = {"history": history, "exclude": exclude, "query_time": query_time, "request": request}
        return await self._send(_recommend(user, k, options))

    async def prefill(
        self,
        user: int,
        *,
        request: str,
        candidates: int,
        history: Sequence[Event] | None = None,
        query_time: int | None = None,
    ) -> PrefillReply:
        """See `Client.prefill`."""
        return await self._send(_prefill(user, request, candidates, {"history": history, "query_time": query_time}))

    async def rank(
        self,
        user: int,
        candidates: Sequence[int],
        *,
        request: str,
        ticket: str | None = None,
        k: int | None = None,
        history: Sequence[Event] | None = None,
        query_time: int | None = None,
        deadline_ms: float | None = None,
    ) -> RankedItems:
        """See `Client.rank`."""
        options = {"ticket": ticket, "k": k, "history": history, "query_time": query_time, "deadline_ms": deadline_ms}
        return await self._send(_rank(user, request, candidates, options))

    async def generate(
        self,
        user: int,
        k: int = 10,
        *,
        scenario: str | None = None,
        trigger: int | None = None,
        history: Sequence[Event] | None = None,
        deadline_ms: float | None = None,
    ) -> GeneratedItems:
        """See `Client.generate`."""
        options = {"scenario": scenario, "trigger": trigger, "history": history, "deadline_ms": deadline_ms}
        return await self._send(_generate(user, k, options))

    async def release(self, ticket: str, *, user: int | None = None) -> None:
        await self._send(_release(ticket, user))

    async def send_events(self, events: Sequence[Event]) -> None:
        await self._send(_nothing("/v1/events", {"events": list(events)}))

    async def invalidate(self, user: int) -> None:
        await self._send(_nothing("/v1/invalidate", {"user": user}))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, call: _Call[Result]) -> Result:
        try:
            return _read(await self._http.post(call.path, json=call.body, headers=call.headers), call)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, call.path, error) from error


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if value is not None
    }


def _reader(kind: type[Result]) -> Callable[[dict[str, Any]], Result]:
    """Reads the fields that the type knows; a newer service may say more."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return lambda answer: kind(**{name: value for name, value in answer.items() if name in names})


def _read(answer: httpx.Response, call: _Call[Result]) -> Result:
    """The result of an answer; raises ServiceError."""
    where = f"{answer.url}"
    try:
        content = answer.json()
    except ValueError:
        content = None
    if answer.status_code == 200 and isinstance(content, dict):
        try:
            return call.read(content)
        except TypeError as error:
            message = f"{where} gave an answer of another version: {error}."
            raise ServiceError(message, status=200, code="bad_answer") from error
    problem = content.get("error") if isinstance(content, dict) else None
    problem = problem if isinstance(problem, dict) else {}
    code, wait = str(problem.get("code", "error")), answer.headers.get("retry-after", "")
    message = f"{where} answered {answer.status_code} {code}: {problem.get('message', 'without a reason; is this a nestpipe service?')}"
    retry_after_s = float(wait) if wait.isdigit() else None
    raise ServiceError(message, status=answer.status_code, code=code, retry_after_s=retry_after_s)


def _unreachable(url: httpx.URL, path: str, error: httpx.HTTPError) -> ServiceError:
    if isinstance(error, httpx.TimeoutException):
        message = f"{url}{path.removeprefix('/')} gave no answer in time; raise timeout_s, or look at its /metrics."
        return ServiceError(message, status=0, code="timeout")
    message = f"nothing answers at {url} ({error}); start it with 'nestpipe serve RUN', or check the address."
    return ServiceError(message, status=0, code="unreachable")
