"""The process of one commit in step_commits.py: trains on request and answers with CPU seconds, or Python calls, per step.

    retrieval   SASRec with sampled negatives, 64 samples x 20 events
    rows        almost no dense part: 512 x 50 Zipf ids, their mean, one layer

The process keeps freed memory, as training does. Without that glibc returned a step's buffers to the system or did not, by the layout
of its heap: 0.15 to 1,071 page faults per step of `rows` and up to 3 ms of the system's time, another number with every start.

Imports only what both commits have.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from nestpipe.distributed.process_group import World
from nestpipe.embedding.lookup import Lookup, TableSpec
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import LossConfig, SASRecConfig
from nestpipe.models.contract import Output
from nestpipe.models.retrieval import build_retrieval
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from nestpipe.training.process import keep_freed_memory

SIZES = {"retrieval": (64, 20, 2000), "rows": (512, 50, 200_000)}  # samples, events of each, items
NUM_BATCHES, MICRO_BATCHES, DIM = 8, 2, 64
RATES = Rates(dense=1e-3, rows=1e-3)


class Pooled(nn.Module):
    """The mean vector of a sample through one layer."""

    tables, coupling = (TableSpec(name="item", dim=DIM),), "none"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1)

    def lookups(self, batch: Any, rng: Any) -> dict[str, Any]:
        return {"items": Lookup(table="item", ids=batch.items.values)}

    def weight(self, batch: Any) -> float:
        return float(batch.num_samples)

    def forward(self, rows: Any, batch: Any, rng: Any) -> Any:
        vectors = rows["items"].gather().view(batch.num_samples, -1, DIM).mean(1)
        return Output(self.layer(vectors).square().sum())


def batch_of(workload: str, number: int) -> Batch:
    samples, events, num_items = SIZES[workload]
    ids = torch.from_numpy(np.random.default_rng(number).zipf(1.25, samples * events + samples) % num_items)
    items = Jagged(ids[: samples * events].contiguous(), torch.arange(samples + 1) * events, events)
    return Batch(
        cursor=Cursor(0, number),
        sample_ids=torch.arange(samples) + number * samples,
        items=items,
        targets=items.with_values(ids[samples:].contiguous()),
    )


def state_of(workload: str) -> TrainState:
    torch.manual_seed(0)
    model: Any = Pooled()
    if workload == "retrieval":
        config = SASRecConfig(dim=32, num_blocks=1, num_heads=2, dropout=0.1)
        catalogue = torch.arange(SIZES[workload][2])
        model = build_retrieval(config, LossConfig(num_negatives=16), catalogue=catalogue, max_len=20, seed=0)
    pipeline = PipelineConfig(micro_batches=MICRO_BATCHES)
    return build_state(model, pipeline=pipeline, channels=Channels.of(World.single()))


class Worker:
    """A state and batches for each workload and mode."""

    def __init__(self) -> None:
        self._batches = {name: [batch_of(name, number) for number in range(NUM_BATCHES)] for name in SIZES}
        self._states: dict[tuple[str, str], TrainState] = {}

    def train(self, workload: str, mode: str, num_steps: int) -> None:
        state = self._states.get((workload, mode)) or self._states.setdefault((workload, mode), state_of(workload))
        read = (self._batches[workload][number % NUM_BATCHES] for number in range(num_steps))
        if mode == "sequential":
            for batch in read:
                step(state, batch, RATES)
            return
        runner = Runner(state, Schedule.of("nested", MICRO_BATCHES))
        runner.run(BatchFeed(batches=read, rates=lambda number: RATES, num_batches=num_steps))

    def seconds(self, workload: str, mode: str, num_steps: int) -> float:
        begin = time.process_time()
        self.train(workload, mode, num_steps)
        return (time.process_time() - begin) / num_steps

    def calls(self, workload: str) -> int:
        """Python and C calls of a sequential step."""
        count = 0

        def noted(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(noted)
        self.train(workload, "sequential", 1)
        sys.setprofile(None)
        return count


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    worker = Worker()
    for line in sys.stdin:
        workload, mode, num_steps = json.loads(line)
        found = worker.calls(workload) if mode == "calls" else worker.seconds(workload, mode, num_steps)
        print(json.dumps(found), flush=True)
