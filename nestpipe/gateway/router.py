"""Routing by user: every gateway sends a user to the same instance, and a signed ticket links prefill hint and ranking.

    hint     -> choose(user, loads)     the owner, or the next in the user's order if the owner is overloaded
    ticket   <- the instance's answer   {request, instance, epoch, key digest, expiry, query time}, signed
    ranking  -> follow(ticket, user)    the instance of the ticket; if that is gone, the user's order, in full

The owner is the instance with the highest rendezvous hash of (user, instance). Gateways agree without shared state, and an
instance that joins takes 1 / (N + 1) of the users and moves no others. Load counts once, for the hint. The ranking follows its
ticket, so that a change of load cannot separate a request from its prefix.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from urllib.parse import unquote

from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import NestPipeError
from nestpipe.rng import GOLDEN, hash_text, mix64
from nestpipe.serve.config import MAX_TICKET_CHARS, MAX_TICKET_S

VERSION = "v1"
_MIN_SECRET_BYTES = 16
_MAX_USER_CHARS = 20  # of 64 bits with a sign
_MAX_TIME = 2.0**53  # NaN and infinity compare false too


class RouterError(NestPipeError):
    """No instance takes requests, or a name is unknown."""


class TicketError(NestPipeError):
    """A ticket is forged, damaged, expired, or not for this instance; its request is ranked in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Where the prefix of one request lives."""

    request: str
    instance: str
    epoch: str  # of the instance's process; no prefix survives a restart
    key: str  # digest of the prefix's key
    expiry: float  # seconds since 1970, by the clock of the instance that signs and verifies
    query_time: int | None = None

    def require(self, *, instance: str, epoch: str, request: str) -> None:
        """Raises TicketError unless the ticket was made by this process for this request."""
        here = {"instance": instance, "epoch": epoch, "request": request}
        for name, wanted in here.items():
            if (value := getattr(self, name)) != wanted:
                raise TicketError(f"the ticket is for {name} {value!r}, this is {wanted!r}; rank in full.")


def sign(ticket: Ticket, secret: bytes) -> str:
    """A ticket as text. Raises TicketError if it is too long."""
    _check_secret(secret)
    content = json.dumps(asdict(ticket), separators=(",", ":"), sort_keys=True, allow_nan=False)
    body = f"{VERSION}.{_encode(content.encode())}"
    text = f"{body}.{_signature(body, secret)}"
    if len(text) > MAX_TICKET_CHARS:
        raise TicketError(
            f"a ticket of {len(text):,} characters is longer than {MAX_TICKET_CHARS:,}; shorten its request id."
        )
    return text


def verify(text: str, secret: bytes, *, now: float) -> Ticket:
    """The ticket in a text of `sign` with the same secret; raises TicketError for anything else and when it has expired."""
    _check_secret(secret)
    if not isinstance(text, str) or len(text) > MAX_TICKET_CHARS or not text.isascii():
        raise TicketError(f"this is no ticket: one is text of at most {MAX_TICKET_CHARS:,} plain characters.")
    version, _, rest = text.partition(".")
    if version != VERSION:
        raise TicketError(f"the ticket has version {version[:8]!r}; this process reads {VERSION}.")
    content, dot, signature = rest.partition(".")
    # Compared as text: two spellings of the same bytes are not the same ticket.
    if not dot or not hmac.compare_digest(signature, _signature(f"{version}.{content}", secret)):
        raise TicketError("the ticket's signature is wrong: it was changed, cut, or signed with another secret.")
    ticket = _decode(content)
    if not now < ticket.expiry:
        raise TicketError(f"the ticket expired {now - ticket.expiry:.1f} s ago.")
    if ticket.expiry > now + MAX_TICKET_S:
        raise TicketError(
            f"the ticket expires in {ticket.expiry - now:.0f} s, but none is given for more than {MAX_TICKET_S:.0f} s: "
            "a clock has jumped back."
        )
    return ticket


def peek_instance(text: str | None) -> str | None:
    """The instance that a ticket names, unverified: that instance verifies it."""
    try:
        return _decode((text or "").split(".")[1]).instance
    except (IndexError, TicketError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceAddress:
    """An instance by name (part of the hash, so it must outlive restarts) and address."""

    name: str
    url: str
    is_draining: bool = False


class Members:
    """The instances of a fleet. Gateways with the same members route alike."""

    def __init__(self, instances: Iterable[InstanceAddress] = ()):
        self._instances = {one.name: one for one in instances}

    def __iter__(self) -> Iterator[InstanceAddress]:
        return iter(tuple(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def find(self, name: str | None) -> InstanceAddress | None:
        return None if name is None else self._instances.get(name)

    def join(self, name: str, url: str) -> None:
        """Adds an instance, or updates the address of a known one, which stops draining."""
        self._instances[name] = InstanceAddress(name=name, url=url)

    def drain(self, name: str) -> None:
        """Sends an instance no new requests, except rankings with its tickets."""
        self._instances[name] = replace(self._known(name), is_draining=True)

    def leave(self, name: str) -> None:
        """Removes an instance: rankings with its tickets go to the next in the user's order."""
        del self._instances[self._known(name).name]

    def order(self, user: OwnId, *, last: Container[str] = ()) -> list[InstanceAddress]:
        """The instances for a user, the owner first; without draining ones, and with `last` (suspects) at the end.

        Raises RouterError if there is none.
        """
        able = self._able(user, last)
        if not able:
            raise RouterError(
                f"none of the {len(self)} instances takes requests (all drain, or none has joined); start one, or let one join."
            )
        return able

    def choose(
        self, user: OwnId, loads: Mapping[str, int], *, spread: float = 1.25, free: int = 4, last: Container[str] = ()
    ) -> InstanceAddress:
        """The instance for a user's hint: the first in the user's order whose load is below `spread` times the mean.

        Loads are requests in flight. With fewer than `free` the owner always keeps its users, because moving costs a prefix.
        """
        order = self.order(user, last=last)
        order = [one for one in order if one.name not in last] or order
        mean = (sum(loads.get(one.name, 0) for one in order) + 1) / len(order)
        bound = max(free, math.ceil(spread * mean))
        return next((one for one in order if loads.get(one.name, 0) < bound), order[0])

    def follow(
        self, ticket: str | None, user: OwnId, *, chosen: str | None = None, last: Container[str] = ()
    ) -> list[InstanceAddress]:
        """Instances to try for a ranking: that of the ticket, else the one chosen for the hint; then the user's order."""
        first = self.find(peek_instance(ticket))
        if first is None and (first := self.find(chosen)) is not None and first.is_draining:
            first = None
        rest = [one for one in self._able(user, last) if one != first]
        return ([first] if first else []) + rest or self.order(user)

    def _able(self, user: OwnId, last: Container[str]) -> list[InstanceAddress]:
        able = [one for one in self._instances.values() if not one.is_draining]
        number = routing_number(user)
        return sorted(
            able, key=lambda one: (one.name not in last, rendezvous(number, one.name), one.name), reverse=True
        )

    def _known(self, name: str) -> InstanceAddress:
        if name not in self._instances:
            raise RouterError(f"there is no instance '{name}'; there are: {', '.join(self._instances) or 'none'}.")
        return self._instances[name]


