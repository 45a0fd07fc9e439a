"""Evaluation of ranking models: a prediction for every held-out event, then metrics per label and slice.

The history of an event is what serving would have: the events before it, truncated in blocks. So it includes earlier test
events. The weights are not updated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nestpipe.config import Config
from nestpipe.data.features import label_values
from nestpipe.data.schema import Label
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split, Windows, disjoint_windows, overlapping_windows, train_mask
from nestpipe.embedding.row_reader import RowReader, read_rows
from nestpipe.errors import DataError
from nestpipe.eval.catalogue_predictor import CataloguePredictor, UserRequest
from nestpipe.eval.eval_ranks import EvalRanks, OneRank, dealt, in_batch_order, raise_on_all
from nestpipe.eval.label_metrics import LabelPredictions
from nestpipe.eval.label_report import LabelReport, label_report
from nestpipe.eval.protocol import Target, protocol_of
from nestpipe.eval.topk_metrics import Array, Counts
from nestpipe.eval.user_sample import sampled_users
from nestpipe.jagged import Batch, Cursor, Jagged, ranges
from nestpipe.models.build_model import inputs_of
from nestpipe.models.contract import Model
from nestpipe.models.dcn import DCN
from nestpipe.models.heads import LabelHeads
from nestpipe.models.kv_prefix import describe_statistics
from nestpipe.models.prefix_inference import CandidateBatch, Ranker
from nestpipe.models.ranking import Ranking
from nestpipe.rules.selection import SelectedItems, select

_CANDIDATES = 4096  # items of the catalogue that are scored at a time
_NOT_FINITE = (
    "a prediction is not finite, so it cannot be evaluated. The model has diverged: use an earlier checkpoint, or lower the "
    "learning rate."
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Predictions:
    """Held-out events: indices of event and user in the folder, history lengths, predictions and labels."""

    labels: tuple[Label, ...]
    event: Counts
    user: Counts
    num_before: Counts
    scores: Array  # [n, labels]
    answers: Array  # [n, labels], the true values, NaN if unobserved

    def of(self, label: int, num_users: int) -> LabelPredictions:
        """The predictions of one label."""
        return LabelPredictions(
            label=self.labels[label],
            scores=self.scores[:, label],
            answers=self.answers[:, label],
            users=self.user,
            num_users=num_users,
        )


class RankingPredictor(CataloguePredictor):
    """Predicts labels with a model and its embedding rows."""

    def __init__(self, model: Model, rows: RowReader, sequences: Sequences, split: Split, config: Config):
        super().__init__(model, rows, sequences, split, config)
        self._inputs = inputs_of(config, sequences)

    @property
    def _tasks(self) -> LabelHeads:
        return cast(Ranking | DCN, self._model).tasks

    def ranker(self, weights: str) -> Ranker:
        """The model as a ranker with KV prefixes; `weights` identifies the weights in prefix keys."""
        if not isinstance(self._model, Ranking):
            raise DataError("this model reads no history, so it has no KV prefixes. Call 'predict' instead.")
        schema = describe_statistics(self._builder.statistics)
        return Ranker(self._model, partial(read_rows, self._rows), weights=weights, schema=schema)

    def evaluate(
        self, target: Target = "test", *, ranks: EvalRanks | None = None, progress: bool = True
    ) -> LabelReport:
        """Metrics per label and slice of history length; `progress` has no effect. Collective."""
        return self.report(self.predict(target, ranks=ranks), target)

    def report(self, found: Predictions, target: Target = "test") -> LabelReport:
        """The metrics of predictions, with the protocol that they were made in."""
        report = report_of(found, self._sequences, self._split, self._config)
        return replace(report, protocol=protocol_of(self._sequences, self._config, target))

    def predict(self, target: Target = "test", *, ranks: EvalRanks | None = None) -> Predictions:
        """Predictions for every held-out event that has a history (or needs none). Collective: each rank predicts its share."""
        is_next = self._inputs.layout == "next"
        windows = held_out(self._sequences, self._split, self._config, target, is_next=is_next)
        if not len(windows):
            raise DataError(
                f"{self._sequences.path} has no {target} events under this split, so there is nothing to predict. Use another split (--data.split)."
            )
        event, user, num_before, scores = self._predict_shared(windows, ranks or OneRank())
        labels = self._tasks.labels
        answers = [label_values(label, self._sequences.event_features, event) for label in labels]
        return Predictions(
            labels=labels,
            event=event,
            user=user,
            num_before=num_before,
            scores=scores,
            answers=np.stack(answers, axis=1).astype(np.float64),
        )

    def _predict_shared(self, windows: Windows, ranks: EvalRanks) -> tuple[Counts, Counts, Counts, Array]:
        """What `_predict` gives for all windows, in their order, on every rank."""
        size = self._config.eval.batch_size
        events, predicted = [], []
        for number, is_own in dealt(math.ceil(len(windows) / size), ranks):
            *columns, scores = self._predict(
                windows.pick(np.arange(number * size, min((number + 1) * size, len(windows))))
            )
            raise_on_all(ranks, None if np.isfinite(scores).all() else _NOT_FINITE)
            if is_own:
                events.append((number, torch.from_numpy(np.stack(columns, axis=1))))
                predicted.append((number, torch.from_numpy(scores)))
        no_events = torch.empty(0, 3, dtype=torch.int64)
        no_scores = torch.empty(0, len(self._tasks.labels), dtype=torch.float64)
        event, user, num_before = in_batch_order(ranks, "events", events, no_events).T.numpy()
        return event, user, num_before, in_batch_order(ranks, "predictions", predicted, no_scores).numpy()

    def lists(self, request: UserRequest, k: int) -> list[SelectedItems]:
        """By the first label, of the whole catalogue: exact, and slow where the catalogue is large."""
        users = [request.batch.select(torch.tensor([row])) for row in range(request.batch.num_samples)]
        vectors = self._alike(request.rules)
        return [
            select(self._catalogue_scores(user).numpy(), request.rules, k, removed=removed, vectors=vectors)
            for user, removed in zip(users, request.removed, strict=True)
        ]

    @torch.no_grad()
    def _catalogue_scores(self, history: Batch) -> Tensor:
        """The first label's prediction for every item of the catalogue [I], for one user."""
        catalogue = np.array(self._sequences.catalogue)
        chunks = np.array_split(catalogue, range(_CANDIDATES, len(catalogue), _CANDIDATES))
        if isinstance(self._model, DCN):
            found = [self._event_scores(self._builder.candidate_events(history, chunk)) for chunk in chunks]
        else:
            ranker = self.ranker("recommend")
            prefix, suffix = ranker.split(history)
            kept = ranker.prefill(prefix)
            found = [ranker.score(kept, suffix, self._candidates(chunk)) for chunk in chunks]
        return self._tasks.predict(torch.cat(found))[:, 0]

    @torch.no_grad()
    def score_each(self, histories: Batch, items: Counts) -> Tensor:
        """The first label's prediction [B, K] for items [B, K], those of row b after history b. Collective."""
        num_users, num_items = items.shape
        if isinstance(self._model, DCN):
            users = [histories.select(torch.tensor([row])) for row in range(num_users)]
            found = [self._event_scores(self._builder.candidate_events(*one)) for one in zip(users, items, strict=True)]
            return self._tasks.predict(torch.cat(found))[:, 0].view(num_users, num_items)
        rows = Jagged(torch.from_numpy(items.reshape(-1)), torch.arange(num_users + 1) * num_items, num_items)
        candidates = CandidateBatch(rows, self._builder.item_features(items.reshape(-1)))
        return self._tasks.predict(self.ranker("values").full(histories, candidates))[:, 0].view(num_users, num_items)

    def _candidates(self, items: Counts) -> CandidateBatch:
        rows = Jagged(torch.from_numpy(items), torch.tensor([0, len(items)]), len(items))
        return CandidateBatch(rows, self._builder.item_features(items))

    def _event_scores(self, batch: Batch) -> Tensor:
        """Scores [T, labels] of events by a model without histories."""
        model = cast(DCN, self._model)
        return model.event_scores(read_rows(self._rows, model.event_lookups(batch)), batch)

    def _predict(self, windows: Windows) -> tuple[Counts, Counts, Counts, Array]:
        """Event, user, history length and prediction of the counted rows of some windows."""
        batch = self._builder.training(Cursor(0, 0), torch.from_numpy(windows.user), windows)
        is_next = isinstance(self._model, Ranking)
        with torch.no_grad():
            if isinstance(self._model, Ranking):
                rows = read_rows(self._rows, self._model.target_lookups(batch))
                scores = self._model.target_scores(rows, batch, None)
            else:
                scores = self._event_scores(batch)
            found = self._tasks.predict(scores)
        lengths = torch.from_numpy(windows.end - windows.start)
        place = ranges(torch.from_numpy(windows.start), lengths).numpy()
        user = np.repeat(windows.user, lengths.numpy())
        counts = place >= np.repeat(windows.counted, lengths.numpy())
        event = self._sequences.offsets[user] + place + is_next
        return event[counts], user[counts], (place + is_next)[counts], found.numpy().astype(np.float64)[counts]


