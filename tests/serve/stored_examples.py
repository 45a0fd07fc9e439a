"""KV prefixes to store, without a model."""

from __future__ import annotations

import torch

from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.kv_prefix import InputDigest, KVPrefix, PrefixKey

BLOCKS, SHAPE = 2, (2, 4)
SIZE = 4096  # of the smallest file


def made(user=3, length=10, *, salt=0, weights="w", has_times=True):
    """A prefix whose every number says whose it is, and its digest: histories with one salt begin alike."""
    items = torch.arange(length) + 1000 * salt
    batch = Batch(cursor=Cursor(0, 0), sample_ids=torch.tensor([user]), items=Jagged.from_rows([items.tolist()]))
    digest = InputDigest().then(batch, 0)
    key = PrefixKey(
        model="m",
        weights=weights,
        schema="s",
        user=user,
        digest=digest.text(),
        length=length,
        anchor="",
        dtype="float32",
    )

    def rows(place):
        grid = items[:, None, None] * 100 + torch.arange(8).reshape(SHAPE)
        return (grid + user + 0.25 * place).float()

    return KVPrefix(
        key=key,
        keys=tuple(rows(block) for block in range(BLOCKS)),
        values=tuple(rows(10 + block) for block in range(BLOCKS)),
        times=items * 7 if has_times else None,
        next_time=length * 7 if has_times else None,
        digest=digest,
    )


def same(a, b):
    times = (a.times is None and b.times is None) or torch.equal(a.times, b.times)
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    rows = all(torch.equal(x, y) for x, y in pairs)
    return rows and times and (a.key, a.next_time) == (b.key, b.next_time)


def write(store, prefix, **options):
    return store.write(prefix, since=store.num_forgets, **options)


def read(store, prefix):
    return store.read(prefix.key, prefix.digest)
