"""The model as it serves: inputs of a request, prefills in chunks, scores of several requests in one call."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.jagged import Batch, Jagged
from nestpipe.models.kv_prefix import KVPrefix, PrefixKey, same_events
from nestpipe.models.prefix_inference import CandidateBatch, Ranker, Suffix, cut_events
from nestpipe.ops.device_memory import wait_here
from nestpipe.serve.known_items import Ints, KnownItems
from nestpipe.serve.kv_cache import CacheEntry, KVCache
from nestpipe.serve.prefill_policy import RankingCosts
from nestpipe.serve.prefix_store import ReadPrefix, StoredMatch

_log = logging.getLogger("nestpipe.serve")
_SLOW, _SLOW_S = 3.0, 0.005  # a read may take so many times its P99, and so many seconds more


class HistoryInputs:
    """The history of a request as the model reads it: whole, and as prefix and suffix, which are cut when they are used.

    The key is a digest of all events. A user without a cached prefix needs none, and a request whose hint gave `earlier` inputs
    takes it from them if its events are the same.
    """

    def __init__(self, history: Batch, served: ServedModel, *, earlier: HistoryInputs | None = None):
        self.history, self.served = history, served
        self._earlier = earlier if earlier is not None and earlier.served is served else None

    @cached_property
    def prefix(self) -> Batch:
        """All events but the last, without a digest: a request with a cached prefix does not read it."""
        last = torch.tensor([max(self.num_events - 1, 0)])
        return cut_events(self.history, torch.zeros_like(last), last)

    @cached_property
    def suffix(self) -> Suffix:
        earlier, self._earlier = self._earlier, None
        if earlier is not None and same_events(earlier.history, self.history):
            return earlier.suffix.at(self.history)
        return self.served.ranker.suffix_of(self.history)

    @property
    def key(self) -> PrefixKey:
        return self.suffix.follows[0]

    @property
    def user(self) -> int:
        """Known without a digest."""
        return int(self.history.sample_ids[0])

    @property
    def num_events(self) -> int:
        return len(self.history.items.values)

    @property
    def num_bytes(self) -> int:
        """Size of its prefix, known before it is computed."""
        length = max(self.num_events - 1, 0)
        return length * (self.served.event_bytes + (0 if self.history.times is None else 8))

    def longest_begun(self, cached: Sequence[KVPrefix]) -> KVPrefix | None:
        """The longest of some prefixes that this history extends."""
        by_length = sorted(cached, key=lambda one: -one.key.length)
        return next((one for one in by_length if self.served.ranker.begins(one, self.prefix)), None)


class ServedModel:
    """A model in use. `name` says which weights it has, `known` which items; candidates are ordered by `label`.

    `block` is training's truncation.
    """

    def __init__(
        self,
        ranker: Ranker,
        builder: BatchBuilder,
        known: KnownItems,
        *,
        name: str,
        label: str = "",
        block: int = 1,
    ):
        self.ranker, self.name, self._builder, self.known = ranker, name, builder, known
        self.max_len, self.block = ranker.model.max_len, block
        self.costs, self.counts = RankingCosts(), Counter[str]()  # on this machine; answers by path
        labels = [one.name for one in ranker.model.tasks.labels]
        self._column = labels.index(label) if label else 0
        config = ranker.model.config
        width = config.num_heads * (config.qk_dim + config.v_dim) * ranker.model.place.itemsize
        self.event_bytes = config.num_blocks * width

    def prepare(self, events: Sequences, query_time: int, *, earlier: HistoryInputs | None = None) -> HistoryInputs:
        """The inputs of one user at a query time in seconds; raises DataError for events that the model cannot read.

        `earlier` are those of the request's hint.
        """
        first = truncate(len(events.items), self.max_len, self.block)
        return HistoryInputs(self._builder.request(events, first, query_s=query_time), self, earlier=earlier)

    def shorter(self, inputs: HistoryInputs, num_events: int) -> HistoryInputs:
        """The inputs of the last events alone."""
        end = torch.tensor([inputs.num_events])
        return HistoryInputs(cut_events(inputs.history, end - num_events, end), self)

    def candidates(self, items: Sequence[int] | Ints, sequences: Sequences) -> CandidateBatch:
        """Items with their features; raises DataError for one that the model does not know."""
        ids = np.asarray(items, np.int64)
        self.known.positions(ids)
        features = self._builder.over(sequences).item_features(ids)
        return CandidateBatch(
            Jagged(torch.from_numpy(ids), torch.from_numpy(np.array([0, len(ids)])), len(ids)), features
        )

    def fill(self, inputs: HistoryInputs, kept: KVPrefix | None, *, chunk: int) -> KVPrefix:
        """The prefix, one chunk longer than `kept`; all of it if its rows depend on the request (anchored models).

        The last chunk may be half as long again: a small rest would cost a call of its own.
        """
        first, last = (kept.key.length if kept else 0), inputs.key.length
        until = last if self.ranker.model.anchored or last - first <= chunk + chunk // 2 else first + chunk
        chunk_events = cut_events(inputs.prefix, torch.tensor([first]), torch.tensor([until]))
        (filled,) = self.ranker.prefill(chunk_events) if kept is None else self.ranker.extend([kept], chunk_events)
        wait_here(*filled.keys)  # a ranking request must not queue behind chunks that were only launched
        return filled

    def fill_all(self, inputs: HistoryInputs, *, chunk: int) -> KVPrefix:
        """A whole prefix, chunk by chunk."""
        kept = self.fill(inputs, None, chunk=chunk)
        while kept.key.length < inputs.key.length:
            kept = self.fill(inputs, kept, chunk=chunk)
        return kept

    def scores(
        self,
        inputs: Sequence[HistoryInputs],
        candidates: Sequence[CandidateBatch],
        prefixes: Sequence[KVPrefix] | None = None,
    ) -> list[Tensor]:
        """Predictions for each request's candidates, with prefixes or in full; raises PrefixError for a wrong prefix."""
        joined = _concat(candidates)
        if prefixes is None:
            logits = self.ranker.full(Batch.concat([one.history for one in inputs]), joined)
        else:
            suffixes = Batch.concat([one.suffix.batch for one in inputs])
            logits = self.ranker.score(prefixes, Suffix(suffixes, tuple(one.key for one in inputs)), joined)
        return self._predicted(logits, candidates)

    def scores_and_prefixes(
        self, inputs: Sequence[HistoryInputs], candidates: Sequence[CandidateBatch]
    ) -> tuple[list[Tensor], Callable[[int], KVPrefix]]:
        """Scores in full, and a function that gives the prefix of each request, which full inference computes anyway."""
        history = Batch.concat([one.history for one in inputs])
        logits, prefix_of = self.ranker.full_and_prefixes(history, _concat(candidates), [one.suffix for one in inputs])
        return self._predicted(logits, candidates), prefix_of

    def _predicted(self, logits: Tensor, candidates: Sequence[CandidateBatch]) -> list[Tensor]:
        """Predictions of the label that orders candidates."""
        with torch.no_grad():
            column = self.ranker.model.tasks.predict(logits)[:, self._column]
        return list(column.split([len(one.items.values) for one in candidates]))