def held_out(sequences: Sequences, split: Split, config: Config, target: Target, *, is_next: bool) -> Windows:
    """Windows that count every held-out event once: as the target of the row before it, or as its own row."""
    lengths = np.diff(sequences.offsets)
    first, end = (split.test_start, lengths) if target == "test" else (split.validation, split.test_start)
    if target == "validation":
        first = np.where(first < 0, end, first)
    data = config.data
    if is_next:
        first, end = np.maximum(first - 1, 0), end - 1
        windows = overlapping_windows(first, end, max_len=data.max_len, block=data.truncate_block)
    else:
        windows = disjoint_windows(first, end, max_len=data.max_len)
    if config.eval.max_users:
        users = np.unique(windows.user)
        users = users[sampled_users(sequences.users[users], config.eval.max_users)]
        windows = windows.pick(np.flatnonzero(np.isin(windows.user, users)))
    return windows


def report_of(found: Predictions, sequences: Sequences, split: Split, config: Config) -> LabelReport:
    """The metrics of some predictions, with slices by history length and of users without training events."""
    new_user = split.train_end[found.user] == 0
    return label_report(
        [found.of(place, len(sequences.users)) for place in range(len(found.labels))],
        num_before=found.num_before,
        masks={"new users": new_user} if new_user.any() and not new_user.all() else {},
        user_ids=sequences.users,
        seed=config.seed,
        num_bootstrap=config.eval.num_bootstrap,
    )


