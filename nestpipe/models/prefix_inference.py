"""The prefix contract: scoring candidates with keys and values of the history that were computed before.

    history   e0 e1 ... e(n-2) | e(n-1)       + candidates
              prefix             suffix

Row i answers for the time of event i + 1, so every row of the prefix is complete before any request is made; the last
event answers for the request and always travels with it. So one prefix serves requests at any time, and when an event is
appended, `extend` adds the former last event, whose next time is now known.

    prefill(prefix) -> Prefix       extend(Prefix, new) -> Prefix       score(Prefix, suffix, candidates)       full(...)

All four are `_run`: rows before (kept), rows now, candidates. `full` keeps nothing and is the oracle of the others; on its way
it makes the rows of the prefix too, and `full_and_prefixes` hands them out.

A model that lets a prefix row see something of the request (places counted from the end, a divisor that depends on the
batch) says `anchored = True`. Its anchor is then part of the key, and a longer history is a new prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nestpipe.embedding.lookup import Lookup, Rows
from nestpipe.errors import PrefixError
from nestpipe.jagged import Batch, Jagged, offsets_of, ranges
from nestpipe.models.backbone import TokenDropout
from nestpipe.models.kv_prefix import InputDigest, KVPrefix, PrefixKey, digest_of
from nestpipe.models.ranking import Ranking
from nestpipe.ops.attention import Layout, attention_layout

RowSource = Callable[[Mapping[str, Lookup]], Mapping[str, Rows]]


@dataclass(frozen=True, slots=True, eq=False)
class CandidateBatch:
    """Items to score, one row per user of the request, with the features of their items (one row per candidate)."""

    items: Jagged
    features: Mapping[str, Jagged] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Suffix:
    """The last event of each user, asked for at the request's time, and the key of the prefix that it follows."""

    batch: Batch
    follows: tuple[PrefixKey, ...]
    digests: tuple[InputDigest, ...] = ()  # of the prefixes' inputs, to go on from


@dataclass(frozen=True, slots=True, eq=False)
class _Ran:
    """Keys and values of the events, block by block, and the candidates' last states."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: Tensor


class _Order:
    """Rows come in three heaps, kept | events | candidates; attention wants them user by user, in this order.

    Of a single user they lie so already, and nothing is moved.
    """

    def __init__(self, kept: Tensor, events: Tensor, candidates: Tensor):
        self.num_kept, self.num_events, self.num_candidates = kept, events, candidates
        self._keys = _interleave([kept, events, candidates])
        self._queries = _interleave([events, candidates])
        self._is_alone, self._num_events = len(events) == 1, int(events.sum())
        self._back = torch.empty_like(self._queries).index_copy_(0, self._queries, torch.arange(len(self._queries)))

    def queries(self, events: Tensor, candidates: Tensor) -> Tensor:
        rows = torch.cat([events, candidates])
        return rows if self._is_alone else rows.index_select(0, self._queries)

    def keys(self, kept: Iterable[Tensor], events: Tensor, candidates: Tensor) -> Tensor:
        rows = torch.cat([*kept, events, candidates])
        return rows if self._is_alone else rows.index_select(0, self._keys)

    def heaps(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Events and candidates apart again."""
        if self._is_alone:
            return queries[: self._num_events], queries[self._num_events :]
        return (
            queries.index_select(0, self._back[: self._num_events]),
            queries.index_select(0, self._back[self._num_events :]),
        )

    def query_rows(self, values: Tensor | None = None) -> Jagged:
        """Values of queries, or just their numbers, as rows per user."""
        lengths = self.num_events + self.num_candidates
        return _rows_of(self._queries if values is None else values, lengths)

    def key_rows(self, values: Tensor | None = None) -> Jagged:
        """The same for keys."""
        lengths = self.num_kept + self.num_events + self.num_candidates
        return _rows_of(self._keys if values is None else values, lengths)


