"""Quality of semantic ids: coverage, collisions, balance of the codes, purity of the prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from nestpipe.generative.residual_kmeans import CHUNK
from nestpipe.generative.semantic_ids import Registry

_NEIGHBOURS = 10
_SAMPLE = 2000


@dataclass(frozen=True, slots=True)
class LevelFigures:
    """One level: codes in use, largest over mean number of items per code, normalised entropy, purity.

    `purity` is the share of an item's 10 nearest neighbours that have its codes up to this level; None without vectors.
    """

    used: int
    size: int
    largest: float
    evenness: float
    purity: float | None


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Statistics of a registry on a catalogue. Collisions are counted before the suffix level."""

    version: str
    num_items: int
    coverage: float  # share of the catalogue that has an id
    num_leaves: int
    collided: float  # share of the items that share their id, before the suffix level
    p90: float  # quantiles of items per id, over items
    p99: float
    p999: float
    most: int
    levels: tuple[LevelFigures, ...]

    def __rich__(self) -> Table:
        table = Table(
            title=f"semantic ids {self.version}: {self.num_items:,} items, coverage {self.coverage:.2%}, {self.num_leaves:,} leaves",
            caption=f"items that share their codes: {self.collided:.2%}; items per id P90 {self.p90:g}, P99 {self.p99:g}, "
            f"P999 {self.p999:g}, most {self.most}",
        )
        for header in ("level", "codes used", "largest / mean", "evenness", "purity"):
            table.add_column(header, justify="right")
        for number, level in enumerate(self.levels):
            purity = "" if level.purity is None else f"{level.purity:.3f}"
            table.add_row(
                str(number), f"{level.used}/{level.size}", f"{level.largest:.2f}", f"{level.evenness:.3f}", purity
            )
        return table


def diagnose(registry: Registry, catalogue: Tensor | None = None, vectors: Tensor | None = None) -> Diagnostics:
    """Statistics of a registry; coverage of a catalogue (ids), purity from the vectors [I, D] of the registry's items."""
    main = registry.codes[:, : registry.config.levels]
    inverse, counts = main.unique(dim=0, return_inverse=True, return_counts=True)[1:]
    shared = counts.index_select(0, inverse).double()
    quantiles = torch.quantile(shared, torch.tensor([0.9, 0.99, 0.999], dtype=torch.float64), interpolation="higher")
    covered = 1.0 if catalogue is None else float(torch.isin(catalogue, registry.items).double().mean())
    purity = [None] * registry.config.levels if vectors is None else _purity(main, vectors)
    return Diagnostics(
        version=registry.version,
        num_items=len(registry.items),
        coverage=covered,
        num_leaves=registry.trie().num_leaves,
        collided=float((shared > 1).double().mean()),
        p90=float(quantiles[0]),
        p99=float(quantiles[1]),
        p999=float(quantiles[2]),
        most=int(counts.max()),
        levels=tuple(
            _level(main[:, level], registry.sizes[level], purity[level]) for level in range(registry.config.levels)
        ),
    )


def _level(codes: Tensor, size: int, purity: float | None) -> LevelFigures:
    counts = torch.bincount(codes, minlength=size).double()
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * share.log()).sum())
    largest = float(counts.max() / counts.mean())
    evenness = entropy / float(torch.tensor(float(size)).log()) if size > 1 else 1.0
    return LevelFigures(int((counts > 0).sum()), size, largest, evenness, purity)


def _purity(codes: Tensor, vectors: Tensor) -> list[float | None]:
    """Purity per level, from a sample of items evenly spaced in the catalogue."""
    rows = torch.arange(0, len(vectors), max(1, len(vectors) // _SAMPLE))
    unit = F.normalize(vectors.float(), dim=1)
    top = torch.cat([_neighbours(unit, part) for part in rows.split(max(1, CHUNK // len(unit)))])
    same = codes.index_select(0, top.flatten()).view(*top.shape, -1) == codes.index_select(0, rows).unsqueeze(1)
    return [float(same[:, :, : level + 1].all(2).double().mean()) for level in range(codes.shape[1])]


def _neighbours(unit: Tensor, rows: Tensor) -> Tensor:
    """Nearest neighbours [n, 10] of rows [n], itself excluded."""
    near = unit.index_select(0, rows) @ unit.T
    near[torch.arange(len(rows)), rows] = -torch.inf
    return near.topk(min(_NEIGHBOURS, len(unit) - 1), dim=1).indices
