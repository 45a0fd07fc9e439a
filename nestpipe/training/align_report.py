"""What alignment did: rewards and NDCG@10 of the start and of the aligned run, on held-out requests, by scenario.

The reward of a list is that of its first item. Both runs answer the same requests, so differences are paired over users.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from nestpipe.atomic_files import replace_file
from nestpipe.distributed.process_group import World
from nestpipe.embedding.row_reader import RowReader
from nestpipe.eval.off_policy import OffPolicyReport
from nestpipe.eval.predictor import EvalBatches, GenerativePredictor
from nestpipe.eval.retrieval_eval import EvalBatch
from nestpipe.eval.topk_metrics import Interval, bootstrap_all
from nestpipe.generative.policy_optimisation import Rollout
from nestpipe.generative.rewards import RewardContext, Rewards
from nestpipe.generative.scenario_pools import pools_of, scenario_pools, scenarios_of
from nestpipe.generative.trie import Trie
from nestpipe.models.build_model import inputs_of
from nestpipe.models.encdec import EncDec
from nestpipe.pipeline.channels import Channels
from nestpipe.training.off_policy_log import ShownBy, off_policy
from nestpipe.training.rollouts import ContextLoader, log_probs_of, open_rewards
from nestpipe.training.run_folder import Run

_K = 10
FILE = "align.json"
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AlignedMetric:
    """A metric of the start and of the aligned run, and the paired 95 % interval of the difference."""

    start: float
    aligned: float
    difference: Interval

    def row(self) -> tuple[str, str, str]:
        """Start, aligned and difference, as text."""
        one = self.difference
        return f"{self.start:.4f}", f"{self.aligned:.4f}", f"{one.mean:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"


@dataclass(frozen=True, slots=True)
class AlignReport:
    """Metrics by scenario, after those of all requests."""

    num_users: dict[str, int]
    reward: dict[str, AlignedMetric]
    ndcg10: dict[str, AlignedMetric]
    off_policy: OffPolicyReport = field(default_factory=OffPolicyReport)

    def save(self, folder: Path) -> None:
        replace_file(folder / FILE, json.dumps(asdict(self), indent=2).encode())

    def __rich__(self) -> Table:
        table = Table(title="held-out requests, differences paired over users", pad_edge=False)
        for header in ("scenario", "users", "metric", "start", "aligned", "difference [95 %]"):
            table.add_column(header, no_wrap=True)
        for name, count in self.num_users.items():
            table.add_row(name, f"{count:,}", "reward", *self.reward[name].row())
            table.add_row("", "", "ndcg@10", *self.ndcg10[name].row())
        return table


def align_report(run: Run, shown_by: ShownBy | None = None) -> AlignReport:
    """Compares an aligned run with its start on the test targets, in one process."""
    assert run.origin is not None
    start = Run.open(run.config.model.start)
    channels = Channels.of(World.single())
    loader = ContextLoader(
        run.instructed,
        run.split,
        run.config.data,
        seed=run.config.seed,
        inputs=inputs_of(run.config, run.instructed),
    )
    opened = open_rewards(run, loader, channels)
    before, after = start.predictor(run.origin.step), run.predictor()
    samples = EvalBatches(run.instructed, run.split, run.config, "test", inputs=inputs_of(run.config, run.instructed))
    scenarios, columns = list[Tensor](), {"reward": list[Column](), "ndcg10": list[Column]()}
    for sample in samples:
        scenarios.append(scenarios_of(sample.batch))
        pairs = [_measured(run, cast(GenerativePredictor, one), opened, sample) for one in (before, after)]
        for name, values in columns.items():
            values.append(np.stack([pair[name] for pair in pairs], 1))
    found = _report(run, torch.cat(scenarios).numpy(), {name: np.concatenate(one) for name, one in columns.items()})
    return replace(found, off_policy=off_policy(run, shown_by or ShownBy(), opened[2]))


def _measured(
    run: Run, predictor: GenerativePredictor, opened: tuple[EncDec, RowReader, Rewards], sample: EvalBatch
) -> dict[str, Column]:
    """Reward of the first item and NDCG@10 of each request."""
    reference, rows, rewards = opened
    trie = cast(Trie, run.semantic_ids)
    pool = pools_of(scenario_pools(run.scenario_records, run.sequences, trie), sample.batch)
    seen = None if run.config.eval.seen == "none" else sample.seen
    found = predictor.generate(sample.batch, _K, seen=seen, pool=pool).positions
    hits = found == sample.target_positions.unsqueeze(1)
    gains = hits.double() / torch.arange(2, _K + 2, dtype=torch.float64).log2()
    users = sample.batch.sample_ids.numpy()
    context = RewardContext(
        users=users,
        ends=run.split.test[users],
        scenarios=scenarios_of(sample.batch),
        given=sample.batch.sample_features,
    )
    leaves = trie.item_nodes[:, -1].index_select(0, found[:, 0].clamp(min=0)).unsqueeze(1)
    request = reference.select(sample.batch, None)
    paths = Rollout(leaves, log_probs_of(reference, rows, request, trie, leaves))
    value = rewards.of(context, paths).squeeze(1).masked_fill(found[:, 0] < 0, 0.0)
    return {"reward": value.double().numpy(), "ndcg10": gains.sum(1).numpy()}


def _report(run: Run, scenarios: NDArray[np.int64], columns: dict[str, Column]) -> AlignReport:
    records = run.scenario_records
    masks = {"all": np.ones(len(scenarios), bool)}
    if len(records) > 1:
        masks |= {one.name: scenarios == number for number, one in enumerate(records) if (scenarios == number).any()}
    metrics: dict[str, dict[str, AlignedMetric]] = {name: {} for name in columns}
    for scenario, mask in masks.items():
        differences = {name: pairs[mask, 1] - pairs[mask, 0] for name, pairs in columns.items()}
        intervals = bootstrap_all(differences, seed=run.config.seed, num=run.config.eval.num_bootstrap)
        for name, pairs in columns.items():
            old, new = pairs[mask].mean(0).tolist()
            metrics[name][scenario] = AlignedMetric(old, new, intervals[name])
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    return AlignReport(counts, metrics["reward"], metrics["ndcg10"])
