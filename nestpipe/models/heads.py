"""Labels as tasks: one score each from a state, its loss, and the prediction that the score means.

    binary      P(1) = sigmoid(score)
    ordinal     P(level > k) = sigmoid(score - cut_k) with rising cuts; the prediction is the expected level
    regression  the score itself, squared error

A label that is unobserved (NaN) adds nothing. The loss is a sum; `weight` is what it is divided by: the weights of all
observed labels, so the result is a weighted mean, however events are spread over batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.data.schema import Label
from nestpipe.jagged import Jagged


class LabelHeads(nn.Module):
    """The heads of all labels on states [n, D]."""

    def __init__(self, labels: Sequence[Label], *, dim: int, hidden: int):
        super().__init__()
        self.labels = tuple(labels)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, len(self.labels))
        # Cuts rise by steps of softplus; these start values are 1 apart around 0.
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
        """The weights of all observed labels together."""
        return sum(float(_weights(label, given).sum(dtype=torch.float64)) for label in self.labels)

    def loss(self, scores: Tensor, given: Mapping[str, Jagged]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum over all labels, and its share of each label."""
        parts = {}
        for column, label in enumerate(self.labels):
            answers = given[label.name].values.to(scores.dtype)
            weights = _weights(label, given).to(scores.dtype)
            one = self._loss(label, scores[:, column], torch.nan_to_num(answers))
            parts[f"loss/{label.name}"] = (one * weights).sum()
        total = torch.stack(list(parts.values())).sum()
        return total, {name: part.detach() for name, part in parts.items()}

    def predict(self, scores: Tensor) -> Tensor:
        """What the scores [n, labels] say: a probability, an expected level from 0, or a number."""
        found = []
        for column, label in enumerate(self.labels):
            score = scores[:, column]
            match label.kind:
                case "binary":
                    found.append(torch.sigmoid(score))
                case "ordinal":
                    found.append(torch.sigmoid(self._above(label, score)).sum(1))
                case "regression":
                    found.append(score)
        return torch.stack(found, dim=1)

    def _loss(self, label: Label, scores: Tensor, answers: Tensor) -> Tensor:
        """One loss [n] per event."""
        match label.kind:
            case "binary":
                return F.binary_cross_entropy_with_logits(scores, answers, reduction="none")
            case "ordinal":
                levels = torch.arange(label.num_levels - 1, dtype=answers.dtype)
                above = (answers.unsqueeze(1) > levels).to(scores.dtype)
                return F.binary_cross_entropy_with_logits(self._above(label, scores), above, reduction="none").sum(1)
            case "regression":
                return (scores - answers).square()

    def _above(self, label: Label, scores: Tensor) -> Tensor:
        """Logits [n, levels - 1] of being above each level but the highest."""
        steps = self.cuts[label.name]
        cuts = torch.cat([steps[:1], F.softplus(steps[1:])]).cumsum(0)
        return scores.unsqueeze(1) - cuts


def _start_cuts(num_levels: int) -> Tensor:
    one = torch.full((num_levels - 1,), torch.e - 1).log()  # softplus of this is 1
    one[0] = -(num_levels - 2) / 2
    return one


def _weights(label: Label, given: Mapping[str, Jagged]) -> Tensor:
    """The weight [n] of the label at each event; 0 where it is unobserved."""
    answers = given[label.name].values
    own = given.get(f"{label.name}.weights")
    weights = torch.ones_like(answers) if own is None else own.values
    return (weights * label.weight).masked_fill(answers.isnan(), 0.0)
