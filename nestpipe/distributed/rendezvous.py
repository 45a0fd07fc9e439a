"""How ranks find each other in a store in which dead groups have left what they wrote."""

from __future__ import annotations

import time
import uuid

from torch._C._distributed_c10d import Store

from nestpipe.distributed.exchange import in_seconds, named_ranks
from nestpipe.errors import CommError


def meet(store: Store, rank: int, size: int, deadline_s: float) -> str:
    """A name for this life of the group, chosen by rank 0, in a store that still holds what dead groups wrote.

    Each rank greets with a word of its own, and only the answer to that very word counts: what a dead rank greeted is
    overwritten, and what a dead rank 0 answered was another word. Raises CommError naming the ranks that did not come.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + deadline_s
    if rank:
        store.set(f"greeting/{rank}", own)
        while not store.check([f"answer/{rank}/{own}"]):
            if time.monotonic() > end:
                raise CommError(
                    f"rank {rank} was not answered in {in_seconds(deadline_s)}; rank 0 never came.", ranks=(0,)
                )
            time.sleep(0.01)
        life = store.get(f"answer/{rank}/{own}").decode()
        store.set(f"taken/{life}/{rank}", "")
        return life
    missing = set(range(1, size))
    while missing:
        for other in tuple(missing):
            if store.check([f"taken/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"greeting/{other}"]):
                store.set(f"answer/{other}/{store.get(f'greeting/{other}').decode()}", own)
        if missing and time.monotonic() > end:
            absent = tuple(sorted(missing))
            raise CommError(f"{named_ranks(absent)} did not come in {in_seconds(deadline_s)}.", ranks=absent)
        time.sleep(0.01)
    return own
