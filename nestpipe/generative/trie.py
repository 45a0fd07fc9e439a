"""Trie of semantic ids in CSR arrays, and item pools: masks over the leaves that may be generated.

    codes        0 1 | 0 1 1 | ...       per level, nodes sorted by code sequence
    first        the children of a node are a range of the next level; those of a leaf are a range of `leaf_items`

Nodes of a level are numbered in the order of their code sequences. So "ties by lower code sequence" is "ties by lower number",
and the leaves below a node are a range. A pool (scenario, stock, business rule) is a mask over leaves; a node is live if a leaf
below it is live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor

from nestpipe.errors import DataError
from nestpipe.jagged import ranges


@dataclass(frozen=True, slots=True, eq=False)
class ItemPool:
    """Live nodes per level, [1, nodes] for all requests or [R, nodes] per request; and a mask of items, if not all of a leaf."""

    version: str
    tree: str  # digest of the trie that the node numbers refer to
    live: tuple[Tensor, ...]
    items: Tensor | None = None  # mask over catalogue positions, [1, I] or [R, I]

    def at(self, level: int, nodes: Tensor) -> Tensor:
        """Whether nodes [R, ...] of a level are live."""
        live = self.live[level]
        if len(live) == 1:
            return live[0].index_select(0, nodes.flatten()).view_as(nodes)
        if len(live) != len(nodes):
            raise ValueError(f"there are {len(live)} pools for {len(nodes)} requests")
        return live.gather(1, nodes.flatten(1)).view_as(nodes)


class Trie:
    """All legal code sequences of a catalogue."""

    def __init__(self, items: Tensor, codes: Tensor, sizes: Sequence[int], *, version: str):
        """Items [I] by ascending id and their codes [I, levels]; items of a leaf keep their order."""
        self.version, self.sizes, self.items, self.item_codes = version, tuple(sizes), items, codes
        _check(items, codes, self.sizes)
        self.digest = blake2b(items.numpy().tobytes() + codes.contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        order = _sequence_number(codes, self.sizes).argsort(stable=True)
        ordered = codes.index_select(0, order)
        self.leaf_items = order
        self.codes: list[Tensor] = []
        self._prefixes: list[Tensor] = []
        self.first: list[Tensor] = []  # [level][n]: the first child, in this level, of node n of the level before
        is_new = torch.zeros(len(items), dtype=torch.bool)
        is_new[:1] = True
        above = torch.zeros(len(items), dtype=torch.int64)  # each item's node at the level before
        nodes = []
        for level in range(len(self.sizes)):
            is_new[1:] |= ordered[1:, level] != ordered[:-1, level]
            begins = is_new.nonzero().flatten()
            self.codes.append(ordered[:, level].index_select(0, begins))
            before = ordered.index_select(0, begins)[:, : level + 1]
            self._prefixes.append(_sequence_number(before, self.sizes[: level + 1]))
            self.first.append(_range_starts(above.index_select(0, begins), int(above[-1]) + 1))
            above = is_new.cumsum(0) - 1
            nodes.append(above)
        self.first.append(_range_starts(above, self.num_leaves))
        # The node of each item at each level, by catalogue position.
        self.item_nodes = torch.empty_like(codes).index_copy_(0, order, torch.stack(nodes, 1))

    def __deepcopy__(self, memo: dict[int, object]) -> Trie:
        return self  # never changed, and large: copies of a model share it

    @property
    def num_levels(self) -> int:
        return len(self.sizes)

    @property
    def num_leaves(self) -> int:
        return len(self.codes[-1])

    def positions(self, ids: Tensor) -> Tensor:
        """Catalogue positions of item ids; raises DataError for an item without a semantic id."""
        found = torch.searchsorted(self.items, ids).clamp_(max=len(self.items) - 1)
        unknown = self.items.index_select(0, found.flatten()).view_as(ids) != ids
        if bool(unknown.any()):
            raise DataError(
                f"item {int(ids[unknown][0])} has no semantic id of version {self.version}; encode it with the frozen codebooks "
                "('nestpipe sid extend')."
            )
        return found

    def children(self, level: int, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Children, at a level, of nodes [n] of the level before, and their flat indices in [n, codes of the level]."""
        start = self.first[level].index_select(0, nodes)
        count = self.first[level].index_select(0, nodes + 1) - start
        children = ranges(start, count)
        rows = torch.arange(len(nodes)).repeat_interleave(count)
        return children, rows * self.sizes[level] + self.codes[level].index_select(0, children)

    def prefixes(self, level: int, nodes: Tensor) -> Tensor:
        """Numbers of the code sequences that end in nodes of a level; they do not depend on the catalogue."""
        return self._prefixes[level].index_select(0, nodes)

    def leaf_codes(self, leaves: Tensor) -> Tensor:
        """The code sequences [n, levels] of leaves [n]."""
        item = self.leaf_items.index_select(0, self.first[-1].index_select(0, leaves))
        return self.item_codes.index_select(0, item)

    def pool(self, leaves: Tensor) -> ItemPool:
        """The pool of a mask over leaves, [leaves] or [R, leaves]; raises DataError if a row is empty."""
        mask = leaves.reshape(-1, leaves.shape[-1])
        if mask.shape[1] != self.num_leaves:
            raise DataError(f"the pool is a mask over {mask.shape[1]:,} leaves, but the trie has {self.num_leaves:,}.")
        if len(empty := (~mask.any(1)).nonzero()):
            where = f" of request {int(empty[0])}" if leaves.dim() > 1 else ""
            raise DataError(f"the pool{where} has no live leaf, so nothing can be generated. Relax its rule.")
        live = [mask]
        for level in range(self.num_levels - 1, 0, -1):
            before = torch.nn.functional.pad(live[0].cumsum(1), (1, 0)).index_select(1, self.first[level])
            live.insert(0, before[:, 1:] > before[:, :-1])
        return ItemPool(self.version, self.digest, tuple(live))

    def pool_of_items(self, allowed: Tensor) -> ItemPool:
        """The pool of a mask over catalogue positions, [I] or [R, I]: a leaf is live if one of its items is."""
        mask = allowed.reshape(-1, allowed.shape[-1])
        leaves = torch.zeros(len(mask), self.num_leaves, dtype=torch.int64)
        leaves.index_add_(1, self.item_nodes[:, -1], mask.to(torch.int64))
        return replace(self.pool((leaves > 0).view(*allowed.shape[:-1], -1)), items=mask)


