"""An index whose vectors can be replaced, added and removed while it is searched.

    search  =  the index that was built, without places that have changed  +  exact scores of the vectors that came since

Any kind of index works, also one of faiss that cannot remove. Changed vectors are scored exactly, so many of them are slow: after
a tenth of the built ones the next change builds the index anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestpipe.gateway.candidates import Floats, Index, Ints, best_places

_REBUILD_SHARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class LiveIndex:
    """Vectors [n, D] by place. Immutable: a change returns another index, sharing the built one."""

    built: Index
    build: Callable[[Floats], Index]
    num_built: int
    vectors: Floats
    is_gone: NDArray[np.bool_]  # [n]
    later: Ints  # places whose vectors the built index does not have, ascending

    @staticmethod
    def of(vectors: Floats, build: Callable[[Floats], Index]) -> LiveIndex:
        """`build` makes an index of vectors."""
        nobody = np.zeros(len(vectors), np.bool_)
        return LiveIndex(build(vectors), build, len(vectors), vectors, nobody, np.empty(0, np.int64))

    def changed(self, places: Ints, vectors: Floats, *, removed: Ints) -> LiveIndex:
        """With other vectors at places, which may follow the last one, and without some places."""
        size = max(len(self.vectors), int(places.max()) + 1 if len(places) else 0)
        grown = np.zeros((size, self.vectors.shape[1]), np.float32)
        grown[: len(self.vectors)] = self.vectors
        grown[places] = vectors
        is_gone = np.zeros(size, np.bool_)
        is_gone[: len(self.is_gone)] = self.is_gone
        is_gone[places], is_gone[removed] = False, True
        later = np.union1d(self.later, places)
        if len(later) > _REBUILD_SHARE * self.num_built:
            return LiveIndex(self.build(grown), self.build, size, grown, is_gone, np.empty(0, np.int64))
        return LiveIndex(self.built, self.build, self.num_built, grown, is_gone, later)

    def search(self, query: Floats, k: int) -> Ints:
        """The places of at most k vectors, best first."""
        num_hidden = len(self.later) + int(self.is_gone.sum())
        found = self.built.search(query, k + num_hidden)
        found = found[~self.is_gone[found] & ~np.isin(found, self.later)]
        later = self.later[~self.is_gone[self.later]]
        both = np.sort(np.concatenate([found[:k], later]))
        return both[best_places(self.vectors[both] @ query, k)]
