"""Chunked messages: the first rows and the last gradients of a window, sent in several messages.

Between two batches the pipeline waits for the last gradients, the update and the first rows. Chunks
shorten that wait:

    split     chunk 0: rows that neighbouring batches share; chunk 1: unshared rows, which need not wait for the update
    chunks    chunk c: one range of each owner's buckets; chunk c is updated while chunk c + 1 is in flight

`Window.post_receives` calls these functions instead of posting one message. Whatever the update
needs is prepared here, before anyone waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nestpipe.embedding.buckets import FINE_CHUNKS
from nestpipe.embedding.routing import Counts, OwnerRequests, TablePlan
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.embedding.unique_ids import among, group, split_by_bit
from nestpipe.errors import CommError

if TYPE_CHECKING:
    from nestpipe.embedding.window import Window


@dataclass(slots=True, eq=False)
class SharedRows:
    """Which rows neighbouring batches share: one bit per row (uint8); None without such a batch."""

    with_previous: Tensor | None = None
    with_next: Tensor | None = None


class RankedPlaces(NamedTuple):
    """Places of one chunk, ascending, and the number of them per rank."""

    places: Tensor
    counts: list[int]


class SharedSplit(NamedTuple):
    """Places 0 .. n-1, `counts[rank]` of each rank, split into an unshared and a shared chunk."""

    unshared: RankedPlaces
    shared: RankedPlaces

    @staticmethod
    def of(bits: Tensor | None, size: int, counts: list[int]) -> SharedSplit:
        """By the bit of each of `size` places; without bits all are unshared."""
        bits = torch.zeros(size, dtype=torch.uint8) if bits is None else bits
        unshared, shared, shared_counts = split_by_bit(bits, counts)
        return SharedSplit(
            RankedPlaces(unshared, [count - own for count, own in zip(counts, shared_counts, strict=True)]),
            RankedPlaces(shared, shared_counts),
        )

    @staticmethod
    def at(bits: Tensor | None, members: Tensor, counts: list[int]) -> SharedSplit:
        """By bits[members], which may repeat members."""
        return SharedSplit.of(None if bits is None else bits.index_select(0, members), len(members), counts)


def split_order(requests: OwnerRequests, last: SharedSplit) -> Tensor:
    """`requests.arrivals` if sums of the last micro-batch arrive as an unshared chunk and then a shared one."""
    places = torch.cat([last.unshared.places, last.shared.places])
    num_before = len(requests.arrivals) - len(places)
    position = torch.arange(len(requests.arrivals))
    position[num_before:].index_copy_(0, places, torch.arange(num_before, len(position)))
    return position.index_select(0, requests.arrivals)


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of one table's messages, as the requester knows them."""

    first_counts: Counts  # [owner][micro-batch * num + chunk]: rows first used in the micro-batch
    ending: tuple[Tensor, ...]  # per micro-batch: positions of rows last used in it, by (owner, chunk)
    last_counts: tuple[Counts, ...]  # per micro-batch: [owner][chunk] of them

    @staticmethod
    def of(plan: TablePlan, num: int) -> Chunks:
        """`num` chunks of nearly the same size, made of the plan's fine chunks."""
        owners, micro_batches = len(plan.first_counts), len(plan.first_counts[0])
        number = plan.fine_chunks.to(torch.int64).mul_(num).floor_divide_(FINE_CHUNKS)
        place = torch.arange(owners * micro_batches).repeat_interleave(torch.tensor(plan.first_counts).flatten())
        first = torch.bincount(place.mul(num).add_(number), minlength=owners * micro_batches * num)
        key = place.floor_divide_(micro_batches).mul_(num).add_(number)
        ending, last_counts = [], []
        for micro_batch, positions in enumerate(plan.ending):
            own = (plan.last_use == micro_batch).nonzero().flatten()
            order, counts = group(key.index_select(0, own), owners * num)
            ending.append(positions.index_select(0, order))
            last_counts.append(counts.reshape(owners, num).tolist())
        return Chunks(first.reshape(owners, micro_batches * num).tolist(), tuple(ending), tuple(last_counts))

    def of_last_micro_batch(self) -> list[tuple[Tensor, list[int]]]:
        """Per chunk: positions of the rows last used in the last micro-batch, and their number per owner."""
        counts = self.last_counts[-1]
        positions, num = self.ending[-1].split([n for own in counts for n in own]), len(counts[0])
        return [(torch.cat(positions[chunk::num]), [own[chunk] for own in counts]) for chunk in range(num)]


