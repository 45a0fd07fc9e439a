"""Prefix inference: scores candidates with keys and values of the history that were computed before the request.

    history   e0 e1 ... e(n-2) | e(n-1)       + candidates
              KV prefix          suffix

The query time of row i is the time of event i + 1. So every row of the prefix is complete before any request arrives, and the
last event, whose query time is that of the request, is always computed with the request. One prefix serves requests at any
time. When an event is appended, `extend` adds the former last event, whose query time is now known.

    prefill(prefix) -> KVPrefix     extend(KVPrefix, new) -> KVPrefix     score(KVPrefix, suffix, candidates)     full(...)

All four call `_run`: cached rows, new rows, candidates. `full` uses no cache and is the oracle of the others. It computes the
rows of the prefix anyway; `full_and_prefixes` returns them.

A model whose prefix rows depend on the request (positions counted from the end, a divisor that depends on the batch) sets
`anchored = True`. Its anchor is then part of the key, and a longer history needs a new prefill.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from nestpipe.embedding.lookup import Lookup, Rows, moved_rows
from nestpipe.errors import PrefixError
from nestpipe.jagged import Batch, Jagged, offsets_of, ranges
from nestpipe.models.backbone import TokenDropout
from nestpipe.models.kv_prefix import InputDigest, KVPrefix, PrefixKey, digest_of
from nestpipe.models.native_hit import NativeHit, native_hit
from nestpipe.models.ranking import Ranking
from nestpipe.models.row_order import RowOrder
from nestpipe.ops.attention import Layout, attention_layout
from nestpipe.ops.device_memory import download, upload

RowSource = Callable[[Mapping[str, Lookup]], Mapping[str, Rows]]


@dataclass(frozen=True, slots=True, eq=False)
class CandidateBatch:
    """Items to score, one row per user of the request, with item features (one row per candidate)."""

    items: Jagged
    features: Mapping[str, Jagged] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Suffix:
    """The last event of each user, with the request's time as query time, and the key of the prefix before it."""

    batch: Batch
    follows: tuple[PrefixKey, ...]
    digests: tuple[InputDigest, ...] = ()  # of the prefixes' inputs; `extend` continues them

    def at(self, history: Batch) -> Suffix:
        """The suffix of a later request with the same events: its query time and the features of its user are its own."""
        asked = None if history.query_times is None else history.query_times.values[-1:]
        times = self.batch.query_times
        moved = times if times is None or asked is None else times.with_values(asked)
        return replace(self, batch=replace(self.batch, query_times=moved, sample_features=history.sample_features))


