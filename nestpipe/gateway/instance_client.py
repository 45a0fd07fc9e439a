"""HTTP client of a gateway for its instances: prefill hints, questions with one retry, releases, broadcasts.

A prefill hint never fails a request: without a prefix the ranking is done in full. Rankings, recommendations and generations are
idempotent, so they may be sent twice: to the instance of the ticket or of the user and, if that fails, to the next in the user's order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import msgspec
from msgspec import Struct

from nestpipe.errors import NestPipeError
from nestpipe.gateway.keep_alive import KeepAliveTransport
from nestpipe.gateway.router import InstanceAddress, Members, RouterError, peek_instance
from nestpipe.serve.route_headers import FORWARDED_HEADER
from nestpipe.serve.schemas import (
    ErrorReply,
    GeneratedItems,
    GenerateRequest,
    InstancePrefillReply,
    PrefillRequest,
    Problem,
    RankedItems,
    RankRequest,
    RecommendRequest,
    ReleaseRequest,
    SimilarItems,
    SimilarRequest,
)

_MIN_ATTEMPT_S = 0.002  # less is not enough for an answer
_JSON = {"content-type": "application/json", FORWARDED_HEADER: "1"}
_MAX_QUIET_S = 5.0  # limit on an instance's `quiet_s`
_TIMEOUTS = 3  # consecutive timeouts that make an instance suspect; a slow one keeps its users


Answer = TypeVar("Answer", bound=Struct)


class _AnyAnswer(Struct):
    """A JSON object whose fields do not matter."""


class InstanceError(NestPipeError):
    """An instance did not give an answer: `status` and `code` are its own, or 503 if it failed or was not reached."""

    def __init__(self, message: str, *, status: int = 503, code: str = "unreachable"):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def is_final(self) -> bool:
        """Whether a retry is pointless because the request itself is wrong."""
        return 400 <= self.status < 500 and self.status not in (408, 429)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOutcome:
    """The instance of a request, the decision about its hint, and the ticket of its prefix, if any."""

    instance: InstanceAddress
    reason: str
    ticket: str | None = None
    epoch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReply(Generic[Answer]):
    """The answer of an instance, its name and the number of attempts."""

    answer: Answer
    instance: str
    num_attempts: int


def make_client() -> httpx.AsyncClient:
    """HTTP client with many keep-alive connections and without proxies. Every call has its own deadline."""
    return httpx.AsyncClient(timeout=None, transport=KeepAliveTransport(), trust_env=False)


def is_address(url: str) -> bool:
    """Whether this is an http address with a host."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


