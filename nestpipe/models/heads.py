"""Prediction heads: one score per label from a hidden state, with its loss and its prediction.

    binary      P(1) = sigmoid(score)
    ordinal     P(level > k) = sigmoid(score - cut_k) with rising cuts; the prediction is the expected level
    regression  the score itself, squared error

An unobserved label (NaN) adds nothing to the loss. The loss is a sum, and `weight` is the total weight of the observed labels.
Their quotient is the weighted mean, for any distribution of events over batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.data.schema import Label
from nestpipe.jagged import Jagged
from nestpipe.ops.precision import widened


class LabelHeads(nn.Module):
    """The heads of all labels on states [n, D]."""

    def __init__(self, labels: Sequence[Label], *, dim: int, hidden: int):
        super().__init__()
        self.labels = tuple(labels)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, len(self.labels))
        # The differences of cuts are softplus values, so cuts rise; initially they are 1 apart and centred at 0.
        self.cuts = nn.ParameterDict(
            {
                label.name: nn.Parameter(_start_cuts(label.num_levels))
                for label in self.labels
                if label.kind == "ordinal"
            }
        )

    def forward(self, states: Tensor) -> Tensor:
        """Scores [n, labels]."""
        scores: Tensor = self.down(F.relu(self.up(states)))
        return scores

    def weight(self, given: Mapping[str, Jagged]) -> float:
        """The total weight of the observed labels."""
        return sum(float(_weights(label, given).sum(dtype=torch.float64)) for label in self.labels)

    def loss(self, scores: Tensor, given: Mapping[str, Jagged]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum over all labels, and the sum of each label."""
        scores, sums = widened(scores), {}
        for column, label in enumerate(self.labels):
            values = given[label.name].values.to(scores.dtype)
            weights = _weights(label, given).to(scores.dtype)
            losses = self._loss(label, scores[:, column], torch.nan_to_num(values))
            sums[f"loss/{label.name}"] = (losses * weights).sum()
        total = torch.stack(list(sums.values())).sum()
        return total, {name: one.detach() for name, one in sums.items()}

    def predict(self, scores: Tensor) -> Tensor:
        """Predictions from scores [n, labels]: a probability, an expected level (from 0), or a number."""
        predictions = []
        for column, label in enumerate(self.labels):
            score = scores[:, column]
            match label.kind:
                case "binary":
                    predictions.append(torch.sigmoid(score))
                case "ordinal":
                    predictions.append(torch.sigmoid(self._above(label, score)).sum(1))
                case "regression":
                    predictions.append(score)
        return torch.stack(predictions, dim=1)

    def _loss(self, label: Label, scores: Tensor, values: Tensor) -> Tensor:
        """One loss [n] per event."""
        match label.kind:
            case "binary":
                return F.binary_cross_entropy_with_logits(scores, values, reduction="none")
            case "ordinal":
                levels = torch.arange(label.num_levels - 1, dtype=values.dtype, device=values.device)
                above = (values.unsqueeze(1) > levels).to(scores.dtype)
                return F.binary_cross_entropy_with_logits(self._above(label, scores), above, reduction="none").sum(1)
            case "regression":
                return (scores - values).square()

    def _above(self, label: Label, scores: Tensor) -> Tensor:
        """Logits [n, levels - 1] of being above each level but the highest."""
        steps = self.cuts[label.name]
        cuts = torch.cat([steps[:1], F.softplus(steps[1:])]).cumsum(0)
        return scores.unsqueeze(1) - cuts


def _start_cuts(num_levels: int) -> Tensor:
    cuts = torch.full((num_levels - 1,), torch.e - 1).log()  # softplus of this is 1
    cuts[0] = -(num_levels - 2) / 2
    return cuts


def _weights(label: Label, given: Mapping[str, Jagged]) -> Tensor:
    """The weight [n] of the label at each event; 0 where it is unobserved."""
    values = given[label.name].values
    own = given.get(f"{label.name}.weights")
    weights = torch.ones_like(values) if own is None else own.values
    return (weights * label.weight).masked_fill(values.isnan(), 0.0)
