"""Buckets and owners: a fixed hash maps an id to one of a fixed number of buckets; each rank owns a range of buckets.

The bucket of an id never changes; the owner of a bucket depends only on the number of ranks. So a
checkpoint written bucket by bucket loads on any number of ranks.

Limits of a table are divided over its buckets, and each bucket keeps its own. So every number of
ranks evicts the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.config import MAX_CHUNKS, EmbeddingConfig
from nestpipe.embedding.unique_ids import owner_of

FINE_CHUNKS = MAX_CHUNKS  # into which the buckets of an owner are divided; chunks are made of these
MIN_ROWS_PER_BUCKET = 64  # of a bounded table: hashing fills smaller buckets too unevenly


def num_table_buckets(config: EmbeddingConfig) -> int:
    """The number of buckets of a table, which is also its largest number of ranks.

    That is `num_buckets`, or fewer for a bounded table that has less than 64 rows for each.
    """
    if not config.max_rows:
        return config.num_buckets
    return min(config.num_buckets, max(1, config.max_rows // MIN_ROWS_PER_BUCKET))


def too_many_ranks(config: EmbeddingConfig, num_ranks: int) -> str | None:
    """Why so many ranks cannot share a table; None if they can."""
    num = num_table_buckets(config)
    if num_ranks <= num:
        return None
    if num == config.num_buckets:
        return (
            f"{num_ranks} ranks cannot share embedding.num_buckets = {num}: each rank needs a bucket of its own. "
            "Start a run with more buckets, or use fewer ranks."
        )
    return (
        f"{num_ranks} ranks cannot share a table of embedding.max_rows = {config.max_rows:,}: it has {_counted(num, 'bucket')} of "
        f"at least {MIN_ROWS_PER_BUCKET} rows, and each rank needs a bucket of its own. Start a run with --embedding.max-rows "
        f"{num_ranks * MIN_ROWS_PER_BUCKET} or more, or use at most {_counted(num, 'rank')}."
    )


def fewer_buckets(config: EmbeddingConfig) -> str:
    """Says how many ranks a bounded table allows if it takes fewer buckets than `num_buckets`; empty if it does not."""
    num = num_table_buckets(config)
    if num == config.num_buckets:
        return ""
    return (
        f"embedding.max_rows {config.max_rows:,} takes {num:,} of {config.num_buckets:,} buckets, so that each has at least "
        f"{min(MIN_ROWS_PER_BUCKET, config.max_rows)} rows: this run can use at most {_counted(num, 'rank')}."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def divide(total: int, num_buckets: int) -> Tensor:
    """Divides a limit of a table over its buckets, [num_buckets]: equally, and the first ones get the remainder."""
    share, rest = divmod(total, num_buckets)
    return torch.full((num_buckets,), share).index_fill_(0, torch.arange(rest), share + 1)


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