class InstanceClient:
    """Calls the members; closes `client`. One per gateway process; all calls on one event loop."""

    def __init__(
        self,
        members: Members,
        client: httpx.AsyncClient,
        *,
        first_share: float = 0.7,
        suspect_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.members = members
        self._client, self._clock = client, clock
        self._first_share = first_share  # of the deadline, before the second attempt
        self._suspect_s = suspect_s
        self._suspects: dict[str, float] = {}  # unreachable instances, tried last until then
        self._unready: set[str] = set()  # at the last readiness check
        self._timeouts: Counter[str] = Counter()  # consecutive
        self._quiet: dict[str, tuple[float, int]] = {}  # no prefill hints until then, up to that many candidates
        self._loads: Counter[str] = Counter()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def loads(self) -> Mapping[str, int]:
        """requests in flight by instance, as far as this gateway knows."""
        return self._loads

    def choose(self, user: int | str) -> InstanceAddress:
        """The instance of a request; the only place where load counts."""
        return self.members.choose(user, self._loads, last=self._down())

    @contextmanager
    def holding(self, instance: InstanceAddress) -> Iterator[None]:
        """Counts a request as load of an instance while it is in flight."""
        self._loads[instance.name] += 1
        try:
            yield
        finally:
            self._loads[instance.name] -= 1

    async def prefill(self, hint: PrefillRequest, instance: InstanceAddress, *, timeout_s: float) -> PrefillOutcome:
        """Sends a prefill hint. Never raises: without a ticket the ranking is done in full.

        An instance that would admit no hint says for how long, and gets none until then.
        """
        until, most = self._quiet.get(instance.name, (0.0, 0))
        if hint.candidates <= most and self._clock() < until:
            return PrefillOutcome(instance=instance, reason="not_at_risk")
        try:
            answer = await self._post(instance, "/v1/prefill", hint, InstancePrefillReply, timeout_s=timeout_s)
        except InstanceError as error:
            return PrefillOutcome(instance=instance, reason=error.code)
        if answer.quiet_s > 0:
            self._quiet[instance.name] = self._clock() + min(answer.quiet_s, _MAX_QUIET_S), hint.candidates
        return PrefillOutcome(instance=instance, ticket=answer.ticket, reason=answer.reason, epoch=answer.epoch)

    async def rank(
        self, request: RankRequest, chosen: InstanceAddress, *, deadline_s: float
    ) -> InstanceReply[RankedItems]:
        """The ranking of a request, from the second instance if the first fails. Raises InstanceError."""
        order = self.members.follow(request.ticket, request.user, chosen=chosen.name, last=self._down())

        def attempt(number: int, left_s: float) -> RankRequest:
            ticket = request.ticket if number == 0 else None
            return msgspec.structs.replace(request, ticket=ticket, deadline_ms=round(left_s * 1e3, 3))

        return await self._ask(order, "/v1/rank", attempt, RankedItems, deadline_s=deadline_s)

    async def of_user(
        self, path: str, request: RecommendRequest | GenerateRequest, answer: type[Answer], *, deadline_s: float
    ) -> InstanceReply[Answer]:
        """The answer of the user's instance, or of the next in the user's order if that fails. Raises InstanceError."""
        chosen = self.choose(request.user)
        order = self.members.follow(None, request.user, chosen=chosen.name, last=self._down())

        def attempt(number: int, left_s: float) -> RecommendRequest | GenerateRequest:
            return msgspec.structs.replace(request, deadline_ms=round(left_s * 1e3, 3))

        with self.holding(chosen):
            return await self._ask(order, path, attempt, answer, deadline_s=deadline_s)

    async def similar(self, request: SimilarRequest, *, deadline_s: float) -> SimilarItems:
        """The answer of the least busy instance, or of the next one if that fails. Raises InstanceError."""
        order = self.least_busy()
        if not order:
            raise RouterError("there are no instances; start one, or let one join.")
        with self.holding(order[0]):
            reply = await self._ask(order, "/v1/similar", lambda *_: request, SimilarItems, deadline_s=deadline_s)
        return reply.answer

    async def _ask(
        self,
        order: Sequence[InstanceAddress],
        path: str,
        attempt: Callable[[int, float], Struct],
        answer: type[Answer],
        *,
        deadline_s: float,
    ) -> InstanceReply[Answer]:
        """The first answer of at most two instances, each asked what `attempt` makes of its number and the seconds left."""
        end = self._clock() + deadline_s
        order = [*order, *order[:1]][:2]  # a single instance is tried twice: its connection may have been stale
        problems: list[InstanceError] = []
        for number, instance in enumerate(order):
            left = end - self._clock()
            if left < _MIN_ATTEMPT_S:
                break
            left *= self._first_share if number == 0 and len(self.members) > 1 else 1.0
            try:
                found = await self._post(instance, path, attempt(number, left), answer, timeout_s=left)
                if not _is_whole(found):
                    message = f"{instance.name} gave an answer without a score for each item"
                    raise InstanceError(message, code="bad_answer")
            except InstanceError as error:
                if error.is_final:
                    raise
                problems.append(error)
                continue
            return InstanceReply(answer=found, instance=instance.name, num_attempts=number + 1)
        reasons = "; ".join(map(str, problems)) or "no time was left"
        last = problems[-1] if problems else InstanceError("", code="deadline")
        raise InstanceError(
            f"no answer inside {deadline_s * 1e3:.0f} ms: {reasons}", status=last.status, code=last.code
        )

    def release(self, hint: asyncio.Task[PrefillOutcome]) -> None:
        """Unpins the prefix of a hint in the background, also of a hint that is still in flight."""

        async def free() -> None:
            outcome = await hint
            if outcome.ticket is not None:
                await self.release_ticket(outcome.ticket)

        self.start(free())

    async def let_go(self, ticket: str) -> None:
        """`release_ticket` without a result, for `start`."""
        await self.release_ticket(ticket)

    async def release_ticket(self, ticket: str) -> bool:
        """Unpins the prefix of a ticket; if that fails, the pin expires, or has gone with the instance."""
        instance = self.members.find(peek_instance(ticket))
        if instance is None:
            return False
        try:
            await self._post(instance, "/v1/release", ReleaseRequest(ticket), _AnyAnswer, timeout_s=1.0)
        except InstanceError:
            return False
        return True

    async def ready(self, *, timeout_s: float) -> dict[str, bool]:
        """Readiness of the members."""

        async def check(instance: InstanceAddress) -> bool:
            try:
                async with asyncio.timeout(timeout_s):
                    return (await self._client.get(instance.url + "/readyz")).status_code == 200
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
                return False

        members = list(self.members)
        states = await asyncio.gather(*map(check, members))
        return {one.name: is_ready for one, is_ready in zip(members, states, strict=True)}

    async def metric_texts(self, *, timeout_s: float) -> list[str]:
        """The /metrics of the members that answer in time."""

        async def read(instance: InstanceAddress) -> str:
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await self._client.get(instance.url + "/metrics")
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
                return ""
            return reply.text if reply.status_code == 200 else ""

        return [text for text in await asyncio.gather(*map(read, list(self.members))) if text]

    async def watch(self, *, every_s: float = 0.5, timeout_s: float = 1.0) -> None:
        """Checks readiness until it is cancelled: members that start, hang or drain are tried last."""
        while True:
            for name, is_ready in (await self.ready(timeout_s=timeout_s)).items():
                if is_ready:
                    self._unready.discard(name)
                    self._suspects.pop(name, None)
                else:
                    self._unready.add(name)
            await asyncio.sleep(every_s)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a background task, which `close` waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def broadcast(self, path: str, request: Struct, *, timeout_s: float) -> dict[str, InstanceError | None]:
        """Sends a request to all members concurrently; returns errors by instance."""
        instances = list(self.members)
        calls = [self._post(one, path, request, _AnyAnswer, timeout_s=timeout_s) for one in instances]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors: dict[str, InstanceError | None] = {}
        for one, result in zip(instances, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, InstanceError):
                raise result
            errors[one.name] = result if isinstance(result, InstanceError) else None
        return errors

    async def close(self) -> None:
        """Waits for background tasks, then closes the connections."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._client.aclose()

    def least_busy(self) -> list[InstanceAddress]:
        """All members, those that drain or are down last."""
        down = self._down()
        return sorted(self.members, key=lambda one: (one.is_draining or one.name in down, self._loads[one.name]))

    def _down(self) -> set[str]:
        now = self._clock()
        return self._unready | {name for name, until in self._suspects.items() if until > now}

    async def _post(
        self, instance: InstanceAddress, path: str, request: Struct, answer: type[Answer], *, timeout_s: float
    ) -> Answer:
        return await self.send(instance, "POST", path, msgspec.json.encode(request), answer, timeout_s=timeout_s)

    async def send(
        self,
        instance: InstanceAddress,
        method: str,
        path: str,
        content: bytes | None,
        answer: type[Answer],
        *,
        timeout_s: float,
    ) -> Answer:
        """The answer of an instance. Raises InstanceError; an instance that was not reached is suspect for a while."""
        where = f"{instance.name} ({instance.url}{path})"
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._client.request(method, instance.url + path, content=content, headers=_JSON)
        except TimeoutError:
            self._timeouts[instance.name] += 1
            if self._timeouts[instance.name] >= _TIMEOUTS:
                self._suspects[instance.name] = self._clock() + self._suspect_s
            raise InstanceError(f"{where} gave no answer in {timeout_s * 1e3:.0f} ms", code="timeout") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._suspects[instance.name] = self._clock() + self._suspect_s
            raise InstanceError(f"{where} cannot be reached ({type(error).__name__})") from error
        self._suspects.pop(instance.name, None)
        self._timeouts.pop(instance.name, None)
        try:
            if reply.status_code == 200:
                return msgspec.json.decode(reply.content, type=answer)
            problem = _problem_in(reply.content)
        except (ValueError, RecursionError) as error:
            message = f"{where} answered {reply.status_code}, but not as documented ({error})"
            raise InstanceError(message, code="bad_answer") from None
        status = reply.status_code if reply.status_code < 500 else 503
        raise InstanceError(
            f"{where} answered {reply.status_code}: {problem.message}", status=status, code=problem.code
        )


def _is_whole(answer: Struct) -> bool:
    """Whether every item has a score."""
    match answer:
        case RankedItems() | SimilarItems():
            return len(answer.items) == len(answer.scores)
        case GeneratedItems():
            return len(answer.items) == len(answer.log_probabilities)
    return True


def _problem_in(content: bytes) -> Problem:
    """The error that a refusal names; raises ValueError unless it is a JSON object."""
    try:
        return msgspec.json.decode(content, type=ErrorReply).error
    except msgspec.ValidationError:
        msgspec.json.decode(content, type=_AnyAnswer)
        return Problem("error", "no reason given")
