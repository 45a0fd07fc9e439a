"""The calls of an instance on its state, in threads of their own: writes wait for the disk or the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from nestpipe.data.sequences import Sequences
from nestpipe.errors import NestPipeError
from nestpipe.serve.request_guard import Run
from nestpipe.serve.schemas import EventsRequest
from nestpipe.serve.state_routes import check_count
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
from nestpipe.serve.state_writer import StateWriter
from nestpipe.state.service_state import StateAwayError

Result = TypeVar("Result")


class StateApi:
    """The handlers of items, users and events."""

    def __init__(
        self,
        writer: StateWriter,
        threads: ThreadPoolExecutor,
        *,
        check: Callable[[Sequences], object],
        forgotten: Callable[[Any], object],
        stored: Callable[[float], object],
        max_events: int,
    ):
        """`check` refuses events that no model can read; `forgotten` drops what is cached of a user; `stored` counts events."""
        self._writer, self._threads, self._check = writer, threads, check
        self._forgotten, self._stored, self._max_events = forgotten, stored, max_events

    def handlers(self) -> dict[str, Run]:
        """What answers each call of STATE_CALLS."""
        return {
            "put_items": self._put_items,
            "list_items": self._list_items,
            "get_item": self._get_item,
            "change_item": self._change_item,
            "withdraw_item": self._withdraw_item,
            "put_users": self._put_users,
            "forget_user": self._forget_user,
        }

    async def events(self, request: EventsRequest) -> EventsReply:
        check_count(request.events, self._max_events)
        reply = await self._run(self._writer.add_events, request.events, self._check)
        self._stored(reply.accepted)
        return reply

    async def _put_items(self, request: ItemsRequest) -> ElementsReply:
        return await self._run(self._writer.put_items, request.items)

    async def _put_users(self, request: UsersRequest) -> ElementsReply:
        return await self._run(self._writer.put_users, request.users)

    async def _list_items(self, request: ItemsPageRequest) -> ItemsPage:
        return await self._run(self._writer.page, request.cursor, request.limit)

    async def _get_item(self, request: ItemRequest) -> ItemReply:
        return ItemReply(item=self._writer.item(request.item))

    async def _change_item(self, request: ItemChangeRequest) -> ItemReply:
        return ItemReply(item=await self._run(self._writer.change_item, request.item, request.change))

    async def _withdraw_item(self, request: ItemRequest) -> ItemReply:
        return ItemReply(item=await self._run(self._writer.withdraw, request.item))

    async def _forget_user(self, request: ForgetRequest) -> ForgottenReply:
        reply = await self._run(self._writer.forget, request.user)
        self._forgotten(request.user)
        return reply

    async def _run(self, work: Callable[..., Result], *values: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *values)


def refuse_away(error: NestPipeError) -> tuple[int, str] | None:
    """The status and code of a state that cannot be written now."""
    return (503, "state_away") if isinstance(error, StateAwayError) else None
