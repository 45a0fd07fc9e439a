"""One all-to-all exchange in flight: its operations, its deadline, and which ranks are at fault if it does not finish.

    post()              receives are posted             early: gloo's sender waits until the receive is posted
    launch(send)        sends are posted
    wait()              each operation is waited for once; CommError names the missing ranks

Behaviour of gloo (torch 2.13) that shapes this code:

- Receives posted before sends use both directions of the link at once. all_to_all_single takes
  turns: twice the time.
- A point-to-point operation cannot be polled: `is_completed` stays False and there is no future. A
  second `wait` on a finished operation hangs. So a handle waits for each operation once and
  remembers.
- A wait that times out closes *all* connections of the group on this rank, so a deadline ends the
  channel. What had arrived before can still be waited for; that separates the missing ranks from
  the others.
- Peers then see a closed connection, as if this rank had died. It therefore publishes a failure
  report first, and a rank that sees a closed connection looks for reports before it calls the peer
  dead.
- A message longer than its receive ends the receiving process in std::terminate; a shorter one
  leaves the rest of the buffer unchanged. So the size is part of the tag, and a message of the
  wrong size never arrives.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from nestpipe.distributed.failure_report import FailureReport, collect, publish, root_causes
from nestpipe.errors import CommError
from nestpipe.ops.device_memory import used_here

if TYPE_CHECKING:
    from nestpipe.distributed.process_group import Channel, World

# A tag has 31 bits: 1 for its kind, 16 for its number, 14 for the size. This is the largest prime below 2**14.
_SIZES_IN_TAG = 16381


class Handle:
    """One exchange: posted, launched, waited for."""

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
        self._is_host = channel.device.type == "cpu"
        self._name = name
        self._title = f"exchange '{name}'" + (f" ({where})" if where else "")
        self._number, self._wire, self._own = number, wire, own
        self._key = f"{channel.name}/{name}/{number}"  # the same on every rank, unique per exchange
        self._receive = list(receive)
        self._arrivals = [
            _narrow_like(buffer, wire) for buffer in receive
        ]  # the buffers themselves, unless the wire is narrower
        self._send: list[Tensor] | None = None
        self._works: list[tuple[int, Any]] = []  # (peer, operation), receives first
        self._num_waited = 0  # operations already waited for
        self._finish: Callable[[], None] | None = None
        self._num_sends = 0
        self._arrived = self._done = False
        self._error: CommError | None = None

    def post(self) -> None:
        if self._is_host:
            for peer in self._peers():
                self._operate(self._channel.group.recv, self._arrivals[peer], peer)

    def launch(self, send: Sequence[Tensor], *, num_rows: int | None = None) -> Handle:
        """Sends. The tensors must not change before `wait` returns. `num_rows` is for the watch, if these are not rows."""
        if len(send) != self._world.size:
            raise ValueError(f"{self._title} has {len(send)} sends for {self._world.size} ranks.")
        rank = self._world.rank
        own, buffer = send[rank], self._receive[rank]
        if self._own and (own.shape != buffer.shape or own.dtype != buffer.dtype):
            raise ValueError(
                f"{self._title} sends itself {own.dtype} {list(own.shape)} for {buffer.dtype} {list(buffer.shape)}."
            )
        self._channel.check_use()
        self._send = [_narrow(one, self._wire) for one in send]
        if self._is_host:
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
        """Blocks until every receive is complete; sends may still be in flight, so `wait` must follow. Raises CommError."""
        if self._error:
            raise self._error
        if self._arrived:
            return
        if self._send is None:
            raise ValueError(f"{self._title} was posted but not launched; the wait would never end.")
        with self._channel.watch.waiting(self._name) if self._channel.watch else nullcontext():
            self._wait_for_works(len(self._works) - self._num_sends)
        if self._finish:  # on the stream that waits, which need not be the one that launched
            self._finish()
            used_here(*self._arrivals, *self._receive)
        for arrival, buffer in zip(self._arrivals, self._receive, strict=True):
            if arrival is not buffer:
                buffer.copy_(arrival)
        self._arrived = True

    def wait(self) -> None:
        """Blocks until receives and sends are complete. Raises CommError with the ranks at fault, again on a second call."""
        self.wait_arrived()
        if self._done:
            return
        self._wait_for_works(len(self._works))
        self._done = True
        self._works.clear()
        self._send = None
        self._channel.unfinished.discard(self)

    def _wait_for_works(self, end: int) -> None:
        """Waits for operations up to `end`, each once."""
        clock = self._world.clock
        start = clock.monotonic()
        while self._num_waited < end:
            index = self._num_waited
            peer, work = self._works[index]
            self._num_waited += 1
            left = self._channel.deadline_s - (clock.monotonic() - start)
            try:
                # gloo takes 0 for "no deadline". On a device wait only orders the stream; the group's own timeout watches.
                work.wait(timedelta(seconds=max(left, 0.001))) if self._is_host else work.wait()
            except RuntimeError as error:
                self._fail(error, peer, self._works[index + 1 :], clock.monotonic() - start)

    def _peers(self) -> Iterable[int]:
        """The other ranks, starting with the successor, so that not all ranks send to one first."""
        return ((self._world.rank + step) % self._world.size for step in range(1, self._world.size))

    def _operate(self, operation: Any, buffer: Tensor, peer: int) -> None:
        data = _as_bytes(buffer)
        tag = self._number << 14 | data.numel() % _SIZES_IN_TAG
        try:
            self._works.append((peer, operation([data], peer, tag)))
        except RuntimeError as error:  # the connection is closed already
            self._fail(error, peer, [], 0.0)

    def _launch_all_to_all(self, send: list[Tensor]) -> None:
        """One all_to_all_single on concatenated buffers, for nccl and hccl."""
        sends, buffers = [_as_bytes(one) for one in send], [_as_bytes(one) for one in self._arrivals]
        if not self._own:
            rank = self._world.rank
            sends[rank] = buffers[rank] = sends[rank][:0]
        source, sizes, target_sizes = torch.cat(sends), [len(one) for one in sends], [len(one) for one in buffers]
        target = source.new_empty(sum(target_sizes))
        if self._channel.group is None:
            target.copy_(source)
        else:
            self._works.append((self._world.rank, self._channel.all_to_all(target, source, target_sizes, sizes)))

        def scatter() -> None:
            used_here(target)
            for buffer, received in zip(buffers, target.split(target_sizes), strict=True):
                buffer.copy_(received)

        self._finish = scatter

    def _fail(self, error: RuntimeError, peer: int, rest: list[tuple[int, Any]], elapsed_s: float) -> NoReturn:
        """Finds the ranks at fault, publishes a failure report, and raises."""
        world, channel = self._world, self._channel
        store, own, global_rank = world.store, world.global_rank(world.rank), world.global_rank
        if channel.broken:  # by another exchange of this channel, which has published a report
            reason, ranks = f"its channel failed before: {channel.broken}".rstrip("."), channel.broken.ranks
        elif elapsed_s >= channel.deadline_s - 0.05:  # gloo counts in whole milliseconds
            late = {peer, *(other for other, work in rest if not _arrived(work))}
            absent = tuple(sorted(map(global_rank, late)))
            reason = f"{named_ranks(absent)} never entered it"
            report = FailureReport(self._key, f"{self._title}: {reason}", absent, own)
            publish(store, own, report)
            others = collect(store, absent, not_about=self._key, within_s=self._late_s, clock=world.clock)
            ranks = root_causes(store, [report, *others])
            reason += _beyond(absent, ranks)
        elif reports := collect(store, [global_rank(peer)], clock=world.clock):
            report = reports[0]
            publish(store, own, report)  # forwarded: whoever waits for this rank reads it too
            if report.exchange:  # a blamed rank, or another thread of this one, may wait for the rank that failed first
                reports += collect(
                    store, report.ranks, not_about=report.exchange, within_s=self._late_s, clock=world.clock
                )
            ranks = root_causes(store, reports)
            reason = f"rank {report.by} aborted: {report.reason}" + _beyond(report.ranks, ranks)
        elif channel.broken:  # meanwhile, in another thread
            self._fail(error, peer, rest, elapsed_s)
        else:
            ranks = (global_rank(peer),)
            reason = f"rank {ranks[0]} closed the connection: its process has ended"
            publish(store, own, FailureReport("", f"{self._title}: {reason}", ranks, own))
        message = f"{self._title} not finished after {in_seconds(elapsed_s)}; {reason}."
        self._error = CommError(message + dump_stacks(world), ranks=ranks)
        channel.broken = channel.broken or self._error
        raise self._error from error

    @property
    def _late_s(self) -> float:
        """How long to wait for reports: a rank that waits elsewhere may have started a little later than this one."""
        return max(1.0, self._channel.deadline_s / 2)


def _beyond(absent: Sequence[int], ranks: Sequence[int]) -> str:
    """The end of a message when the absent ranks themselves waited for others."""
    others = [rank for rank in ranks if rank not in absent]
    return f" because of {named_ranks(others)}" if others else ""


def _arrived(work: Any) -> bool:
    """Whether an operation had finished. Only valid after a timeout, which ends all that had not."""
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True


def dump_stacks(world: World) -> str:
    """Writes the stacks of all threads into the world's folder, if it has one; returns the end of the error message."""
    if world.stacks is None:
        return ""
    world.stacks.mkdir(parents=True, exist_ok=True)
    with (world.stacks / f"stacks-{world.global_rank(world.rank)}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    return f" Stacks: {world.stacks}/stacks-*.txt"


def _as_bytes(buffer: Tensor) -> Tensor:
    """A contiguous tensor viewed as uint8, which every backend can send."""
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
