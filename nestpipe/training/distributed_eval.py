"""Evaluation by all ranks of a world: each encodes its share of the users and scores its part of the catalogue.

    nestpipe eval RUN, under torchrun:   eval_world() -> predictor(run, step)   rows of a checkpoint, each rank its buckets
    validation in training:              ChannelRanks(control)                  rows of the state in training

The algorithm, which knows no process groups, is in eval/eval_ranks.py and eval/catalogue_ranking.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import Channel, World
from nestpipe.eval.eval_ranks import EvalRanks
from nestpipe.eval.predictor import Predictor, make_predictor
from nestpipe.pipeline.channels import Channels
from nestpipe.training.open_run import agree
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state


class ChannelRanks:
    """All ranks of a channel, for evaluation. Used by the thread that may launch on the channel."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self.rank, self.size = channel.world.rank, channel.world.size

    def exchange(self, name: str, send: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        name = f"evaluation/{name}"
        if sizes is None:
            own = [[len(one)] for one in send]
            sizes = [num for (num,) in self._channel.exchange_sizes(own, name=f"{name}/sizes")]
        received = [torch.empty(num, *send[0].shape[1:], dtype=send[0].dtype) for num in sizes]
        self._channel.exchange(name, [one.contiguous() for one in send], received).wait()
        return received


@dataclass(frozen=True, slots=True)
class EvalWorld:
    """The ranks that evaluate runs together."""

    channels: Channels
    ranks: EvalRanks

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes."""
        return self.ranks.rank == 0

    def predictor(self, run: Run, step: int) -> Predictor:
        """Scores with a checkpoint of a run; rows are sharded over the ranks. Collective."""
        if self.ranks.size == 1:
            return run.predictor(step)  # without the state of optimizers
        agree(run, self.channels.control)
        state, _ = all_ranks_or_none(self.channels.saves, "loaded", lambda: load_state(run, step, self.channels))
        return make_predictor(state.model, state.embedding, run.instructed, run.split, run.config)


@contextlib.contextmanager
def eval_world(world: World | None = None, *, stacks: Path | None = None) -> Iterator[EvalWorld]:
    """All ranks of a world, by default torchrun's. Collective."""
    with contextlib.closing(world or World.from_environment(stacks=stacks)) as open_world:
        channels = Channels.of(open_world)
        yield EvalWorld(channels, ChannelRanks(channels.control))
