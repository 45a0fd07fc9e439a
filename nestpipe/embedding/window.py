"""Rows on many ranks: what a window asks of the owners, and what it sends back.

    asker                                        owner
    plan ── counts, weight, flags, ids ────────▶ union of all askers' ids; rows taken        ask, retrieve
    rows of a part's first uses ◀─────────────── gathered from where they are held          launch_rows, leaves
    gradient sums of last uses ────────────────▶ added in (part, rank) order                add_grads, launch_grads, collect
                                                 sums of groups are exchanged, if any       merge (groups.py)
                                                 one optimizer step per row                 update, release

One sum tree, whatever the number of parts and ranks that run it: occurrences of an id inside a part (backward), parts in
part order (asker), arrivals in (part of last use, asking rank) order (owner), groups in group order. No atomics, no order of
arrival.

Each method of a `Window` is a stage: called once (or once per part), by any thread, after those it depends on. Rows and
gradients are *launched* by one thread and waited for by whoever needs them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.embedding.groups import Replicas
from nestpipe.embedding.hot import Cut, hot_bits, order_of_halves
from nestpipe.embedding.ids import among
from nestpipe.embedding.lagging import Lagging
from nestpipe.embedding.messages import Asked, Owned, SentRows, SentSums, computed, held_of, united
from nestpipe.embedding.route import Plan, own_requests
from nestpipe.embedding.rows import Arrived, add_from, copy_from, gather_rows, largest, scatter_rows
from nestpipe.embedding.sharded import Sharded
from nestpipe.embedding.wire import Narrow, narrow_of
from nestpipe.errors import CommError

_Message = tuple[int, bool]  # part, and whether it is the cold half


@dataclass(slots=True, eq=False)
class Window:
    """The rows of one batch, frozen until every part has contributed.

    If it is `split`, rows of the first part and gradients of the last one travel in two halves (hot.py).
    """

    home: Sharded
    plan: Plan
    number: int  # of the batch, from the start of training
    weight: float  # this rank's; global once the ids have been asked for
    asks_to_stop: bool = False  # of this rank; of any rank once the ids have been asked for
    split: bool = False
    largest: dict[str, float] = field(default_factory=dict)  # the largest |gradient| sent, table by table
    _asked: dict[str, Asked] = field(default_factory=dict)
    _owned: dict[str, Owned] = field(default_factory=dict)
    _rows: dict[_Message, dict[str, SentRows]] = field(default_factory=dict)  # table by table
    _grads: dict[_Message, dict[str, SentSums]] = field(default_factory=dict)

    def ask(self, before: Window | None = None, *, where: str = "") -> None:
        """Tells the owners which ids the window needs; agrees on the global weight and on whether to stop.

        If it is split, the owners tell what it shares with the window before, if there is one.
        """
        lane, parts = self.home.keys, self.plan.num_parts
        flags = [*struct.unpack("<q", struct.pack("<d", self.weight)), int(self.asks_to_stop)]
        wanted = [
            [n for plan in self.plan.tables.values() for n in plan.first_counts[rank]] + flags
            for rank in range(self.home.world_size)
        ]
        counts = lane.exchange_sizes(wanted, name="counts")
        told = [row[-2:] for row in counts]
        handles, found = [], {}
        narrow, theirs = narrow_of(self.plan), {}
        for number, (name, plan) in enumerate(self.plan.tables.items()):
            first_counts = [row[number * parts : (number + 1) * parts] for row in counts]
            sizes = [sum(row) for row in first_counts]
            ids, last_part = torch.empty(sum(sizes), dtype=torch.int64), torch.empty(sum(sizes), dtype=torch.uint8)
            found[name] = (ids, last_part, first_counts)
            handles += [
                lane.exchange(f"ids/{name}", plan.ids.split(plan.counts), ids.split(sizes), where=where),
                lane.exchange(
                    f"last parts/{name}", plan.last_part.split(plan.counts), last_part.split(sizes), where=where
                ),
            ]
            if name in narrow:
                mask = torch.empty(sum(sizes), dtype=torch.uint8)
                theirs[name] = Narrow(narrow[name].wire, mask.view(torch.bool), first_counts)
                sends = narrow[name].mask.view(torch.uint8).split(plan.counts)
                handles.append(lane.exchange(f"narrow/{name}", sends, mask.split(sizes), where=where))
        for handle in handles:
            handle.wait()
        for name, (ids, last_part, first_counts) in found.items():
            table, plan = self.home.tables[name], self.plan.tables[name]
            leaves = [table.empty_rows(plan.leaf_size(part)) for part in range(parts)]
            self._asked[name] = Asked(plan, leaves, [None] * parts, narrow.get(name))
            self._owned[name] = Owned(own_requests(ids, last_part, first_counts), theirs.get(name))
        if self.home.replicas:
            told = self._unite(self.home.replicas, told, where)
        self.weight = sum(struct.unpack("<d", struct.pack("<q", weight))[0] for weight, _ in told)  # in rank order
        self.asks_to_stop = any(asks for _, asks in told)
        if self.split and before is not None:
            self._tell_hot(before, where)

    def _unite(self, replicas: Replicas, told: list[list[int]], where: str) -> list[list[int]]:
        """The ids become those of all groups; returns what all ranks told, in rank order, from what this one's group did."""
        asked = {name: owned.requests for name, owned in self._owned.items()}
        unions, flags = replicas.unite(asked, [one for row in told for one in row], where=where)
        for name, union in unions.items():
            self._owned[name].requests, self._owned[name].union = union.requests, union
        return [row[place : place + 2] for row in flags for place in range(0, len(row), 2)]

    def _tell_hot(self, before: Window, where: str) -> None:
        """Owners tell the askers of two windows which of their ids both hold."""
        if before._grads:
            raise CommError(
                "receives were opened before it was known what is hot: a dependency is missing in the schedule."
            )
        ranks = range(self.home.world_size)
        told: list[list[Tensor]] = [[] for _ in ranks]  # to each asker
        sizes: list[list[int]] = [[] for _ in ranks]  # from each owner
        for name, owned in self._owned.items():
            earlier, plan = before._owned[name], before.plan.tables[name]
            owned.hot.into = among(owned.requests.ids, earlier.requests.ids)
            earlier.hot.out = among(earlier.requests.ids, owned.requests.ids)
            into, out = owned.requests.wanted(0), earlier.requests.ending()
            for rank in ranks:
                told[rank] += [
                    owned.hot.into.index_select(0, into[rank]),
                    earlier.hot.out.index_select(0, out[rank]),
                ]
                sizes[rank] += [self.plan.tables[name].first_counts[rank][0], plan.last_counts[rank][-1]]
        heard = [torch.empty(sum(counts), dtype=torch.uint8) for counts in sizes]
        self.home.keys.exchange("hot", [torch.cat(bits) for bits in told], heard, where=where).wait()
        pieces = [bits.split(counts) for bits, counts in zip(heard, sizes, strict=True)]
        for number, name in enumerate(self._owned):
            self._asked[name].hot.into = torch.cat([own[2 * number] for own in pieces])
            before._asked[name].hot.out = torch.cat([own[2 * number + 1] for own in pieces])

    def retrieve(self) -> None:
        """Decides which ids have a row, and takes the rows; once per batch, in order."""
        for name, owned in self._owned.items():
            owned.held = self.home.holders[name].take(owned.requests.ids, self.number)

    def post(self, *, where: str = "") -> None:
        """Opens the receives of all row and gradient messages, so that none of them waits for its peer, and finds what is sent."""
        last = self.plan.num_parts - 1
        for part in range(self.plan.num_parts):
            for name in self._asked:
                place = f"{where}, part {part}"
                rows = self._post_row_halves if self.split and part == 0 else self._post_rows
                sums = self._post_sum_halves if self.split and part == last else self._post_sums
                rows(name, part, place)
                sums(name, part, place)

    def _post_rows(self, name: str, part: int, where: str) -> None:
        asked = self._asked[name]
        room = [asked.leaves[part][fresh] for fresh in asked.plan.fresh(part)]
        packed = None if asked.narrow is None else asked.narrow.rooms(part, room)
        self._open_rows(name, (part, False), self._owned[name].requests.wanted(part), room, packed, where=where)

    def _post_sums(self, name: str, part: int, where: str) -> None:
        plan, counts = self._asked[name].plan, self._owned[name].requests.arrival_counts[part]
        # All that the last part has goes home with it.
        leaving = None if part == self.plan.num_parts - 1 else plan.leaving[part]
        self._open_sums(name, (part, False), leaving, [own[part] for own in plan.last_counts], counts, where=where)

    def _post_row_halves(self, name: str, part: int, where: str) -> None:
        asked, owned = self._asked[name], self._owned[name]
        places = owned.requests.wanted(part)
        wanted = torch.cat(places)
        there = Cut.of(owned.hot.into, wanted, [len(own) for own in places])
        here = Cut.of(asked.hot.into, len(asked.leaves[part]), [own[part] for own in asked.plan.leaf_counts])
        for cold, theirs, ours in zip((True, False), there, here, strict=True):
            rows = torch.empty(len(ours.places), *asked.leaves[part].shape[1:], dtype=asked.leaves[part].dtype)
            asked.halves[cold] = rows, ours.places
            own = wanted.index_select(0, theirs.places).split(theirs.counts)
            said = f"{where}, {'cold' if cold else 'hot'}"
            self._open_rows(name, (part, cold), list(own), list(rows.split(ours.counts)), None, where=said)

    def _post_sum_halves(self, name: str, part: int, where: str) -> None:
        asked, owned = self._asked[name], self._owned[name]
        requests = owned.requests
        there = Cut.of(owned.hot.out, torch.cat(requests.ending()), requests.arrival_counts[part])
        here = Cut.of(asked.hot.out, len(asked.leaves[part]), [own[part] for own in asked.plan.leaf_counts])
        for cold, theirs, ours in zip((True, False), there, here, strict=True):
            said = f"{where}, {'cold' if cold else 'hot'}"
            self._open_sums(name, (part, cold), ours.places, ours.counts, theirs.counts, where=said)
        # While these travel all ranks wait: the rest of an update is made ready before.
        sums = Arrived(self._arrivals(name), requests.starts, order_of_halves(requests, there))
        for cold, half in zip(
            (True, False), Cut.of(owned.hot.out, len(requests.ids), [len(requests.ids)]), strict=True
        ):
            owned.halves[cold] = held_of(owned).at(half.places), sums.at(half.places)

    def _open_rows(
        self,
        name: str,
        message: _Message,
        wanted: list[Tensor],
        room: list[Tensor],
        packed: list[Tensor] | None,
        *,
        where: str,
    ) -> None:
        """Opens receives of rows: of each owner into its room. Own rows do not travel."""
        rank, held = self.home.rank, held_of(self._owned[name])
        handle = self.home.rows.post(f"rows/{name}", packed or room, where=where, own=False)
        own, wanted[rank] = held.at(wanted[rank]), wanted[rank][:0]
        travel = held.at(torch.cat(wanted))
        leaving = self.home.tables[name].empty_rows(len(travel.ids))
        sends = list(leaving.split([len(places) for places in wanted]))
        sends[rank] = room[rank]
        self._rows.setdefault(message, {})[name] = SentRows(handle, travel, leaving, sends, room, own, packed)

    def _open_sums(
        self, name: str, message: _Message, leaving: Tensor | None, sent: list[int], counts: list[int], *, where: str
    ) -> None:
        """Opens receives of so many sums from each asker. Own ones do not travel, but are copied; all of a leaf is not even that."""
        rank = self.home.rank
        own: Tensor | None = None
        if leaving is not None:
            pieces = list(leaving.split(sent))
            own, pieces[rank] = pieces[rank], pieces[rank][:0]
            leaving, sent = torch.cat(pieces), [len(piece) for piece in pieces]
        else:
            counts = [0 if asker == rank else count for asker, count in enumerate(counts)]
        table = self.home.tables[name]
        arrivals = list(table.empty_rows(sum(counts)).split(counts))
        handle = self.home.rows.post(f"gradients/{name}", arrivals, where=where, own=False)
        room = table.empty_rows(0 if leaving is None else len(leaving))
        self._grads.setdefault(message, {})[name] = SentSums(handle, leaving, own, sent, room, arrivals)

    def launch_rows(self, part: int, *, cold: bool = False) -> None:
        """Sends the rows that askers use in this part for the first time."""
        rank = self.home.rank
        for name, message in self._rows[part, cold].items():
            holder, sends = self.home.holders[name], message.sends
            narrow = self._owned[name].narrow if message.packed is not None else None
            holder.gather(message.wanted, message.leaving)
            if narrow is not None:
                others = enumerate(sends)
                sends = [rows if asker == rank else narrow.pack(rows, asker, part) for asker, rows in others]
            message.handle.launch(sends, num_rows=len(message.wanted.ids) + len(message.own.ids))
            holder.gather(message.own, message.room[rank])  # nobody else waits for these
            if narrow is not None:
                narrow.round_(message.room[rank], rank, part)

    def leaves(self, part: int) -> dict[str, Tensor]:
        """Leaf rows [u, D] of the part's distinct ids, table by table, once those of all parts so far have arrived."""
        for asked in self._asked.values():  # needs no message of this part
            copy_from(asked.leaves[part], asked.plan.again[part], asked.plan.source[part], asked.leaves)
        self.arrive(part)
        return {name: asked.leaves[part].detach().requires_grad_() for name, asked in self._asked.items()}

    def arrive(self, part: int) -> None:
        """Waits for the part's rows and brings them to their places, once."""
        for cold in (True, False):  # cold rows are long there, and are brought to their places while hot ones travel
            for name, message in self._rows.get((part, cold), {}).items():
                asked = self._asked[name]
                message.handle.wait_arrived()
                if asked.narrow is not None and message.packed is not None:
                    for owner, (data, room) in enumerate(zip(message.packed, message.room, strict=True)):
                        if owner != self.home.rank:
                            asked.narrow.unpack(data, owner, part, room)
                if part == 0 and (half := asked.halves.pop(cold, None)):
                    rows, places = half
                    scatter_rows(asked.leaves[part], places, rows)

    def add_grads(self, part: int, leaves: Mapping[str, Tensor]) -> None:
        """Adds the sums so far to the part's gradients, for the ids that it shares with parts before."""
        for name, asked in self._asked.items():
            grad = leaves[name].grad
            own = torch.zeros_like(asked.leaves[part]) if grad is None else grad.contiguous()
            before = [computed(one) for one in asked.grads[:part]]
            add_from(own, asked.plan.again[part], asked.plan.source[part], before)
            asked.grads[part] = own

    def launch_grads(self, part: int, *, cold: bool = False) -> None:
        """Sends the sums of ids whose last use this part was."""
        is_last = part == self.plan.num_parts - 1
        for name, message in self._grads[part, cold].items():
            sums, own = computed(self._asked[name].grads[part]), message.arrivals[self.home.rank]
            leaving = sums if message.leaving is None else gather_rows(sums, message.leaving, message.room)
            sends = list(leaving.split(message.sent))
            if message.own is None:
                message.arrivals[self.home.rank] = sends[self.home.rank]
            else:
                sends[self.home.rank] = own
            message.handle.launch(sends)
            if message.own is not None:
                gather_rows(sums, message.own, own)  # nobody else waits for these
            # All of the last part leaves: its hot half comes first, and the flag that travels with it is about both.
            for values in () if cold else (sums,) if is_last else (leaving, own):
                self.largest[name] = larger(self.largest.get(name, 0.0), values)

    def collect(self, part: int, *, cold: bool = False) -> None:
        """The sums that come with a part have arrived."""
        for name, message in self._grads[part, cold].items():
            message.handle.wait_arrived()
            self._owned[name].num_collected += 1

    def merge(self, part: int, *, where: str = "") -> None:
        """Replicas exchange the sums of their groups that are whole with this part; each adds them in group order, in `update`."""
        if (replicas := self.home.replicas) is None:
            return
        handles = []
        for name, owned in self._owned.items():
            if owned.num_collected <= part:
                raise CommError("sums of a group before they were collected: a dependency is missing in the schedule.")
            arrived = [one for number in range(part + 1) for one in self._grads[number, False][name].arrivals]
            handles.append(united(owned).launch(replicas, f"sums/{name}", part, arrived, where=where))
        for handle in handles:
            handle.wait()

    def owned_grads(self) -> dict[str, Tensor]:
        """The full gradient sums [K, D] of the rows that this rank owns, by ascending id, once all are collected."""
        if self.split:
            raise ValueError("the sums of a split window are never whole: its halves are updated one after the other.")
        found = {}
        for name, owned in self._owned.items():
            grads = self._sums(name)
            owned.totals = found[name] = grads.total() if isinstance(grads, Arrived) else grads
            owned.totals.index_fill_(0, held_of(owned).rowless, 0.0)  # they are dropped and count nowhere
        return found

    def keep(self) -> None:
        """The batch after this one reads the rows as they are now, also if a barrier comes first."""
        for name, owned in self._owned.items():
            holder = self.home.holders[name]
            if isinstance(holder, Lagging):
                holder.keep(held_of(owned))

    def update(self, lr: float, *, cold: bool = False) -> None:
        """One optimizer step for each row of the window that this rank owns, in a split one for each hot or cold row."""
        for name, owned in self._owned.items():
            if self.split:
                owned.check_collected(self.plan.num_parts + cold)  # the cold half comes after the hot one
            held, grads = owned.halves[cold] if self.split else (held_of(owned), self._sums(name))
            self.home.holders[name].update(held, grads, lr)

    def _sums(self, name: str) -> Tensor | Arrived:
        """The gradients of the rows that this rank owns, added in (part, rank) order."""
        owned = self._owned[name]
        owned.check_collected(self.plan.num_parts)
        if owned.totals is not None:
            return owned.totals
        if owned.union is not None:
            return owned.union.sums(self.plan.num_parts)
        return Arrived(self._arrivals(name), owned.requests.starts, owned.requests.arrivals)

    def _arrivals(self, name: str) -> list[Tensor]:
        """Sums as they arrive, message by message."""
        return [one for key in sorted(self._grads, key=_as_counted) for one in self._grads[key][name].arrivals]

    def release(self) -> None:
        """The window is done with its rows, and all it sent has left."""
        rows = [message.handle for messages in self._rows.values() for message in messages.values()]
        grads = [message.handle for messages in self._grads.values() for message in messages.values()]
        for handle in rows + grads:
            handle.wait()
        for name, owned in self._owned.items():
            self.home.holders[name].release(held_of(owned))

    def peek_owned(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The ids [K] that this rank owns and their weights [K, D] as they are held now."""
        found = {}
        for name, owned in self._owned.items():
            ids = owned.requests.ids
            found[name] = (ids, self.home.holders[name].gather(held_of(owned)))
        return found

    def peek_hot(self) -> dict[str, Tensor]:
        """Which of these ids the window after holds too (uint8 [K])."""
        return {name: hot_bits(owned.hot.out, len(owned.requests.ids)) for name, owned in self._owned.items()}


def _as_counted(message: _Message) -> tuple[int, bool]:
    """Parts in order, the cold half of a part first."""
    return message[0], not message[1]


def larger(so_far: float, values: Tensor) -> float:
    """The larger of a number and the largest |value|; nan if there is one."""
    own = largest(values)
    return so_far if own <= so_far or math.isnan(so_far) else own