@dataclass(frozen=True, slots=True, eq=False)
class _RunOutput:
    """Keys and values of the events, block by block, and the last hidden states of the candidates."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: Tensor


class Ranker:
    """A ranking model for inference. `rows` reads embedding rows; `weights` and `schema` identify what it was loaded from.

    On a `device` it computes with a copy of the model, and keys and values of prefixes are there. Histories, candidates,
    times and scores are on the host.
    """

    def __init__(
        self, model: Ranking, rows: RowSource, *, weights: str, schema: str = "", device: torch.device | None = None
    ):
        self.model, self._rows, self.device = model, rows, device or torch.device("cpu")
        self._own = model if self.device.type == "cpu" else copy.deepcopy(model).to(self.device)
        self._weights = weights
        self._schema = digest_of((model.declared, schema))
        self._model_digest = digest_of((type(model).__qualname__, model.config, model.max_len))

    def split(self, history: Batch) -> tuple[Batch, Suffix]:
        """Splits a request's history into the prefix, which can be prefilled, and the suffix with the key of that prefix."""
        lengths = history.items.lengths()
        prefix = cut_events(history, torch.zeros_like(lengths), (lengths - 1).clamp(min=0))
        suffix = cut_events(history, (lengths - 1).clamp(min=0), lengths)
        digests = tuple(InputDigest().then(prefix, row) for row in range(prefix.num_samples))
        keys = (self._key(prefix, row, digest) for row, digest in enumerate(digests))
        return prefix, Suffix(suffix, tuple(keys), digests)

    def suffix_of(self, history: Batch) -> Suffix:
        """`split` of one user without the prefix, which a request with a cached one never reads: the key from the whole history."""
        num = len(history.items.values)
        digest = InputDigest().over(history, 0, last := max(num - 1, 0))
        key = self._named(int(history.sample_ids), last, digest)
        return Suffix(_cut_sample(history, last, num), (key,), (digest,))

    def prefill(self, prefix: Batch) -> list[KVPrefix]:
        """The KV prefix of each user. `prefix` has all events but the last, each with the time of its next event."""
        return self._prefixes(self._run(prefix, [], None), prefix, [])

    def extend(self, prefixes: Sequence[KVPrefix], new: Batch) -> list[KVPrefix]:
        """Appends new events to prefixes; raises PrefixError if the model is anchored or `new` does not follow."""
        if self.model.anchored:
            raise PrefixError(
                f"{type(self.model).__name__} is anchored: the rows of its prefix depend on the request, so they are not valid "
                "for a longer history. Prefill the longer prefix from its start."
            )
        for row, prefix in enumerate(prefixes):
            self._check_follows(prefix, new, row)
        here = [one.moved(self.device) for one in prefixes]  # they may be of the host tier
        return self._prefixes(self._run(new, here, None), new, here)

    def begins(self, kept: KVPrefix, prefix: Batch) -> bool:
        """Whether a cached prefix is the beginning of a user's longer prefix, so that `extend` may be used."""
        return self.beginning(kept.key, prefix) is not None

    def beginning(self, key: PrefixKey, prefix: Batch) -> InputDigest | None:
        """The digest of the first events of a user's prefix if `key` is that of their KV prefix, so that it may be used."""
        if key.length > len(prefix.items.values) or (self.model.anchored and key.length < len(prefix.items.values)):
            return None
        first = cut_events(prefix, torch.tensor([0]), torch.tensor([key.length]))
        digest = InputDigest().then(first, 0)
        return digest if self._key(first, 0, digest) == key else None

    @property
    def made_by(self) -> tuple[str, ...]:
        """As `PrefixKey.made_by` of its KV prefixes."""
        dtype = str(self.model.place.dtype).removeprefix("torch.")
        return self._model_digest, self._weights, self._schema, dtype

    def made(self, key: PrefixKey) -> bool:
        """Whether a key belongs to this model with these weights."""
        return key.made_by == self.made_by

    def score(
        self, prefixes: Sequence[KVPrefix], suffix: Suffix, candidates: CandidateBatch, *, native: bool = True
    ) -> Tensor:
        """Scores [C, labels] of all candidates; raises PrefixError if a prefix is not the one before the suffix.

        In one native call where that supports the model, unless `native` is False.
        """
        for prefix, wanted in zip(prefixes, suffix.follows, strict=True):
            prefix.key.require(wanted)
        if native and self._native is not None:
            return self._score_native(self._native, prefixes, suffix.batch, candidates)
        return self._scores(suffix.batch, prefixes, candidates)

    @torch.no_grad()
    def _score_native(
        self, native: NativeHit, prefixes: Sequence[KVPrefix], batch: Batch, candidates: CandidateBatch
    ) -> Tensor:
        num_cached = torch.tensor([one.key.length for one in prefixes])
        events, states = self._inputs(batch, candidates, num_cached, is_request=True)
        return native.scores(events, states, candidates.items.lengths().tolist(), batch, prefixes)

    @cached_property
    def _native(self) -> NativeHit | None:
        return native_hit(self._own)

    def full(self, history: Batch, candidates: CandidateBatch) -> Tensor:
        """Scores [C, labels] from the whole history, without a cache."""
        return self._scores(history, [], candidates)

    def full_and_prefixes(
        self, history: Batch, candidates: CandidateBatch, suffixes: Sequence[Suffix]
    ) -> tuple[Tensor, Callable[[int], KVPrefix]]:
        """Scores in full, and a function that returns the KV prefix of a user, copied from the rows computed for it.

        `suffixes` are those of `split`, one per user.
        """
        ran, cuts = self._run(history, [], candidates), history.items.offsets.tolist()
        with torch.no_grad():
            scores = download(self._own.score(ran.states))

        def prefix(user: int) -> KVPrefix:
            (key,), (digest,) = suffixes[user].follows, suffixes[user].digests
            own, times = slice(cuts[user], cuts[user] + key.length), history.times
            return KVPrefix(
                key=key,
                keys=tuple(one[own].clone() for one in ran.keys),
                values=tuple(one[own].clone() for one in ran.values),
                times=None if times is None or history.query_times is None else times.values[own].clone(),
                next_time=_next_time(history, own),
                digest=digest,
            )

        return scores, prefix

    def _scores(self, batch: Batch, before: Sequence[KVPrefix], candidates: CandidateBatch) -> Tensor:
        with torch.no_grad():
            return download(self._own.score(self._run(batch, before, candidates).states))

    @torch.no_grad()
    def _run(self, batch: Batch, before: Sequence[KVPrefix], candidates: CandidateBatch | None) -> _RunOutput:
        """Runs all blocks on events, and on candidates if there are any, after the cached rows."""
        model, items, drop = self._own, batch.items, TokenDropout(0.0, batch, None)
        targets = candidates or CandidateBatch(Jagged(items.values[:0], torch.zeros_like(items.offsets), 0))
        num_cached = (
            torch.tensor([one.key.length for one in before], dtype=torch.int64) if before else 0 * items.lengths()
        )
        order = RowOrder(num_cached, items.lengths(), targets.items.lengths())
        events, states = self._inputs(batch, targets, num_cached, is_request=candidates is not None)
        x = order.queries(events, states)
        layout = self._layout(batch, before, targets, order)
        keys, values = [], []
        for number, unit in enumerate(model.blocks()):
            own = unit.project(x)
            (event_k, target_k), (event_v, target_v) = order.split(own.k), order.split(own.v)
            keys.append(event_k)
            values.append(event_v)
            q, gate, is_last = own.q, own.gate, number + 1 == len(model.units)
            if is_last:  # event states after the last keys and values are never read
                if candidates is None:
                    break
                (_, x), (_, q), (_, gate) = order.split(x), order.split(q), order.split(gate)
                layout = self._layout(batch, before, targets, order, is_last=True)
            k = order.keys((one.keys[number] for one in before), event_k, target_k)
            v = order.keys((one.values[number] for one in before), event_v, target_v)
            x = unit.finish(x, gate, unit.attend(q, k, v, layout), drop, "")
        return _RunOutput(tuple(keys), tuple(values), x)

    def _inputs(
        self, batch: Batch, targets: CandidateBatch, num_cached: Tensor, *, is_request: bool
    ) -> tuple[Tensor, Tensor]:
        """Input vectors of events and candidates."""
        model = self.model
        lookups = model.event_lookups(batch)
        lookups |= model.candidate_lookups(targets.items, targets.features, batch.sample_features) if is_request else {}
        rows = self._rows(lookups)
        # The request for a prefix has one event more.
        total = num_cached + batch.items.lengths() + (0 if is_request else 1)
        if int(total.max() if len(total) else 0) > model.max_len + (not is_request):
            raise PrefixError(
                f"a history of {int(total.max())} events is longer than max_len {model.max_len}. Truncate it in blocks from the "
                "start and prefill again: the cached rows depend on the events that were cut off."
            )
        event = batch.items.positions() + _by_value(num_cached, batch.items)
        own, here, place = self._own, partial(upload, device=self.device), model.place_of
        rows, there = moved_rows(rows, self.device), batch if self.device.type == "cpu" else batch.moved(here)
        events = own.events(rows, there, here(place(event, _by_value(total, batch.items))))
        if not is_request:
            return events, events[:0]
        last, user = _by_value(total, targets.items), targets.items.row_of_value()
        features = targets.features
        if self.device.type != "cpu":
            features = {name: one.moved(here) for name, one in features.items()}
        states = own.candidates(rows, features, there.sample_features, here(place(last, last)), here(user))
        return events, states

    def _layout(
        self,
        batch: Batch,
        before: Sequence[KVPrefix],
        targets: CandidateBatch,
        order: RowOrder,
        *,
        is_last: bool = False,
    ) -> Layout:
        """The attention layout; in the last block only candidates are queries."""
        times = query_times = None
        if batch.times is not None and batch.query_times is not None:
            now = _request_times(batch).index_select(0, targets.items.row_of_value())
            cached = (one.times for one in before if one.times is not None)
            times = order.key_rows(order.keys(cached, batch.times.values, now))
            queries = now if is_last else order.queries(batch.query_times.values, now)
            query_times = targets.items.with_values(queries) if is_last else order.query_rows(queries)
        return attention_layout(
            targets.items if is_last else order.query_rows(),
            keys=order.key_rows(),
            times=times,
            query_times=query_times,
            num_targets=order.num_candidates,
            num_buckets=self.model.config.num_time_buckets,
        ).moved(self.device)

    def _prefixes(self, ran: _RunOutput, batch: Batch, before: Sequence[KVPrefix]) -> list[KVPrefix]:
        """One prefix per user: the cached rows, then the rows of the batch."""
        prefixes, cuts = [], batch.items.offsets.tolist()
        for row in range(batch.num_samples):
            own, old = slice(cuts[row], cuts[row + 1]), before[row] if before else None
            digest = (old.digest if old else InputDigest()).then(batch, row)
            times, next_time = None, old.next_time if old else None
            if batch.times is not None and batch.query_times is not None:
                (times,) = _joined(() if old is None or old.times is None else [old.times], [batch.times.values[own]])
                next_time = _next_time(batch, own) if own.stop > own.start else next_time
            prefixes.append(
                KVPrefix(
                    key=self._key(batch, row, digest, old),
                    keys=_joined(old.keys if old else (), [one[own] for one in ran.keys]),
                    values=_joined(old.values if old else (), [one[own] for one in ran.values]),
                    times=times,
                    next_time=next_time,
                    digest=digest,
                )
            )
        return prefixes

    def _key(self, batch: Batch, row: int, digest: InputDigest, before: KVPrefix | None = None) -> PrefixKey:
        length = int(batch.items.lengths()[row]) + (before.key.length if before else 0)
        return self._named(int(batch.sample_ids[row]), length, digest)

    def _named(self, user: int, length: int, digest: InputDigest) -> PrefixKey:
        return PrefixKey(
            model=self._model_digest,
            weights=self._weights,
            schema=self._schema,
            user=user,
            digest=digest.text(),
            length=length,
            anchor=self.model.anchor(length + 1),
            dtype=self.made_by[-1],
        )

    def _check_follows(self, prefix: KVPrefix, new: Batch, row: int) -> None:
        """Raises PrefixError unless model and user are those of the prefix and `new` starts with the event after it."""
        mine = self._key(new, row, prefix.digest, prefix)
        prefix.key.require(replace(mine, length=prefix.key.length, anchor=prefix.key.anchor))
        first, last = new.items.offsets[row : row + 2].tolist()
        if new.times is None or first == last or prefix.next_time is None:
            return
        if (seen := int(new.times.values[first])) != prefix.next_time:
            raise PrefixError(
                f"the last row of the KV prefix has query time {prefix.next_time} s, but the event to add is at {seen} s: "
                "the history has changed. Prefill it again."
            )


