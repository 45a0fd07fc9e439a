"""The audit of a run: does it read anything of the events that it is tested on, besides the declared inputs?

    evaluation   everything from the target on is poisoned: what the model computes must keep every bit
    training     all held-out events are poisoned: losses, weights and statistics of the first steps must keep every bit
    statistics   those in the run folder must be those of the training events
    features     number features of items and users must not be computed from held-out events
    permutation  targets of other users must be hit as often as chance says, else the evaluation favours its targets

Declared inputs are the time of the request, the catalogue known at evaluation, and features of the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast, overload

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from nestpipe.data.features import NumberStats
from nestpipe.data.loader import Loader
from nestpipe.data.poison import poison_events
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Ints
from nestpipe.eval.catalogue_predictor import training_counts
from nestpipe.eval.eval_ranks import OneRank
from nestpipe.eval.feature_leaks import find_feature_leaks
from nestpipe.eval.predictor import EvalBatches, GenerativePredictor, Predictor, RetrievalPredictor, make_predictor
from nestpipe.eval.protocol import Protocol, Target, protocol_of
from nestpipe.eval.ranking_eval import RankingPredictor
from nestpipe.eval.retrieval_eval import EvalBatch, evaluate
from nestpipe.eval.topk_metrics import list_length
from nestpipe.jagged import Cursor
from nestpipe.models.build_model import inputs_of
from nestpipe.pipeline.train_batches import train_batches
from nestpipe.training.run_folder import LoadedModel, Run
from nestpipe.training.run_state import new_state

AUDIT = "audit.json"  # beside the report
_NUM_STEPS = 6
_MAX_USERS = 1000
_DEVIATIONS = 4.5  # of the permuted hits from what chance says


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One check: whether it found a leak, and what it saw."""

    name: str
    is_leak: bool
    seen: str


@dataclass(frozen=True, slots=True)
class LeakAudit:
    """The declared inputs of a run and what the checks found."""

    protocol: Protocol
    declared: tuple[str, ...]
    checks: tuple[AuditCheck, ...]

    @property
    def leaks(self) -> list[AuditCheck]:
        return [one for one in self.checks if one.is_leak]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Table:
        table = Table(title=f"audit: {len(self.leaks) or 'no'} leaks", show_lines=True)
        for header in ("check", "result", "seen"):
            table.add_column(header)
        for one in self.declared:
            table.add_row("declared input", "declared", one)
        for check in self.checks:
            table.add_row(check.name, "LEAK" if check.is_leak else "ok", check.seen)
        return table


def audit_run(run: Run, *, step: int | None = None, target: Target = "test") -> LeakAudit:
    """Audits a checkpoint of a run on its own data; one process."""
    most = run.config.eval.max_users or _MAX_USERS
    run = _with_sequences(
        replace(run, config=replace(run.config, eval=replace(run.config.eval, max_users=min(most, _MAX_USERS)))),
        run.sequences,
        run,
    )
    loaded = run.load_model(step)
    subject = _Subject(run, loaded, target)
    checks = [*subject.check_evaluation(), *_check_training(run), _check_statistics(run), *_check_features(run)]
    checks += subject.check_permutation()
    return LeakAudit(protocol_of(run.sequences, run.config, target), tuple(subject.declared()), tuple(checks))


def _with_sequences(run: Run, sequences: Sequences, origin: Run) -> Run:
    """A run on sequences in memory; its split is made anew, its semantic ids are those of the original."""
    other = replace(run)
    other.__dict__.update(sequences=sequences, semantic_ids=origin.semantic_ids)
    return other


