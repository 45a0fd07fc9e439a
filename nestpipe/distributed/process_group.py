"""World, channels and exchanges: the only module that calls torch.distributed.

    world   = World.from_environment()                 # torchrun's variables; without them a world of one
    channel = world.channel("rows")                    # one process group, used by one thread
    handle  = channel.exchange("rows/item", send, receive, where="step 230, micro-batch 2")    # launched
    ...                                                # compute meanwhile
    handle.wait()                                      # complete, or CommError names the missing ranks

Invariants:

- Every rank creates the same channels in the same order and launches the same exchanges on each,
  empty ones included.
- One thread launches on a channel; any thread may wait.
- Both ends know the size of a message before it is sent.
- A world of one runs the same code without process groups.
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
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from nestpipe.distributed.clock import Clock
from nestpipe.distributed.exchange import Handle, dump_stacks, in_seconds, named_ranks
from nestpipe.distributed.failure_report import FailureReport, publish
from nestpipe.distributed.rendezvous import rendezvous
from nestpipe.errors import CommError

__all__ = ["DEADLINE_S", "BACKENDS", "MAX_TAG", "Handle", "Channel", "ChannelWatch", "World"]

DEADLINE_S = 60.0
MAX_TAG = 1 << 16
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The communication library of each device type; others may be registered with torch."""
Place = Literal["host", "device"]
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NEVER_SENT = (1 << 31) - 1  # no message has this tag: the sizes in tags (exchange.py) stay below 2**14 - 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class World:
    """All ranks of a run, as one of them sees it. Created by `single`, `from_environment` or `from_store`."""

    rank: int
    size: int
    store: Store
    device: torch.device
    deadline_s: float
    stacks: Path | None  # folder for the stacks of all threads when a deadline passes
    members: tuple[int, ...] = ()  # of a subgroup: the global rank of each member; () for the whole world
    clock: Clock = time
    _channels: dict[str, Channel] = field(default_factory=dict)

    def global_rank(self, rank: int) -> int:
        """The rank in the whole world; messages name this one."""
        return self.members[rank] if self.members else rank

    @staticmethod
    def single(*, device: str | torch.device = "cpu", deadline_s: float = DEADLINE_S) -> World:
        """A world of one, without a process group; an exchange with itself is a copy."""
        return World.from_store(HashStore(), 0, 1, device=device, deadline_s=deadline_s)

    @staticmethod
    def from_environment(
        *, device: str | torch.device = "cpu", deadline_s: float = DEADLINE_S, stacks: Path | None = None
    ) -> World:
        """The world of torchrun's variables; a world of one if none is set. Raises CommError if only some are set."""
        if not {"RANK", "WORLD_SIZE"} & set(os.environ):
            return World.single(device=device, deadline_s=deadline_s)
        if missing := [name for name in _VARIABLES if name not in os.environ]:
            raise CommError(f"{', '.join(missing)} not set, but other variables of torchrun are. Start with torchrun.")
        rank, size, host, port = (os.environ[name] for name in _VARIABLES)
        # Under torchrun its agent hosts the store; otherwise rank 0 does.
        is_host = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=deadline_s)
        try:
            store = TCPStore(host, int(port), is_master=is_host, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise CommError(f"rank {rank} cannot open the store at {host}:{port}: {_first_line(error)}") from error
        # Not TORCHELASTIC_RESTART_COUNT: each machine's agent counts its own failures, so the counts differ after one.
        incarnation = rendezvous(PrefixStore("nestpipe/rendezvous", store), int(rank), int(size), deadline_s=deadline_s)
        return World.from_store(
            store, int(rank), int(size), restart=incarnation, device=device, deadline_s=deadline_s, stacks=stacks
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
        clock: Clock = time,
    ) -> World:
        """A world whose ranks share `store`. A new `restart` value hides the addresses of the previous incarnation."""
        if not 0 <= rank < size:
            raise CommError(f"rank {rank} does not exist in a world of {size}.")
        prefix = PrefixStore(f"nestpipe/restart-{restart}", store)
        device = torch.device(device)
        if backend_of(device) is None:
            raise CommError(f"no communication backend for device '{device}'; supported: {', '.join(BACKENDS)}.")
        return World(
            rank=rank, size=size, store=prefix, device=device, deadline_s=deadline_s, stacks=stacks, clock=clock
        )

    def channel(
        self, name: str, *, on: Place = "host", deadline_s: float | None = None, ranks: Sequence[int] = ()
    ) -> Channel:
        """Creates a channel. Collective; raises CommError with the ranks that did not create it before the deadline.

        `on` says where the tensors that it sends are. `deadline_s` applies to its exchanges [default: the world's]. With `ranks`, which must contain this one, the
        channel is a subgroup: only these ranks call, and on it they are numbered from 0.
        """
        world = self
        if ranks:
            world = replace(self, rank=list(ranks).index(self.rank), size=len(ranks), members=tuple(ranks))
            name = f"{name} of {named_ranks(ranks)}"
        if name in self._channels:
            raise CommError(f"channel '{name}' exists already; names of channels are unique.")
        self.store.set(f"channel/{name}/{world.rank}", "")
        start = self.clock.monotonic()
        try:
            device = torch.device("cpu") if on == "host" else self.device
            group = None if world.size == 1 else _new_group(self, name, world, device)
        except RuntimeError as error:
            absent = tuple(
                world.global_rank(rank)
                for rank in range(world.size)
                if not self.store.check([f"channel/{name}/{rank}"])
            )
            blame = f"{named_ranks(absent)} never created it" if absent else _first_line(error)
            message = f"channel '{name}' not created after {in_seconds(self.clock.monotonic() - start)}; {blame}."
            raise CommError(message + dump_stacks(self), ranks=absent) from error
        self._channels[name] = Channel(world, name, group, device, deadline_s=deadline_s or self.deadline_s)
        return self._channels[name]

    def close(self) -> None:
        """Closes all channels; peers that still wait on one see a closed connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if self.device.type != "cpu" and dist.is_initialized():
            dist.destroy_process_group()


class ChannelWatch(Protocol):
    """Observer of a channel: what it sends and when a thread waits for it. Called in that thread."""

    def launched(self, name: str, num_bytes: int, num_rows: int) -> None:
        """An exchange was launched, with so many bytes to other ranks and rows to all ranks."""
        ...

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """A context around the wait for an exchange."""
        ...


class Channel:
    """One process group and its exchanges: the same order on every rank, launched by one thread."""

    def __init__(self, world: World, name: str, group: Any, device: torch.device, *, deadline_s: float):
        self.world, self.name, self.deadline_s = world, name, deadline_s
        self.device = device  # of the tensors that are sent
        self.group = group
        self._num_exchanges = 0
        self._thread: int | None = None
        self.broken: CommError | None = None
        self.unfinished: set[Handle] = set()  # keeps buffers alive while gloo uses them
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
        """Sends send[p] to each rank p and receives receive[p] from it; the own buffer is copied. Options as in `post`."""
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
        """Posts the receives of an exchange, contiguous and one per rank; `launch(send)` starts it.

        `tag` (below MAX_TAG) identifies exchanges that are posted in another order than they are launched; without it
        they are counted. `wire`: a 16-bit type in which wider floats are sent, the own buffer included; not exact.
        `where`: context for error messages. `own=False`: the caller handles its own buffer, which is neither checked
        nor copied. On nccl and hccl the exchange is one all_to_all_single at launch.
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
        """Sends integers sizes[p] to each rank p; returns what each rank sent. All lists have the same length."""
        send = torch.tensor(sizes, dtype=torch.int64, device=self.device).reshape(self.world.size, -1)
        receive = torch.empty_like(send)
        self.exchange(name, send.unbind(), receive.unbind()).wait()
        return [[int(value) for value in row] for row in receive.tolist()]

    def all_gather_ints(self, values: Sequence[int], *, name: str = "ints") -> list[list[int]]:
        """The integers of every rank; all ranks pass the same number."""
        return self.exchange_sizes([values] * self.world.size, name=name)

    def all_gather_floats(self, values: Sequence[float], *, name: str = "floats") -> list[list[float]]:
        """The numbers of every rank in fp64; all ranks pass the same number."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        receive = [torch.empty_like(own) for _ in range(self.world.size)]
        self.exchange(name, [own] * self.world.size, receive).wait()
        return [[float(value) for value in row.tolist()] for row in receive]

    def all_gather_bytes(self, data: bytes, *, name: str = "bytes") -> list[bytes]:
        """The bytes of every rank, of any length."""
        lengths = [row[0] for row in self.all_gather_ints([len(data)], name=f"{name}/lengths")]
        receive = [torch.empty(length, dtype=torch.uint8, device=self.device) for length in lengths]
        own = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(self.device)
        self.exchange(name, [own] * self.world.size, receive).wait()
        return [one.cpu().numpy().tobytes() for one in receive]

    def broadcast_bytes(self, data: bytes, source: int, *, name: str = "broadcast") -> bytes:
        """The bytes of rank `source`, on every rank; `data` of the others is ignored."""
        return self.all_gather_bytes(data if self.world.rank == source else b"", name=name)[source]

    def agree(self, name: str, digest: str) -> None:
        """Raises CommError on every rank unless `digest` is the same on all; the message lists values and ranks."""
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
        """Blocks until every rank has entered."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.exchange(name, [empty] * self.world.size, [empty] * self.world.size).wait()

    def all_to_all(self, target: Tensor, source: Tensor, target_sizes: list[int], sizes: list[int]) -> Any:
        """Launches the collective that nccl and hccl use for an exchange."""
        return dist.all_to_all_single(target, source, target_sizes, sizes, group=self.group, async_op=True)

    def hand_over(self) -> None:
        """Allows another thread to launch from now on; the previous one must have stopped."""
        self._thread = None

    def abort(self, reason: str, *, ranks: tuple[int, ...] = ()) -> None:
        """Ends the channel at once: waits in other threads of this rank and on all peers raise with the reason.

        `ranks` are those at fault [default: this one].
        """
        if self.broken is None:
            own = self.world.global_rank(self.world.rank)
            self.broken = CommError(f"aborted: {reason}.", ranks=ranks or (own,))
            publish(self.world.store, own, FailureReport("", reason, self.broken.ranks, own))
        if self.group is not None and self.device.type == "cpu":
            # Closed connections end the waits of other threads, and a wait that times out closes connections.
            peer, buffer = (self.world.rank + 1) % self.world.size, torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                self.group.recv([buffer], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Closes the channel; unfinished exchanges are dropped."""
        self.broken = self.broken or CommError(f"channel '{self.name}' is closed.")
        self.group = None
        self.unfinished.clear()

    def check_use(self) -> None:
        """Raises CommError if the channel has failed or belongs to another thread."""
        if self.broken:
            raise CommError(f"channel '{self.name}' cannot be used any more: {self.broken}", ranks=self.broken.ranks)
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise CommError(
                f"channel '{self.name}' belongs to another thread; two threads on one group mix their messages. "
                "Use one channel per thread, or call hand_over() in between."
            )


def backend_of(device: torch.device) -> str | None:
    """The communication library of a device: ours, or the one that was registered for it."""
    return BACKENDS.get(device.type) or dist.Backend.default_device_backend_map.get(device.type)


def _new_group(whole: World, name: str, world: World, device: torch.device) -> Any:
    """The process group of a channel of `world`, which is the whole world or a subgroup."""
    backend, timeout = backend_of(device), timedelta(seconds=world.deadline_s)
    if backend == "gloo":  # not registered globally, so one process can have many worlds in a row
        gloo: Any = dist.ProcessGroupGloo  # its type stubs lack the options
        options = gloo._Options()
        options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
        options._timeout = timeout
        return gloo(PrefixStore(f"group/{name}", world.store), world.rank, world.size, options)
    if not dist.is_initialized():
        dist.init_process_group(backend, store=whole.store, rank=whole.rank, world_size=whole.size, timeout=timeout)
    members = list(world.members) or None
    return dist.new_group(members, backend=backend, timeout=timeout, use_local_synchronization=members is not None)


@cache
def _gloo_devices(interfaces: str, process: int) -> list[Any]:
    """The gloo devices of a process, shared by all channels: each has a thread that polls 100 times a second."""
    gloo = dist.ProcessGroupGloo
    named = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    return named or [gloo.create_default_device()]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
