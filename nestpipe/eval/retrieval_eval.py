"""Retrieval evaluation: one target per user, ranked against the whole catalogue in bounded memory.

samples -> encode -> rank_targets -> EvalReport (eval_report.py)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F

from nestpipe.errors import DataError, TrainError
from nestpipe.eval.catalogue_ranking import RankedTargets, rank_targets, removed
from nestpipe.eval.config import EvalConfig
from nestpipe.eval.eval_ranks import EvalRanks, OneRank, dealt, in_batch_order
from nestpipe.eval.eval_report import COLUMNS, EvalReport, EvalSlice
from nestpipe.eval.topk_metrics import Counts, Coverage, bootstrap_all, list_length, tertiles, user_metrics
from nestpipe.jagged import Batch, Jagged
from nestpipe.ops.catalogue_scan import CataloguePart


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EvalBatch:
    """Users to evaluate: histories, targets [B] and seen items as catalogue positions, user ids [B]."""

    batch: Batch
    target_positions: Tensor
    seen: Jagged
    users: Tensor

    def first(self, num_users: int) -> EvalBatch:
        """Only the first `num_users` users."""
        rows = torch.arange(min(num_users, len(self.users)), device=self.users.device)
        return EvalBatch(
            batch=self.batch.select(rows),
            target_positions=self.target_positions[rows],
            seen=self.seen.select(rows),
            users=self.users[rows],
        )


def evaluate(
    encode: Callable[[Batch], Tensor],
    part: CataloguePart,
    samples: Sequence[EvalBatch],
    config: EvalConfig,
    seed: int,
    *,
    ranks: EvalRanks | None = None,
    progress: bool = True,
) -> EvalReport:
    """Ranks each user's target by query · item vector; `encode` returns the queries [B, D] of a batch.

    Collective: `samples` are all batches, of which each rank encodes its share; `part` is what it has of the catalogue
    (`part_of`). Shows a progress bar if stderr is a terminal and `progress` is on. Raises DataError without samples, TrainError
    if a query or a score is not finite.
    """
    ranks = ranks or OneRank()

    def rank(sample: EvalBatch, is_own: bool) -> RankedTargets:
        with torch.no_grad():
            queries = encode(sample.batch)
        if not is_own:
            queries, sample = queries[:0], sample.first(0)
        seen, k = None if config.seen == "none" else sample.seen, max(config.ks)
        try:
            return rank_targets(
                queries, part, sample.target_positions, seen, top_k=k, max_bytes=config.max_bytes, ranks=ranks
            )
        except TrainError as error:  # raised on every rank
            _check_queries(queries, sample.users, error)
            raise

    return evaluate_ranked(rank, part.num_items, samples, config, seed, ranks=ranks, progress=progress)


def evaluate_lists(
    generate: Callable[[EvalBatch], Tensor],
    num_items: int,
    samples: Sequence[EvalBatch],
    config: EvalConfig,
    seed: int,
    *,
    ranks: EvalRanks | None = None,
    progress: bool = True,
) -> EvalReport:
    """Like `evaluate`, for a model that generates lists of catalogue positions [B, max(ks)], padded with -1.

    A target outside of its list gets the last rank, so HR and NDCG are exact and MRR is a lower bound.
    """

    def rank(sample: EvalBatch, is_own: bool) -> RankedTargets:
        lists = generate(sample)
        hits = lists == sample.target_positions.unsqueeze(1)
        found = torch.where(hits.any(1), hits.to(torch.uint8).argmax(1) + 1, num_items)
        seen = None if config.seen == "none" else sample.seen
        return RankedTargets(found.masked_fill(removed(sample.target_positions, seen), num_items + 1), lists)

    return evaluate_ranked(rank, num_items, samples, config, seed, ranks=ranks or OneRank(), progress=progress)


def evaluate_ranked(
    rank: Callable[[EvalBatch, bool], RankedTargets],
    num_items: int,
    samples: Sequence[EvalBatch],
    config: EvalConfig,
    seed: int,
    *,
    ranks: EvalRanks | None = None,
    progress: bool = True,
) -> EvalReport:
    """The report of anything that ranks: `rank` gets a batch, and whether it is this rank's own. Collective."""
    ranks = ranks or OneRank()
    coverage, k = Coverage(num_items), list_length(config.ks)
    found = []
    turns = list(dealt(len(samples), ranks))
    for number, is_own in _with_progress(turns, progress=progress and ranks.rank == 0):
        sample = samples[number]
        ranked = rank(sample, is_own)
        if is_own:
            coverage.add(ranked.top)
            columns = (sample.users, sample.target_positions, ranked.ranks, sample.batch.items.lengths())
            best = F.pad(ranked.top[:, :k], (0, max(0, k - ranked.top.shape[1])), value=-1).cpu()
            found.append((number, torch.cat([torch.stack([column.cpu() for column in columns], 1), best], 1)))
    per_user = in_batch_order(ranks, "ranks", found, torch.empty(0, len(COLUMNS) + k, dtype=torch.int64))
    if not len(per_user):
        raise DataError(
            "there are no users to evaluate: no sequence is long enough for a history and a target. Use another split."
        )
    shares = coverage.shares(config.ks, ranks)
    return _report(per_user.T.numpy(), shares, num_items, config, seed)


