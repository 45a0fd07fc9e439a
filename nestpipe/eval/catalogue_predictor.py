"""Recommendations in own ids: the best items of the catalogue for users of the log, and items that are like an item.

    own ids of users -> rows of the sequence folder -> requests, in batches -> top of the catalogue -> own ids of items

A user without history, known or not, gets the most popular items of the training events: a model without any input would
score every item alike. What a model must bring is `top`; ties take the lower catalogue position, as in evaluation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nestpipe.config import Config
from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences, truncate
from nestpipe.data.splits import Ints, Split, train_mask
from nestpipe.data.vocabulary import OwnId, Vocabulary
from nestpipe.embedding.lookup import Rows
from nestpipe.embedding.row_reader import RowReader, read_rows
from nestpipe.errors import ConfigError, DataError
from nestpipe.eval.ruled_ranking import RuledQuery, top_lists
from nestpipe.jagged import Batch, Jagged, offsets_of, ranges
from nestpipe.models.build_model import inputs_of
from nestpipe.models.content_retrieval import ContentRetrieval
from nestpipe.models.contract import Model
from nestpipe.models.encdec import EncDec
from nestpipe.ops.catalogue_scan import block_items
from nestpipe.rules.compiled_rules import CompiledRules, no_rules
from nestpipe.rules.item_attributes import FolderSource
from nestpipe.rules.rule_book import RuleBook
from nestpipe.rules.rule_set import Rules, as_rules
from nestpipe.rules.selection import SelectedItems, select

GivenRules = Rules | Mapping[str, Any] | None
"""Rules, or what they are in JSON."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Items in own ids, best first, with their scores; `path` says whether the model or popularity ordered them.

    `allowed` is how many items the rules left, None without rules.
    """

    items: list[OwnId]
    scores: list[float]
    path: Literal["model", "popular"] = "model"
    allowed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class UserRequest:
    """The histories of some users of the log, compiled rules, and the catalogue positions that they remove for each."""

    batch: Batch
    rules: CompiledRules
    removed: list[Ints]


class CataloguePredictor(ABC):
    """A trained model that can order the whole catalogue for a user."""

    def __init__(self, model: Model, rows: RowReader, sequences: Sequences, split: Split, config: Config):
        self._model, self._rows = model, rows
        self._sequences, self._split, self._config = sequences, split, config
        self.steered: Callable[[Batch], Batch] = lambda batch: batch  # adds what steers requests of a generative model

    @abstractmethod
    def lists(self, request: UserRequest, k: int) -> list[SelectedItems]:
        """The list of each user under the rules."""

    def recommend(
        self, user: OwnId, k: int = 10, *, request_ms: int | None = None, rules: GivenRules = None
    ) -> Recommendation:
        """The best k items that a user has not had, at a time in ms since 1970 [default: that of their last event].

        Raises RuleError for rules that name what does not exist.
        """
        return next(self.recommend_all([user], k, request_ms=request_ms, rules=rules))

    def recommend_all(
        self, users: Iterable[OwnId], k: int = 10, *, request_ms: int | None = None, rules: GivenRules = None
    ) -> Iterator[Recommendation]:
        """The same for many users, one after the other; batches of `eval.batch_size` are scored at a time."""
        if k < 1:
            raise ConfigError(f"k is {k}; a recommendation holds at least one item.")
        given, remaining = self._rules.of(as_rules(rules)), iter(users)
        while chunk := list(islice(remaining, self._config.eval.batch_size)):
            for one in self._recommend(chunk, k, request_ms, given.on(self._sequences.catalogue)):
                yield replace(one, allowed=None) if given.is_empty else one

    def _recommend(
        self, users: list[OwnId], k: int, request_ms: int | None, rules: CompiledRules
    ) -> Iterator[Recommendation]:
        places = np.array([self._place(user) for user in users], dtype=np.int64)
        rows = places[places >= 0]
        found: Iterator[SelectedItems] = iter(())
        if len(rows):
            found = iter(self.lists(self.request_of(rows, request_ms, rules), k))
        for place in places.tolist():
            yield self._in_own_ids(next(found)) if place >= 0 else self._popular(k, rules)

    def similar(self, item: OwnId, k: int = 10, *, rules: GivenRules = None) -> Recommendation:
        """The k items whose vectors point most in the direction of an item's (cosine), without the item itself."""
        number = self._items.number_of(item)
        catalogue = self._sequences.catalogue
        place = -1 if number is None else int(np.searchsorted(catalogue, number))
        if not 0 <= place < len(catalogue) or catalogue[place] != number:
            raise DataError(f"{self._sequences.path} has no item {item!r}; its catalogue has {len(catalogue):,} items.")
        query, given = self._directions[place : place + 1], self._rules.of(as_rules(rules))
        compiled = given.on(catalogue)
        request = RuledQuery(compiled, np.unique(np.append(compiled.excluded, place)), k)
        (found,) = top_lists(query, self._directions, [request], self._config.eval.max_bytes)
        own = self._in_own_ids(found)
        return replace(own, allowed=None) if given.is_empty else own

    @cached_property
    def _rules(self) -> RuleBook:
        return RuleBook(FolderSource(lambda: self._sequences))

    @cached_property
    def item_vectors(self) -> Tensor:
        """Vectors [I, D] of the whole catalogue, as of the first use."""
        return self._vectors_of(slice(0, len(self._sequences.catalogue)))

    def _vectors_of(self, places: slice) -> Tensor:
        """Vectors of some catalogue positions, which begin at a multiple of a block. Collective.

        The model sees blocks of one size, the last one padded, so that their bits do not depend on how many are wanted.
        """
        if "item" not in {table.name for table in self._model.tables}:
            raise ConfigError(f"{type(self._model).__name__} has no item vectors, so it knows no similar items.")
        items, size = (
            torch.from_numpy(np.array(self._sequences.catalogue[places])),
            block_items(self._config.eval.max_bytes),
        )
        if isinstance(self._model, ContentRetrieval):
            return content_vectors(self._model, self._rows, items, size=size)
        rows = self._rows.peek("item", items)
        as_vectors = getattr(self._model, "item_vectors", None)
        if as_vectors is None or not len(rows):
            return rows
        firsts = range(places.start, places.start + len(rows), size)
        with torch.no_grad():
            padded = (F.pad(block, (0, 0, 0, size - len(block))) for block in rows.split(size))
            if isinstance(self._model, EncDec):  # whose vectors also depend on the codes of the items
                return torch.cat([as_vectors(*one) for one in zip(padded, firsts, strict=True)])[: len(rows)]
            return torch.cat([as_vectors(block) for block in padded])[: len(rows)]

    @cached_property
    def _directions(self) -> Tensor:
        return F.normalize(self.item_vectors, dim=1)

    @cached_property
    def _users(self) -> Vocabulary:
        return self._sequences.vocabulary("user")

    @cached_property
    def _items(self) -> Vocabulary:
        return self._sequences.vocabulary("item")

    @property
    def builder(self) -> BatchBuilder:
        """Builds the batches that the model reads."""
        return self._builder

    @cached_property
    def _builder(self) -> BatchBuilder:
        return BatchBuilder(self._sequences, self._split, inputs_of(self._config, self._sequences))

    def _place(self, user: OwnId) -> int:
        """The row of a user in the sequence folder; -1 for one without history."""
        number, users = self._users.number_of(user), self._sequences.users
        if number is None:
            return -1
        place = int(np.searchsorted(users, number))
        return place if place < len(users) and users[place] == number else -1

    def request_of(self, rows: Ints, request_ms: int | None = None, rules: CompiledRules | None = None) -> UserRequest:
        """Whole histories, asked at a time [default: that of each one's last event], under rules [default: none]."""
        sequences, data = self._sequences, self._config.data
        end = np.diff(sequences.offsets)[rows]
        start = truncate(end, data.max_len, data.truncate_block)
        asked = None if sequences.times is None else sequences.times[sequences.offsets[rows + 1] - 1]
        if asked is not None and request_ms is not None:
            asked = np.full(len(rows), request_ms)
        batch = self._builder.history(torch.from_numpy(rows), start, end, request_ms=asked)
        seen, rules = seen_items(sequences, rows, np.zeros_like(end), end), rules or no_rules(len(sequences.catalogue))
        had = np.split(seen.values.numpy(), seen.offsets[1:-1].numpy())
        return UserRequest(self.steered(batch), rules, [rules.removed(one, keeps_seen=self._keeps_seen) for one in had])

    @property
    def _keeps_seen(self) -> bool:
        return self._config.eval.seen == "none"

    def _in_own_ids(self, found: SelectedItems) -> Recommendation:
        items = self._items.own_ids(self._sequences.catalogue[found.positions])
        return Recommendation(items, found.scores.tolist(), allowed=found.num_left)

    def _popular(self, k: int, rules: CompiledRules) -> Recommendation:
        removed = rules.removed(np.empty(0, np.int64), keeps_seen=self._keeps_seen)
        counts = self._popularity.astype(np.float64)
        found = select(counts, rules, k, removed=removed, vectors=self._alike(rules))
        return replace(self._in_own_ids(found), path="popular")

    def _alike(self, rules: CompiledRules) -> NDArray[np.float32] | None:
        """The vectors that `diversity` compares."""
        if not rules.diversity or "item" not in {table.name for table in self._model.tables}:
            return None
        return self.item_vectors.cpu().numpy()

    @cached_property
    def _popularity(self) -> NDArray[np.int64]:
        return training_counts(self._sequences, self._split)