def baselines(found: Predictions, sequences: Sequences, split: Split) -> dict[str, Predictions]:
    """Baseline predictions of the same events, fitted on training events: item mean, and user + item bias."""
    users = np.repeat(np.arange(len(sequences.users)), np.diff(sequences.offsets))
    items = np.searchsorted(sequences.catalogue, sequences.items)
    trained = np.flatnonzero(train_mask(sequences, split))
    sizes = {"num_users": len(sequences.users), "num_items": len(sequences.catalogue)}
    columns: dict[str, list[Array]] = {"item mean": [], "user and item bias": []}
    for label in found.labels:
        answers = label_values(label, sequences.event_features, trained).astype(np.float64)
        known = trained[~np.isnan(answers)]
        answers = answers[~np.isnan(answers)]
        means = item_mean(items[known], answers, len(sequences.catalogue))
        columns["item mean"].append(means[items[found.event]])
        overall, of_user, of_item = user_item_bias(users[known], items[known], answers, **sizes)
        columns["user and item bias"].append(overall + of_user[found.user] + of_item[items[found.event]])
    return {
        name: Predictions(
            labels=found.labels,
            event=found.event,
            user=found.user,
            num_before=found.num_before,
            scores=np.stack(scores, axis=1),
            answers=found.answers,
        )
        for name, scores in columns.items()
    }


def item_mean(items: Counts, answers: Array, num_items: int, *, prior: float = 5.0) -> Array:
    """The mean label of each item [I], shrunk towards the overall mean by `prior` events."""
    overall = float(answers.mean())
    sums = np.bincount(items, weights=answers, minlength=num_items)
    counts = np.bincount(items, minlength=num_items)
    return np.asarray((sums + prior * overall) / (counts + prior))


def user_item_bias(
    users: Counts,
    items: Counts,
    answers: Array,
    *,
    num_users: int,
    num_items: int,
    prior: float = 10.0,
    rounds: int = 20,
) -> tuple[float, Array, Array]:
    """Ridge regression label = mean + user + item by alternating least squares: the mean, biases [U] and [I]."""
    overall = float(answers.mean())
    of_user, of_item = np.zeros(num_users), np.zeros(num_items)
    for _ in range(rounds):
        of_item = _bias(items, answers - overall - of_user[users], num_items, prior)
        of_user = _bias(users, answers - overall - of_item[items], num_users, prior)
    return overall, of_user, of_item


def _bias(groups: Counts, residuals: Array, num_groups: int, prior: float) -> Array:
    sums = np.bincount(groups, weights=residuals, minlength=num_groups)
    return np.asarray(sums / (np.bincount(groups, minlength=num_groups) + prior))
