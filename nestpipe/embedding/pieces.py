"""Messages in pieces: the first rows and the last gradients of a window in two halves (hot.py) or in slices (slices.py).

What `Window.post` calls instead of opening one message each. A piece that is waited for between two batches is made ready here,
while nobody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.embedding.hot import Cut, order_of_halves
from nestpipe.embedding.ids import among
from nestpipe.embedding.messages import held_of
from nestpipe.embedding.rows import Arrived
from nestpipe.errors import CommError

if TYPE_CHECKING:
    from nestpipe.embedding.window import Window


def tell_hot(window: Window, before: Window, where: str) -> None:
    """Owners tell the askers of two windows which of their ids both hold."""
    if before.sent_sums:
        raise CommError(
            "receives were opened before it was known what is hot: a dependency is missing in the schedule."
        )
    ranks = range(window.home.world_size)
    told: list[list[Tensor]] = [[] for _ in ranks]  # to each asker
    sizes: list[list[int]] = [[] for _ in ranks]  # from each owner
    for name, (owned,) in window.owned.items():
        (earlier,), plan = before.owned[name], before.plan.tables[name]
        owned.hot.into = among(owned.requests.ids, earlier.requests.ids)
        earlier.hot.out = among(earlier.requests.ids, owned.requests.ids)
        into, out = owned.requests.wanted(0), earlier.requests.ending()
        for rank in ranks:
            told[rank] += [
                owned.hot.into.index_select(0, into[rank]),
                earlier.hot.out.index_select(0, out[rank]),
            ]
            sizes[rank] += [window.plan.tables[name].first_counts[rank][0], plan.last_counts[rank][-1]]
    heard = [torch.empty(sum(counts), dtype=torch.uint8) for counts in sizes]
    window.home.keys.exchange("hot", [torch.cat(bits) for bits in told], heard, where=where).wait()
    pieces = [bits.split(counts) for bits, counts in zip(heard, sizes, strict=True)]
    for number, name in enumerate(window.owned):
        window.asked[name].hot.into = torch.cat([own[2 * number] for own in pieces])
        before.asked[name].hot.out = torch.cat([own[2 * number + 1] for own in pieces])


def post_row_halves(window: Window, name: str, where: str) -> None:
    """Opens receives of the cold and of the hot rows of the first part."""
    asked, (owned,) = window.asked[name], window.owned[name]
    leaf, places = asked.leaves[0], owned.requests.wanted(0)
    wanted = torch.cat(places)
    there = Cut.of(owned.hot.into, wanted, [len(own) for own in places])
    here = Cut.of(asked.hot.into, len(leaf), [own[0] for own in asked.plan.leaf_counts])
    for cold, theirs, ours in zip((True, False), there, here, strict=True):
        rows = torch.empty(len(ours.places), *leaf.shape[1:], dtype=leaf.dtype)
        asked.halves[cold] = rows, ours.places
        own = wanted.index_select(0, theirs.places).split(theirs.counts)
        said = f"{where}, {'cold' if cold else 'hot'}"
        held, room = held_of(owned), list(rows.split(ours.counts))
        window.open_rows(name, (0, cold), held, list(own), room, None, where=said)


def post_sum_halves(window: Window, name: str, where: str) -> None:
    """Opens receives of the cold and of the hot gradients of the last part, and makes both updates ready."""
    asked, (owned,), last = window.asked[name], window.owned[name], window.plan.num_parts - 1
    requests = owned.requests
    there = Cut.of(owned.hot.out, torch.cat(requests.ending()), requests.arrival_counts[last])
    here = Cut.of(asked.hot.out, len(asked.leaves[last]), [own[last] for own in asked.plan.leaf_counts])
    for cold, theirs, ours in zip((True, False), there, here, strict=True):
        said = f"{where}, {'cold' if cold else 'hot'}"
        window.open_sums(name, (last, cold), ours.places, ours.counts, theirs.counts, where=said)
    sums = Arrived(window.arrivals(name), requests.starts, order_of_halves(requests, there))
    halves = Cut.of(owned.hot.out, len(requests.ids), [len(requests.ids)])
    for cold, half in zip((True, False), halves, strict=True):
        owned.halves[cold] = held_of(owned).at(half.places), sums.at(half.places)


def post_row_slices(window: Window, name: str, where: str) -> None:
    """Opens receives of the rows of the first part, slice by slice."""
    num, counts = window.slices, window.cuts[name].first_counts
    rooms = window.asked[name].leaves[0].split([n for own in counts for n in own[:num]])
    for piece, owned in enumerate(window.owned[name]):
        wanted, room = owned.requests.wanted(0), list(rooms[piece::num])
        window.open_rows(name, (0, piece), held_of(owned), wanted, room, None, where=f"{where}, slice {piece}")


def post_sum_slices(window: Window, name: str, where: str) -> None:
    """Opens receives of the gradients of the last part, slice by slice, and finds where their sums will be."""
    last = window.plan.num_parts - 1
    for piece, (leaving, sent) in enumerate(window.cuts[name].of_last_part()):
        owned = window.owned[name][piece]
        counts = owned.requests.arrival_counts[last]
        window.open_sums(name, (last, piece), leaving, sent, counts, where=f"{where}, slice {piece}")
        arrivals = _arrivals_of(window, name, piece)
        owned.sums = Arrived(arrivals, owned.requests.starts, owned.requests.arrivals).located()


def _arrivals_of(window: Window, name: str, piece: int) -> list[Tensor]:
    """Sums of one slice as they arrive: a piece of each message of the parts before the last, and its own of the last one."""
    last, found = window.plan.num_parts - 1, []
    for part in range(last):
        counts = [owned.requests.arrival_counts[part] for owned in window.owned[name]]
        for sums, sizes in zip(window.sent_sums[part, 0][name].arrivals, zip(*counts, strict=True), strict=True):
            found.append(sums.split(list(sizes))[piece])
    return found + window.sent_sums[last, piece][name].arrivals
