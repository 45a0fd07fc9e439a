"""A generative run opened for serving: encoder memories are separate from what steers a request.

The encoder reads events alone, so its memory serves every scenario, trigger and instruction. Its cache key is that of a KV prefix:
model, weights, semantic ids, user, and a digest of exactly what the encoder reads. If the instruction selects events of a long
history (IGR), the digest is of the selected events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.embedding.row_reader import TableRows
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.generative.allowed_pools import AllowedPools
from nestpipe.generative.beam import Decoder, path_scores
from nestpipe.generative.instruction_store import version_of
from nestpipe.generative.ruled_decoding import RuledRequest, decode_lists
from nestpipe.generative.scenario_pools import scenario_masks
from nestpipe.generative.semantic_ids import Registry
from nestpipe.generative.trie import Trie
from nestpipe.jagged import Batch, Cursor, Jagged, offsets_of
from nestpipe.models.build_model import inputs_of
from nestpipe.models.config import EncDecConfig
from nestpipe.models.encdec import EncDec
from nestpipe.models.instruction import present_rows
from nestpipe.models.kv_prefix import InputDigest, PrefixKey, digest_of
from nestpipe.models.prefix_inference import cut_events
from nestpipe.rules.compiled_rules import CompiledRules
from nestpipe.rules.rule_book import RequestRules
from nestpipe.serve.known_items import Ints, KnownItems, known_items
from nestpipe.serve.model import rows_in_files, without_events
from nestpipe.serve.user_history import only_events
from nestpipe.training.run_folder import Run


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInputs:
    """A history as the encoder reads it, the key of its memory, the rules and the catalogue positions that they remove."""

    history: Batch
    key: PrefixKey
    rules: CompiledRules
    removed: Ints

    @property
    def num_events(self) -> int:
        return self.key.length


@dataclass(frozen=True, slots=True, eq=False)
class EncoderMemory:
    """Encoder output for a history, [M, D]; M is the number of events, plus one if users have rows."""

    key: PrefixKey
    memory: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steering:
    """What steers a request; None is the model's default."""

    scenario: int | None = None
    trigger: int | None = None
    vector: Tensor | None = None  # [reasoning_dim]


@dataclass(frozen=True, slots=True)
class GeneratedList:
    """Items, best first, with the log-probabilities of their semantic ids; `allowed` items could have been generated."""

    items: list[int]
    log_probabilities: list[float]
    allowed: int


