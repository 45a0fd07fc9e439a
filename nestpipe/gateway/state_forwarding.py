"""The gateway's calls on the state of its service: items, users, posted events.

Instances with one state (a shared folder or a database) are asked one at a time: any of them writes for all. Instances with states
of their own all get every write. All calls are idempotent, so after a failure the caller sends the same again.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nestpipe.gateway.instance_client import InstanceClient, InstanceError
from nestpipe.serve.request_guard import Run
from nestpipe.serve.schemas import EventsRequest
from nestpipe.serve.state_routes import check_count
from nestpipe.serve.state_schemas import STATE_CALLS, ElementsReply, EventsReply, StateCall

Answer = TypeVar("Answer", bound=Struct)


class StateForwarding:
    """Handlers of a gateway. `shared`: all instances have one state."""

    def __init__(self, remote: InstanceClient, *, shared: bool, timeout_s: float, max_events: int):
        self._remote, self._shared, self._timeout_s, self._max_events = remote, shared, timeout_s, max_events

    def handlers(self) -> dict[str, Run]:
        """What answers each call of STATE_CALLS."""
        return {name: self._forward(call) for name, call in STATE_CALLS.items()}

    async def events(self, request: EventsRequest) -> EventsReply:
        check_count(request.events, self._max_events)
        return await self._ask("POST", "/v1/events", msgspec.json.encode(request), EventsReply)

    def _forward(self, call: StateCall) -> Run:
        async def run(request: Any) -> Struct:
            path, body = call.path, None
            if call.in_path:
                path += f"/{quote(str(getattr(request, call.in_path)), safe='')}"
            elif not call.has_body:
                path += f"?{urlencode(msgspec.to_builtins(request))}"
            if call.has_body:
                body = msgspec.json.encode(request.change if call.in_path else request)
            return await self._ask(call.method, path, body, call.answer)

        return run

    async def _ask(self, method: str, path: str, content: bytes | None, answer: type[Answer]) -> Answer:
        asked = self._any if self._shared or method == "GET" else self._all
        names, found = await asked(method, path, content, answer)
        return cast(Answer, replace(found, instances=names)) if isinstance(found, ElementsReply) else found

    async def _any(
        self, method: str, path: str, content: bytes | None, answer: type[Answer]
    ) -> tuple[list[str], Answer]:
        """The answer of the least busy instance that gives one; raises InstanceError."""
        problem = InstanceError("there are no instances")
        for instance in self._remote.least_busy():
            try:
                with self._remote.holding(instance):
                    found = await self._remote.send(instance, method, path, content, answer, timeout_s=self._timeout_s)
            except InstanceError as error:
                if error.is_final:
                    raise
                problem = error
            else:
                return [instance.name], found
        raise problem

    async def _all(
        self, method: str, path: str, content: bytes | None, answer: type[Answer]
    ) -> tuple[list[str], Answer]:
        """The answer that every instance gives; raises InstanceError unless all did."""
        members = list(self._remote.members)
        calls = [self._remote.send(one, method, path, content, answer, timeout_s=self._timeout_s) for one in members]
        found, failed = list[Answer](), list[InstanceError]()
        for one in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(one, InstanceError):
                failed.append(one)
            elif isinstance(one, BaseException):
                raise one
            else:
                found.append(one)
        if failed:
            first = failed[0]
            message = f"{len(failed)} of {len(members)} instances did not take it ({first}); send the same again."
            raise InstanceError(message, status=first.status if first.is_final else 503, code=first.code)
        if not found:
            raise InstanceError("there are no instances")
        return sorted(one.name for one in members), found[0]
