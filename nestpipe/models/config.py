"""The `model` and `loss` sections of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nestpipe.ops.limits import MAX_BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingConfig:
    """Predicts the labels of candidates from the history; see docs/concepts/ranking-models.md."""

    backbone: Literal["hstu", "fuxi"] = "hstu"
    """What turns history and candidates into states."""
    dim: int = 64
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of blocks."""
    num_heads: int = 2
    """Attention heads."""
    qk_dim: int = 32
    """Width of queries and keys in each head."""
    v_dim: int = 32
    """Width of values in each head."""
    ffn_dim: int = 128
    """fuxi: width of the feed-forward layer."""
    head_dim: int = 64
    """Width of the layer between a candidate's state and its labels."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and in each block."""
    num_time_buckets: int = 128
    """Buckets of the time bias."""
    features: tuple[str, ...] = ()
    """Features to read: of events and items in the history, of items and users for candidates."""
    labels: tuple[str, ...] = ()
    """Labels to predict; all that the log declares if none is named. They are also the actions of the history."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, ("dim", "num_blocks", "num_heads", "qk_dim", "v_dim", "ffn_dim", "head_dim"))
        yield from _positive(self, ("num_time_buckets",))
        yield from _names(self)
        if not 0 <= self.dropout <= 0.99:
            yield f"dropout is {self.dropout}; it must be in [0, 0.99]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DCNConfig:
    """Deep and cross network, version 2: explicit products of features, and a plain network over them."""

    dim: int = 16
    """Width of the vector of each id feature."""
    num_cross: int = 3
    """Cross layers; the first makes products of two features, each further one adds a factor."""
    rank: int = 0
    """Rank of the cross matrices; 0 means full."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the deep network."""
    features: tuple[str, ...] = ("user", "item")
    """Features to read; 'user' and 'item' are the ids themselves."""
    labels: tuple[str, ...] = ()
    """Labels to predict; all that the log declares if none is named."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, ("dim", "num_cross"))
        yield from _names(self)
        if self.rank < 0:
            yield f"rank is {self.rank}; it must be 0 (full) or more"
        if not self.hidden or min(self.hidden) < 1:
            yield f"hidden is {self.hidden}; it must be one or more widths of at least 1"
        if not self.features:
            yield "features is empty; there would be nothing to cross"


def _positive(config: RankingConfig | DCNConfig, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"


def _names(config: RankingConfig | DCNConfig) -> Iterator[str]:
    for name in ("features", "labels"):
        given = getattr(config, name)
        if len(set(given)) < len(given):
            yield f"{name} is {given}; each may be named once"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SASRecConfig:
    """Self-attentive sequential recommendation: the baseline that every claim stands beside."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Blocks of attention and feed-forward."""
    num_heads: int = 1
    """Attention heads; must divide dim."""
    hidden_dim: int = 0
    """Width of the feed-forward layer; 0 means dim."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and in each block."""

    def problems(self) -> Iterator[str]:
        yield from _size_problems(self)
        if self.num_heads > 0 and self.dim % self.num_heads:
            yield f"num_heads {self.num_heads} does not divide dim {self.dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig:
    """Hierarchical sequential transduction units."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of units."""
    num_heads: int = 1
    """Attention heads."""
    qk_dim: int = 50
    """Width of queries and keys in each head."""
    v_dim: int = 50
    """Width of values and gates in each head."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and in each block."""
    num_time_buckets: int = 128
    """Buckets of the time bias."""

    def problems(self) -> Iterator[str]:
        yield from _size_problems(self)
        yield from _head_problems(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuXiConfig:
    """FuXi-alpha: a channel of attention each for content, position and time, and a SwiGLU block."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of units."""
    num_heads: int = 1
    """Attention heads."""
    qk_dim: int = 50
    """Width of queries and keys in each head."""
    v_dim: int = 50
    """Width of values in each head; gates have three times as much."""
    hidden_dim: int = 0
    """Width of the SwiGLU block; 0 means dim."""
    dropout: float = 0.2
    """Probability of dropping a value, at the input and twice in each block."""
    time: Literal["buckets", "decay"] = "decay"
    """The time channel. buckets: a table, as in FuXi-alpha. decay: alpha · gamma^(T^beta), as in FuXi-gamma."""
    num_time_buckets: int = 128
    """buckets: how many."""

    def problems(self) -> Iterator[str]:
        yield from _size_problems(self)
        yield from _head_problems(self)


RetrievalConfig = SASRecConfig | HSTUConfig | FuXiConfig
ModelConfig = RetrievalConfig | RankingConfig | DCNConfig | EncDecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """How the next item is learned."""

    kind: Literal["full", "sampled", "in_batch"] = "sampled"
    """Softmax over the catalogue; over the next item and random negatives; over the next items of a group, by popularity."""
    num_negatives: int = 128
    """sampled: negatives per event, per sample or in the pool, uniform over the catalogue."""
    source: Literal["token", "sample", "pool"] = "token"
    """sampled: negatives of its own for each event (as published), for each sample, or one pool for the global batch."""
    share: Literal["none", "sample", "group"] = "none"
    """sampled, token: an event also takes the negatives of other events of its sample, or of its data.group_size samples."""
    share_factor: int = 2
    """share: of so many events, its own included; k times the negatives for the same lookups."""
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    """sampled: what negatives are rounded to; rows that a batch needs as nothing else then travel in half the bytes."""
    normalise: bool = True
    """Compare unit vectors (cosine); the temperature then matters."""
    temperature: float = 0.05
    """Scores are divided by this."""
    segment: int = 256
    """Events scored at a time; bounds memory, does not change the result."""
    max_full_catalogue: int = 200_000
    """full: refuse catalogues above this size; each step scores every event against every item."""

    def problems(self) -> Iterator[str]:
        for name in ("num_negatives", "segment", "max_full_catalogue"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if not self.temperature > 0:
            yield f"temperature is {self.temperature}; it must be above 0"
        if self.share != "none" and (self.kind, self.source) != ("sampled", "token"):
            yield f"share is '{self.share}', but only negatives of events are shared; use kind sampled and source token"
        if self.share_factor < 2:
            yield f"share_factor is {self.share_factor}; it must be at least 2 (share none for no sharing)"

    @property
    def mixes_groups(self) -> bool:
        """Whether the loss of a sample depends on the others of its group."""
        return self.kind == "in_batch" or self.share == "group"


def _head_problems(config: HSTUConfig | FuXiConfig) -> Iterator[str]:
    for name in ("qk_dim", "v_dim"):
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"
    if not 1 <= config.num_time_buckets <= MAX_BUCKETS:
        yield f"num_time_buckets is {config.num_time_buckets}; it must be in 1 .. {MAX_BUCKETS}"


def _size_problems(config: RetrievalConfig) -> Iterator[str]:
    for name in ("dim", "num_blocks", "num_heads"):
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"
    if not 0 <= config.dropout <= 0.99:
        yield f"dropout is {config.dropout}; it must be in [0, 0.99]"
