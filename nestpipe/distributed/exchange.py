"""One exchange under way: its operations, its deadline, and who is to blame if it does not end.

What gloo (torch 2.13) does, and what follows from it:

- Receives posted first, then sends, use both directions of the wire at once; all_to_all_single takes turns, twice the
  time. A sender waits for word of the posted receive, so `post` well before `launch` saves one of the two trips.
- A point-to-point operation cannot be polled: `is_completed` stays False and there is no future. Only `wait` tells,
  once: a second wait on a finished operation hangs. So a handle waits for each operation once and remembers.
- A wait that times out closes *all* connections of that group on this rank: the deadline ends the lane. What had
  arrived before can still be waited for, and that is how the missing ranks are told from the others.
- Peers then see a closed connection, as if this rank had died. It therefore leaves a note in the store saying whom it
  was missing, and whoever sees a closed connection looks for that note before it calls the peer dead.
- A message longer than its receive ends the receiving process in std::terminate; a shorter one is accepted and leaves
  the rest of the buffer as it was. So the size is part of the tag, and a wrong size is a message that never arrives.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from nestpipe.distributed import failure_report
from nestpipe.errors import CommError

if TYPE_CHECKING:
    from nestpipe.distributed.process_group import Channel, World

# A tag has 31 bits: one for its kind, 16 for its number, 14 for the size; this is the largest prime below 2**14.
_SIZES_IN_TAG = 16381


class Handle:
    """One exchange under way: posted, launched, waited for."""

    def __init__(
        self,
        channel: Channel,
        name: str,
        receive: Sequence[Tensor],
        *,
        number: int,
        wire: torch.dtype | None,
        where: str,
        own: bool,
    ):
        self._channel, self._world = channel, channel.world
        self._name = name
        self._title = f"exchange '{name}'" + (f" ({where})" if where else "")
        self._number, self._wire, self._own = number, wire, own
        self._key = f"{channel.name}/{name}/{number}"  # the same on every rank, for no other exchange
        self._receive = list(receive)
        self._arrivals = [_narrow_like(buffer, wire) for buffer in receive]  # mostly the buffers themselves
        self._send: list[Tensor] | None = None
        self._works: list[tuple[int, Any]] = []  # (peer, operation), receives first
        self._num_waited = 0  # of them, for which somebody has waited
        self._finish: Callable[[], None] | None = None
        self._num_sends = 0
        self._arrived = self._done = False
        self._error: CommError | None = None

    def post(self) -> None:
        if self._world.device.type == "cpu":
            for peer in self._peers():
                self._operate(self._channel.group.recv, self._arrivals[peer], peer)

    def launch(self, send: Sequence[Tensor], *, num_rows: int | None = None) -> Handle:
        """Sends; the tensors must not change before `wait` has returned. `num_rows` is for who watches, if they are no rows."""
        if len(send) != self._world.size:
            raise ValueError(f"{self._title} has {len(send)} sends for {self._world.size} ranks.")
        rank = self._world.rank
        own, place = send[rank], self._receive[rank]
        if self._own and (own.shape != place.shape or own.dtype != place.dtype):
            raise ValueError(
                f"{self._title} sends itself {own.dtype} {list(own.shape)} for {place.dtype} {list(place.shape)}."
            )
        self._channel.check_use()
        self._send = [_narrow(part, self._wire) for part in send]
        if self._world.device.type == "cpu":
            for peer in self._peers():
                self._operate(self._channel.group.send, self._send[peer], peer)
                self._num_sends += 1
            if self._own:
                self._arrivals[rank].copy_(self._send[rank])
        else:
            self._launch_all_to_all(self._send)
        if watch := self._channel.watch:
            num_bytes = sum(self._send[peer].nbytes for peer in self._peers())
            watch.launched(self._name, num_bytes, sum(map(len, send)) if num_rows is None else num_rows)
        return self

    def wait_arrived(self) -> None:
        """Returns when everything has arrived, whether or not all has left; `wait` must follow. Raises like it."""
        if self._error:
            raise self._error
        if self._arrived:
            return
        if self._send is None:
            raise ValueError(f"{self._title} was posted but not launched; waiting for it would never end.")
        with self._channel.watch.waiting(self._name) if self._channel.watch else nullcontext():
            self._wait_for_works(len(self._works) - self._num_sends)
        if self._finish:
            self._finish()
        for arrival, buffer in zip(self._arrivals, self._receive, strict=True):
            if arrival is not buffer:
                buffer.copy_(arrival)
        self._arrived = True

    def wait(self) -> None:
        """Returns when everything has arrived and left; raises CommError naming the ranks at fault, the second time too."""
        self.wait_arrived()
        if self._done:
            return
        self._wait_for_works(len(self._works))
        self._done = True
        self._works.clear()
        self._send = None
        self._channel.unfinished.discard(self)

    def _wait_for_works(self, end: int) -> None:
        """Waits for the operations up to a number, each once."""
        start = time.monotonic()
        while self._num_waited < end:
            index = self._num_waited
            peer, work = self._works[index]
            self._num_waited += 1
            left = self._channel.deadline_s - (time.monotonic() - start)
            try:
                # gloo takes 0 for "no deadline". On a device wait only orders the stream; the group's own timeout watches.
                work.wait(timedelta(seconds=max(left, 0.001))) if self._world.device.type == "cpu" else work.wait()
            except RuntimeError as error:
                self._fail(error, peer, self._works[index + 1 :], time.monotonic() - start)

    def _peers(self) -> Iterable[int]:
        """The other ranks, each rank starting with its successor so that not all send to one."""
        return ((self._world.rank + step) % self._world.size for step in range(1, self._world.size))

    def _operate(self, operation: Any, buffer: Tensor, peer: int) -> None:
        data = _as_bytes(buffer)
        tag = self._number << 14 | data.numel() % _SIZES_IN_TAG
        try:
            self._works.append((peer, operation([data], peer, tag)))
        except RuntimeError as error:  # the connection is closed already
            self._fail(error, peer, [], 0.0)

    def _launch_all_to_all(self, send: list[Tensor]) -> None:
        """One collective on concatenated buffers, for nccl and hccl."""
        parts, rooms = [_as_bytes(part) for part in send], [_as_bytes(one) for one in self._arrivals]
        if not self._own:
            rank = self._world.rank
            parts[rank] = rooms[rank] = parts[rank][:0]
        source, sizes, target_sizes = torch.cat(parts), [len(part) for part in parts], [len(room) for room in rooms]
        target = source.new_empty(sum(target_sizes))
        if self._channel.group is None:
            target.copy_(source)
        else:
            self._works.append((self._world.rank, self._channel.all_to_all(target, source, target_sizes, sizes)))

        def scatter() -> None:
            for room, part in zip(rooms, target.split(target_sizes), strict=True):
                room.copy_(part)

        self._finish = scatter

    def _fail(self, error: RuntimeError, peer: int, rest: list[tuple[int, Any]], elapsed_s: float) -> NoReturn:
        """Finds out who is to blame, tells the others, and raises."""
        store, number = self._world.store, self._world.number
        own = number(self._world.rank)
        if self._channel.broken:  # by another exchange of this lane, which has told the others
            reason, ranks = f"its lane broke before: {self._channel.broken}".rstrip("."), self._channel.broken.ranks
        elif elapsed_s >= self._channel.deadline_s - 0.05:  # gloo counts in whole milliseconds
            late = {peer, *(other for other, work in rest if not _arrived(work))}
            absent = tuple(sorted(map(number, late)))
            reason = f"{named_ranks(absent)} never entered it"
            note = failure_report.FailureReport(self._key, f"{self._title}: {reason}", absent, own)
            failure_report.publish(store, own, note)
            found = failure_report.collect(store, absent, elsewhere=self._key, within_s=self._late_s)
            ranks = failure_report.root_causes(store, [note, *found])
            reason += _beyond(absent, ranks)
        elif found := failure_report.collect(store, [number(peer)]):
            note = found[0]
            failure_report.publish(store, own, note)  # passed on: whoever waits for this rank reads it too
            if note.exchange:  # those blamed, or another thread of this rank, may wait for one that is really lost
                found += failure_report.collect(store, note.ranks, elsewhere=note.exchange, within_s=self._late_s)
            ranks = failure_report.root_causes(store, found)
            reason = f"rank {note.by} gave up: {note.reason}" + _beyond(note.ranks, ranks)
        elif self._channel.broken:  # meanwhile, in another thread
            self._fail(error, peer, rest, elapsed_s)
        else:
            reason, ranks = f"rank {number(peer)} closed the connection: it has ended", (number(peer),)
            failure_report.publish(store, own, failure_report.FailureReport("", f"{self._title}: {reason}", ranks, own))
        message = f"{self._title} not finished after {in_seconds(elapsed_s)}; {reason}."
        self._error = CommError(message + dump_stacks(self._world), ranks=ranks)
        self._channel.broken = self._channel.broken or self._error
        raise self._error from error

    @property
    def _late_s(self) -> float:
        """How long to wait for notes: who waits for a lost rank elsewhere may have begun a little later than this one."""
        return max(1.0, self._channel.deadline_s / 2)


def _beyond(absent: Sequence[int], ranks: Sequence[int]) -> str:
    """What to add to a reason when those who were missed here missed others."""
    missed = [rank for rank in ranks if rank not in absent]
    return f" and missed {named_ranks(missed)}" if missed else ""


def _arrived(work: Any) -> bool:
    """Whether an operation had finished; only after a timeout, which has ended all that had not."""
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True


def dump_stacks(world: World) -> str:
    """Writes the stacks of all threads if there is a folder for them; returns what to add to the message."""
    if world.stacks is None:
        return ""
    world.stacks.mkdir(parents=True, exist_ok=True)
    with (world.stacks / f"stacks-{world.number(world.rank)}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    return f" Stacks: {world.stacks}/stacks-*.txt"


def _as_bytes(buffer: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8, which every backend can send."""
    return buffer.detach().view(-1).view(torch.uint8)


def _narrows(buffer: Tensor, wire: torch.dtype | None) -> bool:
    return wire is not None and buffer.is_floating_point() and buffer.element_size() > wire.itemsize


def _narrow(buffer: Tensor, wire: torch.dtype | None) -> Tensor:
    return buffer.detach().to(wire) if _narrows(buffer, wire) else buffer


def _narrow_like(buffer: Tensor, wire: torch.dtype | None) -> Tensor:
    return torch.empty_like(buffer, dtype=wire) if _narrows(buffer, wire) else buffer


def named_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def in_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
