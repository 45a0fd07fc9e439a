"""Top lists of the catalogue under rules: queries that only remove single items share one scan, the others one product each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.eval.catalogue_ranking import top_items
from nestpipe.jagged import Jagged, offsets_of
from nestpipe.rules.compiled_rules import CompiledRules
from nestpipe.rules.selection import SelectedItems, best_by_vector


class RuledQuery(NamedTuple):
    """Compiled rules, the positions that they remove, and the length of the list."""

    rules: CompiledRules
    removed: NDArray[np.int64]
    k: int


def top_lists(
    queries: Tensor, item_vectors: Tensor, requests: Sequence[RuledQuery], max_bytes: int
) -> list[SelectedItems]:
    """The list of each query [B, D] by exact scores of all vectors [I, D]; raises TrainError if a score is not finite."""
    found: dict[int, SelectedItems] = {}
    plain = [row for row, one in enumerate(requests) if one.rules.is_plain]
    if plain:
        lengths = torch.tensor([len(requests[row].removed) for row in plain])
        removed = torch.from_numpy(np.concatenate([requests[row].removed for row in plain]))
        seen = Jagged(removed, offsets_of(lengths), int(lengths.max()))
        top = top_items(queries[plain], item_vectors, seen, max(requests[row].k for row in plain), max_bytes)
        for row, positions, scores in zip(plain, top.positions, top.scores, strict=True):
            one, kept = requests[row], (positions >= 0).nonzero().flatten()[: requests[row].k]
            found[row] = SelectedItems(
                positions[kept].cpu().numpy(), scores[kept].cpu().numpy(), one.rules.num_left(one.removed)
            )
    vectors, own = item_vectors.cpu().numpy(), queries.cpu().numpy()
    for row, one in enumerate(requests):
        if not one.rules.is_plain:
            found[row] = best_by_vector(vectors, own[row], one.rules, one.k, removed=one.removed)
    return [found[row] for row in range(len(requests))]
