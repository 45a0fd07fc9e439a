"""The instances of a fleet over HTTP: signals, rankings with one retry inside the deadline, releases, broadcasts.

A hint never fails a request: whatever goes wrong with it, ranking is then done in full. A ranking is idempotent, so
it may be sent twice: to the instance of the ticket, and if that cannot be had to the next in the user's order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from nestpipe.errors import NestPipeError
from nestpipe.gateway.router import InstanceAddress, Members, peek_instance

_MIN_ATTEMPT_S = 0.002  # with less time left an answer cannot come
_MAX_QUIET_S = 5.0  # that an instance may ask for
_TIMEOUTS = 3  # in a row, and an instance is thought to be down; slow ones keep their users


class InstanceError(NestPipeError):
    """An instance did not give an answer: `status` and `code` are its own, or 503 if it could not be reached."""

    def __init__(self, message: str, *, status: int = 503, code: str = "unreachable"):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def is_final(self) -> bool:
        """Whether another instance would say the same: the request itself is wrong."""
        return 400 <= self.status < 500 and self.status not in (408, 429)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAnswer:
    """What a request needs at every instance."""

    user: int
    request: str
    num_candidates: int
    query_time: int | None = None
    history: list[Any] | None = None

    def body(self) -> dict[str, Any]:
        own: dict[str, Any] = {"user": self.user, "request": self.request, "query_time": self.query_time}
        return own if self.history is None else own | {"history": self.history}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOutcome:
    """What became of a hint: where the request belongs, and the ticket of its prefix if one is computed."""

    instance: InstanceAddress
    reason: str
    ticket: str | None = None
    epoch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingReply:
    """An instance's answer to a ranking, and how it was got."""

    answer: dict[str, Any]
    instance: str
    num_attempts: int


def make_client() -> httpx.AsyncClient:
    """Connections to instances: many, kept open, directly. Every call has a deadline of its own."""
    limits = httpx.Limits(max_connections=1024, max_keepalive_connections=128, keepalive_expiry=30.0)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