def popularity_report(counts: Tensor, samples: Sequence[EvalBatch], config: EvalConfig, seed: int) -> EvalReport:
    """Popularity baseline: every user gets the items with the highest training counts [I], ties to the lower position.

    All users share one order, so a rank is a place in it, less the seen items before it.
    """
    num_items, k = len(counts), max(config.ks)
    order = counts.argsort(descending=True, stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(num_items))

    def rank(sample: EvalBatch, is_own: bool) -> RankedTargets:
        seen = None if config.seen == "none" else sample.seen
        num_users, own = len(sample.users), place[sample.target_positions]
        num_best = min(num_items, k + (int(sample.seen.lengths().max()) if seen is not None and num_users else 0))
        is_seen = torch.zeros(num_users, num_best, dtype=torch.bool)
        before = own.clone()
        if seen is not None:
            once = (seen.row_of_value() * num_items + place[seen.values]).unique()  # a repeated item counts once
            row, at = once // num_items, once % num_items
            before -= torch.bincount(row[at < own[row]], minlength=num_users)
            is_seen[row[at < num_best], at[at < num_best]] = True
        kept = is_seen.to(torch.uint8).argsort(dim=1, stable=True)[:, :k]  # unseen places first, in their order
        top = order[kept].masked_fill(is_seen.gather(1, kept), -1)
        top = F.pad(top, (0, k - top.shape[1]), value=-1)
        return RankedTargets((before + 1).masked_fill(removed(sample.target_positions, seen), num_items + 1), top)

    return evaluate_ranked(rank, num_items, samples, config, seed, ranks=OneRank(), progress=True)


def _report(columns: Counts, coverage: dict[str, float], num_items: int, config: EvalConfig, seed: int) -> EvalReport:
    users, targets, ranks, lengths = columns[: len(COLUMNS)]
    per_user = user_metrics(ranks, config.ks, num_items)
    slices = []
    for name, low, high, mask in tertiles(lengths):
        part = {metric: values[mask] for metric, values in per_user.items()}
        intervals = bootstrap_all(part, seed=seed, num=config.num_bootstrap)
        slices.append(EvalSlice(name, low, high, int(mask.sum()), intervals))
    return EvalReport(
        num_users=len(users),
        num_items=num_items,
        ks=config.ks,
        seen=config.seen,
        targets_seen=int((ranks > num_items).sum()),
        metrics=bootstrap_all(per_user, seed=seed, num=config.num_bootstrap),
        coverage=coverage,
        slices=tuple(slices),
        user=users,
        target=targets,
        rank=ranks,
        length=lengths,
        lists=columns[len(COLUMNS) :].T.astype(np.int32),
    )


def _with_progress(turns: Sequence[tuple[int, bool]], *, progress: bool) -> Iterable[tuple[int, bool]]:
    if not (progress and sys.stderr.isatty()):
        return turns
    return track(turns, "evaluate", console=Console(stderr=True), transient=True)


def _check_queries(queries: Tensor, users: Tensor, cause: TrainError) -> None:
    finite = queries.isfinite().all(1)
    if not bool(finite.all()):
        user = int(users[int(finite.logical_not().nonzero()[0])])
        raise TrainError(
            f"the query vector of user {user} is not finite; it cannot be ranked. The model has diverged: "
            "use an earlier checkpoint, or lower the learning rate."
        ) from cause
