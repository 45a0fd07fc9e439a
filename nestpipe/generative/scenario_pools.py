"""The pools of scenarios: which items a scenario may show, as masks over the trie of semantic ids.

The pool of a scenario is 'all' or the name of a number feature of items: those with a value above 0 may be shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.generative.scenarios import Scenario
from nestpipe.generative.trie import ItemPool, Trie
from nestpipe.jagged import Batch


def scenario_pools(records: Sequence[Scenario], sequences: Sequences, trie: Trie) -> ItemPool | None:
    """The pool of each scenario, by number; None if all may show everything. Raises ConfigError."""
    masks = scenario_masks(records, sequences)
    return None if masks is None else trie.pool_of_items(masks)


def scenario_masks(records: Sequence[Scenario], sequences: Sequences) -> Tensor | None:
    """The items [scenario number, I] of each pool; None if all may show everything. Raises ConfigError."""
    if all(one.pool == "all" for one in records):
        return None
    return torch.stack([_allowed(one, sequences) for one in records])


def _allowed(record: Scenario, sequences: Sequences) -> Tensor:
    """A mask [I] over the catalogue."""
    if record.pool == "all":
        return torch.ones(len(sequences.catalogue), dtype=torch.bool)
    numbers = [one.name for one in sequences.schema.of_scope("item") if one.kind == "number"]
    if record.pool not in numbers:
        known = ", ".join(["all", *numbers])
        raise ConfigError(
            f"the pool '{record.pool}' of scenario '{record.name}' is no number feature of items in {sequences.path}; "
            f"there are: {known}. Items with a value above 0 are in the pool."
        )
    allowed = np.nan_to_num(np.asarray(sequences.item_features[record.pool].values)) > 0
    if not allowed.any():
        raise ConfigError(
            f"the pool '{record.pool}' of scenario '{record.name}' is empty: no item has a value above 0."
        )
    return torch.from_numpy(allowed)


def scenarios_of(request: Batch) -> Tensor:
    """The scenario number of each request, [N]; 0 where it has none."""
    numbers = torch.zeros(request.num_samples, dtype=torch.int64)
    if "scenario" not in request.sample_features:
        return numbers
    own = request.sample_features["scenario"]
    return numbers.index_copy(0, own.row_of_value(), own.values)


def pools_of(pools: ItemPool | None, request: Batch) -> ItemPool | None:
    """The pool of each request, from those of all scenarios."""
    if pools is None:
        return None
    numbers = scenarios_of(request)
    live = tuple(one.index_select(0, numbers) for one in pools.live)
    items = None if pools.items is None else pools.items.index_select(0, numbers)
    return dataclasses.replace(pools, live=live, items=items)
