"""Ranks, lanes and exchanges: the only file that talks to torch.distributed.

    world  = World.from_environment()                  # torchrun's variables; without them a world of one
    lane   = world.lane("rows")                        # one process group, used by one thread
    handle = lane.exchange("rows/item", send, receive, where="step 230, micro-batch 2")    # launched
    ...                                                # compute meanwhile
    handle.wait()                                      # all arrived, or CommError says which rank is missing

Rules. Every rank makes the same lanes in the same order (making one is a meeting of all ranks) and launches the same
exchanges on each, empty messages included. One thread launches on a lane; any thread may wait. Both ends know the
size of a message beforehand. A world of one runs the same code, only without messages.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from nestpipe.distributed import failure_report
from nestpipe.distributed.exchange import Handle, dump_stacks, in_seconds, named_ranks
from nestpipe.distributed.rendezvous import meet
from nestpipe.errors import CommError

__all__ = ["DEADLINE_S", "EXCHANGES", "MAX_TAG", "Handle", "Channel", "ChannelWatch", "World"]

DEADLINE_S = 60.0
MAX_TAG = 1 << 16
EXCHANGES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The library that carries messages, by device."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NEVER_SENT = (1 << 31) - 1  # a tag that no message has: the sizes in tags (handle.py) end below its last 14 bits


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class World:
    """All ranks of a run, seen from one of them. Make it with `single`, `from_environment` or `from_store`."""

    rank: int
    size: int
    store: Store
    device: torch.device
    deadline_s: float
    stacks: Path | None  # folder for the stacks of all threads when a deadline passes
    members: tuple[int, ...] = ()  # of a part of a world: what its ranks are called in the whole; () for the whole
    _channels: dict[str, Channel] = field(default_factory=dict)

    def number(self, rank: int) -> int:
        """What a rank is called among all ranks; so it stands in messages."""
        return self.members[rank] if self.members else rank

    @staticmethod
    def single(*, device: str | torch.device = "cpu", deadline_s: float = DEADLINE_S) -> World:
        """A world of one: no process group; an exchange with oneself is a copy."""
        return World.from_store(HashStore(), 0, 1, device=device, deadline_s=deadline_s)

    @staticmethod
    def from_environment(
        *, device: str | torch.device = "cpu", deadline_s: float = DEADLINE_S, stacks: Path | None = None
    ) -> World:
        """The world torchrun describes, or a world of one without its variables; raises CommError if some are missing."""
        if not {"RANK", "WORLD_SIZE"} & set(os.environ):
            return World.single(device=device, deadline_s=deadline_s)
        if missing := [name for name in _VARIABLES if name not in os.environ]:
            raise CommError(f"{', '.join(missing)} not set, but other variables of torchrun are. Start with torchrun.")
        rank, size, host, port = (os.environ[name] for name in _VARIABLES)
        # Under torchrun its agent hosts the store; otherwise rank 0 does.
        host_it = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=deadline_s)
        try:
            store = TCPStore(host, int(port), is_master=host_it, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise CommError(f"rank {rank} cannot open the store at {host}:{port}: {_first_line(error)}") from error
        # Not TORCHELASTIC_RESTART_COUNT: every machine's agent counts its own failures, so after one they differ.
        life = meet(PrefixStore("nestpipe/meeting", store), int(rank), int(size), deadline_s)
        return World.from_store(
            store, int(rank), int(size), restart=life, device=device, deadline_s=deadline_s, stacks=stacks
        )

    @staticmethod
    def from_store(
        store: Store,
        rank: int,
        size: int,
        *,
        restart: int | str = 0,
        device: str | torch.device = "cpu",
        deadline_s: float = DEADLINE_S,
        stacks: Path | None = None,
    ) -> World:
        """A world whose ranks meet in `store`; after a restart another `restart` keeps them from a dead group's addresses."""
        if not 0 <= rank < size:
            raise CommError(f"rank {rank} does not exist in a world of {size}.")
        prefix = PrefixStore(f"nestpipe/restart-{restart}", store)
        device = torch.device(device)
        if device.type not in EXCHANGES:
            raise CommError(f"no exchange for device '{device}'; there is one for {', '.join(EXCHANGES)}.")
        return World(rank=rank, size=size, store=prefix, device=device, deadline_s=deadline_s, stacks=stacks)

    def channel(self, name: str, *, deadline_s: float | None = None, ranks: Sequence[int] = ()) -> Channel:
        """A new lane; a meeting of all ranks, raises CommError naming those that did not come before the deadline.

        `deadline_s` is for its exchanges, by default that of the world. With `ranks` it is a lane of these alone, among whom
        this one must be: they meet, and are counted from 0 on it.
        """
        world = self
        if ranks:
            world = replace(self, rank=list(ranks).index(self.rank), size=len(ranks), members=tuple(ranks))
            name = f"{name} of {named_ranks(ranks)}"
        if name in self._channels:
            raise CommError(f"lane '{name}' exists already; a group belongs to one lane.")
        self.store.set(f"lane/{name}/{world.rank}", "here")
        start = time.monotonic()
        try:
            group = None if world.size == 1 else _new_group(self, name, world)
        except RuntimeError as error:
            absent = tuple(
                world.number(rank) for rank in range(world.size) if not self.store.check([f"lane/{name}/{rank}"])
            )
            blame = f"{named_ranks(absent)} never made it" if absent else _first_line(error)
            message = f"lane '{name}' not made after {in_seconds(time.monotonic() - start)}; {blame}."
            raise CommError(message + dump_stacks(self), ranks=absent) from error
        self._channels[name] = Channel(world, name, group, deadline_s=deadline_s or self.deadline_s)
        return self._channels[name]

    def close(self) -> None:
        """Ends all lanes; peers that still wait on one see a closed connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if self.device.type != "cpu" and dist.is_initialized():
            dist.destroy_process_group()


class ChannelWatch(Protocol):
    """Who wants to know what a lane sends, and when somebody waits for it; called in the thread that does."""

    def launched(self, name: str, num_bytes: int, num_rows: int) -> None:
        """An exchange was launched: bytes to other ranks, first dimensions of what goes to all ranks."""
        ...

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Surrounds a wait for an exchange."""
        ...


