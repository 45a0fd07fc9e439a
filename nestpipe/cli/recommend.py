"""`nestpipe recommend` and `nestpipe similar`: what a trained run recommends, in own ids, without a service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from rich.console import Console
from rich.progress import track

from nestpipe.cli.arguments import RecommendArguments, SimilarArguments
from nestpipe.cli.rule_flags import given_rules
from nestpipe.data.vocabulary import OwnId
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.errors import ConfigError
from nestpipe.eval.catalogue_predictor import CataloguePredictor, Recommendation
from nestpipe.eval.eval_ranks import part_of
from nestpipe.rules.rule_set import Rules
from nestpipe.training.distributed_eval import EvalWorld, eval_world
from nestpipe.training.request_steering import steering_of
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
    rules = given_rules(arguments.filter, arguments.rules, arguments.rule_set, run.sequences)
    predictor = run.predictor(arguments.step)
    steering = {name: getattr(arguments, name) for name in ("scenario", "trigger", "instruction")}
    if any(steering.values()):
        predictor.steered = steering_of(run, **steering)
    if arguments.out is not None:
        users: list[OwnId] = list(arguments.user)
        if arguments.all:
            users = run.sequences.vocabulary("user").own_ids(run.sequences.users)
        with eval_world() as world:
            asked = ListRequest(arguments.k, rules)
            num_rows = write_parquet(predictor, users, asked, arguments.out, world, run.config.eval.batch_size)
        if world.leads:
            print(f"{arguments.out}: {num_rows:,} rows for {len(users):,} users")
        return 0
    for user in arguments.user:
        found = predictor.recommend(user, arguments.k, rules=rules)
        _show(found, arguments.k, arguments.json, {"user": user}, f"user {user}")
    return 0


def similar(arguments: SimilarArguments) -> int:
    """`nestpipe similar`."""
    run = Run.open(arguments.run)
    rules = given_rules(arguments.filter, arguments.rules, arguments.rule_set, run.sequences)
    predictor = run.predictor(arguments.step)
    for item in arguments.item:
        found = predictor.similar(item, arguments.k, rules=rules)
        _show(found, arguments.k, arguments.json, {"item": item}, f"items like {item}")
    return 0


class ListRequest(NamedTuple):
    """The length of lists and their rules."""

    k: int
    rules: Rules


def write_parquet(
    predictor: CataloguePredictor, users: list[OwnId], asked: ListRequest, out: Path, world: EvalWorld, batch_size: int
) -> int:
    """Writes recommendations for users with bounded memory; says how many rows. The file appears whole or not at all.

    Collective: each rank takes a share of whole batches of users, so the file is that of one process.
    """
    parts = out.with_name(f".{out.name}.parts")
    channel = world.channels.saves  # its deadline is long: shares may take differently long
    all_ranks_or_none(channel, "parts created", lambda: _new_folder(parts) if world.leads else None)
    try:
        own = part_of(len(users), batch_size, world.ranks)
        num_rows = all_ranks_or_none(
            channel, "recommended", lambda: _write_parts(predictor, users, own, asked, parts, progress=world.leads)
        )
        all_ranks_or_none(channel, "parts joined", lambda: _join(parts, out) if world.leads else None)
    finally:
        if world.leads:
            shutil.rmtree(parts, ignore_errors=True)
    return sum(num for (num,) in channel.all_gather_ints([num_rows], name="rows"))


def _new_folder(parts: Path) -> None:
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)


def _write_parts(
    predictor: CataloguePredictor, users: list[OwnId], own: slice, asked: ListRequest, parts: Path, *, progress: bool
) -> int:
    """Writes the recommendations for the users at some places, and says how many rows they have."""
    num_rows, num_users = 0, max(_ROWS // asked.k, 1)
    shown = track(users[own], "recommending", console=Console(stderr=True), disable=not progress)
    found = predictor.recommend_all(shown, asked.k, rules=asked.rules)
    for first in range(own.start, own.stop, num_users):
        frame = recommendation_frame(users[first : min(first + num_users, own.stop)], found)
        if frame.height:  # without rows the types are unknown
            frame.write_parquet(parts / f"{first:012d}.parquet")
        num_rows += frame.height
    return num_rows


def _join(parts: Path, out: Path) -> None:
    if not any(parts.iterdir()):
        recommendation_frame([], iter(())).write_parquet(parts / "none.parquet")
    pl.scan_parquet(parts / "*.parquet").sink_parquet(parts / "all")
    (parts / "all").rename(out)


def _show(found: Recommendation, k: int, as_json: bool, about: dict[str, Any], title: str) -> None:
    left = {} if found.allowed is None else {"allowed": found.allowed}
    if as_json:
        print(json.dumps({**about, "items": found.items, "scores": found.scores, "path": found.path, **left}))
        return
    note = "" if found.path == "model" else "   (no history: the most popular items)"
    if left and len(found.items) < k:
        note += f"   (the rules left {found.allowed:,} items)"
    print(f"{title}{note}")
    for item, score in zip(found.items, found.scores, strict=True):
        print(f"  {item}\t{score:.4f}")