class GenerativeModel:
    """A model in use. Stored instructions must have `instruction_version`."""

    def __init__(
        self,
        model: EncDec,
        trie: Trie,
        rows: TableRows,
        builder: BatchBuilder,
        known: KnownItems,
        *,
        max_len: int,
        block: int,
        name: str,
        weights: str,
        instruction_version: str,
    ):
        self.model, self.trie, self.name, self.instruction_version = model, trie, name, instruction_version
        self.known, self.max_len, self._block = known, max_len, block
        self._rows, self._builder, self._weights = rows, builder, weights
        self._description = digest_of((type(model).__name__, model.config))
        self._schema = f"{trie.version}/{trie.digest}"
        self.scenarios: Tensor | None = None  # [scenario number, I]: the items that each may show; None: all
        self._pools = AllowedPools(trie)

    def prepare(
        self, events: Sequences, steering: Steering | None = None, *, rules: RequestRules | None = None
    ) -> EncoderInputs:
        """The inputs of one user, with the events that the steering selects; raises DataError for unreadable events.

        What the rules remove is never generated: by default items of the history, unless the run was evaluated with them.
        """
        is_known = self.known.has(events.items)  # others have no semantic id, so the model cannot read them
        events = events if is_known.all() else only_events(events, np.flatnonzero(is_known))
        compiled = (rules or RequestRules()).on(self.known.items)
        first = truncate(len(events.items), self.max_len, self._block)
        batch = self._builder.request(events, first, query_s=None)
        # The encoder knows the order of events alone.
        read = replace(batch, times=None, query_times=None)
        given = {**read.sample_features, **_instructions([steering or Steering()])}
        read = self.model.select(replace(read, sample_features=given), None)
        had = self.known.positions(events.items[np.isin(events.items, self.known.items)])
        return self._inputs(read, compiled, compiled.removed(had, keeps_seen=self.known.keeps_seen))

    def made(self, key: PrefixKey) -> bool:
        """Whether a memory is one of this model."""
        return (key.model, key.weights, key.schema) == (self._description, self._weights, self._schema)

    def shorter(self, inputs: EncoderInputs, num_events: int) -> EncoderInputs:
        """The inputs of the last events alone; all seen items stay excluded."""
        end = torch.tensor([inputs.num_events])
        return self._inputs(cut_events(inputs.history, end - num_events, end), inputs.rules, inputs.removed)

    def num_bytes(self, inputs: EncoderInputs) -> int:
        """Size of its memory."""
        return (inputs.num_events + self.model.config.user_rows) * self.model.config.dim * self.model.place.itemsize

    @torch.no_grad()
    def encode(self, inputs: EncoderInputs) -> EncoderMemory:
        wanted = {name: one for name, one in self.model.encode_lookups(inputs.history).items() if name != "trigger"}
        return EncoderMemory(inputs.key, self.model.encoded(self._rows.read_each(wanted), inputs.history)[0])

    @torch.no_grad()
    def generate(
        self,
        inputs: Sequence[EncoderInputs],
        memories: Sequence[EncoderMemory],
        steering: Sequence[Steering],
        *,
        width: int,
        k: Sequence[int],
    ) -> list[GeneratedList]:
        """Lists for several requests in one beam search; raises PrefixError if a memory is of another history."""
        for one, kept in zip(inputs, memories, strict=True):
            kept.key.require(one.key)
        found = decode_lists(
            lambda: self._decoding(inputs, memories, steering),
            self.trie,
            self._pools,
            [
                RuledRequest(one.rules, one.removed, most, steered.scenario or 0)
                for one, most, steered in zip(inputs, k, steering, strict=True)
            ],
            width=width,
            softmax=self.model.config.softmax,
            vectors=self.known.vector_array,
        )
        lists = [self.known.listed(one) for one in found]
        return [GeneratedList(one.items, one.scores, one.allowed) for one in lists]

    def limit_scenarios(self, masks: Tensor | None) -> None:
        """Sets the items [scenario number, I] that each scenario may show; None: all."""
        self.scenarios, self._pools = masks, AllowedPools(self.trie, masks)

    @torch.no_grad()
    def scores(self, histories: Sequence[Sequences], items: Sequence[int], *, steering: Steering) -> Tensor:
        """Log-probabilities [n, K] of items after histories, whatever the beam would have found."""
        inputs = [self.prepare(one, steering) for one in histories]
        decoding = self._decoding(inputs, [self.encode(one) for one in inputs], [steering] * len(inputs))
        return path_scores(
            decoding, self.trie, self.trie.positions(torch.tensor(items)), softmax=self.model.config.softmax
        )

    def _decoding(
        self, inputs: Sequence[EncoderInputs], memories: Sequence[EncoderMemory], steering: Sequence[Steering]
    ) -> Decoder:
        batch = self._batch(inputs, steering)
        wanted = {name: one for name, one in self.model.encode_lookups(batch).items() if name == "trigger"}
        offsets = offsets_of(torch.tensor([len(one.memory) for one in memories]))
        memory = torch.cat([one.memory for one in memories])
        tokens = Jagged(torch.empty(len(memory)), offsets, int(offsets.diff().max()))
        return self.model.decoding(self._rows.read_each(wanted), batch, (memory, tokens))

    def _inputs(self, batch: Batch, rules: CompiledRules, removed: Ints) -> EncoderInputs:
        self.trie.positions(batch.items.values)  # raises DataError for an item that the model does not know
        key = PrefixKey(
            model=self._description,
            weights=self._weights,
            schema=self._schema,
            user=int(batch.sample_ids[0]),
            digest=InputDigest().then(batch, 0).text(),
            length=batch.num_tokens,
            anchor="",  # the memory does not depend on the request
            dtype=str(self.model.place.dtype),
        )
        return EncoderInputs(batch, key, rules, removed)

    def _batch(self, inputs: Sequence[EncoderInputs], steering: Sequence[Steering]) -> Batch:
        """The requests without their histories."""
        nothing = torch.zeros(len(inputs) + 1, dtype=torch.int64)
        users = torch.cat([one.history.sample_ids for one in inputs])
        return Batch(
            cursor=Cursor(0, 0),
            sample_ids=users,
            items=Jagged(torch.empty(0, dtype=torch.int64), nothing, 0),
            sample_features={"user": Jagged.singles(users), **_instructions(steering)},
        )


def _instructions(steering: Sequence[Steering]) -> dict[str, Jagged]:
    """Steering as sample features; an empty row is the default."""
    given = {
        "scenario": present_rows([one.scenario for one in steering]),
        "trigger": present_rows([one.trigger for one in steering]),
    }
    vectors = [one.vector for one in steering if one.vector is not None]
    if vectors:
        counts = torch.tensor([int(one.vector is not None) for one in steering])
        given["reasoning"] = Jagged(torch.stack(vectors), offsets_of(counts), 1)
    return given


def open_generative(run: Run, *, step: int | None = None, folder: Path, memory_bytes: int = 1 << 30) -> GenerativeModel:
    """A checkpoint of a run, by default the best validated one, else the latest; its tables are files in `folder`.

    Raises CheckpointError and DataError unless its semantic ids are those that it was trained with.
    """
    config = run.config.model
    if not isinstance(config, EncDecConfig):
        raise ConfigError(f"{run.folder} has a model of kind '{type(config).__name__}', which generates nothing.")
    place, manifest = run.checkpoint(step)
    trained = manifest.progress.get("settings", {}).get("semantic ids", "").partition("/")[0]
    if not trained:
        raise CheckpointError(
            f"{place} does not say which semantic ids it was trained with, so its codes cannot be decoded."
        )
    registry = Registry.load(config.ids, version=trained)
    trie = registry.trie_of(run.sequences)
    loaded = run.load_model(manifest.step, rows=rows_in_files(folder, memory_bytes), ids=trie)
    assert isinstance(loaded.model, EncDec)
    inputs = inputs_of(run.config, run.sequences)
    served = GenerativeModel(
        loaded.model,
        trie,
        loaded.rows,
        BatchBuilder(without_events(run.sequences), None, inputs, statistics=run.statistics()),
        known_items(run, loaded),
        max_len=run.config.data.max_len,
        block=run.config.data.truncate_block,
        name=f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}",
        weights=manifest.digest,
        instruction_version=version_of(registry.version, registry.encoder.partition("/")[0]),
    )
    served.limit_scenarios(scenario_masks(run.scenario_records, run.sequences))
    return served