class Ranker:
    """A ranking model in use. `rows` finds embedding rows; `weights` and `schema` name what the model was made with."""

    def __init__(self, model: Ranking, rows: RowSource, *, weights: str, schema: str = ""):
        self.model, self._rows = model, rows
        self._weights = weights
        self._schema = digest_of((model.declared, schema))
        self._model_digest = digest_of((type(model).__qualname__, model.config, model.max_len))

    def split(self, history: Batch) -> tuple[Batch, Suffix]:
        """A request's history as the prefix that can be computed now, and the suffix with the key that it needs."""
        lengths = history.items.lengths()
        prefix = cut_events(history, torch.zeros_like(lengths), (lengths - 1).clamp(min=0))
        suffix = cut_events(history, (lengths - 1).clamp(min=0), lengths)
        digests = tuple(InputDigest().then(prefix, row) for row in range(prefix.num_samples))
        keys = (self._key(prefix, row, digest) for row, digest in enumerate(digests))
        return prefix, Suffix(suffix, tuple(keys), digests)

    def prefill(self, prefix: Batch) -> list[KVPrefix]:
        """Keys and values of each user's prefix: all events but the last, each with the time of its next event."""
        return self._kept(self._run(prefix, [], None), prefix, [])

    def extend(self, prefixes: Sequence[KVPrefix], new: Batch) -> list[KVPrefix]:
        """Longer prefixes; raises PrefixError if that is not legal for the model, or `new` does not follow."""
        if self.model.anchored:
            raise PrefixError(
                f"{type(self.model).__name__} is anchored: the rows of a prefix depend on the request, so those of a longer "
                "history are others. Fill the longer prefix from its start."
            )
        for row, prefix in enumerate(prefixes):
            self._check_follows(prefix, new, row)
        return self._kept(self._run(new, prefixes, None), new, prefixes)

    def begins(self, kept: KVPrefix, prefix: Batch) -> bool:
        """Whether what was kept is the beginning of one user's longer prefix, so that `extend` may go on from it."""
        if self.model.anchored or kept.key.length > len(prefix.items.values):
            return False
        first = cut_events(prefix, torch.tensor([0]), torch.tensor([kept.key.length]))
        return self._key(first, 0, InputDigest().then(first, 0)) == kept.key

    def made(self, key: PrefixKey) -> bool:
        """Whether a key is one of this model with these weights."""
        return (key.model, key.weights, key.schema) == (self._model_digest, self._weights, self._schema)

    def score(self, prefixes: Sequence[KVPrefix], suffix: Suffix, candidates: CandidateBatch) -> Tensor:
        """Scores [sum of candidates, labels]; raises PrefixError if a prefix is not the one that the suffix follows."""
        for prefix, wanted in zip(prefixes, suffix.follows, strict=True):
            prefix.key.require(wanted)
        return self._scores(suffix.batch, prefixes, candidates)

    def full(self, history: Batch, candidates: CandidateBatch) -> Tensor:
        """The same scores from the whole history, with nothing kept."""
        return self._scores(history, [], candidates)

    def full_and_prefixes(
        self, history: Batch, candidates: CandidateBatch, suffixes: Sequence[Suffix]
    ) -> tuple[Tensor, Callable[[int], KVPrefix]]:
        """Scores in full, and who asks for it gets the prefix of a user, copied out of the rows that were computed anyway.

        `suffixes` are those of `split`, one per user.
        """
        ran, cuts = self._run(history, [], candidates), history.items.offsets.tolist()
        with torch.no_grad():
            scores = self.model.score(ran.states)

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
            return self.model.score(self._run(batch, before, candidates).states)

    @torch.no_grad()
    def _run(self, batch: Batch, before: Sequence[KVPrefix], candidates: CandidateBatch | None) -> _Ran:
        """Events, and candidates if there are any, behind what was kept."""
        model, items, drop = self.model, batch.items, TokenDropout(0.0, batch, None)
        asked = candidates or CandidateBatch(Jagged(items.values[:0], torch.zeros_like(items.offsets), 0))
        num_kept = (
            torch.tensor([one.key.length for one in before], dtype=torch.int64) if before else 0 * items.lengths()
        )
        order = _Order(num_kept, items.lengths(), asked.items.lengths())
        events, states = self._inputs(batch, asked, order, is_request=candidates is not None)
        x = order.queries(events, states)
        layout = self._layout(batch, before, asked, order)
        keys, values = [], []
        for number, unit in enumerate(model.blocks()):
            own = unit.project(x)
            (own_k, asked_k), (own_v, asked_v) = order.heaps(own.k), order.heaps(own.v)
            keys.append(own_k)
            values.append(own_v)
            q, gate, is_last = own.q, own.gate, number + 1 == len(model.units)
            if is_last:  # of events nobody needs anything behind their last keys and values
                if candidates is None:
                    break
                (_, x), (_, q), (_, gate) = order.heaps(x), order.heaps(q), order.heaps(gate)
                layout = self._layout(batch, before, asked, order, is_last=True)
            k = order.keys((one.keys[number] for one in before), own_k, asked_k)
            v = order.keys((one.values[number] for one in before), own_v, asked_v)
            x = unit.finish(x, gate, unit.attend(q, k, v, layout), drop, "")
        return _Ran(tuple(keys), tuple(values), x)

    def _inputs(self, batch: Batch, asked: CandidateBatch, order: _Order, *, is_request: bool) -> tuple[Tensor, Tensor]:
        """Input vectors of events and candidates."""
        model = self.model
        lookups = model.event_lookups(batch)
        lookups |= model.candidate_lookups(asked.items, asked.features, batch.sample_features) if is_request else {}
        rows = self._rows(lookups)
        # A prefix is asked for by a request that has one event more.
        total = order.num_kept + order.num_events + (0 if is_request else 1)
        if int(total.max() if len(total) else 0) > model.max_len + (not is_request):
            raise PrefixError(
                f"a history of {int(total.max())} events is longer than max_len {model.max_len}. Cut it in blocks from the start "
                "and fill the prefix again: rows that saw the events cut off are not those of the shorter history."
            )
        user = batch.items.row_of_value()
        event = batch.items.positions() + order.num_kept.index_select(0, user)
        events = model.events(rows, batch, model.place_of(event, total.index_select(0, user)))
        if not is_request:
            return events, events[:0]
        user = asked.items.row_of_value()
        last = total.index_select(0, user)
        states = model.candidates(rows, asked.features, batch.sample_features, model.place_of(last, last), user)
        return events, states

    def _layout(
        self, batch: Batch, before: Sequence[KVPrefix], asked: CandidateBatch, order: _Order, *, is_last: bool = False
    ) -> Layout:
        """Who sees whom; in the last block only candidates look."""
        times = query_times = None
        if batch.times is not None and batch.query_times is not None:
            now = _asked_times(batch).index_select(0, asked.items.row_of_value())
            kept = (one.times for one in before if one.times is not None)
            times = order.key_rows(order.keys(kept, batch.times.values, now))
            queries = now if is_last else order.queries(batch.query_times.values, now)
            query_times = asked.items.with_values(queries) if is_last else order.query_rows(queries)
        return attention_layout(
            asked.items if is_last else order.query_rows(),
            keys=order.key_rows(),
            times=times,
            query_times=query_times,
            num_targets=order.num_candidates,
            num_buckets=self.model.config.num_time_buckets,
        )

    def _kept(self, ran: _Ran, batch: Batch, before: Sequence[KVPrefix]) -> list[KVPrefix]:
        """One prefix per user: what was kept before, and the rows of the batch."""
        found, cuts = [], batch.items.offsets.tolist()
        for row in range(batch.num_samples):
            own, old = slice(cuts[row], cuts[row + 1]), before[row] if before else None
            digest = (old.digest if old else InputDigest()).then(batch, row)
            times, next_time = None, old.next_time if old else None
            if batch.times is not None and batch.query_times is not None:
                (times,) = _longer(() if old is None or old.times is None else [old.times], [batch.times.values[own]])
                next_time = _next_time(batch, own) if own.stop > own.start else next_time
            found.append(
                KVPrefix(
                    key=self._key(batch, row, digest, old),
                    keys=_longer(old.keys if old else (), [one[own] for one in ran.keys]),
                    values=_longer(old.values if old else (), [one[own] for one in ran.values]),
                    times=times,
                    next_time=next_time,
                    digest=digest,
                )
            )
        return found

    def _key(self, batch: Batch, row: int, digest: InputDigest, before: KVPrefix | None = None) -> PrefixKey:
        length = int(batch.items.lengths()[row]) + (before.key.length if before else 0)
        return PrefixKey(
            model=self._model_digest,
            weights=self._weights,
            schema=self._schema,
            user=int(batch.sample_ids[row]),
            digest=digest.text(),
            length=length,
            anchor=self.model.anchor(length + 1),
            dtype=str(self.model.place.dtype).removeprefix("torch."),
        )

    def _check_follows(self, prefix: KVPrefix, new: Batch, row: int) -> None:
        """A kept prefix may be extended only by its own model, for its own user, by the event that its last row knows."""
        mine = self._key(new, row, prefix.digest, prefix)
        prefix.key.require(replace(mine, length=prefix.key.length, anchor=prefix.key.anchor))
        first, last = new.items.offsets[row : row + 2].tolist()
        if new.times is None or first == last or prefix.next_time is None:
            return
        if (seen := int(new.times.values[first])) != prefix.next_time:
            raise PrefixError(
                f"the prefix ends with a row that answers for an event at {prefix.next_time} s, but the "
                f"event to add is at {seen} s: the history changed. Fill the prefix again."
            )


