"""Retrieval evaluation: one target per user, ranked against the whole catalogue in bounded memory.

    samples -> encode -> rank_targets -> EvalReport -> report.json + per_user.parquet

A report stores the rank of every user, so that `compare` can pair two runs without ranking again.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from nestpipe.atomic_files import replace_file
from nestpipe.errors import DataError, TrainError
from nestpipe.eval.catalogue_ranking import RankedTargets, rank_targets, removed
from nestpipe.eval.config import EvalConfig
from nestpipe.eval.eval_ranks import EvalRanks, OneRank, dealt, in_batch_order
from nestpipe.eval.topk_metrics import (
    Array,
    Counts,
    Coverage,
    Interval,
    bootstrap_all,
    tertiles,
    user_metrics,
)
from nestpipe.jagged import Batch, Jagged
from nestpipe.ops.catalogue_scan import CataloguePart

_COLUMNS = ("user", "target", "rank", "length")


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


@dataclass(frozen=True, slots=True)
class EvalSlice:
    """The metrics of users with histories of low .. high events."""

    name: str
    low: int
    high: int
    num_users: int
    metrics: dict[str, Interval]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EvalReport:
    """Metrics of one evaluation, and the per-user arrays [num_users] behind them."""

    num_users: int
    num_items: int
    ks: tuple[int, ...]
    seen: str
    targets_seen: int  # targets removed because the user had seen them: misses for any model
    metrics: dict[str, Interval]
    coverage: dict[str, float]
    slices: tuple[EvalSlice, ...]
    user: Counts
    target: Counts
    rank: Counts
    length: Counts

    def scalars(self) -> dict[str, float]:
        """Means and coverage by name, for trackers."""
        return {name: interval.mean for name, interval in self.metrics.items()} | self.coverage

    def user_metrics(self, ks: tuple[int, ...]) -> dict[str, Array]:
        """The metrics of each user, by name."""
        return user_metrics(self.rank, ks, self.num_items)

    def to_json(self) -> str:
        """All but the per-user arrays."""
        return json.dumps(self._fields(), indent=2, default=asdict)

    def _fields(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _COLUMNS}

    def save(self, folder: Path) -> None:
        """Writes report.json and per_user.parquet; after a crash `load` gets the old report or refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        pl.DataFrame({name: getattr(self, name) for name in _COLUMNS}).write_parquet(buffer)
        replace_file(folder / "per_user.parquet", buffer.getvalue())
        content = self._fields() | {"per_user_digest": _digest(buffer.getvalue())}
        replace_file(folder / "report.json", json.dumps(content, indent=2, default=asdict).encode())

    @staticmethod
    def load(folder: Path) -> EvalReport:
        """Reads a saved report; raises DataError if a file is missing or the two do not belong together."""
        try:
            content = json.loads((folder / "report.json").read_bytes())
            per_user = (folder / "per_user.parquet").read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"{folder} has no evaluation: {error.filename} is missing. Run 'nestpipe eval'.") from error
        if content.pop("per_user_digest") != _digest(per_user):
            raise DataError(
                f"{folder}: report.json and per_user.parquet are of different evaluations (digests differ), perhaps after a crash. Run 'nestpipe eval' again."
            )
        content["ks"] = tuple(content["ks"])
        content["metrics"] = _intervals(content["metrics"])
        content["slices"] = tuple(
            EvalSlice(**{**one, "metrics": _intervals(one["metrics"])}) for one in content["slices"]
        )
        table = pl.read_parquet(io.BytesIO(per_user))
        content.update({name: table[name].to_numpy() for name in _COLUMNS})
        return EvalReport(**content)

    def __rich__(self) -> Table:
        """A table of all metrics, overall and by slice, for `rich.print`."""
        title = f"{self.num_users:,} users, {self.num_items:,} items, seen items removed: {self.seen}"
        caption = "slices: number of events in the history"
        if self.targets_seen:
            caption += f"\n{self.targets_seen:,} targets were seen before and count as misses"
        table = Table(title=title, caption=caption)
        for header in ("metric", "all users [95 %]"):
            table.add_column(header, no_wrap=True)
        for part in self.slices:
            table.add_column(f"{part.name}\n{part.low:,}-{part.high:,}\n{part.num_users:,} users", justify="right")
        for name, interval in self.metrics.items():
            table.add_row(name, str(interval), *(f"{part.metrics[name].mean:.4f}" for part in self.slices))
        for name, share in self.coverage.items():
            table.add_row(name, f"{share:.4f}")
        return table


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

    return _evaluate(rank, part.num_items, samples, config, seed, ranks=ranks, progress=progress)


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

    return _evaluate(rank, num_items, samples, config, seed, ranks=ranks or OneRank(), progress=progress)


def _evaluate(
    rank: Callable[[EvalBatch, bool], RankedTargets],
    num_items: int,
    samples: Sequence[EvalBatch],
    config: EvalConfig,
    seed: int,
    *,
    ranks: EvalRanks,
    progress: bool,
) -> EvalReport:
    coverage = Coverage(num_items)
    found = []
    turns = list(dealt(len(samples), ranks))
    for number, is_own in _with_progress(turns, progress=progress and ranks.rank == 0):
        sample = samples[number]
        ranked = rank(sample, is_own)
        if is_own:
            coverage.add(ranked.top)
            columns = (sample.users, sample.target_positions, ranked.ranks, sample.batch.items.lengths())
            found.append((number, torch.stack([column.cpu() for column in columns], 1)))
    per_user = in_batch_order(ranks, "ranks", found, torch.empty(0, len(_COLUMNS), dtype=torch.int64))
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

    return _evaluate(rank, num_items, samples, config, seed, ranks=OneRank(), progress=True)


def _report(columns: Counts, coverage: dict[str, float], num_items: int, config: EvalConfig, seed: int) -> EvalReport:
    users, targets, ranks, lengths = columns
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


def _intervals(metrics: dict[str, dict[str, float]]) -> dict[str, Interval]:
    return {name: Interval(**values) for name, values in metrics.items()}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
