"""Trigger rules of a scenario file, applied to a log: training and evaluation see the triggers that requests will have.

optional, given    as the log has it
none               no trigger, also where the log has one
last               the item of the user's event before
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import Sequences, StoredFeature
from nestpipe.generative.logged_reward import event_scenarios
from nestpipe.generative.scenarios import Scenario

TRIGGER = "trigger"


def with_trigger_rules(sequences: Sequences, records: Sequence[Scenario]) -> Sequences:
    """The log with the triggers of its events as the rules of their scenarios, by number, want them."""
    logged, num_events = sequences.event_features.get(TRIGGER), len(sequences.items)
    rules = np.array([one.trigger for one in records])[event_scenarios(sequences, np.arange(num_events))]
    triggers, has = np.zeros(num_events, np.int64), np.zeros(num_events, bool)
    if logged is not None and logged.offsets is not None:
        has = np.isin(rules, ["optional", "given"]) & (np.diff(logged.offsets) > 0)
        triggers[has] = logged.values[logged.offsets[:-1][has]]
    follows = np.ones(num_events, bool)
    follows[sequences.offsets[:-1][np.diff(sequences.offsets) > 0]] = False
    is_last = (rules == "last") & follows
    triggers[is_last] = sequences.items[np.flatnonzero(is_last) - 1]
    has |= is_last
    if logged is None and not has.any():
        return sequences
    stored = StoredFeature(triggers[has], np.concatenate([[0], np.cumsum(has)]))
    own = next((one for one in sequences.schema.features if one.name == TRIGGER), None)
    others = tuple(one for one in sequences.schema.features if one.name != TRIGGER)
    feature = own or Feature(name=TRIGGER, kind="id", encoding="item")
    return dataclasses.replace(
        sequences,
        schema=dataclasses.replace(sequences.schema, features=(*others, feature)),
        event_features={**sequences.event_features, TRIGGER: stored},
    )
