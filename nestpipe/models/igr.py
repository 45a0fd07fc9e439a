"""IGR, instruction-guided retrieval: selects the events of a long history that are related to the instruction.

    q = norm(psi_q[scenario; trigger; reasoning])      h = norm(psi_i[codes; text])
    selected = the newest `recent` events, and of the earlier ones the top `related` by q·h (ties: the newer), in time order

Events are selected before the rows of a batch are looked up, so the rest of the history costs nothing. Selection of a batch
runs while earlier batches train. Therefore it uses a snapshot of psi_q and of all h, which is refreshed between batches every
few steps and saved in the checkpoint: the selection depends on the step alone, not on how batches overlap. An item's h is
computed from dense parameters (its codes) and its text, so a snapshot needs no exchange.

No gradient flows through the selection; psi_q and psi_i learn from the Q2I loss (losses.py). If texts and reasoning come from
one encoder, q·h is initially the similarity of the texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.jagged import Batch, Jagged, offsets_of
from nestpipe.models.config import EncDecConfig
from nestpipe.models.instruction import FIELDS
from nestpipe.ops.device_memory import upload
from nestpipe.rng import Rng, lanes16

_FROZEN = "frozen_"


class IgrQuery(nn.Module):
    """psi_q: instructions as unit vectors."""

    def __init__(self, config: EncDecConfig):
        super().__init__()
        width = config.igr_dim
        self.scenario = nn.Parameter(torch.empty(config.num_scenarios + 1, width).normal_(std=width**-0.5))
        # Not zero: normalising a zero vector has no finite gradient.
        self.no_trigger = nn.Parameter(torch.empty(width).normal_(std=0.02))
        self.no_reasoning = nn.Parameter(torch.empty(width).normal_(std=0.02))
        self.trigger = nn.Linear(width, width, bias=False)
        self.reasoning = nn.Linear(config.reasoning_dim, width, bias=False) if config.reasoning_dim else None
        self.up, self.down = nn.Linear(3 * width, 2 * width), nn.Linear(2 * width, width)
        nn.init.eye_(self.trigger.weight)  # initially, related events are those similar to the trigger
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, given: Mapping[str, Jagged], triggers: Tensor, num_rows: int) -> Tensor:
        """Unit vectors [n, E]; `triggers` are the h of those rows that have a trigger item."""
        return instruction_vectors(dict(self.named_parameters()), given, triggers, num_rows)


def instruction_vectors(
    weights: Mapping[str, Tensor], given: Mapping[str, Jagged], triggers: Tensor, num_rows: int
) -> Tensor:
    """psi_q as a function of its weights: the thread that selects must not read a module that another thread trains."""
    numbers = torch.zeros(num_rows, dtype=torch.int64, device=weights["scenario"].device)
    if "scenario" in given:
        numbers = numbers.index_copy(0, given["scenario"].row_of_value(), given["scenario"].values + 1)
    scenario = F.embedding(numbers, weights["scenario"])
    trigger = weights["no_trigger"].expand(num_rows, -1)
    if "trigger" in given:
        known = F.linear(triggers, weights["trigger.weight"])
        trigger = trigger.index_copy(0, given["trigger"].row_of_value(), known)
    reasoning = weights["no_reasoning"].expand(num_rows, -1)
    if "reasoning.weight" in weights and "reasoning" in given:
        known = F.linear(given["reasoning"].values.to(scenario.dtype), weights["reasoning.weight"])
        reasoning = reasoning.index_copy(0, given["reasoning"].row_of_value(), known)
    hidden = F.relu(F.linear(torch.cat([scenario, trigger, reasoning], 1), weights["up.weight"], weights["up.bias"]))
    change = F.linear(hidden, weights["down.weight"], weights["down.bias"])
    return F.normalize(trigger + reasoning + change, dim=1, eps=1e-6)


class Igr(nn.Module):
    """Instructions and items as unit vectors of one space, and the selection of events by their dot product."""

    buffers_on_host = True  # they decide which rows are looked up

    items: Tensor  # the snapshot's h [I, E] by catalogue position
    version: Tensor  # [1] the step of the snapshot
    text: Tensor  # vectors [I, text] of the items' texts; no columns if there are none

    def __init__(self, config: EncDecConfig, text: Tensor | None, num_items: int):
        super().__init__()
        self.config = config
        self.register_buffer("text", torch.zeros(num_items, 0) if text is None else text, persistent=False)
        self.ask = IgrQuery(config)
        self.item = nn.Linear(config.dim + self.text.shape[1], config.igr_dim, bias=False)
        if self.ask.reasoning is not None and self.text.shape[1] == config.reasoning_dim:
            with torch.no_grad():
                self.ask.reasoning.weight.normal_(std=config.igr_dim**-0.5)
                self.item.weight[:, config.dim :] = self.ask.reasoning.weight
        for name, parameter in self.ask.named_parameters():
            self.register_buffer(_FROZEN + name.replace(".", "_"), parameter.detach().clone())
        self.register_buffer("items", torch.zeros(num_items, config.igr_dim))
        self.register_buffer("version", torch.zeros(1, dtype=torch.int64))

    def vectors(self, positions: Tensor, codes: Tensor) -> Tensor:
        """h [n, E] of items, from catalogue positions and sums of code vectors [n, D], which get no gradient."""
        text = upload(self.text.index_select(0, positions), codes.device).to(codes.dtype)
        return F.normalize(self.item(torch.cat([codes.detach(), text], 1)), dim=1, eps=1e-6)

    @torch.no_grad()
    def refresh(self, codes: Tensor, num_steps: int) -> None:
        """Takes a new snapshot; codes [I, D] of the whole catalogue."""
        self.items.copy_(self.vectors(torch.arange(len(codes)), codes))
        for name, parameter in self.ask.named_parameters():
            getattr(self, _FROZEN + name.replace(".", "_")).copy_(parameter)
        self.version.fill_(num_steps)

    @torch.no_grad()
    def select(
        self, batch: Batch, given: Mapping[str, Jagged], positions: Tensor, triggers: Tensor, rng: Rng | None
    ) -> Batch:
        """The batch with the selected events only.

        `given` has the instruction of each sample; `positions` and `triggers` are catalogue positions.
        """
        rows, places = batch.items.row_of_value(), batch.items.positions()
        lengths = batch.items.lengths()
        recent = places >= (lengths - self.config.igr_recent).index_select(0, rows)
        match self.config.igr:
            case "query":
                queries = self._frozen_queries(given, triggers, batch.num_samples)
                scores = (queries.index_select(0, rows) * self.items.double().index_select(0, positions)).sum(1)
            case "random":
                keys = (rng or Rng(0, 0)).keys("igr", batch.sample_of_token(), places)
                scores = lanes16(keys, 1).flatten().double()
            case _:
                scores = places.double()
        return keep_events(
            batch, recent | top_of_rows(scores.masked_fill(recent, -torch.inf), rows, self.config.igr_related)
        )

    def _frozen_queries(self, given: Mapping[str, Jagged], triggers: Tensor, num_rows: int) -> Tensor:
        # In double precision, so that the order of scores does not depend on the other samples of the batch.
        frozen = {
            name: cast(Tensor, getattr(self, _FROZEN + name.replace(".", "_"))).double()
            for name, _ in self.ask.named_parameters()
        }
        vectors = self.items.double().index_select(0, triggers)
        return instruction_vectors(frozen, given, vectors, num_rows)


def top_of_rows(scores: Tensor, rows: Tensor, num: int) -> Tensor:
    """Mask [T] of the top `num` finite values of each row; ties go to the later."""
    order = torch.arange(len(scores) - 1, -1, -1)
    order = order[scores[order].argsort(descending=True, stable=True)]
    order = order[rows[order].argsort(stable=True)]
    ordered = rows[order]
    rank = torch.arange(len(order)) - torch.searchsorted(ordered, ordered)
    taken = torch.empty_like(rank).index_copy_(0, order, rank) < num
    return taken & scores.isfinite()


def same_instructions(given: Mapping[str, Jagged], num_rows: int) -> Tensor:
    """Numbers [n] that are equal exactly where scenario, trigger and reasoning are equal."""
    columns = []
    for name in FIELDS:
        if name in given:
            rows, values = given[name].row_of_value(), given[name].values.unsqueeze(1).flatten(1)
            bits = values if values.dtype == torch.int64 else values.float().view(torch.int32).to(torch.int64)
            known = torch.zeros(num_rows, 1, dtype=torch.int64).index_fill_(0, rows, 1)
            columns += [known, torch.zeros(num_rows, bits.shape[1], dtype=torch.int64).index_copy_(0, rows, bits)]
    if not columns or not num_rows:
        return torch.zeros(num_rows, dtype=torch.int64)
    numbers: Tensor = torch.cat(columns, 1).unique(dim=0, return_inverse=True)[1]
    return numbers


def keep_events(batch: Batch, keep: Tensor) -> Batch:
    """The samples with only the events of the mask [T], in their order."""
    places = keep.nonzero().flatten()
    counts = torch.zeros(batch.num_samples, dtype=torch.int64)
    counts.index_add_(0, batch.items.row_of_value(), keep.to(torch.int64))
    offsets, longest = offsets_of(counts), int(counts.max()) if len(counts) else 0

    def pick(jagged: Jagged | None) -> Jagged | None:
        return None if jagged is None else Jagged(jagged.values.index_select(0, places), offsets, longest)

    items = pick(batch.items)
    assert items is not None
    return dataclasses.replace(
        batch,
        items=items,
        times=pick(batch.times),
        query_times=pick(batch.query_times),
        targets=pick(batch.targets),
        event_features={name: one.select(places) for name, one in batch.event_features.items()},
        target_features={name: one.select(places) for name, one in batch.target_features.items()},
    )
