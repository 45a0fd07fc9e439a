"""Chunked messages: the first rows and the last gradients of a window, sent in several messages.

Between two batches the pipeline waits for the last gradients, the update and the first rows. Chunks
shorten that wait. They are one mechanism: a number per row says which chunk it is in.

    "shared"   chunk 0: rows that neighbouring batches share; chunk 1: all others, which need not wait for the update
    2 .. 8     chunk c: one range of each owner's buckets; chunk c is updated while chunk c + 1 is in flight

A requester knows the bucket of an id; what is shared only the owner knows, who sends one bit per id
(`exchange_shared`). `Window.post_receives` then posts one message per chunk. Whatever the update
needs is prepared here, before anyone waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nestpipe.embedding.buckets import FINE_CHUNKS
from nestpipe.embedding.routing import TablePlan
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.unique_ids import among, group
from nestpipe.errors import CommError

if TYPE_CHECKING:
    from nestpipe.embedding.window import Window


@dataclass(slots=True, eq=False)
class RowChunks:
    """The chunk (uint8) of each row of one table.

    At a requester: of the local rows of the first and of the last micro-batch. At the owner: of its requested ids, twice.
    """

    of_rows: Tensor
    of_grads: Tensor

    @staticmethod
    def unshared(num_rows: int, num_grads: int) -> RowChunks:
        """All in chunk 1: no neighbouring batch is known."""
        return RowChunks(*(torch.ones(n, dtype=torch.uint8) for n in (num_rows, num_grads)))


class ChunkPlaces(NamedTuple):
    """Places of one chunk, ascending, and the number of them per rank."""

    places: Tensor
    counts: list[int]

    def ranges(self) -> list[slice] | None:
        """Per rank: its places as a range; None if those of some rank are not adjacent."""
        found = []
        for own in self.places.split(self.counts):
            first, last = (int(own[0]), int(own[-1])) if len(own) else (0, -1)
            if last - first + 1 != len(own):
                return None
            found.append(slice(first, last + 1))
        return found


def divided(chunk_of: Tensor, num: int, counts: list[int]) -> Iterator[ChunkPlaces]:
    """Places 0 .. n-1, `counts[rank]` of each rank, chunk by chunk."""
    order, sizes = group(chunk_of.to(torch.int64), num)
    ends = torch.tensor(counts).cumsum(0)
    for places in order.split(sizes.tolist()):
        before = torch.searchsorted(places, ends)
        yield ChunkPlaces(places, before.diff(prepend=before.new_zeros(1)).tolist())


def number_rows(window: Window) -> None:
    """Assigns the chunk of every row: by its bucket, or as unshared until a neighbouring window is known."""
    last, num = window.plan.num_micro_batches - 1, window.num_chunks
    for name, requester in window.requester.items():
        owner = window.owner[name]
        ids, local_rows = owner.requests.ids, requester.local_rows
        if window.chunks == "shared":
            requester.chunks = RowChunks.unshared(len(local_rows[0]), len(local_rows[last]))
            owner.chunks = RowChunks.unshared(len(ids), len(ids))
        else:
            requester.chunks = requested_chunks(requester.plan, num)
            fine_chunks = window.tables.owners.fine_chunks_of(ids).remainder_(FINE_CHUNKS)
            owned = fine_chunks.mul_(num).floor_divide_(FINE_CHUNKS).to(torch.uint8)
            owner.chunks = RowChunks(owned, owned)


def requested_chunks(plan: TablePlan, num: int) -> RowChunks:
    """The chunks of the first and of the last micro-batch's local rows, by bucket."""
    number = plan.fine_chunks.mul(num).floor_divide_(FINE_CHUNKS)  # at most 7 * 8, so it fits
    of_owners = number.split(plan.counts)
    first = [own[: counts[0]] for own, counts in zip(of_owners, plan.first_counts, strict=True)]
    is_last = (plan.last_use == len(plan.ending) - 1).nonzero().flatten()
    return RowChunks(torch.cat(first), number.index_select(0, is_last))


