"""From the events of a user to what the model is asked: keys, prefills in chunks, scores of several requests at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.jagged import Batch, Jagged
from nestpipe.models.kv_prefix import KVPrefix, PrefixKey
from nestpipe.models.prefix_inference import CandidateBatch, Ranker, Suffix, cut_events
from nestpipe.serve.prefill_policy import RankingCosts


@dataclass(frozen=True, slots=True, eq=False)
class HistoryRequest:
    """One request's history as the model reads it: whole, and as prefix and suffix."""

    history: Batch
    prefix: Batch
    suffix: Suffix
    served: ServedModel

    @property
    def key(self) -> PrefixKey:
        return self.suffix.follows[0]

    @property
    def num_events(self) -> int:
        return len(self.history.items.values)

    @property
    def num_bytes(self) -> int:
        """What its prefix will take, known before it is computed."""
        return self.key.length * (self.served.event_bytes + (0 if self.prefix.times is None else 8))


class ServedModel:
    """A model in use. `name` says which weights it has, `label` orders candidates, `block` cuts histories as in training."""

    def __init__(self, ranker: Ranker, builder: BatchBuilder, *, name: str, label: str = "", block: int = 1):
        self.ranker, self.name, self._builder = ranker, name, builder
        self.max_len, self.block = ranker.model.max_len, block
        self.costs, self.counts = RankingCosts(), Counter[str]()  # what it takes on this machine; answers by path
        labels = [one.name for one in ranker.model.tasks.labels]
        self._column = labels.index(label) if label else 0
        config = ranker.model.config
        width = config.num_heads * (config.qk_dim + config.v_dim) * ranker.model.place.itemsize
        self.event_bytes = config.num_blocks * width

    def ask(self, events: Sequences, query_time: int) -> HistoryRequest:
        """The events of one user, asked for at a time in seconds; raises DataError if the model cannot read them."""
        end = np.array([len(events.items)])
        start, asked = truncate(end, self.max_len, self.block), np.array([query_time * 1000])
        batch = self._builder.over(events).history(torch.tensor([0]), start, end, request_ms=asked)
        return self._split(replace(batch, sample_ids=torch.from_numpy(events.users)))

    def shorter(self, asked: HistoryRequest, num_events: int) -> HistoryRequest:
        """The same request with its last events alone."""
        end = torch.tensor([asked.num_events])
        return self._split(cut_events(asked.history, end - num_events, end))

    def candidates(self, items: Sequence[int], sequences: Sequences) -> CandidateBatch:
        """Items with their features; raises DataError for one that the catalogue does not have."""
        ids = np.array(items, np.int64)
        features = self._builder.over(sequences).item_features(ids)
        return CandidateBatch(Jagged(torch.from_numpy(ids), torch.tensor([0, len(ids)]), len(ids)), features)

    def fill(self, asked: HistoryRequest, kept: KVPrefix | None, *, chunk: int) -> KVPrefix:
        """The next chunk of a prefix behind what is kept; all that is left if the model's rows know the request."""
        first, last = (kept.key.length if kept else 0), asked.key.length
        until = last if self.ranker.model.anchored else min(first + chunk, last)
        part = cut_events(asked.prefix, torch.tensor([first]), torch.tensor([until]))
        (filled,) = self.ranker.prefill(part) if kept is None else self.ranker.extend([kept], part)
        return filled

    def fill_all(self, asked: HistoryRequest, *, chunk: int) -> KVPrefix:
        """A whole prefix, chunk by chunk."""
        kept = self.fill(asked, None, chunk=chunk)
        while kept.key.length < asked.key.length:
            kept = self.fill(asked, kept, chunk=chunk)
        return kept

    def scores(
        self,
        asked: Sequence[HistoryRequest],
        candidates: Sequence[CandidateBatch],
        prefixes: Sequence[KVPrefix] | None = None,
    ) -> list[Tensor]:
        """What each request's candidates are predicted, with prefixes or in full; raises PrefixError for a wrong prefix."""
        wanted = _together(candidates)
        if prefixes is None:
            found = self.ranker.full(Batch.concat([one.history for one in asked]), wanted)
        else:
            suffixes = Batch.concat([one.suffix.batch for one in asked])
            found = self.ranker.score(prefixes, Suffix(suffixes, tuple(one.key for one in asked)), wanted)
        return self._predicted(found, candidates)

    def scores_and_prefixes(
        self, asked: Sequence[HistoryRequest], candidates: Sequence[CandidateBatch]
    ) -> tuple[list[Tensor], Callable[[int], KVPrefix]]:
        """The same in full, and the prefix of any of the requests, which were made on the way."""
        history = Batch.concat([one.history for one in asked])
        found, prefix_of = self.ranker.full_and_prefixes(history, _together(candidates), [one.suffix for one in asked])
        return self._predicted(found, candidates), prefix_of

    def _predicted(self, found: Tensor, candidates: Sequence[CandidateBatch]) -> list[Tensor]:
        """What candidates are predicted for the label that orders them."""
        with torch.no_grad():
            column = self.ranker.model.tasks.predict(found)[:, self._column]
        return list(column.split([len(one.items.values) for one in candidates]))

    def _split(self, history: Batch) -> HistoryRequest:
        return HistoryRequest(history, *self.ranker.split(history), self)


def copy_prefix(prefix: KVPrefix) -> KVPrefix:
    """The same in memory of its own, as a move between devices makes it."""
    return replace(
        prefix,
        keys=tuple(one.clone() for one in prefix.keys),
        values=tuple(one.clone() for one in prefix.values),
        times=None if prefix.times is None else prefix.times.clone(),
    )


def _together(candidates: Sequence[CandidateBatch]) -> CandidateBatch:
    if len(candidates) == 1:
        return candidates[0]
    features = {name: Jagged.concat([one.features[name] for one in candidates]) for name in candidates[0].features}
    return CandidateBatch(Jagged.concat([one.items for one in candidates]), features)
