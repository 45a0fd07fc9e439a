"""A small ranking model with rich features, and requests for it."""

from __future__ import annotations

from dataclasses import replace

import torch

from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.routing import route
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of
from nestpipe.models.config import RankingConfig
from nestpipe.models.prefix_inference import CandidateBatch, Ranker
from nestpipe.models.ranking import Ranking, build_ranking
from nestpipe.rng import hash_text

MAX_LEN = 12
NUM_ITEMS = 40
SCHEMA = Schema(
    features=(
        Feature(name="watch", kind="number"),
        Feature(name="hate", kind="number"),
        Feature(name="stars", kind="number"),
        Feature(name="hour", kind="id"),
        Feature(name="tags", kind="ids", scope="item"),
        Feature(name="price", kind="number", scope="item"),
        Feature(name="age", kind="id", scope="user"),
    ),
    labels=(
        Label(name="hated", kind="binary", feature="hate"),
        Label(name="level", kind="ordinal", feature="stars", lowest=1, num_levels=5, weight=0.5),
        Label(name="seconds", kind="regression", feature="watch", log=True),
    ),
)
CONFIG = RankingConfig(
    dim=8,
    num_blocks=3,
    num_heads=2,
    qk_dim=3,
    v_dim=5,
    ffn_dim=12,
    head_dim=6,
    num_time_buckets=60,  # up to two years
    features=("hour", "tags", "price", "age"),
)


def build(backbone: str = "hstu", dtype: torch.dtype = torch.float64, kind: type[Ranking] = Ranking) -> Ranking:
    """Biases and weights of order one: with the small ones of a new model, wrong attention would hide in the noise."""
    model = build_ranking(replace(CONFIG, backbone=backbone), SCHEMA, max_len=MAX_LEN, seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".position", ".time", "uvqk")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    if kind is not Ranking:
        model.__class__ = kind
    return model.to(dtype)


def table_rows(lookups, dtype=torch.float64, seed=5, leaves=None):
    """Rows of order one for any lookups, from fixed tables; `leaves` collects them for their gradients."""
    plan = route([lookups], sorted({lookup.table for lookup in lookups.values()}), Owners(1, 1))
    found = {}
    for name, table in plan.tables.items():
        generator = torch.Generator().manual_seed(seed + abs(hash_text(name)) % 10**6)
        rows = torch.randn(400, CONFIG.dim, generator=generator, dtype=torch.float64) * 0.4
        found[name] = rows.index_select(0, table.ids).to(dtype)
    if leaves is not None:
        leaves.update({name: rows.requires_grad_() for name, rows in found.items()})
    return plan.rows(0, found)


def ranker(model: Ranking, *, weights: str = "step 1", seed: int = 5) -> Ranker:
    return Ranker(model, lambda lookups: table_rows(lookups, model.place.dtype, seed), weights=weights)


def item_features(items: torch.Tensor) -> dict[str, Jagged]:
    """Functions of the item, as in a side table."""
    lengths = items % 4
    tags = torch.cat([torch.arange(int(n)) + int(item) % 7 for item, n in zip(items, lengths, strict=True)] or [items])
    return {
        "tags": Jagged(tags, offsets_of(lengths), 3),
        "price": Jagged.singles((items % 5).float() / 5),
    }


def events(num: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    pick = lambda low, high: torch.randint(low, high, (num,), generator=generator)  # noqa: E731
    hated = pick(0, 2).float()
    hated[pick(0, 4) == 0] = torch.nan
    return {
        "items": pick(0, NUM_ITEMS),
        "times": pick(0, 10**6).sort().values,
        "hour": pick(0, 24),
        "hated": hated,
        "level": pick(0, 5).float(),
        "seconds": pick(0, 50).float() / 10,
    }


def history(lengths: list[int], *, seed: int = 0, asked: int = 2_000_000) -> Batch:
    """Histories of some users, asked for at one time."""
    generator = torch.Generator().manual_seed(seed)
    users = [events(length, generator) for length in lengths]
    joined = {name: torch.cat([user[name] for user in users]) for name in users[0]}
    offsets, longest = offsets_of(torch.tensor(lengths)), max(lengths)
    following = [torch.cat([user["times"][1:], torch.tensor([asked])])[: len(user["times"])] for user in users]
    singles = {name: Jagged.singles(joined[name]) for name in ("hour", "hated", "level", "seconds")}
    return Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.arange(len(lengths)) + 100,
        items=Jagged(joined["items"], offsets, longest),
        times=Jagged(joined["times"], offsets, longest),
        query_times=Jagged(torch.cat(following), offsets, longest),
        event_features={**item_features(joined["items"]), **singles},
        sample_features={"age": Jagged.singles(torch.arange(len(lengths)) % 3)},
    )


def candidates(counts: list[int], seed: int = 9) -> CandidateBatch:
    items = torch.randint(0, NUM_ITEMS, (sum(counts),), generator=torch.Generator().manual_seed(seed))
    return CandidateBatch(Jagged(items, offsets_of(torch.tensor(counts)), max(counts)), item_features(items))


def select(found: CandidateBatch, places: torch.Tensor, counts: list[int]) -> CandidateBatch:
    """Some candidates, as requests of other sizes."""
    features = {name: one.select(places) for name, one in found.features.items()}
    return CandidateBatch(Jagged(found.items.values[places], offsets_of(torch.tensor(counts)), max(counts)), features)
