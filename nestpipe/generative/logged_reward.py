"""The reward of a logged number (a rating, a margin, minutes watched) for items that were not shown: a model fitted to the log.

    r(scenario, item, context) = w0 + w1 * mean of the item in the scenario + sum over levels of w[2 + l] * log p(code l | context)

A logged number is known for logged pairs alone. The item's mean says what the item is worth, the probabilities that the frozen
reference gives to its codes say how well it fits the context: an item that nobody would have expected there usually paid less.
Drawn paths have the same probabilities as logged items, so the fit does not extrapolate. Means are shrunk, the item's in a
scenario to the item's, and that to the mean of the log; for the fit an event is left out of its own mean. Weights are those
of a scenario, shrunk to those of all.

Letters: n events, S scenarios, I items, L levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.features import label_values
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Ints, Split, train_mask

Floats = NDArray[np.float64]
_PRIOR_EVENTS = 5.0  # weight of the mean that a mean of few events is shrunk to
_PRIOR_ROWS = 100.0  # weight of the fit of all scenarios in that of one


@dataclass(frozen=True, slots=True, eq=False)
class ItemMeans:
    """Means of a logged number by scenario and item, from sums and counts [S, I]."""

    sums: Floats
    counts: Floats

    @staticmethod
    def of(items: Ints, scenarios: Ints, values: Floats, *, num_items: int, num_scenarios: int) -> ItemMeans:
        cells, size = scenarios * num_items + items, num_scenarios * num_items
        sums, counts = np.bincount(cells, values, minlength=size), np.bincount(cells, minlength=size)
        shape = (num_scenarios, num_items)
        return ItemMeans(sums.astype(np.float64).reshape(shape), counts.astype(np.float64).reshape(shape))

    def means(self) -> Floats:
        """[S, I]."""
        return _shrunk(self.sums, self.counts, self._items()[None])

    def without(self, items: Ints, scenarios: Ints, values: Floats) -> Floats:
        """The mean [n] of each event's item and scenario, the event itself left out."""
        total, count = self.sums.sum(0)[items] - values, self.counts.sum(0)[items] - 1
        by_item = _shrunk(total, count, self._all())
        return _shrunk(self.sums[scenarios, items] - values, self.counts[scenarios, items] - 1, by_item)

    def _all(self) -> Floats:
        return np.asarray(self.sums.sum() / max(self.counts.sum(), 1.0))

    def _items(self) -> Floats:
        return _shrunk(self.sums.sum(0), self.counts.sum(0), self._all())


def _shrunk(sums: Floats, counts: Floats, prior: Floats) -> Floats:
    return np.asarray((sums + _PRIOR_EVENTS * prior) / (counts + _PRIOR_EVENTS))


@dataclass(frozen=True, slots=True, eq=False)
class LoggedReward:
    """The fitted model, scaled so that 0 .. 1 is the range of the log without its outer hundredths."""

    means: Tensor  # [S, I]
    weights: Tensor  # [S, 2 + L]
    low: float
    high: float

    def of(self, scenarios: Tensor, items: Tensor, log_probs: Tensor) -> Tensor:
        """Rewards [N, K] of items (catalogue positions) with log-probabilities [N, K, L], in scenarios [N]."""
        weights = self.weights.index_select(0, scenarios).unsqueeze(1)
        found = weights[..., 0] + weights[..., 1] * self.means[scenarios.unsqueeze(1), items]
        found = found + (weights[..., 2:] * log_probs.double()).sum(2)
        return self.scaled(found)

    def scaled(self, values: Tensor) -> Tensor:
        """Numbers of the log as rewards in 0 .. 1."""
        return ((values - self.low) / (self.high - self.low)).clamp(0, 1).float()


@dataclass(frozen=True, slots=True, eq=False)
class LoggedColumn:
    """A logged number: its training events, and the means of its items."""

    values: Floats  # [E], NaN where it is missing or the event is held out
    means: ItemMeans

    @staticmethod
    def read(sequences: Sequences, split: Split, name: str, num_scenarios: int) -> LoggedColumn:
        """A number feature of events, or a label; only training events are read."""
        places = np.flatnonzero(train_mask(sequences, split))
        labels = {label.name: label for label in sequences.schema.labels}
        if name in labels:
            own = label_values(labels[name], sequences.event_features, places)
        else:
            own = sequences.event_features[name].values[places]
        values = np.full(len(sequences.items), np.nan)
        values[places] = own
        known = np.flatnonzero(~np.isnan(values))
        items = np.searchsorted(sequences.catalogue, sequences.items[known])
        means = ItemMeans.of(
            items,
            event_scenarios(sequences, known),
            values[known],
            num_items=len(sequences.catalogue),
            num_scenarios=num_scenarios,
        )
        return LoggedColumn(values, means)

    def fit(self, events: Ints, items: Ints, scenarios: Ints, log_probs: Floats) -> LoggedReward:
        """Fits the rewards of logged events: their items (catalogue positions) and log-probabilities [n, L]."""
        known = ~np.isnan(self.values[events])
        values = self.values[events][known]
        means = self.means.without(items[known], scenarios[known], values)
        inputs = np.column_stack([np.ones(len(values)), means, log_probs[known]])
        weights = fit_by_scenario(inputs, values, scenarios[known], len(self.means.sums))
        every = self.values[~np.isnan(self.values)]
        low, high = np.quantile(every, [0.01, 0.99]).tolist() if len(every) else (0.0, 1.0)
        high = high if high > low else low + 1.0
        return LoggedReward(torch.from_numpy(self.means.means()), torch.from_numpy(weights), low, high)


def fit_by_scenario(inputs: Floats, values: Floats, scenarios: Ints, num_scenarios: int) -> Floats:
    """Least squares [S, C] of each scenario, shrunk to those of all events; inputs [n, C], the first is 1."""
    scale = np.maximum(inputs.std(0), 1e-6) if len(inputs) else np.ones(inputs.shape[1])
    scale[0] = 1.0
    scaled, none = inputs / scale, np.zeros(inputs.shape[1])
    pooled = _ridge(scaled, values, none, 1e-3)
    own = [_ridge(scaled[scenarios == s], values[scenarios == s], pooled, _PRIOR_ROWS) for s in range(num_scenarios)]
    return np.asarray(np.stack(own) / scale)


def _ridge(inputs: Floats, values: Floats, prior: Floats, strength: float) -> Floats:
    """Least squares with a quadratic penalty on the distance from the prior."""
    gram = inputs.T @ inputs + strength * np.eye(inputs.shape[1])
    return np.asarray(prior + np.linalg.solve(gram, inputs.T @ (values - inputs @ prior)))


def event_scenarios(sequences: Sequences, events: Ints) -> Ints:
    """The scenario number of each event; 0 where the log names none."""
    stored = sequences.event_features.get("scenario")
    if stored is None or stored.offsets is None or not len(stored.values):
        return np.zeros(len(events), np.int64)
    first, last = stored.offsets[events], stored.offsets[events + 1]
    return np.asarray(np.where(last > first, stored.values[np.minimum(first, len(stored.values) - 1)], 0))
