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

from nestpipe.embedding import pieces
from nestpipe.embedding.asking import Announced, Asking, announce
from nestpipe.embedding.groups import Replicas
from nestpipe.embedding.held import Held
from nestpipe.embedding.lagging import Lagging
from nestpipe.embedding.messages import Asked, Owned, SentRows, SentSums, computed, held_of, united
from nestpipe.embedding.route import Plan
from nestpipe.embedding.rows import Arrived, add_from, copy_from, gather_rows, largest, scatter_rows
from nestpipe.embedding.sharded import Sharded
from nestpipe.embedding.slices import Slices
from nestpipe.errors import CommError

COLD = 1  # of two halves; the hot one is 0
Message = tuple[int, int]  # part, and which half or slice of it


@dataclass(slots=True, eq=False)
class Window:
    """The rows of one batch, frozen until every part has contributed.

    If it is `split`, rows of the first part and gradients of the last one travel in two halves (hot.py), and if it has `cuts` (all
    tables or none) in slices (slices.py).
    """

    home: Sharded
    plan: Plan
    number: int  # of the batch, from the start of training
    weight: float  # this rank's; global once the ids have been asked for
    asks_to_stop: bool = False  # of this rank; of any rank once the ids have been asked for
    split: bool = False
    cuts: Mapping[str, Slices] = field(default_factory=dict)
    announced: Announced | None = None
    largest: dict[str, float] = field(default_factory=dict)  # the largest |gradient| sent, table by table
    asked: dict[str, Asked] = field(default_factory=dict)
    owned: dict[str, list[Owned]] = field(default_factory=dict)  # slice by slice
    held: dict[str, Held] = field(default_factory=dict)  # those of all slices, one after the other
    sent_rows: dict[Message, dict[str, SentRows]] = field(default_factory=dict)  # table by table
    sent_sums: dict[Message, dict[str, SentSums]] = field(default_factory=dict)

    def announce(self, *, where: str = "") -> Announced:
        """Tells the owners how many ids the window will ask for, and all ranks its weight and whether to stop."""
        flags = [*struct.unpack("<q", struct.pack("<d", self.weight)), int(self.asks_to_stop)]
        return announce(self.home, self.plan, self.cuts, flags, where=where)

    def ask(self, before: Window | None = None, after: Window | None = None, *, where: str = "") -> None:
        """Tells the owners which ids the window needs; agrees on the global weight and on whether to stop.

        If it is split, the owners tell what it shares with the window before, if there is one. The window after, if it is given (on
        every rank or on none) and there will be one, is announced meanwhile.
        """
        announced = self.announced or self.announce(where=where)
        heard = announced.told()
        told = [row[-2:] for row in heard]
        asking = Asking.of(self.home, self.plan, announced.own, heard, where=where)
        if after is not None and not any(asks for _, asks in told):
            after.announced = after.announce(where=f"the one after {where}")
        self.asked, self.owned = asking.answers()
        if self.home.replicas:
            told = self._unite(self.home.replicas, told, where)
        self.weight = sum(struct.unpack("<d", struct.pack("<q", weight))[0] for weight, _ in told)  # in rank order
        self.asks_to_stop = any(asks for _, asks in told)
        if self.split and before is not None:
            pieces.tell_hot(self, before, where)

    def _unite(self, replicas: Replicas, told: list[list[int]], where: str) -> list[list[int]]:
        """The ids become those of all groups; returns what all ranks told, in rank order, from what this one's group did."""
        asked = {name: owned.requests for name, (owned,) in self.owned.items()}
        unions, flags = replicas.unite(asked, [one for row in told for one in row], where=where)
        for name, union in unions.items():
            self.owned[name][0].requests, self.owned[name][0].union = union.requests, union
        return [row[place : place + 2] for row in flags for place in range(0, len(row), 2)]

    def retrieve(self) -> None:
        """Decides which ids have a row, and takes the rows; once per batch, in order."""
        for name, slices in self.owned.items():
            ids = [owned.requests.ids for owned in slices]
            held = self.held[name] = self.home.holders[name].take(torch.cat(ids), self.number)
            for owned, own in zip(slices, held.split([len(one) for one in ids]), strict=True):
                owned.held = own

    def post(self, *, where: str = "") -> None:
        """Opens the receives of all row and gradient messages, so that none of them waits for its peer, and finds what is sent."""
        last = self.plan.num_parts - 1
        for part in range(self.plan.num_parts):
            for name in self.asked:
                place = f"{where}, part {part}"
                if part == 0 and (self.split or self.cuts):
                    (pieces.post_row_halves if self.split else pieces.post_row_slices)(self, name, place)
                else:
                    self._post_rows(name, part, place)
                if part == last and (self.split or self.cuts):
                    (pieces.post_sum_halves if self.split else pieces.post_sum_slices)(self, name, place)
                else:
                    self._post_sums(name, part, place)

    def _post_rows(self, name: str, part: int, where: str) -> None:
        asked = self.asked[name]
        room = [asked.leaves[part][fresh] for fresh in asked.plan.fresh(part)]
        packed = None if asked.narrow is None else asked.narrow.rooms(part, room)
        self.open_rows(name, (part, 0), self._held_of(name), self._wanted(name, part), room, packed, where=where)

    def _wanted(self, name: str, part: int) -> list[Tensor]:
        """Places among all rows that are held of those that each asker gets with a part."""
        found, begin = [], 0
        for owned in self.owned[name]:
            found.append([places + begin if begin else places for places in owned.requests.wanted(part)])
            begin += len(owned.requests.ids)
        return [torch.cat(own) for own in zip(*found, strict=True)] if len(found) > 1 else found[0]

    def _post_sums(self, name: str, part: int, where: str) -> None:
        plan, is_last = self.asked[name].plan, part == self.plan.num_parts - 1
        counts = [
            sum(own) for own in zip(*(one.requests.arrival_counts[part] for one in self.owned[name]), strict=True)
        ]
        leaving = self.cuts[name].leaving[part] if self.cuts else plan.leaving[part]
        # All that the last part has goes home with it.
        sent = [own[part] for own in plan.last_counts]
        self.open_sums(name, (part, 0), None if is_last else leaving, sent, counts, where=where)

    def open_rows(
        self,
        name: str,
        message: Message,
        held: Held,
        wanted: list[Tensor],
        room: list[Tensor],
        packed: list[Tensor] | None,
        *,
        where: str,
    ) -> None:
        """Opens receives of rows: of each owner into its room. Own rows do not travel."""
        rank = self.home.rank
        handle = self.home.rows.post(f"rows/{name}", packed or room, where=where, own=False)
        own, wanted[rank] = held.at(wanted[rank]), wanted[rank][:0]
        travel = held.at(torch.cat(wanted))
        leaving = self.home.tables[name].empty_rows(len(travel.ids))
        sends = list(leaving.split([len(places) for places in wanted]))
        sends[rank] = room[rank]
        self.sent_rows.setdefault(message, {})[name] = SentRows(handle, travel, leaving, sends, room, own, packed)

    def open_sums(
        self, name: str, message: Message, leaving: Tensor | None, sent: list[int], counts: list[int], *, where: str
    ) -> None:
        """Opens receives of so many sums from each asker. Own ones do not travel, but are copied; all of a leaf is not even that."""
        rank = self.home.rank
        own: Tensor | None = None
        if leaving is not None:
            places = list(leaving.split(sent))
            own, places[rank] = places[rank], places[rank][:0]
            leaving, sent = torch.cat(places), [len(one) for one in places]
        else:
            counts = [0 if asker == rank else count for asker, count in enumerate(counts)]
        table = self.home.tables[name]
        arrivals = list(table.empty_rows(sum(counts)).split(counts))
        handle = self.home.rows.post(f"gradients/{name}", arrivals, where=where, own=False)
        room = table.empty_rows(0 if leaving is None else len(leaving))
        self.sent_sums.setdefault(message, {})[name] = SentSums(handle, leaving, own, sent, room, arrivals)

    def launch_rows(self, part: int, piece: int = 0) -> None:
        """Sends the rows that askers use in this part for the first time, or a half or slice of them."""
        rank = self.home.rank
        for name, message in self.sent_rows[part, piece].items():
            holder, sends = self.home.holders[name], message.sends
            narrow = self.owned[name][0].narrow if message.packed is not None else None
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
        for asked in self.asked.values():  # needs no message of this part
            copy_from(asked.leaves[part], asked.plan.again[part], asked.plan.source[part], asked.leaves)
        self.arrive(part)
        return {name: asked.leaves[part].detach().requires_grad_() for name, asked in self.asked.items()}

    def arrive(self, part: int) -> None:
        """Waits for the part's rows and brings them to their places, once."""
        # Cold rows are long there, and are brought to their places while hot ones travel.
        for piece in (COLD, 0) if self.split else range(self.slices):
            for name, message in self.sent_rows.get((part, piece), {}).items():
                asked = self.asked[name]
                message.handle.wait_arrived()
                if asked.narrow is not None and message.packed is not None:
                    for owner, (data, room) in enumerate(zip(message.packed, message.room, strict=True)):
                        if owner != self.home.rank:
                            asked.narrow.unpack(data, owner, part, room)
                if part == 0 and (half := asked.halves.pop(bool(piece), None)):
                    rows, places = half
                    scatter_rows(asked.leaves[part], places, rows)

    def add_grads(self, part: int, leaves: Mapping[str, Tensor]) -> None:
        """Adds the sums so far to the part's gradients, for the ids that it shares with parts before."""
        for name, asked in self.asked.items():
            grad = leaves[name].grad
            own = torch.zeros_like(asked.leaves[part]) if grad is None else grad.contiguous()
            before = [computed(one) for one in asked.grads[:part]]
            add_from(own, asked.plan.again[part], asked.plan.source[part], before)
            asked.grads[part] = own

    def launch_grads(self, part: int, piece: int = 0) -> None:
        """Sends the sums of ids whose last use this part was, or a half or slice of them."""
        is_last = part == self.plan.num_parts - 1
        for name, message in self.sent_sums[part, piece].items():
            sums, own = computed(self.asked[name].grads[part]), message.arrivals[self.home.rank]
            leaving = sums if message.leaving is None else gather_rows(sums, message.leaving, message.room)
            sends = list(leaving.split(message.sent))
            if message.own is None:
                message.arrivals[self.home.rank] = sends[self.home.rank]
            else:
                sends[self.home.rank] = own
            message.handle.launch(sends)
            if message.own is not None:
                gather_rows(sums, message.own, own)  # nobody else waits for these
            # All of the last part leaves: its hot half or first slice comes first, and the flag that travels with it is about all.
            for values in () if piece else (sums,) if is_last else (leaving, own):
                self.largest[name] = larger(self.largest.get(name, 0.0), values)

    def collect(self, part: int, piece: int = 0) -> None:
        """The sums that come with a part, or a half or slice of them, have arrived."""
        is_one = self.cuts and part == self.plan.num_parts - 1
        for name, message in self.sent_sums[part, piece].items():
            message.handle.wait_arrived()
            for owned in [self.owned[name][piece]] if is_one else self.owned[name]:
                owned.num_collected += 1

    def merge(self, part: int, *, where: str = "") -> None:
        """Replicas exchange the sums of their groups that are whole with this part; each adds them in group order, in `update`."""
        if (replicas := self.home.replicas) is None:
            return
        handles = []
        for name, (owned,) in self.owned.items():
            if owned.num_collected <= part:
                raise CommError("sums of a group before they were collected: a dependency is missing in the schedule.")
            arrived = [one for number in range(part + 1) for one in self.sent_sums[number, 0][name].arrivals]
            handles.append(united(owned).launch(replicas, f"sums/{name}", part, arrived, where=where))
        for handle in handles:
            handle.wait()

    def owned_grads(self) -> dict[str, Tensor]:
        """The full gradient sums [K, D] of the rows that this rank owns, by ascending id, once all are collected."""
        if self.split or self.cuts:
            raise ValueError("the sums of a split window are never whole: its pieces are updated one after the other.")
        found = {}
        for name, (owned,) in self.owned.items():
            grads = self._sums(name, 0)
            owned.totals = found[name] = grads.total() if isinstance(grads, Arrived) else grads
            owned.totals.index_fill_(0, held_of(owned).rowless, 0.0)  # they are dropped and count nowhere
        return found

    def keep(self) -> None:
        """The batch after this one reads the rows as they are now, also if a barrier comes first."""
        for name, (owned,) in self.owned.items():
            holder = self.home.holders[name]
            if isinstance(holder, Lagging):
                holder.keep(held_of(owned))

    def update(self, lr: float, piece: int = 0) -> None:
        """One optimizer step for each row of the window, or of a half or slice of it, that this rank owns."""
        for name, slices in self.owned.items():
            owned = slices[0 if self.split else piece]
            if self.split:
                owned.check_collected(self.plan.num_parts + piece)  # the cold half comes after the hot one
            held, grads = owned.halves[bool(piece)] if self.split else (held_of(owned), self._sums(name, piece))
            self.home.holders[name].update(held, grads, lr)

    def _sums(self, name: str, piece: int) -> Tensor | Arrived:
        """The gradients of the rows of a slice that this rank owns, added in (part, rank) order."""
        owned = self.owned[name][piece]
        owned.check_collected(self.plan.num_parts)
        if owned.totals is not None:
            return owned.totals
        if owned.union is not None:
            return owned.union.sums(self.plan.num_parts)
        return owned.sums or Arrived(self.arrivals(name), owned.requests.starts, owned.requests.arrivals)

    def arrivals(self, name: str) -> list[Tensor]:
        """Sums as they arrive, message by message."""
        return [one for key in sorted(self.sent_sums, key=_as_counted) for one in self.sent_sums[key][name].arrivals]

    def release(self) -> None:
        """The window is done with its rows, and all it sent has left."""
        rows = [message.handle for messages in self.sent_rows.values() for message in messages.values()]
        grads = [message.handle for messages in self.sent_sums.values() for message in messages.values()]
        for handle in rows + grads:
            handle.wait()
        for name in self.owned:
            self.home.holders[name].release(self._held_of(name))

    @property
    def slices(self) -> int:
        """In how many the first rows and the last gradients travel."""
        return next((len(cut.last_counts[0][0]) for cut in self.cuts.values()), 1)

    def _held_of(self, name: str) -> Held:
        if name not in self.held:
            raise CommError("rows were asked for before they were retrieved: a dependency is missing in the schedule.")
        return self.held[name]


def _as_counted(message: Message) -> tuple[int, bool]:
    """Parts in order, the cold half of a part first."""
    return message[0], message[1] != COLD


def larger(so_far: float, values: Tensor) -> float:
    """The larger of a number and the largest |value|; nan if there is one."""
    own = largest(values)
    return so_far if own <= so_far or math.isnan(so_far) else own