@dataclass(slots=True, eq=False)
class PrefillTask:
    """A prefill in flight, which may start from a shorter prefix, or from one that is being read from disk."""

    inputs: HistoryInputs
    lease: CacheEntry[KVPrefix]
    prefix: KVPrefix | None
    stored: StoredMatch | None = None
    reading: Future[ReadPrefix] | None = None

    @property
    def remaining(self) -> tuple[int, int]:
        """The wanted length, and how many events of it are done or being read."""
        return self.inputs.key.length, length_of(self.prefix) or self.num_reading

    @property
    def num_reading(self) -> int:
        """Events of the prefix that is being read."""
        return self.stored.key.length if self.stored and self.reading else 0

    @property
    def is_waiting(self) -> bool:
        return self.reading is not None and not self.reading.done()

    def take_read(self) -> None:
        """Takes what was read. A read that takes far longer than others is given up, and the prefix is computed."""
        if self.stored is None or self.reading is None:
            return
        costs, length, reading = self.inputs.served.costs, self.stored.key.length, self.reading
        self.reading = None
        try:
            read = reading.result(_SLOW * costs.read_ms(length) / 1000 + _SLOW_S)
        except TimeoutError:
            _log.warning("a KV prefix is still being read from disk; it is computed instead")
            costs.observe("read", (_SLOW - 1) * costs.read_ms(length))
            return
        self.prefix = read.prefix and read.prefix.moved(self.inputs.served.ranker.device)
        costs.observe("read", read.ms - costs.expected("read", length, 0))


