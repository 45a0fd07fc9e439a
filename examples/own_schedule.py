"""Your own schedule: a schedule is data. This one removes the optional edges, so every stream runs as early as it can.

python examples/own_schedule.py
"""

from itertools import count

import torch
from torch import nn

import nestpipe
from nestpipe.pipeline.deadlock_check import check
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Event, Schedule
from nestpipe.pipeline.stages import Rates


class Eager(Schedule):
    """Nested, without the edges that only let more urgent work go first."""

    def yields_to(self, event: Event) -> list[Event]:
        return []


class Bilinear(nn.Module):
    """The smallest model: an event scores the next one by a product with a matrix."""

    tables, coupling = (nestpipe.TableSpec(name="item", dim=8, init_std=0.1),), "none"

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.eye(8))

    def lookups(self, batch, rng):
        ids = {"event": batch.items.values, "next": batch.targets.values}
        return {name: nestpipe.Lookup(table="item", ids=one) for name, one in ids.items()}

    def weight(self, batch):
        return float(batch.num_tokens)

    def forward(self, rows, batch, rng):
        scores = (rows["event"].gather() @ self.mix * rows["next"].gather()).sum(1)
        return nestpipe.Output(nn.functional.softplus(-scores).sum())


def batches():
    for number in count():
        rows = [[(7 * user + 3 * place + number) % 50 for place in range(9)] for user in range(16)]
        items, targets = (nestpipe.Jagged.from_rows([row[i : i + 8] for row in rows]) for i in (0, 1))
        cursor = nestpipe.Cursor(0, number)
        yield nestpipe.Batch(cursor=cursor, sample_ids=torch.arange(16), items=items, targets=targets)


states = [nestpipe.build_state(Bilinear(), pipeline=nestpipe.PipelineConfig(micro_batches=2)) for _ in range(2)]
schedule = Eager("nested", 2, depth=1)
check(schedule, 6, 2)  # raises if two ranks could wait for each other forever
Runner(states[0], schedule).run(BatchFeed(batches=batches(), rates=lambda _: Rates(1e-2, 1e-2), num_batches=6))
nestpipe.train_batches(states[1], batches(), num_batches=6, lr=1e-2)
print("bitwise identical to sequential:", torch.equal(states[0].model.mix, states[1].model.mix))
