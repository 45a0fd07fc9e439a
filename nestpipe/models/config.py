"""The `model` and `loss` sections of a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nestpipe.ops.limits import MAX_BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingConfig:
    """Ranking model: predicts the labels of candidates from the history; see docs/concepts/ranking-models.md."""

    backbone: Literal["hstu", "fuxi"] = "hstu"
    """Type of the blocks."""
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
    """Width of the hidden layer of the prediction heads."""
    dropout: float = 0.2
    """Dropout probability, at the input and in each block."""
    num_time_buckets: int = 128
    """Number of buckets of the time bias."""
    features: tuple[str, ...] = ()
    """Input features: those of events and items in the history, those of items and users for candidates."""
    id_dropout: float = 0.0
    """Share of the items whose id row is left out of a step, so that an item without training events is scored from its features;
    0: off. Ids without a trained row are zero then, instead of random."""
    labels: tuple[str, ...] = ()
    """Labels to predict [default: all labels of the log]. They are also the actions of the history."""

    def problems(self) -> Iterator[str]:
        yield from _at_least_one(self, "dim", "num_blocks", "num_heads", "qk_dim", "v_dim", "ffn_dim", "head_dim")
        yield from _time_buckets(self)
        yield from _names(self)
        yield from _probability(self, "dropout", "id_dropout")
        if self.id_dropout and not self.features:
            yield f"id_dropout is {self.id_dropout}, but features is empty: nothing would be left of an item; name item features"


@dataclass(frozen=True, slots=True, kw_only=True)
class DCNConfig:
    """Deep & Cross Network v2: cross layers (products of features) in parallel with an MLP."""

    dim: int = 16
    """Width of the embedding of each id feature."""
    num_cross: int = 3
    """Number of cross layers; n layers give products of up to n + 1 features."""
    rank: int = 0
    """Rank of the cross matrices; 0 means full."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the hidden layers of the MLP."""
    features: tuple[str, ...] = ("user", "item")
    """Input features; 'user' and 'item' are the ids themselves."""
    labels: tuple[str, ...] = ()
    """Labels to predict [default: all labels of the log]."""

    def problems(self) -> Iterator[str]:
        yield from _at_least_one(self, "dim", "num_cross")
        yield from _names(self)
        if self.rank < 0:
            yield f"rank is {self.rank}; it must be 0 (full) or more"
        if not self.hidden or min(self.hidden) < 1:
            yield f"hidden is {self.hidden}; it must be one or more widths of at least 1"
        if not self.features:
            yield "features is empty; name at least one"


def _names(config: RankingConfig | DCNConfig) -> Iterator[str]:
    for name in ("features", "labels"):
        given = getattr(config, name)
        if len(set(given)) < len(given):
            yield f"{name} is {given}; name each one once"


Igr = Literal["off", "query", "recency", "random"]

TextEncoder = Literal["auto", "minilm", "words"]