def cut_events(batch: Batch, start: Tensor, end: Tensor) -> Batch:
    """Events start .. end - 1 of each sample, for prediction."""
    if batch.num_samples == 1:
        return _cut_one(batch, int(start), int(end))
    lengths = end - start
    places = ranges(batch.items.offsets[:-1] + start, lengths)
    offsets, longest = offsets_of(lengths), int(lengths.max()) if len(lengths) else 0

    def cut(jagged: Jagged | None) -> Jagged | None:
        return None if jagged is None else Jagged(jagged.values.index_select(0, places), offsets, longest)

    return replace(
        batch,
        items=Jagged(batch.items.values.index_select(0, places), offsets, longest),
        times=cut(batch.times),
        query_times=cut(batch.query_times),
        targets=None,
        event_features={name: one.select(places) for name, one in batch.event_features.items()},
        target_features={},
    )


def _cut_one(batch: Batch, start: int, end: int) -> Batch:
    """The same of a single sample, whose events lie side by side: nothing is copied."""
    offsets = torch.tensor([0, end - start])

    def cut(jagged: Jagged | None) -> Jagged | None:
        return None if jagged is None else Jagged(jagged.values[start:end], offsets, end - start)

    return replace(
        batch,
        items=Jagged(batch.items.values[start:end], offsets, end - start),
        times=cut(batch.times),
        query_times=cut(batch.query_times),
        targets=None,
        event_features={name: one.slice(start, end) for name, one in batch.event_features.items()},
        target_features={},
    )


