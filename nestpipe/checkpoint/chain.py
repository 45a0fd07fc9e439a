"""Tables of a checkpoint, section by section: of a full one, or of a full one with the deltas after it.

    full      ids 1 2 3 4 5                 the first link
    delta     ids 2 6, gone 4               ids that changed or are new, ids that left
    merged    ids 1 2'3   5 6'              for each id the newest link that mentions it

Sections of the full checkpoint cover all buckets. The deltas' ids of the same buckets are merged into each, so one section is in
memory at a time. Applying the deltas gives, bit for bit, the rows that a full checkpoint of the same step would hold.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.checkpoint.folders import step_name
from nestpipe.checkpoint.manifest import INDEX, ROWS, STATE, Blob, Manifest
from nestpipe.checkpoint.packed_file import read_blob
from nestpipe.checkpoint.places import Place
from nestpipe.embedding.admission import PENDING
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.changed_rows import GONE
from nestpipe.embedding.stale_rows import KEPT
from nestpipe.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class BucketRange:
    """Some of the buckets that a reader divides ids into; their number may differ from that of a checkpoint."""

    owners: Owners
    buckets: range

    def overlaps(self, blob: Blob, num_buckets: int) -> bool:
        """Whether a blob may hold ids of this range: a bucket is a range of hashes, for any number of buckets."""
        now = self.owners.num_buckets
        return blob.first * now < self.buckets.stop * num_buckets and blob.last * now > self.buckets.start * num_buckets

    def places(self, ids: Tensor) -> Tensor:
        """Where in `ids` those of this range are."""
        bucket = self.owners.bucket_of(ids)
        return ((bucket >= self.buckets.start) & (bucket < self.buckets.stop)).nonzero().flatten()


class Chain:
    """The links of a checkpoint: the full one that it begins with, deltas, and itself last."""

    def __init__(self, folder: Place, manifest: Manifest):
        """Raises CheckpointError naming a link that is missing or is not the one that the delta was made after."""
        self.links: list[tuple[Place, Manifest]] = []
        for link in manifest.chain:
            place = folder.parent / step_name(link.step)
            try:
                found = Manifest.read(place)
            except CheckpointError as error:
                raise CheckpointError(f"{folder} is a delta that needs {place}: {error}") from error
            if found.digest != link.digest:
                raise CheckpointError(
                    f"{folder} is a delta that needs another {place} than is there: its manifest has changed."
                )
            self.links.append((place, found))
        self.links.append((folder, manifest))
        self._sorted: dict[tuple[int, str, str], list[Blob]] = {}
        self._recent: dict[tuple[int, str], tuple[Blob, dict[str, Tensor]]] = {}

    def sections(self, table: str, within: BucketRange | None = None) -> Iterator[MergedSection]:
        """The sections of a table, or what they hold within a range; raises CheckpointError naming a damaged file."""
        num_buckets = self.links[0][1].tables[table]
        for blob in self._blobs(0, table, INDEX):
            if within is None or within.overlaps(blob, num_buckets):
                yield MergedSection(self, table, blob, within)

    def columns(self, number: int, kind: str, section: Blob) -> dict[str, Tensor]:
        """Columns of one kind of one link, from all its blobs that share buckets with a section; not reduced to those."""
        folder, found = self.links[number][0], dict[str, list[Tensor]]()
        blobs = self._blobs(number, section.table, kind)
        begin = max(bisect_right(blobs, section.first, key=lambda one: one.first) - 1, 0)
        for blob in itertools.takewhile(lambda one: one.first < section.last, blobs[begin:]):
            for name, values in self._read(number, folder, blob).items():
                found.setdefault(name, []).append(values)
        return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in found.items()}

    def _blobs(self, number: int, table: str, kind: str) -> list[Blob]:
        """The blobs of one kind, by ascending bucket; they cover all buckets."""
        key = number, table, kind
        if key not in self._sorted:
            self._sorted[key] = list(self.links[number][1].blobs_of(table, kind))
        return self._sorted[key]

    def _read(self, number: int, folder: Place, blob: Blob) -> dict[str, Tensor]:
        """A blob, from memory if it was the last one: sections of a delta are larger than those that they are merged into."""
        key = number, blob.kind
        if number and key in self._recent and self._recent[key][0] == blob:
            return self._recent[key][1]
        tensors = read_blob(folder, blob)
        if number:
            self._recent[key] = blob, tensors
        return tensors


class MergedSection:
    """The ids of some buckets, and where their rows are."""

    def __init__(self, chain: Chain, table: str, blob: Blob, within: BucketRange | None):
        self._chain, self._blob = chain, blob
        num_buckets = chain.links[0][1].tables[table]
        self._own = BucketRange(Owners(num_buckets, 1), range(blob.first, blob.last))
        self._is_whole = len(chain.links) == 1 and within is None
        contents = [chain.columns(number, INDEX, blob) for number in range(len(chain.links))]
        self._places: list[Tensor] = []  # per link: of the ids that it decides
        self.index = contents[0] if self._is_whole else self._merge(contents, within)

    def rows(self, kinds: Sequence[str] = (ROWS, STATE)) -> dict[str, Tensor]:
        """Weights and, if wanted, optimizer state, in the order of `index["ids"]`."""
        parts: dict[str, list[Tensor]] = {}
        for kind in kinds:
            for number in range(len(self._chain.links)):
                for name, values in self._chain.columns(number, kind, self._blob).items():
                    own = values if self._is_whole else values.index_select(0, self._places[number])
                    parts.setdefault(name, []).append(own)
        return {name: torch.cat(values) if len(values) > 1 else values[0] for name, values in parts.items()}

    def _merge(self, contents: list[dict[str, Tensor]], within: BucketRange | None) -> dict[str, Tensor]:
        ranges = [self._own] if within is None else [self._own, within]
        self._places = _newest(contents, "ids", GONE, ranges)
        pending = _newest(contents, f"{PENDING}ids", PENDING + GONE, ranges)
        merged: dict[str, list[Tensor]] = {}
        for content, own, counted in zip(contents, self._places, pending, strict=True):
            for name, values in content.items():
                if name == GONE or name.endswith(f".{GONE}") or name.startswith(KEPT):
                    continue
                places = counted if name.startswith(PENDING) else own
                merged.setdefault(name, []).append(values.index_select(0, places))
        latest = contents[-1]
        if f"{KEPT}ids" in latest:
            own = _within(latest[f"{KEPT}ids"], ranges)
            merged |= {name: [one.index_select(0, own)] for name, one in latest.items() if name.startswith(KEPT)}
        return {name: torch.cat(values) for name, values in merged.items()}


def _within(ids: Tensor, ranges: Sequence[BucketRange]) -> Tensor:
    """Places of the ids that are in all ranges."""
    places = torch.arange(len(ids))
    for one in ranges:
        places = places.index_select(0, one.places(ids.index_select(0, places)))
    return places


def _newest(contents: list[dict[str, Tensor]], key: str, gone: str, ranges: Sequence[BucketRange]) -> list[Tensor]:
    """Per link: places of the ids that no later link mentions."""
    none = torch.empty(0, dtype=torch.int64)
    decided, places = none, []
    for content in reversed(contents):
        ids = content.get(key, none)
        own = _within(ids, ranges)
        if len(decided):
            own = own[~torch.isin(ids.index_select(0, own), decided)]
        places.append(own)
        decided = torch.cat([decided, ids, content.get(gone, none)])
    return places[::-1]
