"""Encoder-decoder that generates the semantic id of the next item, conditioned on one instruction token.

    encoder    [user], e1, e2, ... en                e = item row + its codes + behaviour + scenario + position
    decoder    BOS, INSTR, s1, s2, ...               predicts  -, s1, s2, s3 ...

INSTR = MLP[scenario; trigger item or default; reasoning vector or default]. In training every event of a history is a query
for the next one and has its own instruction (`target_features`). A request has one instruction (`sample_features`). `scenario`
and `trigger` are ids, `reasoning` is rows of floats. An empty row means "none", which has a learned vector.

With `igr` a history is reduced to its newest events and those most related to the instruction (igr.py), and only its last
event is a query. Earlier events must not see a selection that was made for a later instruction.

What is decided from ids (queries, codes, children in the trie) is decided on the host and uploaded: weights may be on a device.

BOS also carries the hidden state of the last event. Code vectors are dense parameters: sharding them would cost an exchange
per decoded code. Rows of users and items are sharded. Losses are sums over targets, weighted by the target's behaviour.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.jagged import Batch, Jagged
from nestpipe.models.backbone import initial_weights
from nestpipe.models.config import EncDecConfig, SASRecConfig
from nestpipe.models.contract import Coupling, Output
from nestpipe.models.decoder import DecoderBlock, DecoderCache, Layouts, TargetDropout
from nestpipe.models.decoding import Decoding
from nestpipe.models.igr import Igr, same_instructions
from nestpipe.models.instruction import FIELDS, InstructionEncoder, Queries, queries_of
from nestpipe.models.losses import query_to_item
from nestpipe.models.negative_sampling import group_runs
from nestpipe.models.sasrec import SASRec
from nestpipe.ops.attention import attention_layout
from nestpipe.ops.device_memory import upload
from nestpipe.ops.precision import widened
from nestpipe.rng import Rng, mix64_


class SemanticIds(Protocol):
    """The part of the trie of semantic ids that a model uses."""

    @property
    def version(self) -> str: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def item_codes(self) -> Tensor: ...
    @property
    def item_nodes(self) -> Tensor: ...

    def positions(self, ids: Tensor) -> Tensor: ...
    def prefixes(self, level: int, nodes: Tensor) -> Tensor: ...
    def children(self, level: int, nodes: Tensor) -> tuple[Tensor, Tensor]: ...


class EncDec(nn.Module):
    """Trains every event of a history to generate the next item; generates from its last event."""

    coupling: Coupling

    def __init__(self, config: EncDecConfig, ids: SemanticIds, *, max_len: int, text: Tensor | None = None):
        """`text`: text vectors [I, W] by catalogue position, which IGR compares with instructions."""
        super().__init__()
        self.config, self.ids = config, ids
        self.behaviour_weights = torch.tensor([config.behaviour_weights])  # [1, levels], or by scenario [S, levels]
        self.coupling = "group" if config.q2i else "none"
        self.refresh_steps = config.igr_refresh_steps if config.igr != "off" else 0
        if self.refresh_steps:
            max_len = min(max_len, config.igr_recent + config.igr_related)
        dim, hidden = config.dim, config.hidden_dim or 4 * config.dim
        self._has_prefix = config.placement in {"after", "before"}
        self.num_tokens = len(ids.sizes) + self._has_prefix
        tables = [TableSpec(name="item", dim=dim)]  # empty without item rows
        if config.user_rows:
            tables.append(TableSpec(name="user", dim=dim))
        self.tables: tuple[TableSpec, ...] = tuple(tables)
        own = () if config.tied else ids.sizes
        self.codes = nn.ParameterList(torch.empty(size, dim).normal_(std=0.02) for size in own)
        self.behaviour = nn.Parameter(torch.empty(len(config.behaviour_weights), dim).normal_(std=0.02))
        self.encoder = SASRec(
            SASRecConfig(
                dim=dim,
                num_blocks=config.num_encoder,
                num_heads=config.num_heads,
                hidden_dim=hidden,
                dropout=config.dropout,
            ),
            max_len=max_len + config.user_rows,
        )
        self.instruction = InstructionEncoder(config)
        self.begin = nn.Parameter(torch.empty(dim).normal_(std=0.02))
        self.state = nn.Linear(dim, dim)
        self.place = nn.Parameter(torch.empty(self.num_tokens, dim).normal_(std=0.02))
        self.decode_codes = nn.ParameterList(torch.empty(size, dim).normal_(std=dim**-0.5) for size in ids.sizes[:-1])
        self.blocks = nn.ModuleList(
            DecoderBlock(dim, hidden, config.num_heads, max_len + config.user_rows) for _ in range(config.num_decoder)
        )
        self.norm = nn.LayerNorm(dim)
        self.heads = nn.ModuleList(nn.Linear(dim, size) for size in ids.sizes)
        self.prefixes = nn.ParameterList(torch.zeros(config.prefix_vectors, dim) for _ in ids.sizes[1:])
        self.igr = Igr(config, text, len(ids.item_codes)) if config.compares else None
        self.related = nn.Parameter(torch.zeros(dim)) if self.refresh_steps else None
        self.refresh(0)

    # The model contract

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        if batch.targets is None:
            raise ValueError("a training batch needs targets")
        return self._lookups(batch, queries_of(batch, self.config.queries).given)

    def encode_lookups(self, batch: Batch) -> dict[str, Lookup]:
        return self._lookups(batch, batch.sample_features)

    def weight(self, batch: Batch) -> float:
        weights = self._weights(queries_of(batch, self.config.queries))
        return float(weights.sum(dtype=torch.float64))  # float64: the same for any division over ranks

    def forward(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng) -> Output:
        queries = queries_of(batch.on_host, self.config.queries)
        weights = self.put(self._weights(queries))
        losses = self.target_losses(rows, batch, rng) * weights.unsqueeze(1)
        logs = {f"code{level}": one for level, one in enumerate(losses.detach().sum(0).unbind())}
        total = losses.sum()
        if self.config.q2i:
            q2i = self._query_to_item(batch, queries, weights.to(losses.dtype), rng)
            logs["q2i"] = q2i.detach()
            total = total + self.config.q2i * q2i
        return Output(total, logs)

    @torch.no_grad()
    def refresh(self, num_steps: int) -> None:
        if self.igr is not None:
            self.igr.refresh(self._code_vectors(torch.arange(len(self.ids.item_codes))), num_steps)

    def select(self, batch: Batch, rng: Rng | None) -> Batch:
        if self.igr is None or not self.refresh_steps:
            return batch
        given: Mapping[str, Jagged] = batch.sample_features
        if batch.targets is not None:
            queries = queries_of(batch, "last")
            given = queries.of_samples(queries.instructions(self.config.reasoning_dropout, rng))
        triggers = given["trigger"].values if "trigger" in given else batch.items.values[:0]
        positions = self.ids.positions(batch.items.values)
        return self.igr.select(batch, given, positions, self.ids.positions(triggers), rng)

    # Training

    def target_losses(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng | None) -> Tensor:
        """Loss per target and code, [T, levels]; without label smoothing the sum over levels is -log p(item)."""
        queries = queries_of(batch.on_host, self.config.queries)
        positions = self.ids.positions(queries.targets)
        codes = self.put(self.ids.item_codes.index_select(0, positions))
        memory, keys = self._memory(rows, batch, rng)
        states = memory if keys is batch.items else memory.index_select(0, self.put(_without_first(keys)))
        if self.config.queries == "last":
            states = states.index_select(0, self.put(queries.events))
        places = (self.put(one) for one in (queries.samples, queries.places))
        drop = TargetDropout(self.config.dropout, *places, num_tokens=self.num_tokens, rng=rng)
        token = self._instruction(rows, queries.instructions(self.config.reasoning_dropout, rng), len(codes))
        x = drop(self._tokens(states, token, codes), "decoder")
        num = torch.full((len(codes),), self.num_tokens, dtype=torch.int64)
        tokens = Jagged(torch.empty(len(codes) * self.num_tokens), F.pad(num.cumsum(0), (1, 0)), self.num_tokens)
        layouts = Layouts(
            attention_layout(self._placed(tokens), num_buckets=0),
            attention_layout(self._placed(queries.rows), keys=keys, num_buckets=0),
        )
        for number, block in enumerate(self.blocks):
            x = block(x, memory, layouts, drop, f"decoder{number}")
        hidden = self.norm(x[:, self._has_prefix :])
        nodes = self.ids.item_nodes.index_select(0, positions)
        return torch.stack([self._loss(hidden[:, level], level, codes, nodes) for level in range(codes.shape[1])], 1)

    def _loss(self, hidden: Tensor, level: int, codes: Tensor, nodes: Tensor) -> Tensor:
        """Cross-entropy [T] of the target code, with label smoothing over the codes of the softmax."""
        scores, hidden = widened(self.heads[level](hidden)), widened(hidden)
        if self.config.softmax == "legal":
            before = nodes[:, level - 1] if level else torch.zeros(len(codes), dtype=torch.int64)
            children, flat = self.ids.children(level, before)
            places = self.put(flat)
            scores = self.with_prefixes(scores, hidden, level, children, places)
            mask = torch.zeros_like(scores, dtype=torch.bool).view(-1).index_fill_(0, places, True).view_as(scores)
            logs = scores.masked_fill(~mask, -torch.inf).log_softmax(1)
            count: Tensor | int = mask.sum(1)
        else:
            mask, logs, count = None, scores.log_softmax(1), scores.shape[1]
        loss: Tensor = -logs.gather(1, codes[:, level : level + 1]).squeeze(1)
        smooth = self.config.label_smoothing
        if smooth:
            finite = logs if mask is None else logs.masked_fill(~mask, 0.0)
            loss = (1 - smooth) * loss - smooth * finite.sum(1) / count
        return loss

    def with_prefixes(self, scores: Tensor, hidden: Tensor, level: int, children: Tensor, places: Tensor) -> Tensor:
        """Scores [n, codes] plus those of the prefix vectors; `children` on the host, `places` are their flat indices."""
        if not (self.config.prefix_vectors and level):  # at level 0 the code is the whole prefix
            return scores
        query = hidden.index_select(0, places // scores.shape[1])
        vectors = self.prefixes[level - 1]
        added = (query * F.embedding(self._prefix_rows(level, children), vectors)).sum(1)
        return scores.flatten().index_add(0, places, added).view_as(scores)

    def _prefix_rows(self, level: int, nodes: Tensor) -> Tensor:
        """Rows of the prefix vectors of nodes of a level, where the weights are; `nodes` on the host."""
        return self.put(mix64_(self.ids.prefixes(level, nodes)).remainder_(len(self.prefixes[level - 1])))

    # Generation

    def encoded(self, rows: Mapping[str, Rows], batch: Batch) -> tuple[Tensor, Jagged]:
        """Encoder output [M, D] of the histories, and its tokens as rows; independent of the instructions."""
        return self._memory(rows, batch, None)

    def decoding(
        self, rows: Mapping[str, Rows], batch: Batch, encoded: tuple[Tensor, Jagged] | None = None
    ) -> Decoding:
        """The decoder state of the requests of a batch; with `encoded` (from `encoded()`), history rows are not needed."""
        memory, keys = self._memory(rows, batch, None) if encoded is None else encoded
        last = (keys.offsets[1:] - 1).clamp(min=0)
        padded = torch.cat([memory, memory.new_zeros(1, memory.shape[1])])
        state = padded.index_select(0, torch.where(keys.lengths() > 0, last, len(memory)))
        token = self._instruction(rows, batch.on_host.sample_features, batch.num_samples)
        return Decoding(self, DecoderCache(self.blocks, memory, keys), self._tokens(state, token, None), token)

    # Shared by training and generation

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the host where the weights are."""
        return upload(tensor, self.begin.device)

    def _placed(self, rows: Jagged) -> Jagged:
        """Rows of the host where the weights are."""
        return rows if self.begin.is_cpu else rows.moved(self.put)

    def _steering(self, given: Mapping[str, Jagged]) -> dict[str, Jagged]:
        """The instructions of the host where the weights are."""
        return {name: self._placed(one) for name, one in given.items() if name in FIELDS}

    def _lookups(self, batch: Batch, instructions: Mapping[str, Jagged]) -> dict[str, Lookup]:
        lookups = {}
        if self.config.item_rows:
            lookups["history"] = Lookup(table="item", ids=batch.items.values)
        if self.config.user_rows:
            lookups["user"] = Lookup(table="user", ids=batch.sample_features["user"].values)
        if self.config.item_rows and "trigger" in instructions and self.config.placement != "none":
            lookups["trigger"] = Lookup(table="item", ids=instructions["trigger"].values)
        return lookups

    def query_vectors(self, given: Mapping[str, Jagged], num_rows: int) -> Tensor:
        """Unit vectors [n, E] of instructions, which Q2I compares with items."""
        assert self.igr is not None
        triggers = self.ids.positions(given["trigger"].values if "trigger" in given else torch.tensor([]).long())
        vectors: Tensor = self.igr.ask(self._steering(given), self.igr_vectors(triggers).detach(), num_rows)
        return vectors

    def igr_vectors(self, positions: Tensor) -> Tensor:
        """Unit vectors [..., E] of items, by catalogue position."""
        assert self.igr is not None
        flat = positions.flatten()
        vectors: Tensor = self.igr.vectors(flat, self._code_vectors(flat)).unflatten(0, positions.shape)
        return vectors

    def _query_to_item(self, batch: Batch, queries: Queries, weights: Tensor, rng: Rng) -> Tensor:
        """The Q2I loss, weighted by group."""
        given = queries.instructions(self.config.reasoning_dropout, rng)
        positions = self.ids.positions(queries.targets)
        return query_to_item(
            self.query_vectors(given, len(positions)),
            self.igr_vectors(positions),
            weights,
            self.put(same_instructions(given, len(positions))),
            group_runs(batch, queries.rows)[0],
            variance_weight=self.config.q2i_variance,
            orthogonality_weight=self.config.q2i_orthogonality,
        )

    def _code_vectors(self, positions: Tensor) -> Tensor:
        """Sums [n, D] of the code vectors of items, by catalogue position; tied, also of the vectors of their prefixes."""
        codes = self.put(self.ids.item_codes.index_select(0, positions))
        tables = [head.weight for head in self.heads] if self.config.tied else self.codes
        vectors = [F.embedding(codes[:, level], one) for level, one in enumerate(tables)]
        if self.config.tied and self.config.prefix_vectors:
            nodes = self.ids.item_nodes.index_select(0, positions)
            vectors += [
                F.embedding(self._prefix_rows(level, nodes[:, level]), one)
                for level, one in enumerate(self.prefixes, 1)
            ]
        return torch.stack(vectors).sum(0)

    def _item_vectors(self, rows: Rows | None, ids: Tensor) -> Tensor:
        """Item vectors [n, D]: the sum of their code vectors, plus their own rows."""
        vectors = self._code_vectors(self.ids.positions(ids))
        return vectors if rows is None else vectors + rows.gather()

    def item_vectors(self, rows: Tensor, first: int = 0) -> Tensor:
        """Vectors [n, D] of catalogue positions from `first` on, as the encoder reads items, from their rows [n, D].

        Rows beyond the catalogue are padding.
        """
        places = torch.arange(first, first + len(rows)).clamp_(max=len(self.ids.item_codes) - 1)
        vectors = self._code_vectors(places)
        return vectors + rows if self.config.item_rows else vectors

    def _memory(self, rows: Mapping[str, Rows], batch: Batch, rng: Rng | None) -> tuple[Tensor, Jagged]:
        """Encoder output [M, D], and the encoder's tokens as rows."""
        vectors = self._item_vectors(rows.get("history"), batch.on_host.items.values)
        if self.related is not None:
            distance_from_end = (
                batch.items.lengths().index_select(0, batch.items.row_of_value()) - batch.items.positions()
            )
            vectors = vectors + (distance_from_end > self.config.igr_recent).unsqueeze(1) * self.related
        if self.config.behaviour:
            vectors = vectors + F.embedding(self._levels(batch.event_features[self.config.behaviour]), self.behaviour)
        if self.config.past_scenarios and "scenario" in batch.event_features:
            vectors = vectors + self.instruction.scenario_vectors(batch.event_features, len(vectors))
        if not self.config.user_rows:
            return self.encoder(vectors, batch, rng), batch.items
        keys = self._placed(_with_first(batch.on_host.items))
        joined = vectors.new_zeros(len(keys.values), vectors.shape[1])
        joined = joined.index_copy(0, self.put(_without_first(keys)), vectors)
        joined = joined.index_copy(0, keys.offsets[:-1], rows["user"].gather())
        return self.encoder(joined, dataclasses.replace(batch, items=keys), rng), keys

    def _instruction(self, rows: Mapping[str, Rows], given: Mapping[str, Jagged], num_rows: int) -> Tensor | None:
        if self.config.placement == "none":
            return None
        triggers = self.place.new_zeros(0, self.config.dim)
        if "trigger" in given:
            triggers = self._item_vectors(rows.get("trigger"), given["trigger"].values)
        token: Tensor = self.instruction(self._steering(given), triggers, num_rows)
        return token

    def _tokens(self, states: Tensor, token: Tensor | None, codes: Tensor | None) -> Tensor:
        """Input tokens of the decoder [n, P, D]; without codes only those before the first code."""
        first = self.begin + self.state(states)
        match self.config.placement:
            case "none":
                tokens = [first]
            case "sum" | "all":
                tokens = [first + token]
            case "before":
                tokens = [token, first]
            case "after":
                tokens = [first, token]
        if codes is not None:
            tokens += [self.code_token(level, codes[:, level], token) for level in range(len(self.decode_codes))]
        stacked = torch.stack(tokens, 1)
        return stacked + self.place[: stacked.shape[1]]

    def code_token(self, level: int, codes: Tensor, token: Tensor | None) -> Tensor:
        """Input tokens [n, D] of codes [n] of a level."""
        vectors = F.embedding(codes, self.decode_codes[level])
        return vectors + token if token is not None and self.config.placement == "all" else vectors

    def _weights(self, queries: Queries) -> Tensor:
        """The weight of each target, [T]."""
        if not self.config.behaviour:
            return torch.ones(len(queries.events))
        return queries.weights(self._levels(queries.given[self.config.behaviour]), self.behaviour_weights)

    def _levels(self, behaviour: Jagged) -> Tensor:
        """Levels of a behaviour; an unobserved one counts as level 0."""
        return behaviour.values.nan_to_num(0.0).to(torch.int64)


def _with_first(rows: Jagged) -> Jagged:
    """Rows with one value more at the front."""
    offsets = rows.offsets + torch.arange(len(rows.offsets))
    return Jagged(torch.zeros(int(offsets[-1]), dtype=torch.int64), offsets, rows.max_len + 1)


def _without_first(rows: Jagged) -> Tensor:
    """Indices, on the host, of all values but the first of each row."""
    return ((rows.host or rows).positions() > 0).nonzero().flatten()


def build_encdec(
    config: EncDecConfig,
    ids: SemanticIds,
    *,
    max_len: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    text: Tensor | None = None,
) -> EncDec:
    """A model whose initial dense weights are a function of the seed."""
    with initial_weights(seed):
        return EncDec(config, ids, max_len=max_len, text=text).to(dtype)