def cut_events(batch: Batch, start: Tensor, end: Tensor) -> Batch:
    """Events start .. end - 1 of each sample, for inference."""
    if batch.num_samples == 1:
        return _cut_sample(batch, int(start), int(end))
    lengths = end - start
    index = ranges(batch.items.offsets[:-1] + start, lengths)
    offsets, longest = offsets_of(lengths), int(lengths.max()) if len(lengths) else 0
    return _cut(batch, lambda one: one.index_select(0, index), lambda one: one.select(index), offsets, longest)


def _cut_sample(batch: Batch, first: int, last: int) -> Batch:
    """Events of the one sample, which are contiguous and not copied."""
    offsets = torch.tensor([0, last - first])
    return _cut(batch, lambda one: one[first:last], lambda one: one.slice(first, last), offsets, last - first)


def _cut(
    batch: Batch,
    values: Callable[[Tensor], Tensor],
    features: Callable[[Jagged], Jagged],
    offsets: Tensor,
    longest: int,
) -> Batch:
    times, asked = batch.times, batch.query_times
    return replace(
        batch,
        items=Jagged(values(batch.items.values), offsets, longest),
        times=None if times is None else Jagged(values(times.values), offsets, longest),
        query_times=None if asked is None else Jagged(values(asked.values), offsets, longest),
        targets=None,
        event_features={name: features(one) for name, one in batch.event_features.items()},
        target_features={},
    )


def _by_value(of_user: Tensor, rows: Jagged) -> Tensor:
    """A number of each user [B], for each value of the users' rows."""
    return of_user.expand(len(rows.values)) if rows.num_rows == 1 else of_user.index_select(0, rows.row_of_value())


def _request_times(batch: Batch) -> Tensor:
    """The time of each user's request: the query time of its last event; 0 for an empty history, which reads no times."""
    assert batch.query_times is not None
    values = torch.cat([batch.query_times.values, torch.zeros(1, dtype=torch.int64)])
    last = torch.where(batch.items.lengths() > 0, batch.items.offsets[1:] - 1, len(values) - 1)
    return values.index_select(0, last)


def _next_time(batch: Batch, rows: slice) -> int | None:
    """The query time of the last of some events."""
    if batch.times is None or batch.query_times is None or rows.stop == rows.start:
        return None
    return int(batch.query_times.values[rows.stop - 1])


def _joined(old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Old and new rows joined, always copied: a view would keep the whole batch alive."""
    if not old:
        return tuple(one.clone() for one in new)
    return tuple(torch.cat([a, b]) for a, b in zip(old, new, strict=True))
