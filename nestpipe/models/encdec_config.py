"""The `model` section of a generative run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Igr = Literal["off", "query", "recency", "random"]
Placement = Literal["after", "before", "sum", "all", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncDecConfig:
    """Encoder-decoder that generates semantic ids, steered by one instruction token."""

    ids: str = "data/ids"
    """Folder of semantic ids, written by 'nestpipe sid build'."""
    dim: int = 128
    """Width of encoder and decoder."""
    num_encoder: int = 2
    """Blocks of the encoder."""
    num_decoder: int = 2
    """Blocks of the decoder."""
    num_heads: int = 4
    """Attention heads; must divide dim."""
    hidden_dim: int = 0
    """Width of feed-forward layers; 0 means four times dim."""
    dropout: float = 0.1
    """Probability of dropping a value, at the inputs and in each block."""
    item_rows: bool = True
    """A history's item is its own row beside its codes; off, items are known by their codes alone."""
    user_rows: bool = False
    """A row of the user stands before its history."""
    placement: Placement = "after"
    """Where the instruction goes: after or before the decoder's first token, added to it, added to all tokens, or nowhere."""
    num_scenarios: int = 0
    """Scenarios with a vector of their own in events and instructions; 0 for none."""
    reasoning_dim: int = 0
    """Width of the reasoning vectors in instructions; 0 for none."""
    reasoning_dropout: float = 0.2
    """Share of training targets without their reasoning vector, so that a missing one is a state that was trained."""
    behaviour: str = ""
    """An ordinal label that says what kind of event it was (click, cart, order); events carry it, targets are weighted by it."""
    behaviour_weights: tuple[float, ...] = (1.0, 1.5, 2.0)
    """The weight of a target by the level of its behaviour."""
    softmax: Literal["legal", "full"] = "legal"
    """Probabilities over the codes that exist after a prefix, or over all codes of the level; for training and generation."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the codes it is compared with."""
    prefix_vectors: int = 0
    """Output vectors for prefixes of ids beside those of codes, by hash, at each level but the first; 0 for none. They let a code mean
    something else after each prefix: sharper on small catalogues, for that many more dense rows."""
    beam: int = 50
    """Width of the search; evaluation lists cannot be longer."""

    queries: Literal["all", "last"] = "all"
    """Every event of a history is trained to generate the next one, or only the last, as in a request."""
    igr: Igr = "off"
    """Which events before the recent ones are read: none are left out (off), those that the instruction asks for, the newest, any."""
    igr_recent: int = 16
    """igr: newest events, which are always read."""
    igr_related: int = 16
    """igr: events before them, chosen by the instruction."""
    igr_dim: int = 32
    """Width in which instructions and items are compared."""
    igr_refresh_steps: int = 100
    """igr: steps between snapshots of the vectors that events are chosen by."""
    q2i: float = 0.0
    """Weight of the loss that brings an instruction near its target's vector; it mixes the samples of data.group_size."""
    q2i_spread: float = 0.05
    """q2i: weight of minus the log of the variances, which keeps vectors from becoming one."""
    q2i_apart: float = 0.05
    """q2i: weight of the squared likeness of different instructions."""

    @property
    def compares(self) -> bool:
        """Whether there are vectors to compare instructions and items by."""
        return self.igr != "off" or self.q2i > 0

    def problems(self) -> Iterator[str]:
        for name in (
            *("dim", "num_encoder", "num_decoder", "num_heads", "beam"),
            *("igr_recent", "igr_related", "igr_dim", "igr_refresh_steps"),
        ):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if self.num_heads > 0 and self.dim % self.num_heads:
            yield f"num_heads {self.num_heads} does not divide dim {self.dim}"
        if self.prefix_vectors and self.softmax != "legal":
            yield f"prefix_vectors needs softmax 'legal', but it is '{self.softmax}': codes that do not exist have no prefix"
        for name in ("hidden_dim", "num_scenarios", "reasoning_dim", "prefix_vectors"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must not be negative"
        for name in ("q2i", "q2i_spread", "q2i_apart"):
            if not getattr(self, name) >= 0:
                yield f"{name} is {getattr(self, name)}; it must not be negative"
        if self.igr != "off" and self.queries != "last":
            yield f"igr is '{self.igr}', which reads a history for one instruction, but every event is a query; use queries last"
        for name in ("dropout", "reasoning_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 0.99:
                yield f"{name} is {getattr(self, name)}; it must be in [0, 0.99]"
        if not self.behaviour_weights or min(self.behaviour_weights) <= 0:
            yield f"behaviour_weights is {self.behaviour_weights}; each must be above 0"
