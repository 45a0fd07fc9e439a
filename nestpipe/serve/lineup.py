"""Which model answers whom: one for everybody, or two side by side by a hash of the user.

A lineup is replaced as a whole, so a request sees the old one or the new one.
"""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.hashing import GOLDEN, hash_text, mix64
from nestpipe.serve.prefix import Served


@dataclass(frozen=True, slots=True)
class Lineup:
    """The model of new requests, and that of a share of users if two are compared."""

    main: Served
    other: Served | None = None
    share: float = 0.0

    def of(self, user: int) -> Served:
        """Always the same for a user, on every instance; independent of which instance the user belongs to."""
        place = mix64(mix64(user + GOLDEN) ^ hash_text("two models")) / 2**64
        return self.other if self.other and place < self.share else self.main
