"""The schema of a log: its columns, features and labels, declared once for ingest, models, serving and checkpoints.

A `Schema` names the log's user, item and time columns and any number of features. A feature has a *kind* (what its
values are) and a *scope* (whose values they are):

    kind    id      one int64 (or string, hashed or numbered)      at most one per row; a missing one is an empty row
            ids     several, with optional weights, pooled         "12|7|93" in text columns
            number  one float; a rule for missing values, then a transform fitted on the training events
            vector  a fixed number of floats
    scope   event   a column of the log                  item, user   a column of a side table, joined by id
            request sent with a request for recommendations; never stored in the log

A `Label` is what a ranking model learns to predict about an event. It is derived from a number feature of the event, so
one declaration gives both the action of a past event and the target of a candidate.

    kind    binary      1 if at least `threshold`: a click, a like, but also a dislike, a skip, a short view
            ordinal     num_levels whole levels from `lowest` up: stars
            regression  the number itself, or its logarithm: seconds watched
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nestpipe.errors import ConfigError

Kind = Literal["id", "ids", "number", "vector"]
Scope = Literal["event", "item", "user", "request"]
Encoding = Literal["int64", "hash", "dictionary"]
FeatureEncoding = Literal["int64", "hash", "dictionary", "item"]
Missing = Literal["mean", "zero", "refuse"]
Transform = Literal["none", "log", "standardise", "log_standardise", "bucketise"]
TimeUnit = Literal["auto", "s", "ms", "iso8601"]
LabelKind = Literal["binary", "regression", "ordinal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature; fields after the first block apply only to the kinds named in their comments."""

    name: str
    kind: Kind
    scope: Scope = "event"
    column: str | None = None  # in the log or side table; by default the name

    encoding: FeatureEncoding = "int64"  # id, ids: how a value becomes an int64; item: it names an item of the log
    separator: str = "|"  # ids, vector: between values in a text column
    weights: str | None = None  # ids: a column of weights, separated likewise
    pool: Literal["sum", "mean"] = "mean"  # ids

    missing: Missing = "zero"  # number: replacement of a missing value, or quarantine of the record
    transform: Transform = "none"  # number
    num_buckets: int = 16  # number, bucketise: quantile buckets, used as ids

    dim: int = 0  # vector

    @property
    def source(self) -> str:
        return self.column or self.name

    def problems(self) -> Iterator[str]:
        where = f"feature '{self.name}'"
        if not self.name.isidentifier():
            yield f"{where}: the name must be a Python identifier, because it becomes part of file names"
        if self.name in {"user", "item", "time"}:
            yield f"{where}: the names user, item and time are reserved for the schema's columns"
        if self.weights is not None and self.kind != "ids":
            yield f"{where}: weights need kind 'ids', not '{self.kind}'"
        if self.encoding == "item" and self.kind not in {"id", "ids"}:
            yield f"{where}: encoding 'item' needs kind 'id' or 'ids', not '{self.kind}'"
        if (self.dim > 0) != (self.kind == "vector"):
            yield f"{where}: kind '{self.kind}' with dim {self.dim}; a vector needs dim > 0, other kinds dim 0"
        if self.transform != "none" and self.kind != "number":
            yield f"{where}: transform '{self.transform}' needs kind 'number', not '{self.kind}'"
        if self.transform == "bucketise" and self.num_buckets < 2:
            yield f"{where}: num_buckets is {self.num_buckets}; it must be at least 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One label; unobserved if its number is missing, or if `observed` is not above 0."""

    name: str
    kind: LabelKind
    feature: str  # the number feature of the event that it is derived from
    weight: float = 1.0  # of its loss, relative to other labels
    weights: str | None = None  # a number feature with the weight of each event; a missing one is 0
    observed: str | None = None  # a number feature: the label counts only where it is above 0

    threshold: float = 0.5  # binary
    lowest: int = 0  # ordinal
    num_levels: int = 0  # ordinal
    log: bool = False  # regression: sign(x) * log(1 + |x|)

    def sources(self) -> tuple[str, ...]:
        """The features that it is made of: they give the answer away, so no candidate may have them."""
        return tuple(name for name in (self.feature, self.weights, self.observed) if name is not None)

    def problems(self) -> Iterator[str]:
        where = f"label '{self.name}'"
        if not self.name.isidentifier():
            yield f"{where}: the name must be a Python identifier, it becomes a keyword"
        if (self.num_levels >= 2) != (self.kind == "ordinal"):
            yield f"{where}: kind '{self.kind}' with num_levels {self.num_levels}; ordinal needs at least 2, other kinds 0"
        if not 0 < self.weight < float("inf"):
            yield f"{where}: weight is {self.weight}; it must be above 0 and finite"
        if self.log and self.kind != "regression":
            yield f"{where}: log needs kind 'regression', not '{self.kind}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of a log, its features and its labels."""

    user: str = "user"
    item: str = "item"
    time: str | None = "time"  # None: an order-only log, whose records are in time order
    time_unit: TimeUnit = "auto"  # each value by itself: seconds, milliseconds or an ISO 8601 text
    user_encoding: Encoding = "int64"
    item_encoding: Encoding = "int64"
    features: tuple[Feature, ...] = ()
    labels: tuple[Label, ...] = ()

    def of_scope(self, *scopes: Scope) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.scope in scopes)

    def encoding_of(self, feature: Feature) -> Encoding:
        """How the values of a feature are read; one that names items is read as the item column is."""
        return self.item_encoding if feature.encoding == "item" else feature.encoding

    def log_columns(self) -> tuple[str, ...]:
        """The columns that ingest reads from the log, without repetition."""
        names = [self.user, self.item, *([self.time] if self.time else [])]
        for feature in self.of_scope("event"):
            names += [feature.source, *([feature.weights] if feature.weights else [])]
        return tuple(dict.fromkeys(names))

    def problems(self) -> Iterator[str]:
        for feature in self.features:
            yield from feature.problems()
        names = [feature.name for feature in self.features]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"feature '{name}' is declared {names.count(name)} times"
        numbers = {feature.name for feature in self.of_scope("event") if feature.kind == "number"}
        for label in self.labels:
            yield from label.problems()
            if lacking := [name for name in label.sources() if name not in numbers]:
                yield f"label '{label.name}': {lacking} are not among the number features of scope 'event', {sorted(numbers)}"
        taken = [*names, "user", "item", "time", *(label.name for label in self.labels)]
        for name in sorted({label.name for label in self.labels if taken.count(label.name) > 1}):
            yield f"label '{name}': the name is taken; features and labels share the keys of a batch"

    def labels_named(self, names: tuple[str, ...]) -> tuple[Label, ...]:
        """The labels of these names in this order, or all of them if none is named; raises ConfigError."""
        known = {label.name: label for label in self.labels}
        if missing := [name for name in names if name not in known]:
            raise ConfigError(
                f"the model needs the labels {missing}, but the log has {sorted(known) or 'none'}. Declare them in the schema and ingest the log again, or name other labels."
            )
        return tuple(known[name] for name in names or known)

    def check(self) -> None:
        """Raises ConfigError with every problem at once."""
        if found := list(self.problems()):
            raise ConfigError("the schema has problems:\n" + "\n".join(f"  - {problem}" for problem in found))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Schema:
        features = tuple(Feature(**feature) for feature in data["features"])
        labels = tuple(Label(**label) for label in data.get("labels", ()))
        return Schema(**{**data, "features": features, "labels": labels})
