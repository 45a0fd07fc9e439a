"""The instruction token, and the queries of a batch: the events that are trained, each with its instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Batch, Jagged, offsets_of
from nestpipe.models.config import EncDecConfig
from nestpipe.ops.precision import widened
from nestpipe.rng import Rng, lanes16

FIELDS = ("scenario", "trigger", "reasoning")


class InstructionEncoder(nn.Module):
    """Encodes instructions (scenario, trigger item, reasoning vector) as one token each."""

    def __init__(self, config: EncDecConfig):
        super().__init__()
        dim = config.dim
        self.scenario = nn.Parameter(torch.empty(config.num_scenarios + 1, dim).normal_(std=0.02))
        self.no_trigger = nn.Parameter(torch.zeros(dim))
        self.no_reasoning = nn.Parameter(torch.zeros(dim))
        self.reasoning = nn.Linear(config.reasoning_dim, dim) if config.reasoning_dim else None
        self.up, self.down = nn.Linear(3 * dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, given: Mapping[str, Jagged], triggers: Tensor, num_rows: int) -> Tensor:
        """Tokens [n, D]; `triggers` are the item vectors of those rows that have a trigger."""
        scenarios = self.scenario_vectors(given, num_rows)
        trigger = self.no_trigger.expand(num_rows, -1)
        if "trigger" in given:
            trigger = trigger.index_copy(0, given["trigger"].row_of_value(), triggers)
        reasoning = self.no_reasoning.expand(num_rows, -1)
        if self.reasoning is not None and "reasoning" in given:
            rows = given["reasoning"]
            known = self.reasoning(rows.values.to(self.reasoning.weight.dtype))
            reasoning = reasoning.index_copy(0, rows.row_of_value(), widened(known))
        hidden = F.relu(self.up(torch.cat([scenarios, trigger, reasoning], 1)))
        token: Tensor = self.down(hidden)
        return token

    def scenario_vectors(self, given: Mapping[str, Jagged], num_rows: int) -> Tensor:
        """Vectors [n, D] of the scenarios of some rows; no scenario, and one that was not trained, is row 0."""
        numbers = torch.zeros(num_rows, dtype=torch.int64, device=self.scenario.device)
        if "scenario" in given:
            rows = given["scenario"]
            is_known = (rows.values >= 0) & (rows.values < len(self.scenario) - 1)
            numbers = numbers.index_copy(0, rows.row_of_value(), torch.where(is_known, rows.values + 1, 0))
        return F.embedding(numbers, self.scenario)


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """The events [T] that are trained, as rows of their samples, each with its target and instruction."""

    rows: Jagged
    events: Tensor
    targets: Tensor
    given: Mapping[str, Jagged]
    samples: Tensor  # global sample ids [T]
    places: Tensor  # numbers the queries of a sample; independent of which other events were selected

    def instructions(self, dropout: float, rng: Rng | None) -> Mapping[str, Jagged]:
        """The instructions; in training a share of them loses the reasoning, so that its absence is learned too."""
        if rng is None or not dropout or "reasoning" not in self.given:
            return self.given
        keys = rng.keys("reasoning", self.samples, self.places)
        kept = (lanes16(keys, 1) >= round(dropout * 65536) - 32768).flatten()
        rows = self.given["reasoning"]
        values = kept.index_select(0, rows.row_of_value()).nonzero().flatten()
        reasoning = Jagged(rows.values.index_select(0, values), offsets_of(rows.lengths() * kept), rows.max_len)
        return {**self.given, "reasoning": reasoning}

    def weights(self, levels: Tensor, by_scenario: Tensor) -> Tensor:
        """The weight [T] of each target by the level of its behaviour and, with a row for each, by its scenario."""
        scenarios = torch.zeros_like(levels)
        if "scenario" in self.given and len(by_scenario) > 1:
            scenarios = scenarios.index_copy(0, self.given["scenario"].row_of_value(), self.given["scenario"].values)
        return by_scenario[scenarios, levels.clamp(max=by_scenario.shape[1] - 1)]

    def of_samples(self, given: Mapping[str, Jagged]) -> dict[str, Jagged]:
        """Instructions as one row per sample, empty for a sample without a query; for at most one query per sample."""
        rows, zeros = self.rows.row_of_value(), torch.zeros(self.rows.num_rows, dtype=torch.int64)
        return {
            name: Jagged(one.values, offsets_of(zeros.index_copy(0, rows, one.lengths())), one.max_len)
            for name, one in given.items()
        }


def queries_of(batch: Batch, which: Literal["all", "last"]) -> Queries:
    """All events of a training batch, or the last event of each sample that has one."""
    if batch.targets is None:
        raise ValueError("a training batch needs targets")
    if which == "all":
        events, samples, places = torch.arange(batch.num_tokens), batch.sample_of_token(), batch.items.positions()
        return Queries(batch.items, events, batch.targets.values, batch.target_features, samples, places)
    some = batch.items.lengths() > 0
    events = (batch.items.offsets[1:] - 1)[some]
    given = {name: one.select(events) for name, one in batch.target_features.items()}
    rows = Jagged(events, offsets_of(some.to(torch.int64)), 1)
    samples = batch.sample_ids.index_select(0, rows.row_of_value())
    targets = batch.targets.values.index_select(0, events)
    return Queries(rows, events, targets, given, samples, torch.zeros_like(samples))


def present_rows(values: Sequence[int | None]) -> Jagged:
    """One row per value, empty for None."""
    counts = torch.tensor([int(one is not None) for one in values])
    return Jagged(torch.tensor([one for one in values if one is not None], dtype=torch.int64), offsets_of(counts), 1)
