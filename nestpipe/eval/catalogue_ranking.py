"""Full ranking of the catalogue: ranks of targets and top-k lists, by one process or by ranks that share the catalogue.

    rank 0 .. W-1   each with a batch of queries, and with a part of the catalogue

    1  queries, targets and seen items of all batches   ->  every rank
    2  score of each target, by the rank that has it    ->  every rank
    3  scan of all batches against the own part         ->  counts and best items, back to the rank of the batch
    4  rank of a target = 1 + sum of counts; best items merged in the order of the parts

A score does not depend on the part that it is computed in (ops/catalogue_scan.py), counts are integers and ties go to the lower
position, so the result is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.errors import DataError, TrainError
from nestpipe.eval.eval_ranks import EvalRanks, OneRank, Unpacked, gather, packed
from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops.catalogue_scan import CataloguePart, PartScan, Targets, Top, merge_tops, scan, scores_at

_AT_ONCE = 1 << 16  # items among which one with a score that is not finite is looked for


class RankedTargets(NamedTuple):
    """Ranks of the targets [B], from 1; num_items + 1 if the target was removed. Best positions [B, top_k]."""

    ranks: Tensor
    top: Tensor


def rank_targets(
    queries: Tensor,
    part: CataloguePart,
    targets: Tensor,
    seen: Jagged | None,
    *,
    top_k: int,
    max_bytes: int,
    ranks: EvalRanks | None = None,
) -> RankedTargets:
    """Ranks catalogue positions `targets` [B] among all items but those in `seen`; also the top-k lists.

    Collective: each rank passes its own queries and its part of the catalogue. Raises TrainError if a score is not finite and
    DataError if a position is outside of the catalogue.
    """
    ranks = ranks or OneRank()
    _check(queries, part, seen)
    _check_positions("target", targets, part.num_items)
    batches = _of_all_ranks(ranks, queries, targets, seen)
    num_queries = [len(one.queries) for one in batches]
    known = torch.cat([scores_at(one.queries, part, one.targets, max_bytes=max_bytes) for one in batches])
    of_parts = ranks.exchange("target scores", [known.cpu()] * ranks.size, [sum(num_queries)] * ranks.size)
    target_scores = torch.stack(of_parts).amax(0).to(queries.device).split(num_queries)
    found = []
    for one, scores in zip(batches, target_scores, strict=True):
        own = Targets(one.targets, scores)
        found.append(scan(one.queries, part, one.seen, k=top_k, targets=own, max_bytes=max_bytes))
    before, top = _returned(ranks, found, _not_finite(batches, found, part, max_bytes), top_k)
    return RankedTargets((before + 1).masked_fill(removed(targets, seen).cpu(), part.num_items + 1), top.positions)


def top_items(queries: Tensor, item_vectors: Tensor, seen: Jagged | None, k: int, max_bytes: int) -> Top:
    """The k best items for each query [B, D], without those in `seen`; raises like `rank_targets`."""
    part = CataloguePart.whole(item_vectors)
    _check(queries, part, seen)
    found = scan(queries, part, seen, k=k, max_bytes=max_bytes)
    _raise(_not_finite([_QueryBatch(queries, queries, None)], [found], part, max_bytes))
    return found.top


class _QueryBatch(NamedTuple):
    queries: Tensor
    targets: Tensor
    seen: Jagged | None


def _of_all_ranks(ranks: EvalRanks, queries: Tensor, targets: Tensor, seen: Jagged | None) -> list[_QueryBatch]:
    """The batch of every rank; all pass `seen`, or none."""
    lengths = None if seen is None else seen.lengths()
    values = targets[:0] if seen is None else seen.values
    sizes = torch.tensor([len(queries), len(values)])
    message = packed(sizes, targets, targets[:0] if lengths is None else lengths, values, queries)
    batches = []
    for data in gather(ranks, "queries", message):
        reader = Unpacked(data)
        num_queries, num_seen = reader.take(torch.int64, 2).tolist()
        own_targets = reader.take(torch.int64, num_queries)
        own_lengths = None if lengths is None else reader.take(torch.int64, num_queries)
        own_values = reader.take(torch.int64, num_seen)
        own_queries = reader.take(queries.dtype, num_queries, queries.shape[1]).to(queries.device)
        own_seen = None
        if own_lengths is not None:
            own_seen = Jagged(own_values, offsets_of(own_lengths), int(own_lengths.max()) if num_queries else 0)
        batches.append(_QueryBatch(own_queries, own_targets, own_seen))
    return batches


def _returned(ranks: EvalRanks, found: Sequence[PartScan], problem: _NotFinite | None, k: int) -> tuple[Tensor, Top]:
    """The counts and best items of this rank's queries over all parts; raises on every rank if one has a problem."""
    dtype = found[0].top.scores.dtype
    place, value = (-1, -1), 0.0
    if problem is not None:
        place, value = (problem.sample, problem.position), problem.value
    note = (torch.tensor(place), torch.tensor([value], dtype=torch.float64))
    messages = [packed(*note, one.before, one.top.positions, one.top.scores) for one in found]
    own, counts, tops = found[ranks.rank], [], []
    for data in ranks.exchange("counts and best items", messages, [len(messages[ranks.rank])] * ranks.size):
        reader = Unpacked(data)
        sample, position = reader.take(torch.int64, 2).tolist()
        value = float(reader.take(torch.float64, 1))
        _raise(_NotFinite(sample, position, value) if sample >= 0 else None)
        counts.append(reader.take(torch.int64, len(own.before)))
        positions = reader.take(torch.int64, len(own.before), k)
        tops.append(Top(positions, reader.take(dtype, len(own.before), k)))
    return torch.stack(counts).sum(0), merge_tops(tops, k)


