"""Clients of the HTTP service: one synchronous, one asynchronous, with typed answers.

    with Client("http://127.0.0.1:8700") as client:
        for item, score in client.recommend(42, k=10).pairs():
            ...

The parameters of a call are the fields of its request in nestpipe.serve.schemas. Every call has a deadline. A refusal raises
`ServiceError` with the service's own code and message.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, overload
from urllib.parse import quote, urlencode

import httpx
import msgspec
from msgspec import Struct

from nestpipe.errors import NestPipeError
from nestpipe.serve.route_headers import SESSION_HEADER, USER_HEADER, session_of, user_key
from nestpipe.serve.schemas import (
    ErrorReply,
    Event,
    EventsRequest,
    GeneratedItems,
    GenerateRequest,
    InvalidateRequest,
    PrefillReply,
    PrefillRequest,
    Problem,
    RankedItems,
    RankRequest,
    RecommendedItems,
    ReleaseRequest,
    SimilarItems,
    SimilarRequest,
    SteeredRecommendRequest,
)
from nestpipe.serve.state_schemas import (
    ElementsReply,
    EventsReply,
    ForgetRequest,
    ForgottenReply,
    ItemChangeRequest,
    ItemReply,
    ItemRequest,
    ItemsPage,
    ItemsPageRequest,
    ItemsRequest,
    UsersRequest,
)

__all__ = [
    "AsyncClient",
    "Client",
    "ElementsReply",
    "Event",
    "EventsReply",
    "ForgottenReply",
    "GeneratedItems",
    "ItemReply",
    "ItemsPage",
    "PrefillReply",
    "RankedItems",
    "RecommendedItems",
    "ServiceError",
    "SimilarItems",
]

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


class ServiceError(NestPipeError):
    """The service refused, or could not be reached (status 0)."""

    def __init__(self, message: str, *, status: int, code: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


class _Acknowledgement(Struct):
    """An answer whose fields the client does not use."""


class _ReleaseOfUser(ReleaseRequest, kw_only=True):
    """Unpins the KV prefix of a ticket that no ranking request will use.

    Behind nginx, which routes by the user, say whose ticket it is; that is sent as a header.
    """

    user: int | str | None = None


class _Call(Generic[Parameters, Answer]):
    """One call of the service as a method of both clients: its path, its request, whose fields it takes, and its answer."""

    def __init__(
        self,
        path: str,
        request: Callable[Parameters, Struct],
        answer: type[Answer],
        *,
        unsent: str = "",
        method: str = "POST",
        in_path: str = "",
    ):
        """`unsent` is a field that is a header alone, `in_path` one that belongs into the address."""
        self.path, self.answer, self.method = path, answer, method
        self._request, self._unsent, self._in_path = request, unsent, in_path
        self.__doc__, self.__signature__ = request.__doc__, inspect.signature(request)

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[Parameters, Answer]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[Parameters, Awaitable[Answer]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self if client is None else partial(self, client)

    def __call__(self, client: Any, /, *args: Parameters.args, **fields: Parameters.kwargs) -> Any:
        request = self._request(*args, **fields)
        body, path = msgspec.to_builtins(request), self.path
        body.pop(self._unsent, None)
        if self._in_path:
            path += f"/{quote(str(body.pop(self._in_path)), safe='')}"
        if self.method in ("GET", "DELETE"):
            return client._send(self, path + (f"?{urlencode(body)}" if body else ""), None, _headers(request))
        body = body["change"] if self.method == "PATCH" else body
        return client._send(self, path, msgspec.json.encode(body), _headers(request))

    def read(self, reply: httpx.Response) -> Answer:
        """The answer in a reply; raises ServiceError."""
        if reply.status_code == 200:
            try:
                if self.answer is type(None):
                    return cast(Answer, msgspec.json.decode(reply.content, type=_Acknowledgement) and None)
                return msgspec.json.decode(reply.content, type=self.answer)
            except ValueError as error:
                message = f"{reply.url} gave an answer of another version: {error}."
                raise ServiceError(message, status=200, code="bad_answer") from error
        try:
            problem = msgspec.json.decode(reply.content, type=ErrorReply).error
        except ValueError:
            problem = Problem("error", "without a reason; is this a nestpipe service?")
        message, wait = f"{reply.url} answered {reply.status_code} {problem.code}: {problem.message}", "retry-after"
        retry_after_s = float(reply.headers[wait]) if reply.headers.get(wait, "").isdigit() else None
        raise ServiceError(message, status=reply.status_code, code=problem.code, retry_after_s=retry_after_s)


class _Calls:
    """The calls of both clients."""

    recommend = _Call("/v1/recommend", SteeredRecommendRequest, RecommendedItems)
    """The best k items for a user; `history` replaces the stored one, `exclude` lists items not to show."""
    similar = _Call("/v1/similar", SimilarRequest, SimilarItems)
    """Items that are like an item, or like several together."""
    prefill = _Call("/v1/prefill", PrefillRequest, PrefillReply)
    """Prefill hint: a ranking request with this many candidates will follow. Its ticket goes to `rank`."""
    rank = _Call("/v1/rank", RankRequest, RankedItems)
    """The candidates in order, the best k of them or all."""
    generate = _Call("/v1/generate", GenerateRequest, GeneratedItems)
    """The best k items of a generative run; `scenario` and `trigger` (an item) steer it."""
    release = _Call("/v1/release", _ReleaseOfUser, type(None), unsent="user")
    """Unpins the KV prefix of a ticket that no ranking request will use."""
    send_events = _Call("/v1/events", EventsRequest, EventsReply)
    """Appends events (id, user, item, time, features) to histories and says of each whether it is stored."""
    put_items = _Call("/v1/items", ItemsRequest, ElementsReply, method="PUT")
    """Stores items: id, attributes of the log's schema, text, available."""
    get_item = _Call("/v1/items", ItemRequest, ItemReply, method="GET", in_path="item")
    """An item as it is stored now."""
    change_item = _Call("/v1/items", ItemChangeRequest, ItemReply, method="PATCH", in_path="item")
    """Changes some fields of an item; null removes a value."""
    withdraw_item = _Call("/v1/items", ItemRequest, ItemReply, method="DELETE", in_path="item")
    """Takes an item out of every answer; its record stays."""
    list_items = _Call("/v1/items", ItemsPageRequest, ItemsPage, method="GET")
    """A page of the catalogue."""
    put_users = _Call("/v1/users", UsersRequest, ElementsReply, method="PUT")
    """Stores users: id, features of the log's schema."""
    forget_user = _Call("/v1/users", ForgetRequest, ForgottenReply, method="DELETE", in_path="user")
    """Erases the events and features of a user."""
    invalidate = _Call("/v1/invalidate", InvalidateRequest, type(None))
    """Drops all KV prefixes of a user."""


