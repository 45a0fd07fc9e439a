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

from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.errors import DataError
from nestpipe.eval.eval_ranks import EvalRanks, OneRank, gather, raise_on_all
from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops.catalogue_scan import CataloguePart, PartScan, Targets, Top, merge_tops, scan, scores_at


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
    known = [scores_at(one.queries, part, one.targets, max_bytes=max_bytes) for one in batches]
    target_scores = torch.stack(gather(ranks, "target scores", torch.cat(known))).amax(0)
    found = []
    for one, scores in zip(batches, target_scores.split([len(one.queries) for one in batches]), strict=True):
        own = Targets(one.targets, scores)
        found.append(scan(one.queries, part, one.seen, k=top_k, targets=own, max_bytes=max_bytes))
    problems = (_not_finite(one.queries, part, result, max_bytes) for one, result in zip(batches, found, strict=True))
    raise_on_all(ranks, next(filter(None, problems), None))
    before = torch.stack(ranks.exchange("counts", [one.before for one in found])).sum(0)
    positions = ranks.exchange("best items", [one.top.positions for one in found])
    scores_of_best = ranks.exchange("best scores", [one.top.scores for one in found])
    top = merge_tops([Top(*one) for one in zip(positions, scores_of_best, strict=True)], top_k)
    return RankedTargets(torch.where(removed(targets, seen), part.num_items + 1, before + 1), top.positions)


def top_items(queries: Tensor, item_vectors: Tensor, seen: Jagged | None, k: int, max_bytes: int) -> Top:
    """The k best items for each query [B, D], without those in `seen`; raises like `rank_targets`."""
    part = CataloguePart.whole(item_vectors)
    _check(queries, part, seen)
    found = scan(queries, part, seen, k=k, max_bytes=max_bytes)
    raise_on_all(OneRank(), _not_finite(queries, part, found, max_bytes))
    return found.top


class _QueryBatch(NamedTuple):
    queries: Tensor
    targets: Tensor
    seen: Jagged | None


def _of_all_ranks(ranks: EvalRanks, queries: Tensor, targets: Tensor, seen: Jagged | None) -> list[_QueryBatch]:
    all_queries = gather(ranks, "queries", queries)
    all_targets = gather(ranks, "targets", targets)
    if seen is None:
        return [_QueryBatch(own, positions, None) for own, positions in zip(all_queries, all_targets, strict=True)]
    lengths = gather(ranks, "seen/lengths", seen.lengths())
    values = gather(ranks, "seen/items", seen.values)
    return [
        _QueryBatch(own, positions, Jagged(items, offsets_of(num), int(num.max()) if len(num) else 0))
        for own, positions, items, num in zip(all_queries, all_targets, values, lengths, strict=True)
    ]


def removed(targets: Tensor, seen: Jagged | None) -> Tensor:
    """Whether each target is among the seen items of its row."""
    removed = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    if seen is not None:
        row = seen.row_of_value()
        removed[row[seen.values == targets.index_select(0, row)]] = True
    return removed


def _not_finite(queries: Tensor, part: CataloguePart, found: PartScan, max_bytes: int) -> str | None:
    """Names the first sample and item whose score is not finite, if there is one."""
    if not bool(found.not_finite.any()):
        return None
    row = int(found.not_finite.nonzero()[0])
    query = queries[row : row + 1].expand(len(part.vectors), -1)
    positions = torch.arange(part.first, part.first + len(part.vectors))
    scores = scores_at(query, part, positions, max_bytes=max_bytes)
    place = int(scores.isfinite().logical_not().nonzero()[0])
    return (
        f"score of sample {row} for the item at catalogue position {part.first + place} is {float(scores[place])}; it cannot be "
        "ranked. The model has diverged: use an earlier checkpoint, or lower the learning rate."
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
