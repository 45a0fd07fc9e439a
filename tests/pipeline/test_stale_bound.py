"""Training with rows one update old converges as docs/concepts/exactness.md says: on strongly convex quadratics, step by step.

Every batch holds every row, so every row is stale in every step; dense weights, which are never old, are part of the sum of
squares too.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestpipe.distributed.process_group import World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.embedding.lookup import Lookup, TableSpec
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.stale_rows import StaleRows
from nestpipe.embedding.table import Table
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.contract import Output
from nestpipe.pipeline import semi_async, sequential
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.stages import Rates, TrainState

NUM_ROWS, DIM, NUM_DENSE = 5, 3, 3
SIZE = NUM_ROWS * DIM + NUM_DENSE  # of the vector that is sought; a batch has as many samples
STEEP, FLAT = 1.0, 0.5  # L and mu: all eigenvalues of every batch lie between


class Quadratic(nn.Module):
    """Sample i of batch t: half the square of (x - optimum) along its own direction, plus a slope that is noise."""

    tables = (TableSpec(name="row", dim=DIM, init_std=1.0),)
    coupling = "none"

    def __init__(self, seed: int, noise: float, eigenvalues: tuple[float, float] = (FLAT, STEEP)):
        super().__init__()
        self.x = nn.Parameter(torch.ones(NUM_DENSE, dtype=torch.float64))
        self._source = torch.Generator().manual_seed(seed)
        self._eigenvalues, self._noise = eigenvalues, noise
        self.optimum = self._draw(SIZE)
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._source, dtype=torch.float64)

    def of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The directions [samples, SIZE] of a batch, by which A = Σ v vᵀ, and its noise [SIZE]."""
        if number not in self._known:
            turned, _ = torch.linalg.qr(self._draw(SIZE, SIZE))
            low, high = self._eigenvalues
            spectrum = torch.linspace(low, high, SIZE, dtype=torch.float64)
            slope = self._draw(SIZE)
            self._known[number] = (turned * spectrum.sqrt()).T, self._noise * slope / slope.norm()
        return self._known[number]

    def lookups(self, batch, rng):
        return {"rows": Lookup(table="row", ids=batch.items.values)}

    def weight(self, batch):
        return 1.0

    def forward(self, rows, batch, rng):
        own, (directions, slope) = batch.sample_ids % SIZE, self.of(batch.cursor.number)
        x = rows["rows"].gather().view(batch.num_samples, NUM_ROWS * DIM)
        away = torch.cat([x, self.x.expand(batch.num_samples, -1)], 1) - self.optimum
        along = (away * directions.index_select(0, own)).sum(1)
        return Output(along.square().sum() / 2 + (away @ slope).sum() / SIZE)


def batch_of(number):
    ids = torch.arange(NUM_ROWS).repeat(SIZE)
    items = Jagged(ids, torch.arange(SIZE + 1) * NUM_ROWS, NUM_ROWS)
    return Batch(cursor=Cursor(0, number), sample_ids=torch.arange(SIZE) + SIZE * number, items=items)


def distances(model, rate, num_steps, *, stale):
    """From the optimum, at the start and after every step, by the real stages on a real table."""
    channels, config = Channels.of(World.single()), EmbeddingConfig(optimizer="sgd")
    table = Table(model.tables[0], OPTIMIZERS["sgd"](config), seed=0, config=config, dtype=torch.float64)
    embedding = ShardedTables({"row": table}, channels.keys, channels.rows, Owners(64, 1))
    embedding.row_access = {"row": StaleRows(embedding.row_access["row"])}
    dense = DenseParams(model, DenseConfig(optimizer="sgd"), channels.dense)
    state = TrainState(
        model=model,
        embedding=embedding,
        dense=dense,
        control=channels.control,
        seed=0,
        micro_batching=MicroBatchConfig(micro_batches=2),
    )
    run, found = semi_async.step_to_barrier if stale else sequential.step, []
    for number in range(num_steps + 1):
        rows = table.peek(torch.arange(NUM_ROWS)).flatten()
        found.append(float((torch.cat([rows, dense.weights]) - model.optimum).norm()))
        means = run(state, batch_of(number), Rates(dense=rate, rows=rate))
        assert means["collision_rate"] == (float(number > 0) if stale else means["collision_rate"])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("share", [1.0, 0.3], ids=["largest rate", "smaller rate"])
def test_the_distance_stays_below_the_bound_at_every_step(noise, share):
    rate = share * FLAT / (4 * STEEP**2)
    found = distances(Quadratic(1, noise), rate, 200, stale=True)
    radius = noise * (1 + rate * STEEP) / (FLAT - 2**0.5 * rate * STEEP**2)
    bound = found[0] * (1 - rate * FLAT / 2) ** torch.arange(len(found), dtype=torch.float64) + radius
    assert bool((found <= bound).all())
    assert bool((found[1:] != distances(Quadratic(1, noise), rate, 200, stale=False)[1:]).any()), "nothing was stale"
    if not noise:
        assert found[-1] < 0.01 * found[0]


def test_what_staleness_costs():
    """At 1.5 / L the exact loop halves the distance in every step, and the stale one goes away from the optimum."""
    round_bowl = (STEEP, STEEP)
    exact, stale = (distances(Quadratic(2, 0.0, round_bowl), 1.5 / STEEP, 30, stale=stale) for stale in (False, True))
    torch.testing.assert_close(exact[1:11], exact[:10] / 2)
    assert stale[-1] > 10 * stale[0]