class _Subject:
    """A loaded model, evaluated on changed data."""

    def __init__(self, run: Run, loaded: LoadedModel, target: Target):
        self._run, self._loaded, self._target = run, loaded, target
        self._inputs = inputs_of(run.config, run.sequences)
        split = run.split
        one = split.test if target == "test" else split.validation
        self._by_label = isinstance(self._predictor(run.sequences), RankingPredictor)
        lengths = np.diff(run.sequences.offsets)
        if (
            self._by_label
        ):  # every held-out event is scored: the last one of a user, for which all before it may be read
            end = lengths if target == "test" else split.test_start
            has = split.test_start < lengths if target == "test" else split.validation >= 0
            one = np.where(has, end - 1, -1)
        self._first: Ints = np.where(one >= 0, one, lengths)
        own = {feature.name for feature in run.sequences.schema.of_scope("event")}
        read_now = self._inputs.features if self._inputs.layout == "events" else ()
        self._kept = tuple(name for name in (*self._inputs.requests, *read_now) if name in own)

    def _predictor(self, sequences: Sequences) -> Predictor:
        # The split, statistics included, is that of the run: what a run has fitted is not fitted again.
        return make_predictor(self._loaded.model, self._loaded.rows, sequences, self._run.split, self._run.config)

    def declared(self) -> Iterator[str]:
        sequences = self._run.sequences
        if sequences.times is not None:
            later = replace(sequences, times=sequences.times + 86_400_000 * self._is_first())
            reads = self._differs(later) is not None
            yield f"time of the request: {'read' if reads else 'not read'} by the model"
        num_new = int((training_counts(sequences, self._run.split) == 0).sum())
        yield f"catalogue: {len(sequences.catalogue):,} items, {num_new:,} of them without a training event"
        if self._by_label:
            yield "the item of the event that is scored"
        if self._kept:
            yield f"features of the request: {', '.join(self._kept)}"
        if self._run.semantic_ids is not None:
            yield "semantic ids of the catalogue, made before training by 'nestpipe sid build'"

    def check_evaluation(self) -> Iterator[AuditCheck]:
        poisoned = poison_events(
            self._run.sequences, self._first, items=not self._by_label, first_times=False, keep=self._kept
        )
        differs = self._differs(poisoned)
        seen = f"the same bits for {self._num_compared:,} users with the target and all later events poisoned"
        if differs is not None:
            (user,) = self._run.sequences.vocabulary("user").own_ids(np.array([differs]))
            seen = f"what the model computes for user {user!r} changes with the target or later events: its history reaches too far"
        yield AuditCheck("evaluation reads held-out events", differs is not None, seen)

    def _is_first(self) -> Ints:
        lengths = np.diff(self._run.sequences.offsets)
        place = np.arange(len(self._run.sequences.items)) - np.repeat(self._run.sequences.offsets[:-1], lengths)
        return np.asarray(place == np.repeat(self._first, lengths), np.int64)

    def _differs(self, changed: Sequences) -> int | None:
        """The first user whose result differs on changed data, if any."""
        users, before = self._computed(self._run.sequences)
        _, after = self._computed(changed)
        self._num_compared = len(users)
        rows = torch.nonzero((before != after).flatten(1).any(1)).flatten()
        return int(users[rows[0]]) if len(rows) else None

    def _computed(self, sequences: Sequences) -> tuple[Ints, Tensor]:
        """User ids and what the model computes for the last target of each."""
        predictor = self._predictor(sequences)
        if isinstance(predictor, RankingPredictor):
            found = predictor.predict(self._target)
            last = found.event == (self._run.sequences.offsets[:-1] + self._first)[found.user]
            return self._run.sequences.users[found.user[last]], torch.from_numpy(found.scores[last])
        inputs = self._inputs if isinstance(predictor, GenerativePredictor) else None
        samples = EvalBatches(sequences, self._run.split, self._run.config, self._target, inputs=inputs)
        users, results = [], []
        for sample in samples:
            users.append(sample.users)
            results.append(_query(predictor, sample, max(self._run.config.eval.ks)))
        return torch.cat(users).numpy(), torch.cat(results)

    def check_permutation(self) -> Iterator[AuditCheck]:
        predictor = self._predictor(self._run.sequences)
        if not isinstance(predictor, RetrievalPredictor):
            return
        config = self._run.config
        samples = EvalBatches(self._run.sequences, self._run.split, config, self._target)
        part = predictor.catalogue_part(OneRank())
        own = evaluate(predictor.encode, part, samples, config.eval, config.seed, progress=False)
        order = np.random.default_rng(0).permutation(len(own.target))
        permuted = evaluate(
            predictor.encode, part, _Permuted(samples, own.target[order]), config.eval, config.seed, progress=False
        )
        assert own.lists is not None
        k = list_length(config.eval.ks)
        share = np.bincount(own.target, minlength=own.num_items) / len(own.target)
        chance = np.where(own.lists >= 0, share[own.lists], 0).sum(1)
        bound = chance.mean() + _DEVIATIONS * np.sqrt((chance * (1 - chance)).sum() + 1) / len(chance)
        hits = permuted.metrics[f"hr@{k}"].mean
        seen = f"hr@{k} {own.metrics[f'hr@{k}'].mean:.4f}; with the targets of other users {hits:.4f}, by chance {chance.mean():.4f}"
        yield AuditCheck("evaluation favours its targets", bool(hits > bound), seen)