class PrefillQueue:
    """Prefills in the order of their hints, computed chunk by chunk. Used by the engine's thread alone."""

    def __init__(self, cache: KVCache[KVPrefix], *, chunk: int):
        self._cache, self._chunk = cache, chunk
        self._tasks: deque[PrefillTask] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[PrefillTask]:
        return iter(self._tasks)

    def append(self, task: PrefillTask) -> None:
        self._tasks.append(task)

    def remove(self, task: PrefillTask) -> None:
        self._tasks.remove(task)

    def of(self, key: PrefixKey) -> PrefillTask | None:
        return next((task for task in self._tasks if task.inputs.key == key), None)

    def prune(self) -> None:
        """Drops prefills whose cache entry was invalidated."""
        self._tasks = deque(task for task in self._tasks if self._cache.peek_state(task.inputs.key) is not None)

    def backlog_ms(self, key: PrefixKey | None = None) -> float:
        """Time until the prefill of a key is done, or all prefills; 0 for a key without one."""
        keys = [task.inputs.key for task in self._tasks]
        end = len(keys) if key is None else keys.index(key) + 1 if key in keys else 0
        return sum(task.inputs.served.costs.pre_ms(*task.remaining) for task in list(self._tasks)[:end])

    def run(self, key: PrefixKey | None = None) -> bool:
        """Computes one chunk of the oldest prefill, or all that remains of a key's; False if there is none.

        A key's prefill waits for what is being read for it; without a key such prefills are passed over.
        """
        task = self.of(key) if key else next((one for one in self._tasks if not one.is_waiting), None)
        if task is None:
            return False
        length, served = task.inputs.key.length, task.inputs.served
        try:
            if self._cache.start(task.lease):
                task.take_read()
                start, before = time.perf_counter(), length_of(task.prefix)
                if before == length and task.prefix is not None:
                    self._cache.finish(task.lease, task.prefix)
                    self._tasks.remove(task)
                    return True
                task.prefix = served.fill(task.inputs, task.prefix, chunk=length if key else self._chunk)
                done = length_of(task.prefix)
                expected = served.costs.expected("pre", done, 0) - served.costs.expected("pre", before, 0)
                served.costs.observe("pre", 1000 * (time.perf_counter() - start) - expected)
                if done < length:
                    return True
                self._cache.finish(task.lease, task.prefix)
        except Exception:
            _log.exception("a prefill failed; its user is ranked in full")
            self._cache.fail(task.lease)
        self._tasks.remove(task)
        return True


def length_of(prefix: KVPrefix | None) -> int:
    return prefix.key.length if prefix else 0


def copy_prefix(prefix: KVPrefix) -> KVPrefix:
    """A copy in its own memory, as a move between devices makes it."""
    return replace(
        prefix,
        keys=tuple(one.clone() for one in prefix.keys),
        values=tuple(one.clone() for one in prefix.values),
        times=None if prefix.times is None else prefix.times.clone(),
    )


def _concat(candidates: Sequence[CandidateBatch]) -> CandidateBatch:
    if len(candidates) == 1:
        return candidates[0]
    features = {name: Jagged.concat([one.features[name] for one in candidates]) for name in candidates[0].features}
    return CandidateBatch(Jagged.concat([one.items for one in candidates]), features)
