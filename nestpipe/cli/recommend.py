"""`nestpipe recommend` and `nestpipe similar`: what a trained run recommends, in own ids, without a service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.progress import track

from nestpipe.cli.arguments import RecommendArguments, SimilarArguments
from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import ConfigError
from nestpipe.eval.catalogue_predictor import CataloguePredictor, Recommendation
from nestpipe.training.run_folder import Run
from nestpipe.training.trained_run import recommendation_frame

_ROWS = 1_000_000  # of the output held in memory at a time


def recommend(arguments: RecommendArguments) -> int:
    """`nestpipe recommend`."""
    if arguments.all == bool(arguments.user):
        raise ConfigError("name users with --user, or take every user of the log with --all; one of the two.")
    if arguments.k < 1:
        raise ConfigError(f"--k is {arguments.k}; a recommendation holds at least one item.")
    if arguments.all and arguments.out is None:
        raise ConfigError("--all needs a file: --out recommendations.parquet")
    run = Run.open(arguments.run)
    predictor = run.predictor(arguments.step)
    if arguments.out is not None:
        users: list[OwnId] = list(arguments.user)
        if arguments.all:
            users = run.sequences.vocabulary("user").own_ids(run.sequences.users)
        num_rows = write_parquet(predictor, users, arguments.k, arguments.out)
        print(f"{arguments.out}: {num_rows:,} rows for {len(users):,} users")
        return 0
    for user in arguments.user:
        _show(predictor.recommend(user, arguments.k), arguments.json, {"user": user}, f"user {user}")
    return 0


def similar(arguments: SimilarArguments) -> int:
    """`nestpipe similar`."""
    predictor = Run.open(arguments.run).predictor(arguments.step)
    for item in arguments.item:
        _show(predictor.similar(item, arguments.k), arguments.json, {"item": item}, f"items like {item}")
    return 0


def write_parquet(predictor: CataloguePredictor, users: list[OwnId], k: int, out: Path) -> int:
    """Writes recommendations for users with bounded memory; says how many rows. The file appears whole or not at all."""
    parts = out.with_name(f".{out.name}.parts")
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    try:
        num_rows = 0
        found = predictor.recommend_all(track(users, "recommending", console=Console(stderr=True)), k)
        num_users = max(_ROWS // k, 1)
        for first in range(0, len(users), num_users):
            frame = recommendation_frame(users[first : first + num_users], found)
            if frame.height or (first + num_users >= len(users) and not num_rows):  # without rows the types are unknown
                frame.write_parquet(parts / f"{first:012d}.parquet")
            num_rows += frame.height
        pl.scan_parquet(parts / "*.parquet").sink_parquet(parts / "all")
        (parts / "all").rename(out)
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return num_rows


def _show(found: Recommendation, as_json: bool, about: dict[str, Any], title: str) -> None:
    if as_json:
        print(json.dumps({**about, "items": found.items, "scores": found.scores, "path": found.path}))
        return
    note = "" if found.path == "model" else "   (no history: the most popular items)"
    print(f"{title}{note}")
    for item, score in zip(found.items, found.scores, strict=True):
        print(f"  {item}\t{score:.4f}")