class Channel:
    """One process group and its exchanges, in the same order on every rank, launched by one thread."""

    def __init__(self, world: World, name: str, group: Any, *, deadline_s: float):
        self.world, self.name, self.deadline_s = world, name, deadline_s
        self.group = group
        self._num_exchanges = 0
        self._thread: int | None = None
        self.broken: CommError | None = None
        self.unfinished: set[Handle] = set()  # keeps buffers alive while gloo reads and writes them
        self.watch: ChannelWatch | None = None

    def exchange(
        self,
        name: str,
        send: Sequence[Tensor],
        receive: Sequence[Tensor],
        *,
        tag: int | None = None,
        wire: torch.dtype | None = None,
        where: str = "",
    ) -> Handle:
        """Launches send[p] to every rank p and receive[p] from it; own part copied. See `post` for the rest."""
        return self.post(name, receive, tag=tag, wire=wire, where=where).launch(send)

    def post(
        self,
        name: str,
        receive: Sequence[Tensor],
        *,
        tag: int | None = None,
        wire: torch.dtype | None = None,
        where: str = "",
        own: bool = True,
    ) -> Handle:
        """Posts the receives of an exchange, to be launched later by `launch(send)`; contiguous, one per rank.

        `tag` (below MAX_TAG) tells exchanges apart that ranks post in another order than they launch; without it they
        are counted. `wire` is a 16-bit type for wider floats on their way, the own part included: not exact. `where`
        stands in error messages. Without `own` the own part stays with the caller, neither checked nor copied. On nccl and hccl
        (written, not yet run) the work is one all_to_all_single at launch.
        """
        self.check_use()
        if len(receive) != self.world.size:
            raise ValueError(f"exchange '{name}' has {len(receive)} receives for {self.world.size} ranks.")
        if tag is not None and not 0 <= tag < MAX_TAG:
            raise ValueError(f"exchange '{name}' has tag {tag}, but tags end below {MAX_TAG:,}.")
        number = self._num_exchanges % MAX_TAG if tag is None else MAX_TAG + tag
        self._num_exchanges += tag is None
        handle = Handle(self, name, receive, number=number, wire=wire, where=where, own=own)
        self.unfinished.add(handle)
        handle.post()
        return handle

    def exchange_sizes(self, sizes: Sequence[Sequence[int]], *, name: str = "sizes") -> list[list[int]]:
        """Tells rank p the integers sizes[p] and returns what each rank told this one; all lists of equal length."""
        send = torch.tensor(sizes, dtype=torch.int64, device=self.world.device).reshape(self.world.size, -1)
        receive = torch.empty_like(send)
        self.exchange(name, send.unbind(), receive.unbind()).wait()
        return [[int(value) for value in row] for row in receive.tolist()]

    def all_gather_ints(self, values: Sequence[int], *, name: str = "ints") -> list[list[int]]:
        """The integers of every rank, equally many on each."""
        return self.exchange_sizes([values] * self.world.size, name=name)

    def all_gather_floats(self, values: Sequence[float], *, name: str = "floats") -> list[list[float]]:
        """The numbers of every rank in fp64, equally many on each."""
        own = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        receive = [torch.empty_like(own) for _ in range(self.world.size)]
        self.exchange(name, [own] * self.world.size, receive).wait()
        return [[float(value) for value in row.tolist()] for row in receive]

    def all_gather_bytes(self, data: bytes, *, name: str = "bytes") -> list[bytes]:
        """The bytes of every rank, of any length."""
        lengths = [row[0] for row in self.all_gather_ints([len(data)], name=f"{name}/lengths")]
        receive = [torch.empty(length, dtype=torch.uint8, device=self.world.device) for length in lengths]
        own = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(self.world.device)
        self.exchange(name, [own] * self.world.size, receive).wait()
        return [part.cpu().numpy().tobytes() for part in receive]

    def broadcast_bytes(self, data: bytes, source: int, *, name: str = "broadcast") -> bytes:
        """The source's bytes, on every rank; what the others pass is not looked at."""
        return self.all_gather_bytes(data if self.world.rank == source else b"", name=name)[source]

    def agree(self, name: str, digest: str) -> None:
        """Raises CommError on every rank, with all values and who has them, unless `digest` is the same everywhere."""
        values = [data.decode() for data in self.all_gather_bytes(digest.encode(), name=f"agree/{name}")]
        if len(set(values)) == 1:
            return
        holders = {value: tuple(rank for rank, own in enumerate(values) if own == value) for value in values}
        first, *others = (
            f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} '{value}'" for value, ranks in holders.items()
        )
        blame = tuple(rank for rank, value in enumerate(values) if value != values[0])
        raise CommError(f"{name} differs: {first}, but {', '.join(others)}. All ranks must run the same.", ranks=blame)

    def barrier(self, *, name: str = "barrier") -> None:
        """Returns when every rank has come."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.world.device)
        self.exchange(name, [empty] * self.world.size, [empty] * self.world.size).wait()

    def sum_in_rank_order(self, buffer: Tensor, *, name: str = "sum", where: str = "") -> None:
        """Replaces a vector by the sum over ranks, ((x0 + x1) + x2) + ... elementwise: the same bits on every rank."""
        if self.world.size <= 2:  # all of it in one trip is no more bytes than halves in two
            whole = [torch.empty_like(buffer) for _ in range(self.world.size)]
            self.exchange(name, [buffer] * self.world.size, whole, where=where).wait()
            buffer.copy_(whole[0])
            for other in whole[1:]:
                buffer.add_(other)
            return
        parts = buffer.tensor_split(self.world.size)  # 1 rank r adds part r; sizes may differ by one, or be zero
        received = [torch.empty_like(parts[self.world.rank]) for _ in parts]
        self.exchange(f"{name}/scatter", parts, received, where=where).wait()
        total = received[0]
        for other in received[1:]:  # 2 in rank order, whoever came first
            total.add_(other)
        everywhere = [total] * self.world.size  # 3 everyone gets all parts
        self.exchange(f"{name}/gather", everywhere, parts, where=where).wait()

    def all_to_all(self, target: Tensor, source: Tensor, target_sizes: list[int], sizes: list[int]) -> Any:
        """The one collective of nccl and hccl, launched."""
        return dist.all_to_all_single(target, source, target_sizes, sizes, group=self.group, async_op=True)

    def hand_over(self) -> None:
        """Lets another thread launch from now on; the old one must have stopped."""
        self._thread = None

    def give_up(self, reason: str, *, ranks: tuple[int, ...] = ()) -> None:
        """Ends the lane at once because this rank cannot go on: its own threads that wait and all peers learn why.

        `ranks` are those to blame, by default this one.
        """
        if self.broken is None:
            own = self.world.number(self.world.rank)
            self.broken = CommError(f"it was given up: {reason}.", ranks=ranks or (own,))
            failure_report.publish(
                self.world.store, own, failure_report.FailureReport("", reason, self.broken.ranks, own)
            )
        if self.group is not None and self.world.device.type == "cpu":
            # What ends a wait in another thread is closed connections, and what closes them is a wait that times out.
            peer, nothing = (self.world.rank + 1) % self.world.size, torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                self.group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends the lane; exchanges that are not finished are lost."""
        self.broken = self.broken or CommError(f"lane '{self.name}' is closed.")
        self.group = None
        self.unfinished.clear()

    def check_use(self) -> None:
        if self.broken:
            raise CommError(f"lane '{self.name}' cannot be used any more: {self.broken}", ranks=self.broken.ranks)
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise CommError(
                f"lane '{self.name}' belongs to another thread; two threads on one group mix their messages. "
                "Use a lane of its own, or hand_over() between them."
            )


def _new_group(whole: World, name: str, world: World) -> Any:
    """The process group of a lane of `world`, which is the whole or a part of it."""
    backend, timeout = EXCHANGES[world.device.type], timedelta(seconds=world.deadline_s)
    if backend == "gloo":  # stands alone, so that many worlds can follow each other in one process
        gloo: Any = dist.ProcessGroupGloo  # its type stubs lack the options
        options = gloo._Options()
        options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
        options._timeout = timeout
        return gloo(PrefixStore(f"group/{name}", world.store), world.rank, world.size, options)
    if not dist.is_initialized():
        dist.init_process_group(backend, store=whole.store, rank=whole.rank, world_size=whole.size, timeout=timeout)
    some = list(world.members) or None
    return dist.new_group(some, backend=backend, timeout=timeout, use_local_synchronization=some is not None)


@cache
def _gloo_devices(interfaces: str, process: int) -> list[Any]:
    """What gloo sends through, once for all lanes of a process: each has a thread that looks for work 100 times a second."""
    make = dist.ProcessGroupGloo
    named = [make.create_device(interface=name) for name in interfaces.split(",") if name]
    return named or [make.create_default_device()]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