def exchange_shared(window: Window, before: Window, where: str) -> None:
    """Owners send the requesters of two neighbouring windows one bit per id: whether both windows hold it."""
    if before.grad_messages:
        raise CommError("receives posted before the shared rows were known: the schedule lacks a dependency.")
    ranks = range(window.tables.world_size)
    flags: list[list[Tensor]] = [[] for _ in ranks]  # to each requester
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
    bits_of = [bits.split(counts) for bits, counts in zip(received, sizes, strict=True)]
    for number, name in enumerate(window.owner_chunks):
        window.requester[name].shared.with_previous = torch.cat([own[2 * number] for own in bits_of])
        before.requester[name].shared.with_next = torch.cat([own[2 * number + 1] for own in bits_of])


def post_split_rows(window: Window, name: str, where: str) -> None:
    """Posts receives of the unshared and of the shared rows of the first micro-batch."""
    requester, (owner,) = window.requester[name], window.owner_chunks[name]
    local, by_rank = requester.local_rows[0], owner.requests.rows_for(0)
    requested = torch.cat(by_rank)
    sent = SharedSplit.at(owner.shared.with_previous, requested, [len(own) for own in by_rank])
    received = SharedSplit.of(
        requester.shared.with_previous, len(local), [own[0] for own in requester.plan.local_counts]
    )
    for is_unshared, send, receive in zip((True, False), sent, received, strict=True):
        rows = torch.empty(len(receive.places), *local.shape[1:], dtype=local.dtype)
        requester.split_rows[is_unshared] = rows, receive.places
        places = list(requested.index_select(0, send.places).split(send.counts))
        buffers = list(rows.split(receive.counts))
        label = f"{where}, {'unshared' if is_unshared else 'shared'}"
        window.post_rows(name, (0, is_unshared), owner.retrieved, places, buffers, None, where=label)


def post_split_grads(window: Window, name: str, where: str) -> None:
    """Posts receives of the unshared and shared gradients of the last micro-batch, and prepares both updates."""
    requester, (owner,), last = window.requester[name], window.owner_chunks[name], window.plan.num_micro_batches - 1
    requests = owner.requests
    received = SharedSplit.at(owner.shared.with_next, torch.cat(requests.ending()), requests.arrival_counts[last])
    sent = SharedSplit.of(
        requester.shared.with_next, len(requester.local_rows[last]), [own[last] for own in requester.plan.local_counts]
    )
    for is_unshared, send, receive in zip((True, False), sent, received, strict=True):
        label = f"{where}, {'unshared' if is_unshared else 'shared'}"
        window.post_grads(name, (last, is_unshared), send.places, send.counts, receive.counts, where=label)
    sums = ArrivedGrads(window.arrivals(name), requests.starts, split_order(requests, received))
    splits = SharedSplit.of(owner.shared.with_next, len(requests.ids), [len(requests.ids)])
    for is_unshared, places in zip((True, False), splits, strict=True):
        owner.split_updates[is_unshared] = owner.retrieved.at(places.places), sums.at(places.places)


def post_chunk_rows(window: Window, name: str, where: str) -> None:
    """Posts receives of the rows of the first micro-batch, chunk by chunk."""
    num, counts = window.num_chunks, window.chunks[name].first_counts
    buffers = window.requester[name].local_rows[0].split([n for own in counts for n in own[:num]])
    for chunk, owner in enumerate(window.owner_chunks[name]):
        places, own = owner.requests.rows_for(0), list(buffers[chunk::num])
        window.post_rows(name, (0, chunk), owner.retrieved, places, own, None, where=f"{where}, chunk {chunk}")


def post_chunk_grads(window: Window, name: str, where: str) -> None:
    """Posts receives of the gradients of the last micro-batch, chunk by chunk, and locates their sums."""
    last = window.plan.num_micro_batches - 1
    for chunk, (positions, send_counts) in enumerate(window.chunks[name].of_last_micro_batch()):
        owner = window.owner_chunks[name][chunk]
        counts = owner.requests.arrival_counts[last]
        window.post_grads(name, (last, chunk), positions, send_counts, counts, where=f"{where}, chunk {chunk}")
        arrivals = _arrivals_of(window, name, chunk)
        owner.chunk_grads = ArrivedGrads(arrivals, owner.requests.starts, owner.requests.arrivals).located()


def _arrivals_of(window: Window, name: str, chunk: int) -> list[Tensor]:
    """Received sums of one chunk: its share of each message before the last micro-batch, and its own message of that."""
    last, received = window.plan.num_micro_batches - 1, []
    for micro_batch in range(last):
        counts = [owner.requests.arrival_counts[micro_batch] for owner in window.owner_chunks[name]]
        for sums, sizes in zip(
            window.grad_messages[micro_batch, 0][name].received, zip(*counts, strict=True), strict=True
        ):
            received.append(sums.split(list(sizes))[chunk])
    return received + window.grad_messages[last, chunk][name].received