def order_of(session: str, loads: Mapping[str, int], *, request: str) -> list[str]:
    """The names of all instances in the order to try them, from the text of `session_of`, whatever a caller has written.

    A request without a user is spread by its own id.
    """
    text, slash, ticket = session.partition("/")
    user = unquote(text) or request
    members = Members(InstanceAddress(name=name, url="") for name in loads)
    if slash:
        return [one.name for one in members.follow(ticket, user)]
    first = members.choose(user, loads)
    return [first.name, *(one.name for one in members.order(user) if one != first)]


def routing_number(user: OwnId) -> int:
    """A user as a number to hash: the same whether an id comes as a number or as its text."""
    text = str(user)
    is_number = text.isascii() and text.removeprefix("-").isdecimal() and len(text) <= _MAX_USER_CHARS
    return int(text) if is_number else hash_text(text)


def rendezvous(user: int, instance: str) -> int:
    """The rendezvous hash of a user and an instance: 64 bits."""
    return mix64(mix64(user + GOLDEN) ^ hash_text(instance))


def _check_secret(secret: bytes) -> None:
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes can be guessed; use at least {_MIN_SECRET_BYTES}.")


def _signature(body: str, secret: bytes) -> str:
    return _encode(hmac.new(secret, body.encode(), hashlib.sha256).digest())


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _decode(text: str) -> Ticket:
    """The ticket of a body, every field of its type; raises TicketError."""
    try:
        content = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise TicketError("the ticket's content is no JSON; it was cut or changed.") from error
    names = {one.name for one in fields(Ticket)}
    if not isinstance(content, dict) or set(content) != names:
        raise TicketError(f"the ticket's content is not the fields {', '.join(sorted(names))}.")
    texts = all(isinstance(content[name], str) for name in ("request", "instance", "epoch", "key"))
    query_time, expiry = content["query_time"], content["expiry"]
    timed = (query_time is None or type(query_time) is int) and type(expiry) in (int, float) and abs(expiry) < _MAX_TIME
    if not texts or not timed:
        raise TicketError("a field of the ticket has the wrong type.")
    return Ticket(**content)