def _asked_times(batch: Batch) -> Tensor:
    """The time of each user's request: that for which its last event answers; 0 without any event, where none matters."""
    assert batch.query_times is not None
    values = torch.cat([batch.query_times.values, torch.zeros(1, dtype=torch.int64)])
    last = torch.where(batch.items.lengths() > 0, batch.items.offsets[1:] - 1, len(values) - 1)
    return values.index_select(0, last)


def _next_time(batch: Batch, rows: slice) -> int | None:
    """The time for which the last of some events answers."""
    if batch.times is None or batch.query_times is None or rows.stop == rows.start:
        return None
    return int(batch.query_times.values[rows.stop - 1])


def _rows_of(values: Tensor, lengths: Tensor) -> Jagged:
    return Jagged(values, offsets_of(lengths), int(lengths.max()) if len(lengths) else 0)


def _interleave(lengths: Sequence[Tensor]) -> Tensor:
    """Places in heaps laid back to back (one per length vector [B]), read row by row over all heaps."""
    counts = torch.stack(list(lengths), dim=1)  # [B, heaps]
    if len(counts) == 1:
        return torch.arange(int(counts.sum()))
    starts = offsets_of(counts.T.flatten())[:-1].reshape(counts.T.shape).T
    return ranges(starts.flatten(), counts.flatten())


def _longer(old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Own memory for each user: a view would keep the whole batch alive."""
    if not old:
        return tuple(one.clone() for one in new)
    return tuple(torch.cat([a, b]) for a, b in zip(old, new, strict=True))
