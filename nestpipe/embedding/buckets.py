"""Buckets and owners: a fixed hash maps an id to one of a fixed number of buckets; each rank owns a range of buckets.

The bucket of an id never changes; the owner of a bucket depends only on the number of ranks. So a
checkpoint written bucket by bucket loads on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nestpipe.embedding.config import MAX_CHUNKS
from nestpipe.embedding.unique_ids import owner_of

FINE_CHUNKS = MAX_CHUNKS  # into which the buckets of an owner are divided; chunks are made of these


@dataclass(frozen=True, slots=True)
class Owners:
    """The ranks that own the buckets."""

    num_buckets: int
    world_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= self.num_buckets:
            raise ValueError(
                f"{self.world_size} ranks cannot share {self.num_buckets} buckets; each rank needs at least one"
            )

    def bucket_of(self, ids: Tensor) -> Tensor:
        """The bucket [n] of each id."""
        return owner_of(ids, self.num_buckets, self.num_buckets)

    def owner_of(self, ids: Tensor) -> Tensor:
        """The rank [n] that holds each id."""
        return owner_of(ids, self.num_buckets, self.world_size)

    def fine_chunks_of(self, ids: Tensor) -> Tensor:
        """The fine chunk [n] of each id: chunk c of rank r is FINE_CHUNKS * r + c. With few buckets some are empty."""
        return owner_of(ids, self.num_buckets, FINE_CHUNKS * self.world_size)

    def buckets_of(self, rank: int) -> range:
        """The buckets that a rank owns."""
        first, last = (-(-edge * self.num_buckets // self.world_size) for edge in (rank, rank + 1))
        return range(first, last)
