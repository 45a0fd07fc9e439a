"""What a window knows of one table: what this rank asks for, what it owns, and the messages under way (window.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from nestpipe.comm import Handle
from nestpipe.embedding.groups import Union
from nestpipe.embedding.held import Held
from nestpipe.embedding.hot import Hot
from nestpipe.embedding.route import Requests, TablePlan
from nestpipe.embedding.rows import Arrived
from nestpipe.embedding.wire import Narrow
from nestpipe.errors import CommError


@dataclass(slots=True, eq=False)
class Asked:
    """An asker's side of one table in a window."""

    plan: TablePlan
    leaves: list[Tensor]  # [part]: rows [u, D] of its distinct ids; new ones arrive there, the others are copied
    grads: list[Tensor | None]  # [part]: sums [u, D] of the parts up to this one, once it has computed
    narrow: Narrow | None = None  # if some rows travel in 16 bits
    hot: Hot = field(default_factory=Hot)  # of the first leaf, and of the last one
    # Of the first leaf, cold and hot rows as they arrive, and their positions.
    halves: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Owned:
    """An owner's side of one table in a window, or of a slice of it."""

    requests: Requests
    narrow: Narrow | None = None  # if some rows travel in 16 bits
    hot: Hot = field(default_factory=Hot)  # of the ids of all askers
    num_collected: int = 0  # messages of gradients that have come
    held: Held | None = None
    halves: dict[bool, tuple[Held, Arrived]] = field(
        default_factory=dict
    )  # cold and hot rows, and their sums, if split
    sums: Arrived | None = None  # of a slice, where they will be
    union: Union | None = None  # of all groups; then these are the requests that it has
    totals: Tensor | None = None  # [K, D] what they add up to, if somebody asked

    def check_collected(self, num_messages: int) -> None:
        if self.num_collected < num_messages:
            raise CommError("an update before its gradients were collected: a dependency is missing in the schedule.")


@dataclass(frozen=True, slots=True, eq=False)
class SentRows:
    """One message of rows of a table, to every asker and from every owner."""

    handle: Handle
    wanted: Held  # the rows that travel, asker after asker
    leaving: Tensor  # room for them
    sends: list[Tensor]  # to each asker: its part of that
    room: list[Tensor]  # for each owner: where its rows belong
    own: Held  # the rows that do not travel, but are copied to where they belong
    packed: list[Tensor] | None = None  # from each owner: bytes, if some rows travel in 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class SentSums:
    """One message of gradient sums of a table, to every owner and from every asker."""

    handle: Handle
    leaving: Tensor | None  # positions in the leaf, owner by owner, of what travels; None for all of it
    own: Tensor | None  # positions of what is copied; None if it is used where it is
    sent: list[int]  # to each owner
    room: Tensor  # for what leaves, if that is not all of the leaf
    arrivals: list[Tensor]  # of each asker


def computed(grads: Tensor | None) -> Tensor:
    if grads is None:
        raise CommError("gradients were needed before they were computed: a dependency is missing in the schedule.")
    return grads


def united(owned: Owned) -> Union:
    if owned.union is None:
        raise CommError("sums of groups before their ids were known: a dependency is missing in the schedule.")
    return owned.union


def held_of(owned: Owned) -> Held:
    if owned.held is None:
        raise CommError("rows were asked for before they were retrieved: a dependency is missing in the schedule.")
    return owned.held
