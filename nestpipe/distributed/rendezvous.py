"""Rendezvous that tolerates stale keys of a previous incarnation of the group.

    rank r > 0                        rank 0
    hello/r = random word     ──▶     reply/r/word = name of the incarnation
    ack/name/r                ──▶     done when every rank has acknowledged

The reply names the word it answers, so a rank never accepts the reply that a dead rank 0 left in
the store.
"""

from __future__ import annotations

import time
import uuid

from torch._C._distributed_c10d import Store

from nestpipe.distributed.clock import Clock
from nestpipe.distributed.exchange import in_seconds, named_ranks
from nestpipe.errors import CommError

_POLL_S = 0.01


def rendezvous(store: Store, rank: int, size: int, *, deadline_s: float, clock: Clock = time) -> str:
    """The name of this incarnation, chosen by rank 0. Raises CommError with the ranks absent at the deadline."""
    word, end = uuid.uuid4().hex, clock.monotonic() + deadline_s
    if rank:
        store.set(f"hello/{rank}", word)
        while not store.check([f"reply/{rank}/{word}"]):
            if clock.monotonic() > end:
                raise CommError(f"rank {rank} had no reply from rank 0 after {in_seconds(deadline_s)}.", ranks=(0,))
            clock.sleep(_POLL_S)
        name = store.get(f"reply/{rank}/{word}").decode()
        store.set(f"ack/{name}/{rank}", "")
        return name
    missing = set(range(1, size))
    while missing:
        for other in tuple(missing):
            if store.check([f"ack/{word}/{other}"]):
                missing.discard(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"reply/{other}/{store.get(f'hello/{other}').decode()}", word)
        if missing and clock.monotonic() > end:
            absent = tuple(sorted(missing))
            raise CommError(
                f"{named_ranks(absent)} not at the rendezvous after {in_seconds(deadline_s)}.", ranks=absent
            )
        clock.sleep(_POLL_S)
    return word