def content_vectors(model: ContentRetrieval, rows: RowReader, items: Tensor, *, size: int) -> Tensor:
    """Vectors [n, D] of items from ids and content, in blocks of one size, the last one padded. Collective: one lookup."""
    padded = F.pad(items, (0, -len(items) % size), value=int(items[0]) if len(items) else 0)
    whole = read_rows(rows, model.item_lookups(padded))
    found, used = [torch.empty(0, model.tables[0].dim)], dict.fromkeys(whole, 0)
    for block in padded.split(size) if len(padded) else ():
        own = {}
        for name, lookup in model.item_lookups(block).items():
            first, used[name] = used[name], used[name] + len(lookup.ids)
            own[name] = Rows(whole[name].unique, whole[name].index[first : used[name]], lookup)
        with torch.no_grad():
            found.append(model.content_vectors(own))
    return torch.cat(found)[: len(items)]


def training_counts(sequences: Sequences, split: Split) -> NDArray[np.int64]:
    """How many training events each item of the catalogue has."""
    positions = catalogue_positions(sequences, sequences.items[train_mask(sequences, split)])
    return np.bincount(positions, minlength=len(sequences.catalogue))


def catalogue_positions(sequences: Sequences, items: NDArray[np.int64]) -> Ints:
    """The place of each item in the catalogue."""
    return np.searchsorted(sequences.catalogue, items)


def seen_items(sequences: Sequences, rows: Ints, start: Ints, end: Ints) -> Jagged:
    """Catalogue positions of the events start .. end - 1 of each user."""
    lengths = torch.from_numpy(end - start)
    events = ranges(torch.from_numpy(sequences.offsets[rows] + start), lengths).numpy()
    positions = torch.from_numpy(catalogue_positions(sequences, sequences.items[events]))
    return Jagged(positions, offsets_of(lengths), int(lengths.max()) if len(lengths) else 0)