def _query(predictor: Predictor, sample: EvalBatch, k: int) -> Tensor:
    if isinstance(predictor, GenerativePredictor):
        found = predictor.generate(sample.batch, k)
        return torch.cat([found.positions.double(), found.scores.double()], 1).nan_to_num()
    return cast(RetrievalPredictor, predictor).encode(sample.batch)


class _Permuted(Sequence[EvalBatch]):
    """Batches with other targets."""

    def __init__(self, samples: EvalBatches, targets: Ints):
        self._samples, self._targets = samples, torch.from_numpy(targets)
        self._size = len(samples[0].users)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, number: int) -> EvalBatch: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[EvalBatch]: ...
    def __getitem__(self, number: int | slice) -> EvalBatch | Sequence[EvalBatch]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        own = self._samples[number]
        first = number * self._size
        return replace(own, target_positions=self._targets[first : first + len(own.users)])


def _check_training(run: Run) -> Iterator[AuditCheck]:
    poisoned = _with_sequences(run, poison_events(run.sequences, run.split.train_end), run)
    before, after = _trained(run), _trained(poisoned)
    changed = [
        name for name in before if before[name].shape != after[name].shape or not before[name].equal(after[name])
    ]
    seen = f"losses, weights and item rows of {len(before['loss'])} steps keep their bits with all held-out events poisoned"
    if changed:
        seen = f"held-out events change {', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''}: training reads them"
    yield AuditCheck("training reads held-out events", bool(changed), seen)


def _trained(run: Run) -> dict[str, Tensor]:
    """Statistics, losses, dense weights and item rows of the first steps of a training, by name."""
    config = run.config
    run = _with_sequences(
        replace(run, config=replace(config, embedding=replace(config.embedding, tier="memory"))), run.sequences, run
    )
    inputs = inputs_of(config, run.sequences)
    loader = Loader(run.sequences, run.split, config.data, seed=config.seed, inputs=inputs)
    state = new_state(run)
    num = min(_NUM_STEPS, loader.num_batches(0))
    means = train_batches(state, (loader.batch(Cursor(0, n)) for n in range(num)), num_batches=num)
    statistics = {f"statistics of '{name}'": _numbers(one) for name, one in loader.statistics.items()}
    weights = {f"weights {name}": one.detach() for name, one in cast(nn.Module, state.model).state_dict().items()}
    tables = {table.name for table in state.model.tables}
    rows = {}
    if "item" in tables:
        rows["rows of items"] = state.embedding.peek("item", torch.from_numpy(np.array(run.sequences.catalogue)))
    return {**statistics, "loss": torch.tensor([one["loss"] for one in means], dtype=torch.float64), **weights, **rows}


def _numbers(statistics: NumberStats) -> Tensor:
    return torch.tensor([statistics.mean, statistics.std, statistics.num_values, *statistics.boundaries])


def _check_statistics(run: Run) -> AuditCheck:
    """What the run folder says was fitted, against a fit on the training events of its split."""
    stored = run.statistics()
    inputs = inputs_of(run.config, run.sequences)
    fitted = Loader(run.sequences, run.split, run.config.data, seed=run.config.seed, inputs=inputs).statistics
    wrong = [name for name in stored if stored[name] != fitted.get(name)]
    seen = (
        f"{len(stored)} number features are scaled by their training events" if stored else "no number feature is read"
    )
    if wrong:
        seen = f"feature '{wrong[0]}' is scaled by {stored[wrong[0]]}, its training events give {fitted.get(wrong[0])}"
    return AuditCheck("statistics of other than training events", bool(wrong), seen)


def _check_features(run: Run) -> Iterator[AuditCheck]:
    read = set(inputs_of(run.config, run.sequences).features)
    found = find_feature_leaks(run.sequences, run.split)
    name = "features computed from held-out events"
    for leak in found:
        note = "" if leak.feature in read else "; this model does not read it"
        yield AuditCheck(name, leak.feature in read, f"{leak}{note}")
    if not found:
        num = sum(feature.kind == "number" for feature in run.sequences.schema.of_scope("item", "user"))
        yield AuditCheck(name, False, f"none of {num} number features of items and users")