Placement = Literal["after", "before", "sum", "all", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncDecConfig:
    """Encoder-decoder that generates semantic ids, conditioned on one instruction token."""

    ids: str = "data/ids"
    """Folder of semantic ids, created by 'nestpipe sid build'."""
    dim: int = 128
    """Width of encoder and decoder."""
    num_encoder: int = 2
    """Number of encoder blocks."""
    num_decoder: int = 2
    """Number of decoder blocks."""
    num_heads: int = 4
    """Attention heads; must divide dim."""
    hidden_dim: int = 0
    """Width of feed-forward layers; 0 means four times dim."""
    dropout: float = 0.1
    """Dropout probability, at the inputs and in each block."""
    item_rows: bool = True
    """Add an embedding row per item to its code vectors in the history; off: codes only."""
    user_rows: bool = False
    """Prepend a user embedding to the history."""
    placement: Placement = "after"
    """Position of the instruction token: after or before the decoder's first token, added to it (sum), added to all tokens, or none."""
    num_scenarios: int = 0
    """Number of scenarios, each with its own vector; 0: none, or those of `scenarios`."""
    past_scenarios: bool = False
    """The encoder reads in which scenario each past event happened, too."""
    scenarios: str = ""
    """Scenario file (JSON): for each scenario of the log its trigger rule, pool, weights of behaviours and rewards, beam."""
    reasoning_dim: int = 0
    """Width of the reasoning vectors in instructions; 0: none."""
    instructions: str = ""
    """Store of instructions for training, written by 'nestpipe think --for-training'; it decides reasoning_dim."""
    reasoning_dropout: float = 0.2
    """Share of training targets whose reasoning vector is dropped, so that a missing one is trained too."""
    behaviour: str = ""
    """Ordinal label with the kind of an event (click, cart, order): an input of the history and the weight of targets."""
    behaviour_weights: tuple[float, ...] = (1.0, 1.5, 2.0)
    """Weight of a target, by level of its behaviour."""
    softmax: Literal["legal", "full"] = "legal"
    """Softmax over the codes that exist after a prefix (legal) or over all codes of the level (full), in training and generation."""
    label_smoothing: float = 0.0
    """Label smoothing over the codes of the softmax."""
    prefix_vectors: int = 0
    """Hashed output vectors per id prefix, in addition to those of codes, at each level but the first; 0: none. A code can then
    mean something else after each prefix. Better on small catalogues, at the cost of as many dense rows."""
    tied: bool = False
    """Read the items of a history by the vectors that score their codes and prefixes, instead of by vectors of their own."""
    beam: int = 50
    """Beam width; evaluation lists cannot be longer."""

    queries: Literal["all", "last"] = "all"
    """Train every event of a history to generate the next item, or one per epoch as in a request: the last, then the one before."""
    igr: Igr = "off"
    """Instruction-guided retrieval: which earlier events are read besides the recent ones. off: all of them; query: those most
    related to the instruction; recency: the newest; random: any."""
    igr_recent: int = 16
    """igr: number of newest events, which are always read."""
    igr_related: int = 16
    """igr: number of earlier events that are selected."""
    igr_dim: int = 32
    """igr, q2i: width of the vectors of instructions and items."""
    igr_texts: bool = True
    """igr, q2i: compare instructions with the texts of the items too, if the log has them; off: with their codes alone."""
    igr_refresh_steps: int = 100
    """igr: steps between two snapshots of the vectors used for selection."""
    q2i: float = 0.0
    """Weight of the query-to-item loss, which aligns an instruction with its target; it mixes the samples of data.group_size."""
    q2i_variance: float = 0.05
    """q2i: weight of the variance term (minus the log variances), which prevents collapse."""
    q2i_orthogonality: float = 0.05
    """q2i: weight of the squared cosine between different instructions."""

    @property
    def compares(self) -> bool:
        """Whether the model has instruction and item vectors to compare."""
        return self.igr != "off" or self.q2i > 0

    def problems(self) -> Iterator[str]:
        yield from _at_least_one(self, "dim", "num_encoder", "num_decoder", "num_heads", "beam")
        yield from _at_least_one(self, "igr_recent", "igr_related", "igr_dim", "igr_refresh_steps")
        yield from _divides(self)
        if self.prefix_vectors and self.softmax != "legal":
            yield f"prefix_vectors needs softmax 'legal', but softmax is '{self.softmax}'"
        for name in (
            *("hidden_dim", "num_scenarios", "reasoning_dim", "prefix_vectors"),
            *("q2i", "q2i_variance", "q2i_orthogonality"),
        ):
            if not getattr(self, name) >= 0:
                yield f"{name} is {getattr(self, name)}; it must not be negative"
        if self.igr != "off" and self.queries != "last":
            yield f"igr is '{self.igr}', which selects events for one instruction per history; set queries to last"
        yield from _probability(self, "dropout", "reasoning_dropout", "label_smoothing")
        if not self.behaviour_weights or min(self.behaviour_weights) <= 0:
            yield f"behaviour_weights is {self.behaviour_weights}; each must be above 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFeatureConfig:
    """What a next-item model knows of an item besides its id."""

    item_features: tuple[str, ...] = ()
    """Features of items that join their id rows, so that new items are recommended from content: item features of the log,
    and columns of its item texts (title), which are embedded."""
    id_dropout: float = 0.2
    """item_features: share of the items whose id row is left out of a step, so that content learns to stand alone."""
    text_encoder: TextEncoder = "auto"
    """item_features: how texts become vectors. minilm: sentence vectors (nestpipe[text]); words: hashed words; auto: the best
    that is installed when the run starts."""

    def item_problems(self) -> Iterator[str]:
        if len(set(self.item_features)) < len(self.item_features):
            yield f"item_features is {self.item_features}; name each one once"
        yield from _probability(self, "id_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class SASRecConfig(ItemFeatureConfig):
    """SASRec, self-attentive sequential recommendation: the baseline."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of blocks."""
    num_heads: int = 1
    """Attention heads; must divide dim."""
    hidden_dim: int = 0
    """Width of the feed-forward layer; 0 means dim."""
    dropout: float = 0.2
    """Dropout probability, at the input and in each block."""
    block: Literal["pre_norm", "ligr", "meta"] = "pre_norm"
    """Type of the blocks. ligr: gated, with SwiGLU, as in eSASRec. meta: that of Meta's SASRec, for cosine scores."""

    def problems(self) -> Iterator[str]:
        yield from self.item_problems()
        yield from _at_least_one(self, "dim", "num_blocks", "num_heads")
        yield from _divides(self)
        yield from _probability(self, "dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig(ItemFeatureConfig):
    """HSTU, hierarchical sequential transduction units."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of blocks."""
    num_heads: int = 1
    """Attention heads."""
    qk_dim: int = 50
    """Width of queries and keys in each head."""
    v_dim: int = 50
    """Width of values and gates in each head."""
    dropout: float = 0.2
    """Dropout probability, at the input and in each block."""
    num_time_buckets: int = 128
    """Number of buckets of the time bias."""
    divisor: int = 0
    """What attention sums are divided by; 0 means data.max_len. Meta's code divides by max_len + 11, 211 on ML-1M."""
    position_std: float = 0.0
    """Standard deviation of the initial position vectors; 0 means dim ** -0.5."""

    def problems(self) -> Iterator[str]:
        yield from self.item_problems()
        yield from _at_least_one(self, "dim", "num_blocks", "num_heads", "qk_dim", "v_dim")
        yield from _time_buckets(self)
        yield from _probability(self, "dropout")
        for name in ("divisor", "position_std"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must not be negative"


@dataclass(frozen=True, slots=True, kw_only=True)
class FuXiConfig(ItemFeatureConfig):
    """FuXi: attention channels for content, position and time, and a SwiGLU layer."""

    dim: int = 50
    """Width of item vectors and blocks."""
    num_blocks: int = 2
    """Number of blocks."""
    num_heads: int = 1
    """Attention heads."""
    qk_dim: int = 50
    """Width of queries and keys in each head."""
    v_dim: int = 50
    """Width of values in each head; gates are three times as wide."""
    hidden_dim: int = 0
    """Width of the SwiGLU layer; 0 means dim."""
    dropout: float = 0.2
    """Dropout probability, at the input and twice in each block."""
    feed_dropout: Literal["hidden", "input"] = "hidden"
    """Place of the second dropout in a block: the hidden layer of SwiGLU, or its input, as published."""
    time: Literal["buckets", "decay"] = "decay"
    """Time channel. buckets: a table (FuXi-alpha). decay: alpha · gamma^(T^beta) (FuXi-gamma)."""
    num_time_buckets: int = 128
    """buckets: number of buckets."""

    def problems(self) -> Iterator[str]:
        yield from self.item_problems()
        yield from _at_least_one(self, "dim", "num_blocks", "num_heads", "qk_dim", "v_dim")
        yield from _time_buckets(self)
        yield from _probability(self, "dropout")


RetrievalConfig = SASRecConfig | HSTUConfig | FuXiConfig
ModelConfig = RetrievalConfig | RankingConfig | DCNConfig | EncDecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Loss of next-item models."""

    kind: Literal["full", "sampled", "in_batch"] = "sampled"
    """Softmax over the catalogue (full), over the target and random negatives (sampled), or over the targets of a group with logQ
    correction (in_batch)."""
    num_negatives: int = 128
    """sampled: number of negatives per event, per sample or in the pool, uniform over the catalogue."""
    source: Literal["token", "sample", "pool"] = "token"
    """sampled: draw negatives per event (as published), per sample, or one pool for the global batch."""
    share: Literal["none", "sample", "group"] = "none"
    """sampled, token: reuse the negatives of other events of the sample, or of the data.group_size samples of its group."""
    share_factor: int = 2
    """share: number of events whose negatives are used, its own included; k times the negatives for the same lookups."""
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    """sampled: dtype in which rows that are only negatives are sent; 16 bits halve their traffic and round them."""
    normalise: bool = True
    """Score by cosine instead of dot product."""
    temperature: float = 0.05
    """Divisor of the scores."""
    segment: int = 256
    """Number of events scored at a time; bounds memory, does not change the result."""
    max_full_catalogue: int = 200_000
    """full: largest catalogue that is accepted; each step scores every event against every item."""

    def problems(self) -> Iterator[str]:
        yield from _at_least_one(self, "num_negatives", "segment", "max_full_catalogue")
        if not self.temperature > 0:
            yield f"temperature is {self.temperature}; it must be above 0"
        if self.share != "none" and (self.kind, self.source) != ("sampled", "token"):
            yield f"share is '{self.share}', which needs kind sampled and source token"
        if self.share_factor < 2:
            yield f"share_factor is {self.share_factor}; it must be at least 2 (share none for no sharing)"

    @property
    def mixes_groups(self) -> bool:
        """Whether the loss of a sample depends on other samples of its group."""
        return self.kind == "in_batch" or self.share == "group"


def _at_least_one(config: object, *names: str) -> Iterator[str]:
    for name in names:
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"


def _probability(config: object, *names: str) -> Iterator[str]:
    for name in names:
        if not 0 <= getattr(config, name) <= 0.99:
            yield f"{name} is {getattr(config, name)}; it must be in [0, 0.99]"


def _time_buckets(config: RankingConfig | HSTUConfig | FuXiConfig) -> Iterator[str]:
    if not 1 <= config.num_time_buckets <= MAX_BUCKETS:
        yield f"num_time_buckets is {config.num_time_buckets}; it must be in 1 .. {MAX_BUCKETS}"


def _divides(config: SASRecConfig | EncDecConfig) -> Iterator[str]:
    if config.num_heads > 0 and config.dim % config.num_heads:
        yield f"num_heads {config.num_heads} does not divide dim {config.dim}"
