"""The channels of a run: one process group for each thread that communicates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nestpipe.distributed.process_group import Channel, World
from nestpipe.embedding.replica_groups import Replicas, join

_SAVE_S = 1800.0  # one rank may have so much more to write or to copy than another


@dataclass(frozen=True, slots=True)
class Channels:
    """The message lanes of a run. Each is used by one thread at a time: that of the saves by the saver, others by the runner."""

    control: Channel
    keys: Channel
    rows: Channel
    dense: Channel
    saves: Channel
    replicas: Replicas | None = None  # of groups; then `keys` and `rows` are those of this rank's group

    @staticmethod
    def of(world: World) -> Channels:
        """A meeting of all ranks."""
        control, keys, rows, dense = (world.channel(name) for name in ("control", "keys", "rows", "dense"))
        return Channels(control, keys, rows, dense, world.channel("saves", deadline_s=max(_SAVE_S, world.deadline_s)))

    def in_groups(self, num_groups: int) -> Channels:
        """The same with all tables in each of so many groups of ranks; a meeting of all ranks."""
        if num_groups == 1:
            return self
        keys, rows, replicas = join(self.rows.world, num_groups, all_ranks=self.rows)
        return replace(self, keys=keys, rows=rows, replicas=replicas)
