"""What the ranks of the evaluation tests run; functions here are called by name in other processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nestpipe.cli.eval import evaluate_run
from nestpipe.cli.recommend import ListRequest, write_parquet
from nestpipe.config import Config
from nestpipe.distributed.process_group import World
from nestpipe.errors import NestPipeError
from nestpipe.eval.catalogue_ranking import rank_targets
from nestpipe.eval.eval_ranks import part_of
from nestpipe.eval.label_report import LabelReport
from nestpipe.jagged import Jagged
from nestpipe.ops.catalogue_scan import CataloguePart, block_items
from nestpipe.rules.rule_set import Rules
from nestpipe.training.distributed_eval import ChannelRanks, eval_world
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run


def train_run(world: World, config: Config, folder: Path) -> str:
    return train_to_end(config, folder, quiet=True, world=world).stopped


def evaluated(world: World, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The report of a run, evaluated by all ranks, with its per-user columns."""
    run = Run.open(folder)
    run = replace(run, config=replace(run.config, eval=replace(run.config.eval, **settings)))
    with eval_world(world) as ranks:
        report = evaluate_run(run, world=ranks).report
    if isinstance(report, LabelReport):
        return {"report": report.to_json(), "sums": {k: v.tolist() for k, v in report.per_user.items()}}
    columns = {name: getattr(report, name).tolist() for name in ("user", "target", "rank", "length")}
    return {"report": json.loads(report.to_json()), **columns}


def instructions_of(world: World | None, folder: Path) -> dict[str, Any]:
    """What the instructions of a run are worth, measured by all ranks."""
    with eval_world(world) as ranks:
        found = evaluate_run(Run.open(folder), world=ranks, stores=[]).instructions
    assert found is not None
    return dict(json.loads(found.to_json()))


def shared_ranking(
    world: World, problems: list[dict[str, Any]], items: torch.Tensor, max_bytes: int
) -> list[dict[str, Any]]:
    """Ranks and lists of some batches, of which rank r has number r, r + W, ..."""
    ranks = ChannelRanks(world.channel("evaluation"))
    own = part_of(len(items), block_items(max_bytes), ranks)
    part = CataloguePart(items[own], own.start, len(items))
    found = []
    for first in range(0, len(problems), world.size):
        number = first + world.rank
        problem = problems[min(number, len(problems) - 1)]
        num = len(problem["queries"]) if number < len(problems) else 0
        ranked = rank_targets(
            problem["queries"][:num],
            part,
            problem["targets"][:num],
            Jagged.from_rows(problem["seen"][:num]),
            top_k=problem["k"],
            max_bytes=max_bytes,
            ranks=ranks,
        )
        if num:
            found.append({"number": number, "ranks": ranked.ranks.tolist(), "top": ranked.top.tolist()})
    return found


def refused(world: World, items: torch.Tensor) -> str:
    """What a rank says when the catalogue has a vector that is not finite, in the part of the last rank."""
    ranks = ChannelRanks(world.channel("evaluation"))
    own = part_of(len(items), 1, ranks)
    part = CataloguePart(items[own], own.start, len(items))
    try:
        rank_targets(torch.ones(3, 2), part, torch.zeros(3, dtype=torch.int64), None, top_k=2, max_bytes=1, ranks=ranks)
    except NestPipeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def recommended(world: World, folder: Path, out: Path, num_users: int) -> int:
    """Recommendations for the first users of the log, written by all ranks; the number of rows."""
    run = Run.open(folder)
    users = run.sequences.vocabulary("user").own_ids(run.sequences.users[:num_users])
    with eval_world(world) as ranks:
        return write_parquet(run.predictor(), users, ListRequest(3, Rules()), out, ranks, run.config.eval.batch_size)
