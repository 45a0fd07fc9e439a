"""What does a full ranking cost over the bare matrix product, and how much of it does each of two ranks take?

512 users x 1.78M items, width 64: the rank of each user's target and the best 200 items, in batches of 256 users. Every score
needs a multiplication of 64 numbers, so the bare sgemm in the same process, whose scores nobody reads, is the reference. One
thread; figures are CPU time, so other load matters little. Arms alternate.

`over_sgemm`: ranking over the bare product. `busiest_of_two`: CPU of the busier of two real ranks, each with half of the users and
of the catalogue, over that of one process. Ranks and lists must be equal in all arms, or nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import measure
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.distributed.process_group import World
from nestpipe.eval.catalogue_ranking import rank_targets
from nestpipe.eval.eval_ranks import EvalRanks, OneRank, dealt, in_batch_order, part_of
from nestpipe.ops.catalogue_scan import CataloguePart, block_items
from nestpipe.training.distributed_eval import ChannelRanks

NAME = "evaluation"
AT_MOST, BUSIEST = 4.0, 0.6
BATCH, TOP, MAX_BYTES, BLOCK = 256, 200, 256 * 2**20, 4096


class Problem:
    """Random queries and targets, and the part of a random catalogue that a rank scores."""

    def __init__(self, num_users: int, num_items: int, width: int, ranks: EvalRanks):
        random = torch.Generator().manual_seed(0)
        self.queries = torch.randn(num_users, width, generator=random)
        self.targets = torch.randint(num_items, (num_users,), generator=random)
        own = part_of(num_items, block_items(MAX_BYTES), ranks)
        items = torch.randn(num_items, width, generator=random)
        self.part, self.ranks = CataloguePart(items[own].clone(), own.start, num_items), ranks

    def rank(self) -> Tensor:
        """Ranks and best items [users, 1 + TOP] of all users. Collective."""
        found = []
        for number, is_own in dealt(-(-len(self.queries) // BATCH), self.ranks):
            users = slice(number * BATCH, (number + 1) * BATCH if is_own else number * BATCH)
            ranked = rank_targets(
                self.queries[users],
                self.part,
                self.targets[users],
                None,
                top_k=TOP,
                max_bytes=MAX_BYTES,
                ranks=self.ranks,
            )
            found.append((number, torch.cat([ranked.ranks.unsqueeze(1), ranked.top], 1)))
        return in_batch_order(self.ranks, "found", found, torch.empty(0, 1 + TOP, dtype=torch.int64))

    def sgemm(self) -> None:
        for start in range(0, len(self.part.vectors), BLOCK):
            _ = self.queries @ self.part.vectors[start : start + BLOCK].T


def timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def serve_rank(pipe: Connection, store: str, rank: int, size: int, sizes: tuple[int, int, int]) -> None:
    """One of the ranks: answers each message with its CPU time and what it found."""
    torch.set_num_threads(1)
    world = World.from_store(dist.FileStore(store, size), rank, size, deadline_s=600)
    problem = Problem(*sizes, ChannelRanks(world.channel("evaluation")))
    found = torch.empty(0)

    def work() -> None:
        nonlocal found
        found = problem.rank()

    while pipe.recv():
        pipe.send((timed(work), found.numpy()))
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100,000 items, result not recorded")
    parser.add_argument("--items", type=int, default=1_780_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (512, 100_000 if options.quick else options.items, 64)
    alone = Problem(*sizes, OneRank())
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (theirs, str(Path(folder) / "store"), rank, 2, sizes)
            processes.append(context.Process(target=serve_rank, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(ours)

        def busiest() -> float:
            for pipe in pipes:
                pipe.send(True)
            answers = [pipe.recv() for pipe in pipes]
            assert all(torch.equal(torch.from_numpy(found), wanted) for _, found in answers), (
                "ranks disagree with one process"
            )
            return max(seconds for seconds, _ in answers)

        wanted = alone.rank()
        times = measure.alternate(
            {
                "sgemm": lambda: timed(alone.sgemm),
                "ranking": lambda: timed(alone.rank),
                "busiest of two ranks": busiest,
            }
        )
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(False)
            process.join()
    over, share = (
        measure.ratio(times["ranking"], times["sgemm"]),
        measure.ratio(times["busiest of two ranks"], times["ranking"]),
    )
    rows = [[name, f"{measure.Spread.of(values).median:.3f}"] for name, values in times.items()]
    print(measure.table(["arm", "CPU s"], rows))
    figures = {
        "over_sgemm": round(over.median, 3),
        "over_sgemm_range": over.range,
        "over_sgemm_verdict": measure.verdict(over, at_most=AT_MOST),
        "busiest_of_two": round(share.median, 3),
        "busiest_of_two_range": share.range,
        "busiest_of_two_verdict": measure.verdict(share, at_most=BUSIEST),
        "cpu_s": {name: round(measure.Spread.of(values).median, 3) for name, values in times.items()},
    }
    if not options.quick:
        settings = {"users": sizes[0], "items": sizes[1], "width": sizes[2], "top": TOP, "batch": BATCH}
        measure.append(NAME, measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
