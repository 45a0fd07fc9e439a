"""Events from JSON to the arrays of a sequence folder, with times in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import StoredFeature
from nestpipe.errors import DataError

Ints = NDArray[np.int64]
_LATEST_S = 2**43  # in milliseconds still far from the end of 64 bits
_INT64 = range(-(2**63), 2**63)


def parse_events(
    schema: Schema, events: Sequence[Mapping[str, Any]]
) -> tuple[Ints, Ints | None, dict[str, StoredFeature]]:
    """Items, times in milliseconds and features of events; raises DataError that names the event and the field."""
    features = schema.of_scope("event")
    names = {"item", *(["time"] if schema.time else []), *(one.name for one in features)}
    names |= {f"{one.name}.weights" for one in features if one.weights is not None}
    for place, event in enumerate(events):
        if unknown := sorted(set(event) - names):
            raise DataError(f"event {place} has {unknown[0]!r}, which the log does not have; it has {sorted(names)}.")
        _check_integer(event, "item", place, _INT64)
        if schema.time:
            _check_integer(event, "time", place, range(_LATEST_S))
    times = [event["time"] * 1000 for event in events] if schema.time else None
    return (
        np.array([event["item"] for event in events], np.int64),
        None if times is None else np.array(times, np.int64),
        {feature.name: parse_feature(feature, events) for feature in features},
    )


def parse_feature(feature: Feature, events: Sequence[Mapping[str, Any]]) -> StoredFeature:
    """One feature of some events, as the sequence folder stores it; a missing value is null or absent."""
    values = [event.get(feature.name) for event in events]
    if feature.kind == "number":
        return StoredFeature(np.array([_float(one, feature, n) for n, one in enumerate(values)], np.float32))
    if feature.kind == "vector":
        rows = [[None] * feature.dim if one is None else one for one in values]
        if any(not isinstance(row, list) or len(row) != feature.dim for row in rows):
            raise DataError(f"'{feature.name}' is a vector of {feature.dim} numbers; an event has something else.")
        flat = [[_float(one, feature, n) for one in row] for n, row in enumerate(rows)]
        return StoredFeature(np.array(flat, np.float32).reshape(len(rows), feature.dim))
    bags = [[] if one is None else [one] if feature.kind == "id" else one for one in values]
    for place, bag in enumerate(bags):
        if not isinstance(bag, list) or not all(type(one) is int and one in _INT64 for one in bag):
            raise DataError(
                f"event {place}: '{feature.name}' is {values[place]!r}; it takes {feature.kind} as whole numbers."
            )
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags], dtype=np.int64)]).astype(np.int64)
    weights = None
    if feature.weights is not None:
        given = [
            event.get(f"{feature.name}.weights") or [1.0] * len(bag) for event, bag in zip(events, bags, strict=True)
        ]
        if any(not isinstance(own, list) or len(own) != len(bag) for own, bag in zip(given, bags, strict=True)):
            raise DataError(f"'{feature.name}.weights' must have one number for each of '{feature.name}'.")
        weights = np.array([_float(one, feature, n) for n, own in enumerate(given) for one in own], np.float32)
    return StoredFeature(np.array([one for bag in bags for one in bag], np.int64), offsets, weights)


def _float(value: Any, feature: Feature, place: int) -> float:
    if value is None:
        return math.nan
    if type(value) not in {int, float} or not abs(value) < 1e38:
        raise DataError(f"event {place}: '{feature.name}' has {value!r}; it takes finite numbers of 32 bits.")
    return float(value)


def _check_integer(event: Mapping[str, Any], name: str, place: int, legal: range) -> None:
    value = event.get(name)
    if type(value) is not int or value not in legal:
        raise DataError(
            f"event {place}: '{name}' is {value!r}; it must be a whole number in {legal.start} .. {legal.stop - 1}."
        )