class Client(_Calls):
    """Calls that block until they are answered. A context manager, or `close` it; threads may share it."""

    def __init__(self, url: str, *, timeout_s: float = 2.0):
        self._http = httpx.Client(base_url=url, timeout=timeout_s)

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

    def _send(self, call: _Call[Any, Answer], path: str, content: bytes | None, headers: dict[str, str]) -> Answer:
        try:
            return call.read(self._http.request(call.method, path, content=content, headers=headers))
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, call.path, error) from error


class AsyncClient(_Calls):
    """The same calls, awaited."""

    def __init__(self, url: str, *, timeout_s: float = 2.0):
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(
        self, call: _Call[Any, Answer], path: str, content: bytes | None, headers: dict[str, str]
    ) -> Answer:
        try:
            return call.read(await self._http.request(call.method, path, content=content, headers=headers))
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, call.path, error) from error


def _headers(request: Struct) -> dict[str, str]:
    """The routing key is a header too, because nginx and Ray Serve read no bodies."""
    user, ticket = getattr(request, "user", None), getattr(request, "ticket", None)
    user = user if isinstance(user, int | str) else None  # the service refuses anything else
    named = {} if user is None else {USER_HEADER: user_key(user)}
    return {"content-type": "application/json", SESSION_HEADER: session_of(user, ticket), **named}


def _unreachable(url: httpx.URL, path: str, error: httpx.HTTPError) -> ServiceError:
    if isinstance(error, httpx.TimeoutException):
        message = f"{url}{path.removeprefix('/')} gave no answer in time; raise timeout_s, or look at its /metrics."
        return ServiceError(message, status=0, code="timeout")
    message = f"nothing answers at {url} ({error}); start it with 'nestpipe serve RUN', or check the address."
    return ServiceError(message, status=0, code="unreachable")
