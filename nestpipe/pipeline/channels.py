"""The channels of a run: one process group for each thread that communicates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nestpipe.distributed.process_group import Channel, World
from nestpipe.embedding.replica_groups import Replicas, join

_SAVE_S = 1800.0  # deadline of checkpoint exchanges: a rank may write much more than another


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels of a run. One thread at a time uses each: the checkpoint writer `saves`, the runner the others."""

    control: Channel
    keys: Channel
    rows: Channel
    dense: Channel
    saves: Channel
    replicas: Replicas | None = None  # with replica groups; `keys` and `rows` are then those of this rank's group
    flags: Channel | None = None  # on the host, for the thread that sends rows, if those are on a device

    @staticmethod
    def of(world: World) -> Channels:
        """Creates all channels. Collective."""
        control, keys = world.channel("control"), world.channel("keys")
        rows, dense = world.channel("rows", on="device"), world.channel("dense", on="device")
        saves = world.channel("saves", deadline_s=max(_SAVE_S, world.deadline_s))
        flags = None if rows.device.type == "cpu" else world.channel("flags")
        return Channels(control, keys, rows, dense, saves, flags=flags)

    def on_host(self) -> Channels:
        """The same ranks with rows and weights on the host, for what is read before training."""
        return self if self.flags is None else replace(self, rows=self.keys, dense=self.control, flags=None)

    def in_groups(self, num_groups: int) -> Channels:
        """The same channels with so many replica groups. Collective."""
        if num_groups == 1:
            return self
        keys, rows, replicas = join(self.rows.world, num_groups, all_ranks=self.rows)
        return replace(self, keys=keys, rows=rows, replicas=replicas)