def removed(targets: Tensor, seen: Jagged | None) -> Tensor:
    """Whether each target is among the seen items of its row."""
    found = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    if seen is not None:
        row = seen.row_of_value()
        found[row[seen.values == targets.index_select(0, row)]] = True
    return found


class _NotFinite(NamedTuple):
    """A score that is not finite."""

    sample: int
    position: int
    value: float


def _not_finite(
    batches: Sequence[_QueryBatch], found: Sequence[PartScan], part: CataloguePart, max_bytes: int
) -> _NotFinite | None:
    """The first sample and item whose score is not finite, if there is one."""
    for one, result in zip(batches, found, strict=True):
        if bool(result.not_finite.any()):
            row = int(result.not_finite.nonzero()[0])
            for positions in torch.arange(part.first, part.first + len(part.vectors)).split(_AT_ONCE):
                query = one.queries[row : row + 1].expand(len(positions), -1)
                scores = scores_at(query, part, positions, max_bytes=max_bytes)
                for place in scores.isfinite().logical_not().nonzero().squeeze(1).tolist():
                    return _NotFinite(row, int(positions[place]), float(scores[place]))
    return None


def _raise(problem: _NotFinite | None) -> None:
    if problem is not None:
        raise TrainError(
            f"score of sample {problem.sample} for the item at catalogue position {problem.position} is {problem.value}; it "
            "cannot be ranked. The model has diverged: use an earlier checkpoint, or lower the learning rate."
        )


def _check(queries: Tensor, part: CataloguePart, seen: Jagged | None) -> None:
    if seen is None:
        return
    if seen.num_rows != len(queries):
        raise DataError(
            f"there are {len(queries)} queries but {seen.num_rows} rows of seen items. Pass one row per query."
        )
    _check_positions("seen item", seen.values, part.num_items)


def _check_positions(what: str, positions: Tensor, num_items: int) -> None:
    wrong = (positions < 0) | (positions >= num_items)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise DataError(
            f"{what} {place} has catalogue position {int(positions[place])}, but the catalogue has {num_items:,} items. "
            "Leave out items that are not in the catalogue; positions start at 0."
        )
