"""Requests and answers that change or show the state of a service: items, users, posted events. Needs neither torch nor starlette.

Attributes of items and users depend on the log, so elements stay plain objects; `StateWriter` reads each of them, and one that is
wrong gets an error of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from nestpipe.serve.schemas import EventsRequest, OwnId, Problem, Request, limited

Element = Mapping[str, Any]
"""An item or a user as JSON: `id` and the attributes of the log's schema; an item also has `text` and `available`."""
Cursor = Annotated[str, Meta(min_length=1, max_length=32, description="The `cursor` of the page before.")]
PageSize = Annotated[int, Meta(ge=1, le=1000)]


class _StateRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that are left at their default are not sent."""


class ItemsRequest(_StateRequest):
    """Stores items, new ones or new versions of known ones. Attributes that are left out are missing from then on."""

    items: Sequence[Element]


class UsersRequest(_StateRequest):
    """Stores the features of users."""

    users: Sequence[Element]


class ItemRequest(_StateRequest):
    """One item of the catalogue, whose id is percent-encoded in the address."""

    item: OwnId


class ItemChangeRequest(ItemRequest):
    """Changes some fields of an item; null removes a value."""

    change: Element


class ItemsPageRequest(_StateRequest):
    """A page of the catalogue."""

    cursor: Cursor | None = None
    limit: PageSize = 100


class ForgetRequest(_StateRequest):
    """Forgets a user, whose id is percent-encoded in the address."""

    user: OwnId


class ElementResult(Struct, frozen=True, kw_only=True):
    """What became of one element, at its place."""

    result: Literal["created", "updated", "stored", "duplicate", "error"]
    error: Problem | None = None


class ElementsReply(Struct, frozen=True, kw_only=True):
    """The result of each element, in their order; `instances` took the request, if a gateway was asked."""

    results: list[ElementResult]
    instances: list[str] = []


class EventsReply(ElementsReply, frozen=True, kw_only=True):
    """The result of each event; `accepted` are stored, `duplicates` were known."""

    accepted: int
    duplicates: int


class ItemsPage(Struct, frozen=True, kw_only=True):
    """Items in the order of their numbers; `cursor` asks for the next page, null after the last."""

    items: list[dict[str, Any]]
    cursor: str | None


class ItemReply(Struct, frozen=True, kw_only=True):
    """An item as it is stored now."""

    item: dict[str, Any]


class ForgottenReply(Struct, frozen=True, kw_only=True):
    """How many posted events were erased, and how many of the sequence folder no longer count."""

    erased: int
    masked: int


# The calls, for instances, gateways and documents; POST /v1/events is among the others.


class StateCall(NamedTuple):
    """A call: its method and path, what is in the address, and its request and answer."""

    method: Literal["GET", "PUT", "PATCH", "DELETE"]
    path: str
    in_path: str
    request: type[Struct]
    answer: type[Struct]

    @property
    def has_body(self) -> bool:
        return self.method in ("PUT", "PATCH")


STATE_CALLS: dict[str, StateCall] = {
    "put_items": StateCall("PUT", "/v1/items", "", ItemsRequest, ElementsReply),
    "list_items": StateCall("GET", "/v1/items", "", ItemsPageRequest, ItemsPage),
    "get_item": StateCall("GET", "/v1/items", "item", ItemRequest, ItemReply),
    "change_item": StateCall("PATCH", "/v1/items", "item", ItemChangeRequest, ItemReply),
    "withdraw_item": StateCall("DELETE", "/v1/items", "item", ItemRequest, ItemReply),
    "put_users": StateCall("PUT", "/v1/users", "", UsersRequest, ElementsReply),
    "forget_user": StateCall("DELETE", "/v1/users", "user", ForgetRequest, ForgottenReply),
}


def any_elements(kind: type[Request], name: str, *, most: int) -> type[Request]:
    """A request whose elements are read one by one, so that a bad one spoils no other, with the limit for the document.

    What exceeds the limit is answered with 413, not as a wrong field.
    """
    shape = {"maxItems": most, "items": {"type": "object"}}
    return limited(kind, **{name: (Annotated[list[Any], Meta(extra_json_schema=shape)], msgspec.NODEFAULT)})


def posted_events(most: int) -> type[EventsRequest]:
    """POST /v1/events of a service."""
    return any_elements(EventsRequest, "events", most=most)
