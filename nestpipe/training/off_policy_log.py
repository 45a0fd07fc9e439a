"""Off-policy report of an aligned run: what the log and the runs say about the held-out requests.

The policy shows one item, drawn with the probabilities of a run. The log must say with which probability it showed its own:
in a number column, or by naming the generative run that drew the items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.features import label_values
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Ints
from nestpipe.embedding.row_reader import RowReader, read_rows
from nestpipe.errors import ConfigError
from nestpipe.eval.off_policy import LoggedRequests, OffPolicyReport, PolicyAnswers, off_policy_report
from nestpipe.eval.predictor import EvalBatches
from nestpipe.eval.topk_metrics import Array
from nestpipe.generative.policy_optimisation import Rollout, draw_paths, path_log_probs
from nestpipe.generative.rewards import RewardContext, Rewards
from nestpipe.generative.scenario_pools import pools_of, scenario_pools, scenarios_of
from nestpipe.generative.trie import ItemPool, Trie
from nestpipe.jagged import Batch
from nestpipe.models.build_model import inputs_of
from nestpipe.models.encdec import EncDec
from nestpipe.rng import Rng
from nestpipe.training.run_folder import Run

_DRAWS = 16  # items drawn for the modelled value of a policy


@dataclass(frozen=True, slots=True)
class ShownBy:
    """Where propensities come from: a number column of events, or the generative run that drew the items."""

    column: str = ""
    run: Path | None = None

    def check(self, sequences: Sequences) -> None:
        """Raises ConfigError for a column that does not exist, or a run that gives no probabilities."""
        if self.column and self.run is not None:
            raise ConfigError("--propensity and --shown-by both say with which probability items were shown; give one.")
        numbers = [one.name for one in sequences.schema.of_scope("event") if one.kind == "number"]
        if self.column and self.column not in numbers:
            raise ConfigError(
                f"--propensity {self.column} is no number of events in {sequences.path}; there are: "
                f"{', '.join(numbers) or 'none'}. Ingest the log with --feature {self.column}:number:event."
            )
        if self.run is None:
            return
        if (shown := Run.open(self.run)).semantic_ids is None:
            raise ConfigError(f"--shown-by {self.run} is not a generative run, so it has no probabilities of items.")
        if shown.sequences.digest != sequences.digest:
            raise ConfigError(
                f"--shown-by {self.run} was trained on {shown.sequences.path}, not on {sequences.path}: its numbers of users and "
                "items are others. Log the probability of each shown item, and name the column with --propensity."
            )

    @property
    def is_known(self) -> bool:
        return bool(self.column) or self.run is not None


@dataclass(frozen=True, eq=False)
class ProbabilityModel:
    """A generative run that draws items."""

    model: EncDec
    rows: RowReader
    trie: Trie

    @staticmethod
    def open(run: Run, step: int | None = None) -> ProbabilityModel:
        loaded = run.load_model(step)
        return ProbabilityModel(cast(EncDec, loaded.model), loaded.rows, cast(Trie, run.semantic_ids))

    def log_probs(self, batch: Batch, leaves: Tensor, pool: ItemPool | None = None) -> Tensor:
        """[N, K, L] of leaves [N, K]."""
        request = self.model.select(batch, None)
        decoding = self.model.decoding(read_rows(self.rows, self.model.encode_lookups(request)), request)
        return path_log_probs(decoding, self.trie, leaves, pool=pool, softmax=self.model.config.softmax)

    def probabilities(self, batch: Batch, leaves: Tensor, pool: ItemPool | None = None) -> Array:
        """[N] of one leaf each [N, 1]; 0 outside of the pool."""
        inside = torch.ones(len(leaves), dtype=torch.bool) if pool is None else pool.at(-1, leaves).flatten()
        found = torch.zeros(len(leaves), dtype=torch.float64)
        if bool(inside.any()):
            found = self.log_probs(batch, leaves, pool).double().sum(2).exp().flatten()
        return found.masked_fill(~inside, 0.0).nan_to_num(0.0).numpy()

    def draw(self, batch: Batch, pool: ItemPool | None, seed: int) -> Tensor:
        """Leaves [N, draws]."""
        request = self.model.select(batch, None)
        decoding = self.model.decoding(read_rows(self.rows, self.model.encode_lookups(request)), request)
        settings = {"num": _DRAWS, "rng": Rng(seed, 0), "samples": batch.sample_ids}
        return draw_paths(decoding, self.trie, **settings, pool=pool, softmax=self.model.config.softmax).leaves  # type: ignore[arg-type]


@torch.no_grad()
def off_policy(run: Run, shown_by: ShownBy, rewards: Rewards) -> OffPolicyReport:
    """The report of an aligned run with its rewards, in one process."""
    assert run.origin is not None
    trie = cast(Trie, run.semantic_ids)
    if reason := _reason(shown_by, rewards, trie):
        return OffPolicyReport(reason=reason)
    start = ProbabilityModel.open(Run.open(run.config.model.start), run.origin.step)
    policies = (start, ProbabilityModel.open(run))
    pools = scenario_pools(run.scenario_records, run.sequences, trie)
    names = ("rewards", "modelled", "propensities", "p start", "direct start", "p aligned", "direct aligned")
    columns: dict[str, list[Array]] = {name: [] for name in names}
    propensities = _propensities(run, shown_by)
    for sample in EvalBatches(
        run.instructed, run.split, run.config, "test", inputs=inputs_of(run.config, run.instructed)
    ):
        batch, users = sample.batch, sample.batch.sample_ids.numpy()
        events, pool = run.sequences.offsets[users] + run.split.test[users], pools_of(pools, batch)
        leaves = trie.item_nodes[:, -1].index_select(0, sample.target_positions).unsqueeze(1)
        context = RewardContext(
            users=users, ends=run.split.test[users], scenarios=scenarios_of(batch), given=batch.sample_features
        )
        logged = Rollout(leaves, start.log_probs(batch, leaves))
        observed = observed_columns(run.sequences, rewards, events)
        found = [rewards.of(context, logged, observed=observed), rewards.of(context, logged)]
        columns["rewards"].append(found[0].flatten().double().numpy())
        columns["modelled"].append(found[1].flatten().double().numpy())
        columns["propensities"].append(np.nan_to_num(next(propensities)))
        for name, policy in zip(("start", "aligned"), policies, strict=True):
            columns[f"p {name}"].append(policy.probabilities(batch, leaves, pool))
            drawn = policy.draw(batch, pool, run.config.seed)
            logs = start.log_probs(batch, drawn)
            # One at a time: nothing else is shown with it.
            values = [rewards.of(context, Rollout(drawn[:, [k]], logs[:, [k]])) for k in range(drawn.shape[1])]
            columns[f"direct {name}"].append(torch.cat(values, 1).double().mean(1).numpy())
    joined = {name: np.concatenate(one) for name, one in columns.items()}
    return off_policy_report(
        LoggedRequests(rewards=joined["rewards"], modelled=joined["modelled"], propensities=joined["propensities"]),
        PolicyAnswers(probabilities=joined["p start"], direct=joined["direct start"]),
        PolicyAnswers(probabilities=joined["p aligned"], direct=joined["direct aligned"]),
    )


def _reason(shown_by: ShownBy, rewards: Rewards, trie: Trie) -> str:
    """Why there is no estimate; empty if there can be one."""
    if not shown_by.is_known:
        return (
            "the log does not say with which probability an item was shown. Name its column with --propensity, or the run "
            "that drew the items with --shown-by."
        )
    if not rewards.logged_columns:
        return "no reward is a number of the log, so the rewards of all items are known; see the table above."
    if trie.num_leaves < len(trie.items):
        return "several items share a semantic id, and the run does not draw which of them it shows."
    return ""


def observed_columns(sequences: Sequences, rewards: Rewards, events: Ints) -> dict[str, Tensor]:
    """The logged numbers of events, scaled as rewards are, [n, 1]; NaN where one is missing."""
    labels = {label.name: label for label in sequences.schema.labels}
    found = {}
    for name, model in rewards.logged_columns.items():
        if name in labels:
            values = label_values(labels[name], sequences.event_features, events)
        else:
            values = sequences.event_features[name].values[events]
        found[name] = model.scaled(torch.from_numpy(np.asarray(values, np.float64))).unsqueeze(1)
    return found


def _propensities(run: Run, shown_by: ShownBy) -> Iterator[Array]:
    """The probability that the logged item was shown, for each batch of held-out requests of a run."""
    showed = run if shown_by.run is None else Run.open(shown_by.run)
    # What the run that showed the items reads of a request, but the requests of this evaluation.
    config = replace(showed.config, eval=run.config.eval)
    samples = EvalBatches(showed.instructed, run.split, config, "test", inputs=inputs_of(config, showed.instructed))
    drawn = None if shown_by.run is None else ProbabilityModel.open(showed)
    for sample in samples:
        if drawn is not None:
            leaves = drawn.trie.item_nodes[:, -1].index_select(0, sample.target_positions).unsqueeze(1)
            yield drawn.probabilities(sample.batch, leaves)
            continue
        users = sample.batch.sample_ids.numpy()
        events = run.sequences.offsets[users] + run.split.test[users]
        yield np.asarray(run.sequences.event_features[shown_by.column].values[events], np.float64)