def is_address(url: str) -> bool:
    """Whether an instance can be asked there."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


class InstanceClient:
    """Talks to the members over a client that it closes. One per gateway process; all calls on one event loop."""

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
        self._suspects: dict[str, float] = {}  # who could not be reached, until when it is asked last
        self._unready: set[str] = set()  # who said so, or nothing, when it was last looked at
        self._timeouts: Counter[str] = Counter()  # in a row
        self._quiet: dict[str, tuple[float, int]] = {}  # who needs no signals: until when, up to how many candidates
        self._loads: Counter[str] = Counter()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def loads(self) -> Mapping[str, int]:
        """requests in flight by instance, as far as this gateway knows."""
        return self._loads

    def choose(self, user: int) -> InstanceAddress:
        """Where a request belongs; the only time that load is looked at."""
        return self.members.choose(user, self._loads, last=self._down())

    @contextmanager
    def holding(self, instance: InstanceAddress) -> Iterator[None]:
        """Counts a request as load of an instance while it is under way."""
        self._loads[instance.name] += 1
        try:
            yield
        finally:
            self._loads[instance.name] -= 1

    async def prefill(self, asked: PrefillAnswer, instance: InstanceAddress, *, timeout_s: float) -> PrefillOutcome:
        """Asks for the prefix of a user ahead of ranking. Does not raise: without a ticket ranking is done in full.

        An instance at which not even the longest history is at risk says so, and for how long it is not asked again.
        """
        until, most = self._quiet.get(instance.name, (0.0, 0))
        if asked.num_candidates <= most and self._clock() < until:
            return PrefillOutcome(instance=instance, reason="not_at_risk")
        body = asked.body() | {"candidates": asked.num_candidates}
        try:
            answer = await self._post(instance, "/v1/prefill", body, timeout_s=timeout_s)
        except InstanceError as error:
            return PrefillOutcome(instance=instance, reason=error.code)
        ticket, quiet_s = answer.get("ticket"), answer.get("quiet_s")
        if isinstance(quiet_s, int | float) and quiet_s > 0:
            self._quiet[instance.name] = self._clock() + min(quiet_s, _MAX_QUIET_S), asked.num_candidates
        return PrefillOutcome(
            instance=instance,
            ticket=ticket if isinstance(ticket, str) else None,
            reason=str(answer.get("reason", "")),
            epoch=str(answer.get("epoch", "")),
        )

    async def rank(
        self, asked: PrefillAnswer, hint: PrefillOutcome, items: list[int], k: int | None, *, deadline_s: float
    ) -> RankingReply:
        """The ranking of some items, from the second instance if the first fails. Raises RemoteError."""
        end = self._clock() + deadline_s
        order = self.members.follow(hint.ticket, asked.user, chosen=hint.instance.name, last=self._down())
        order = (order + order[:1])[:2]  # a fleet of one is asked again: the connection may have been old
        body = asked.body() | {"candidates": items, "k": k}
        problems: list[InstanceError] = []
        for number, instance in enumerate(order):
            left = end - self._clock()
            if left < _MIN_ATTEMPT_S:
                break
            left *= self._first_share if number == 0 and len(self.members) > 1 else 1.0
            own = {"ticket": hint.ticket if number == 0 else None, "deadline_ms": round(left * 1e3, 3)}
            try:
                answer = _ranking(await self._post(instance, "/v1/rank", body | own, timeout_s=left), instance)
            except InstanceError as error:
                if error.is_final:
                    raise
                problems.append(error)
                continue
            return RankingReply(answer=answer, instance=instance.name, num_attempts=number + 1)
        said = "; ".join(map(str, problems)) or "no time was left"
        worst = problems[-1] if problems else InstanceError("", code="deadline")
        raise InstanceError(
            f"no ranking inside {deadline_s * 1e3:.0f} ms: {said}", status=worst.status, code=worst.code
        )

    def release(self, hint: asyncio.Task[PrefillOutcome]) -> None:
        """Frees the prefix of a hint, in the background, also one that is still being asked for."""

        async def free() -> None:
            found = await hint
            if found.ticket is not None:
                await self.release_ticket(found.ticket)

        self.start(free())

    async def let_go(self, ticket: str) -> None:
        """`release_ticket`, whatever becomes of it; for `start`."""
        await self.release_ticket(ticket)

    async def release_ticket(self, ticket: str) -> bool:
        """Frees the prefix of a ticket; if that fails, its pin ends with its time, or has ended with the instance."""
        instance = self.members.find(peek_instance(ticket))
        if instance is None:
            return False
        try:
            await self._post(instance, "/v1/release", {"ticket": ticket}, timeout_s=1.0)
        except InstanceError:
            return False
        return True

    async def ready(self, *, timeout_s: float) -> dict[str, bool]:
        """Which members say that they are ready."""

        async def ask(instance: InstanceAddress) -> bool:
            try:
                async with asyncio.timeout(timeout_s):
                    return (await self._client.get(instance.url + "/readyz")).status_code == 200
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
                return False

        members = list(self.members)
        said = await asyncio.gather(*map(ask, members))
        return {one.name: is_ready for one, is_ready in zip(members, said, strict=True)}

    async def watch(self, *, every_s: float = 0.5, timeout_s: float = 1.0) -> None:
        """Looks at the members until it is cancelled: who starts, hangs or drains is asked last, who is back is asked again."""
        while True:
            for name, is_ready in (await self.ready(timeout_s=timeout_s)).items():
                if is_ready:
                    self._unready.discard(name)
                    self._suspects.pop(name, None)
                else:
                    self._unready.add(name)
            await asyncio.sleep(every_s)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something that no answer waits for; `close` does."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def broadcast(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, InstanceError | None]:
        """Sends the same to all members at once; what went wrong, by instance."""
        instances = list(self.members)
        calls = [self._post(one, path, body, timeout_s=timeout_s) for one in instances]
        said = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[str, InstanceError | None] = {}
        for one, result in zip(instances, said, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, InstanceError):
                raise result
            found[one.name] = result if isinstance(result, InstanceError) else None
        return found

    async def to_any(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> str:
        """Sends to the least busy member that takes it, and says which; raises RemoteError if none does, or the body is refused."""
        down, problem = self._down(), InstanceError("there are no instances")
        for instance in sorted(self.members, key=lambda one: (one.name in down, self._loads[one.name])):
            try:
                with self.holding(instance):
                    await self._post(instance, path, body, timeout_s=timeout_s)
            except InstanceError as error:
                if error.is_final:
                    raise
                problem = error
            else:
                return instance.name
        raise problem

    async def close(self) -> None:
        """Waits for what runs in the background, then closes the connections."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._client.aclose()

    def _down(self) -> set[str]:
        now = self._clock()
        return self._unready | {name for name, until in self._suspects.items() if until > now}

    async def _post(
        self, instance: InstanceAddress, path: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """A JSON answer. Raises RemoteError; who could not be reached is asked last for a while."""
        where = f"{instance.name} ({instance.url}{path})"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.post(instance.url + path, json=body)
        except TimeoutError:
            self._timeouts[instance.name] += 1
            if self._timeouts[instance.name] >= _TIMEOUTS:  # one is slow, more are gone
                self._suspects[instance.name] = self._clock() + self._suspect_s
            raise InstanceError(
                f"{where} gave no answer in {timeout_s * 1e3:.0f} ms", status=504, code="timeout"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._suspects[instance.name] = self._clock() + self._suspect_s
            raise InstanceError(f"{where} cannot be reached ({type(error).__name__})") from error
        self._suspects.pop(instance.name, None)
        self._timeouts.pop(instance.name, None)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise InstanceError(
                f"{where} answered {answer.status_code} without a JSON object", status=502, code="bad_answer"
            )
        if answer.status_code == 200:
            return content
        problem = content.get("error")
        problem = problem if isinstance(problem, dict) else {}
        message = f"{where} answered {answer.status_code}: {problem.get('message', 'no reason given')}"
        raise InstanceError(message, status=answer.status_code, code=str(problem.get("code", "error")))


def _ranking(answer: dict[str, Any], instance: InstanceAddress) -> dict[str, Any]:
    """An answer that has what a ranking must have; raises RemoteError."""
    kinds = {"items": list, "scores": list, "path": str, "prefix_len": int, "degraded": bool, "model": str}
    wrong = [name for name, kind in kinds.items() if not isinstance(answer.get(name), kind)]
    if wrong or len(answer["items"]) != len(answer["scores"]):
        message = f"{instance.name} gave a ranking without {', '.join(wrong) or 'a score for each item'}"
        raise InstanceError(message, status=502, code="bad_answer")
    return answer
