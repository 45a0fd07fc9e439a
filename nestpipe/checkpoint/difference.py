"""What differs between two checkpoints: by tensor name and by id, whoever wrote them with how many ranks, full or delta."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.checkpoint.chain import BucketRange
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.places import Place
from nestpipe.checkpoint.reader import by_id, current_rows, read_dense, table_sections
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.row_snapshot import ids_column
from nestpipe.embedding.table import WEIGHTS


@dataclass(slots=True)
class TableDifference:
    """Numbers of ids of a table that only one checkpoint has, and of values that differ per column."""

    name: str
    num_common: int
    num_only: tuple[int, int]
    changed: dict[str, int]

    @property
    def is_equal(self) -> bool:
        return self.num_only == (0, 0) and not any(self.changed.values())


def dense_differences(a: Place, b: Place) -> list[str]:
    """Names of the dense tensors that are not bitwise identical."""
    ours, theirs = (read_dense(folder, Manifest.read(folder)) for folder in (a, b))
    return [
        name
        for name in ours | theirs
        if name not in ours or name not in theirs or not same_bits(ours[name], theirs[name])
    ]


def table_differences(a: Place, b: Place) -> Iterator[TableDifference]:
    """Per table of either checkpoint, one section in memory at a time; `kept.*` and `pending.*` count as columns."""
    manifests = [Manifest.read(folder) for folder in (a, b)]
    for name in {**manifests[0].tables, **manifests[1].tables}:
        found = TableDifference(name, 0, (0, 0), {})
        num_buckets = next(one.tables[name] for one in manifests if name in one.tables)
        step = max(num_buckets // 64, 1)
        for first in range(0, num_buckets, step):
            own = BucketRange(Owners(num_buckets, 1), range(first, min(first + step, num_buckets)))
            _add(found, *(_content(folder, one, name, own) for folder, one in zip((a, b), manifests, strict=True)))
        yield found


def _content(folder: Place, manifest: Manifest, name: str, own: BucketRange) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {"ids": [torch.empty(0, dtype=torch.int64)]}
    if name in manifest.tables:
        current = current_rows(folder, manifest, name)
        for section in table_sections(folder, manifest, name, own):
            rows = section.rows()
            if current is not None:
                rows[WEIGHTS] = current.weights(rows)
            for column, values in {**section.index, **rows}.items():
                parts.setdefault(column, []).append(values)
    return by_id(parts)


def _add(found: TableDifference, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    common = {}  # per column of ids: places of the common ones in both
    for key in {ids_column(column) for column in (*ours, *theirs)}:
        none = torch.empty(0, dtype=torch.int64)
        mine, other = ours.get(key, none), theirs.get(key, none)
        common[key] = (torch.isin(mine, other).nonzero().flatten(), torch.isin(other, mine).nonzero().flatten())
        lacking = len(mine) - len(common[key][0]), len(other) - len(common[key][1])
        if key == "ids":
            found.num_common += len(common[key][0])
            found.num_only = (found.num_only[0] + lacking[0], found.num_only[1] + lacking[1])
        else:
            found.changed[key] = found.changed.get(key, 0) + sum(lacking)
    for column in (one for one in ours | theirs if one not in common):
        places = common[ids_column(column)]
        if column not in ours or column not in theirs:
            num = len(places[0])
        else:
            num = _num_differing(ours[column][places[0]], theirs[column][places[1]])
        found.changed[column] = found.changed.get(column, 0) + num


def _num_differing(a: Tensor, b: Tensor) -> int:
    """Number of rows [n, ...] that are not bitwise identical."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return max(len(a), len(b))
    if not a.numel():
        return 0
    bits = [one.contiguous().view(len(one), -1).view(torch.uint8) for one in (a, b)]
    return int((bits[0] != bits[1]).any(1).sum())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bitwise identical."""
    return a.dtype == b.dtype and a.shape == b.shape and _num_differing(a.reshape(1, -1), b.reshape(1, -1)) == 0
