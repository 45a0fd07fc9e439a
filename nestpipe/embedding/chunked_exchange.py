"""Messages in pieces: the first rows and the last gradients of a window in two halves (hot.py) or in slices (slices.py).

What `Window.post` calls instead of opening one message each. A piece that is waited for between two batches is made ready here,
while nobody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.unique_ids import among
from nestpipe.errors import CommError

if TYPE_CHECKING:
    from nestpipe.embedding.window import Window
from dataclasses import dataclass
from typing import NamedTuple

from nestpipe.embedding.buckets import FINE_CHUNKS
from nestpipe.embedding.routing import Counts, OwnerRequests, TablePlan
from nestpipe.embedding.unique_ids import cut, group


@dataclass(slots=True, eq=False)
class SharedRows:
    """Which rows are hot: a bit for each (uint8); None if no batch comes before or after."""

    with_previous: Tensor | None = None
    with_next: Tensor | None = None


class RankedPlaces(NamedTuple):
    """Places of one half, ascending, and how many of them each rank has."""

    places: Tensor
    counts: list[int]


class SharedSplit(NamedTuple):
    """Places 0 .. n-1 of something that ranks share, so many each, cut into two halves."""

    unshared: RankedPlaces
    shared: RankedPlaces

    @staticmethod
    def of(bits: Tensor | None, among: Tensor | int, counts: list[int]) -> SharedSplit:
        """By the bit of each place: of all n, or of the members `among` [n] to whom the bits belong."""
        if not isinstance(among, int):
            bits, among = None if bits is None else bits.index_select(0, among), len(among)
        is_unshared, hot, hot_counts = cut(shared_bits(bits, among), counts)
        return SharedSplit(
            RankedPlaces(is_unshared, [count - own for count, own in zip(counts, hot_counts, strict=True)]),
            RankedPlaces(hot, hot_counts),
        )


def shared_bits(known: Tensor | None, size: int) -> Tensor:
    """The bits, all 0 where nobody shares anything."""
    return torch.zeros(size, dtype=torch.uint8) if known is None else known


def split_order(requests: OwnerRequests, last: SharedSplit) -> Tensor:
    """`requests.arrivals`, if those of the last part are counted through its cold half first and then through the hot one."""
    places = torch.cat([last.unshared.places, last.shared.places])
    before = len(requests.arrivals) - len(places)
    number = torch.arange(len(requests.arrivals))
    number[before:].index_copy_(0, places, torch.arange(before, len(number)))
    return number.index_select(0, requests.arrivals)


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """How the messages of one table are cut, as its asker knows it. Sums go home by (owner, slice)."""

    first_counts: Counts  # [owner][part * num + slice]: ids that travel with the part
    leaving: tuple[Tensor, ...]  # for each part: positions of rows whose sums go home with it
    last_counts: tuple[Counts, ...]  # for each part: [owner][slice] of them

    @staticmethod
    def of(plan: TablePlan, num: int) -> Chunks:
        """Eighths, which are neighbours in a plan, make up slices of nearly the same size."""
        owners, micro_batches = len(plan.first_counts), len(plan.first_counts[0])
        number = plan.fine_chunks.to(torch.int64).mul_(num).floor_divide_(FINE_CHUNKS)
        place = torch.arange(owners * micro_batches).repeat_interleave(torch.tensor(plan.first_counts).flatten())
        first = torch.bincount(place.mul(num).add_(number), minlength=owners * micro_batches * num)
        key = place.floor_divide_(micro_batches).mul_(num).add_(number)
        leaving, last_counts = [], []
        for micro_batch, positions in enumerate(plan.ending):
            own = (plan.last_use == micro_batch).nonzero().flatten()
            order, counts = group(key.index_select(0, own), owners * num)
            leaving.append(positions.index_select(0, order))
            last_counts.append(counts.reshape(owners, num).tolist())
        return Chunks(first.reshape(owners, micro_batches * num).tolist(), tuple(leaving), tuple(last_counts))

    def of_last_micro_batch(self) -> list[tuple[Tensor, list[int]]]:
        """For each slice: positions of the rows whose sums go home with the last part, and how many of each owner."""
        counts = self.last_counts[-1]
        pieces, num = self.leaving[-1].split([n for own in counts for n in own]), len(counts[0])
        return [(torch.cat(pieces[number::num]), [own[number] for own in counts]) for number in range(num)]


def exchange_shared(window: Window, before: Window, where: str) -> None:
    """Owners tell the askers of two windows which of their ids both hold."""
    if before.grad_messages:
        raise CommError(
            "receives were opened before it was known what is hot: a dependency is missing in the schedule."
        )
    ranks = range(window.tables.world_size)
    flags: list[list[Tensor]] = [[] for _ in ranks]  # to each asker
    sizes: list[list[int]] = [[] for _ in ranks]  # from each owner
    for name, (owner,) in window.owner_chunks.items():
        (earlier,), plan = before.owner_chunks[name], before.plan.tables[name]
        owner.shared.with_previous = among(owner.requests.ids, earlier.requests.ids)
        earlier.shared.with_next = among(earlier.requests.ids, owner.requests.ids)
        into, out = owner.requests.rows_for(0), earlier.requests.ending()
        for rank in ranks:
            flags[rank] += [
                owner.shared.with_previous.index_select(0, into[rank]),
                earlier.shared.with_next.index_select(0, out[rank]),
            ]
            sizes[rank] += [window.plan.tables[name].first_counts[rank][0], plan.last_counts[rank][-1]]
    received = [torch.empty(sum(counts), dtype=torch.uint8) for counts in sizes]
    window.tables.id_channel.exchange("shared", [torch.cat(bits) for bits in flags], received, where=where).wait()
    pieces = [bits.split(counts) for bits, counts in zip(received, sizes, strict=True)]
    for number, name in enumerate(window.owner_chunks):
        window.requester[name].shared.with_previous = torch.cat([own[2 * number] for own in pieces])
        before.requester[name].shared.with_next = torch.cat([own[2 * number + 1] for own in pieces])


def post_split_rows(window: Window, name: str, where: str) -> None:
    """Opens receives of the cold and of the hot rows of the first part."""
    requester, (owner,) = window.requester[name], window.owner_chunks[name]
    local, places = requester.local_rows[0], owner.requests.rows_for(0)
    wanted = torch.cat(places)
    there = SharedSplit.of(owner.shared.with_previous, wanted, [len(own) for own in places])
    here = SharedSplit.of(requester.shared.with_previous, len(local), [own[0] for own in requester.plan.local_counts])
    for is_unshared, theirs, ours in zip((True, False), there, here, strict=True):
        rows = torch.empty(len(ours.places), *local.shape[1:], dtype=local.dtype)
        requester.split_rows[is_unshared] = rows, ours.places
        own = wanted.index_select(0, theirs.places).split(theirs.counts)
        label = f"{where}, {'cold' if is_unshared else 'hot'}"
        refs, buffer = owner.retrieved, list(rows.split(ours.counts))
        window.open_rows(name, (0, is_unshared), refs, list(own), buffer, None, where=label)


def post_split_grads(window: Window, name: str, where: str) -> None:
    """Opens receives of the cold and of the hot gradients of the last part, and makes both updates ready."""
    requester, (owner,), last = window.requester[name], window.owner_chunks[name], window.plan.num_micro_batches - 1
    requests = owner.requests
    there = SharedSplit.of(owner.shared.with_next, torch.cat(requests.ending()), requests.arrival_counts[last])
    here = SharedSplit.of(
        requester.shared.with_next, len(requester.local_rows[last]), [own[last] for own in requester.plan.local_counts]
    )
    for is_unshared, theirs, ours in zip((True, False), there, here, strict=True):
        label = f"{where}, {'cold' if is_unshared else 'hot'}"
        window.open_grads(name, (last, is_unshared), ours.places, ours.counts, theirs.counts, where=label)
    sums = ArrivedGrads(window.arrivals(name), requests.starts, split_order(requests, there))
    splits = SharedSplit.of(owner.shared.with_next, len(requests.ids), [len(requests.ids)])
    for is_unshared, places in zip((True, False), splits, strict=True):
        owner.split_updates[is_unshared] = owner.retrieved.at(places.places), sums.at(places.places)


def post_chunk_rows(window: Window, name: str, where: str) -> None:
    """Opens receives of the rows of the first part, slice by slice."""
    num, counts = window.num_chunks, window.chunks[name].first_counts
    buffers = window.requester[name].local_rows[0].split([n for own in counts for n in own[:num]])
    for chunk, owner in enumerate(window.owner_chunks[name]):
        wanted, buffer = owner.requests.rows_for(0), list(buffers[chunk::num])
        window.open_rows(name, (0, chunk), owner.retrieved, wanted, buffer, None, where=f"{where}, slice {chunk}")


def post_chunk_grads(window: Window, name: str, where: str) -> None:
    """Opens receives of the gradients of the last part, slice by slice, and finds where their sums will be."""
    last = window.plan.num_micro_batches - 1
    for chunk, (leaving, sent) in enumerate(window.chunks[name].of_last_micro_batch()):
        owner = window.owner_chunks[name][chunk]
        counts = owner.requests.arrival_counts[last]
        window.open_grads(name, (last, chunk), leaving, sent, counts, where=f"{where}, slice {chunk}")
        arrivals = _arrivals_of(window, name, chunk)
        owner.chunk_grads = ArrivedGrads(arrivals, owner.requests.starts, owner.requests.arrivals).located()


def _arrivals_of(window: Window, name: str, chunk: int) -> list[Tensor]:
    """Sums of one slice as they arrive: a piece of each message of the parts before the last, and its own of the last one."""
    last, found = window.plan.num_micro_batches - 1, []
    for micro_batch in range(last):
        counts = [owner.requests.arrival_counts[micro_batch] for owner in window.owner_chunks[name]]
        for sums, sizes in zip(
            window.grad_messages[micro_batch, 0][name].received, zip(*counts, strict=True), strict=True
        ):
            found.append(sums.split(list(sizes))[chunk])
    return found + window.grad_messages[last, chunk][name].received
