"""Headers by which proxies route requests, instances know who forwarded them, and callers when to ask again."""

from __future__ import annotations

import re
from urllib.parse import quote

from nestpipe.serve.config import MAX_TICKET_CHARS

USER_HEADER = "X-Nestpipe-User"
"""For nginx, which hashes it."""
SESSION_HEADER = "X-Session-Id"
"""For Ray Serve, whose name it is."""
FORWARDED_HEADER = "X-Nestpipe-Forwarded"
"""Of a gateway, which asks another instance as soon as one refuses: its refusals are not held."""
RETRY_LATER = frozenset({429, 503})
"""Statuses whose answers have `Retry-After`."""
_TICKET = re.compile(rf"[\w.-]{{1,{MAX_TICKET_CHARS}}}", re.ASCII)


def session_of(user: int | str | None, ticket: str | None = None) -> str:
    """Routing key for proxies that route by a header: 'USER', 'USER/TICKET' or '/TICKET'.

    A text that is no ticket is left out: a header could not carry every text.
    """
    is_ticket = _TICKET.fullmatch(ticket or "") is not None
    return f"{'' if user is None else user_key(user)}{f'/{ticket}' if is_ticket else ''}"


def user_key(user: int | str) -> str:
    """A user as a header can carry it: percent-encoded, so that it has no slash and is ASCII."""
    return quote(str(user), safe="")