def check_version(what: str, found: str, expected: str) -> None:
    """Raises DataError if something was made for another version of semantic ids: codes would mean other items."""
    if found != expected:
        raise DataError(
            f"{what} belongs to semantic ids of version {found}, but these are version {expected}: the same codes mean other "
            "items. Use the ids it was built with, or build it again."
        )


def check_pool(pool: ItemPool | None, trie: Trie) -> None:
    """Raises DataError if a pool was made for another trie: its node numbers would mean other leaves."""
    if pool is None:
        return
    check_version("the pool", pool.version, trie.version)
    if pool.tree != trie.digest:
        raise DataError(
            "the pool was made for another catalogue of the same semantic ids, so its leaves are others. Build it from the "
            "trie that is searched."
        )


def _range_starts(owner: Tensor, num_owners: int) -> Tensor:
    """Starts [num_owners + 1] of each owner's range in a list sorted by owner."""
    return torch.searchsorted(owner, torch.arange(num_owners + 1))


def _sequence_number(codes: Tensor, sizes: Sequence[int]) -> Tensor:
    """Code sequences as one number each, order-preserving."""
    number = torch.zeros(len(codes), dtype=torch.int64)
    for level, size in enumerate(sizes):
        number = number * size + codes[:, level]
    return number


def _check(items: Tensor, codes: Tensor, sizes: Sequence[int]) -> None:
    if not len(items) or codes.shape != (len(items), len(sizes)):
        raise DataError(f"a trie of semantic ids needs codes [{len(items)}, {len(sizes)}], got {list(codes.shape)}.")
    if math.prod(sizes) >= 2**63:
        raise DataError(
            f"levels of {tuple(sizes)} codes have more sequences than 63 bits can number; use fewer levels or codes."
        )
    wrong = (codes < 0) | (codes >= torch.tensor(sizes))
    if bool(wrong.any()):
        row, level = wrong.nonzero()[0].tolist()
        raise DataError(
            f"item {int(items[row])} has code {int(codes[row, level])} at level {level}, which has {sizes[level]} codes."
        )