def exchange_shared(window: Window, before: Window, where: str) -> None:
    """Owners send the requesters of two neighbouring windows one bit per id: whether both windows hold it."""
    if before.grad_messages:
        raise CommError("receives posted before the shared rows were known: the schedule lacks a dependency.")
    ranks = range(window.tables.world_size)
    flags: list[list[Tensor]] = [[] for _ in ranks]  # to each requester
    sizes: list[list[int]] = [[] for _ in ranks]  # from each owner
    for name, owner in window.owner.items():
        earlier, plan = before.owner[name], before.plan.tables[name]
        ids, earlier_ids = owner.requests.ids, earlier.requests.ids
        owner.chunked.of_rows = among(ids, earlier_ids).bitwise_xor_(1)
        earlier.chunked.of_grads = among(earlier_ids, ids).bitwise_xor_(1)
        into, out = owner.requests.rows_for(0), earlier.requests.ending()
        for rank in ranks:
            flags[rank] += [
                owner.chunked.of_rows.index_select(0, into[rank]),
                earlier.chunked.of_grads.index_select(0, out[rank]),
            ]
            sizes[rank] += [window.plan.tables[name].first_counts[rank][0], plan.last_counts[rank][-1]]
    received = [torch.empty(sum(counts), dtype=torch.uint8) for counts in sizes]
    window.tables.id_channel.exchange("shared", [torch.cat(bits) for bits in flags], received, where=where).wait()
    bits_of = [bits.split(counts) for bits, counts in zip(received, sizes, strict=True)]
    for number, name in enumerate(window.owner):
        window.requester[name].chunked.of_rows = torch.cat([own[2 * number] for own in bits_of])
        before.requester[name].chunked.of_grads = torch.cat([own[2 * number + 1] for own in bits_of])


def post_first_rows(window: Window, name: str, where: str) -> None:
    """Posts receives of the rows of the first micro-batch, chunk by chunk; in place where they are adjacent."""
    requester, owner, num = window.requester[name], window.owner[name], window.num_chunks
    local, by_rank = requester.local_rows[0], owner.requests.rows_for(0)
    requested = torch.cat(by_rank)
    sent = divided(owner.chunked.of_rows.index_select(0, requested), num, [len(own) for own in by_rank])
    received = divided(requester.chunked.of_rows, num, [own[0] for own in requester.plan.local_counts])
    for chunk, (send, receive) in enumerate(zip(sent, received, strict=True)):
        if (ranges := receive.ranges()) is not None:
            buffers = [local[own] for own in ranges]
        else:
            rows = local.new_empty(len(receive.places), *local.shape[1:])
            requester.scattered[chunk] = rows, receive.places
            buffers = list(rows.split(receive.counts))
        places = list(requested.index_select(0, send.places).split(send.counts))
        window.post_rows(name, (0, chunk), owner.retrieved, places, buffers, None, where=f"{where}, chunk {chunk}")


def post_last_grads(window: Window, name: str, where: str) -> None:
    """Posts receives of the gradients of the last micro-batch, chunk by chunk, and prepares the update of each."""
    requester, owner, num = window.requester[name], window.owner[name], window.num_chunks
    requests, last = owner.requests, window.plan.num_micro_batches - 1
    sent = divided(requester.chunked.of_grads, num, [own[last] for own in requester.plan.local_counts])
    arriving = owner.chunked.of_grads.index_select(0, torch.cat(requests.ending()))
    received = list(divided(arriving, num, requests.arrival_counts[last]))
    for chunk, (send, receive) in enumerate(zip(sent, received, strict=True)):
        label = f"{where}, chunk {chunk}"
        window.post_grads(name, (last, chunk), send.places, send.counts, receive.counts, where=label)
    arrivals = in_chunks(requests.arrivals, torch.cat([one.places for one in received]))
    sums = ArrivedGrads(window.arrivals(name), requests.starts, arrivals)
    if owner.union is not None:
        owner.union.divide(owner.chunked.of_grads, num, arrivals)
        sums = owner.union.grads(sums.segments[0])
    for chunk, (places, _) in enumerate(divided(owner.chunked.of_grads, num, [len(requests.ids)])):
        owner.updates[chunk] = owner.retrieved.at(places), sums.at(places)


def in_chunks(arrivals: Tensor, places: Tensor) -> Tensor:
    """Numbers of arrivals if the last of them, at these places among the last, arrive in this order."""
    num_before = len(arrivals) - len(places)
    position = torch.arange(len(arrivals))
    position[num_before:].index_copy_(0, places, torch.arange(num_before, len(position)))
    return position.index_select(0, arrivals)
