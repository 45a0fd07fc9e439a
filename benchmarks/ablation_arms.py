"""The runs of the ablations: train a model for one arm and one seed, and evaluate its lists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from ablation_world import NUM_SCENARIOS, TEXT_DIM, Stage
from torch import Tensor

from nestpipe.data.synthetic_scenarios import ScenarioLog, ScenarioLogConfig
from nestpipe.distributed.process_group import World as Ranks
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.embedding.prefetch_buffer import InPlaceRows
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.generative.beam import expand, search
from nestpipe.generative.config import PolicyConfig, PolicyKind
from nestpipe.generative.policy_optimisation import Policy, draw_paths, path_log_probs
from nestpipe.jagged import Batch
from nestpipe.models.config import EncDecConfig
from nestpipe.models.encdec import EncDec, build_encdec
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from nestpipe.rng import Rng, permutation

# Fixed before the first run, the same for every arm. Items have no rows: their codes name them.
MODEL = EncDecConfig(
    dim=32,
    num_encoder=1,
    num_decoder=1,
    num_heads=2,
    hidden_dim=64,
    dropout=0.1,
    item_rows=False,
    num_scenarios=NUM_SCENARIOS,
    reasoning_dim=TEXT_DIM,
    igr_recent=8,
    igr_related=8,
    igr_refresh_steps=25,
    beam=32,
)
LR = 4e-3
NUM_USERS_OF_BATCH = 48  # whole histories
NUM_REQUESTS_OF_BATCH = 192
EPOCHS = 4
REQUEST_STEPS = 200
GROUP = 16  # samples whose instructions Q2I compares
POLICY_START_EPOCHS, POLICY_STEPS, POLICY_REQUESTS, POLICY_LR, POLICY_UPDATES = 3, 40, 32, 1e-3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What differs from arm to arm."""

    accuracy: float = 0.9
    model: EncDecConfig = MODEL
    newest: int = 0  # requests with so many events at most; 0: whole histories, all events are queries
    per_scenario: bool = False  # a model for each scenario, with the steps of one divided among them
    policy: PolicyKind | None = None  # improved for the utility after a short training on the log
    start_only: bool = False  # that short training alone


_LAST = replace(MODEL, queries="last")
ARMS: dict[str, Arm] = {
    "accuracy 0": Arm(accuracy=0.0),
    "accuracy 50": Arm(accuracy=0.5),
    "accuracy 90": Arm(),
    **{f"placement {one}": Arm(model=replace(MODEL, placement=one)) for one in ("none", "before", "sum", "all")},
    "recent 8": Arm(model=_LAST, newest=8),
    **{f"igr {one}": Arm(model=replace(_LAST, igr=one), newest=47) for one in ("recency", "random", "query")},
    "igr query, q2i": Arm(model=replace(_LAST, igr="query", q2i=0.1), newest=47),
    "per scenario": Arm(model=_LAST, newest=16, per_scenario=True),
    "log only": Arm(start_only=True),
    **{kind: Arm(policy=kind) for kind in ("sa_gcpo", "gspo", "grpo")},
}


def run(arm: Arm, seed: int) -> dict[str, object]:
    """Trains and measures one arm; world, weights and draws are those of the seed."""
    began, busy = time.monotonic(), time.process_time()
    stage = Stage(ScenarioLog.make(ScenarioLogConfig(accuracy=arm.accuracy, seed=seed)))
    if arm.policy or arm.start_only:
        model = trained(arm, stage, seed, epochs=POLICY_START_EPOCHS)
        figures = improve(model, stage, arm.policy, seed) if arm.policy else {}
        lists = listed(model, stage, newest=47)
    elif arm.per_scenario:
        figures, lists = {}, torch.zeros(stage.world.config.num_users, 10, dtype=torch.int64)
        for scenario in range(NUM_SCENARIOS):
            own = listed(trained(arm, stage, seed, scenario=scenario), stage, newest=arm.newest)
            is_own = torch.from_numpy(stage.world.scenarios[:, stage.test_place] == scenario)
            lists[is_own] = own[is_own]
    else:
        figures, lists = {}, listed(trained(arm, stage, seed), stage, newest=arm.newest or 47)
    best = stage.world.optimum()
    return {
        **stage.worth(lists, torch.arange(len(lists))),
        "optimum_ndcg10": round(best.ndcg10, 5),
        "optimum_utility": round(best.utility, 5),
        **figures,
        "cpu_s": round(time.process_time() - busy, 1),
        "wall_s": round(time.monotonic() - began, 1),
    }


def trained(arm: Arm, stage: Stage, seed: int, *, epochs: int = EPOCHS, scenario: int | None = None) -> EncDec:
    """A model after its training on the log."""
    model = build_encdec(arm.model, stage.trie, max_len=stage.test_place, seed=seed, text=stage.texts)
    state = state_of(model, seed)
    batches = list(_batches(arm, stage, seed, epochs, scenario))
    for number, batch in enumerate(batches):
        if model.refresh_steps and number % model.refresh_steps == 0:
            model.refresh(number)
        rate = LR * min(1.0, (number + 1) / 20) * max(0.05, 1 - number / len(batches))
        step(state, batch, Rates(rate, rate))
    return model


def _batches(arm: Arm, stage: Stage, seed: int, epochs: int, scenario: int | None) -> Iterator[Batch]:
    groups = GROUP if arm.model.q2i else 0
    if not arm.newest:
        for epoch in range(epochs):
            order = permutation(stage.world.config.num_users, seed=seed, epoch=epoch)
            yield from (stage.histories(users, groups=groups) for users in order.split(NUM_USERS_OF_BATCH))
        return
    for number in range(REQUEST_STEPS // (NUM_SCENARIOS if arm.per_scenario else 1)):
        users, places = stage.draw_requests(Rng(seed, number), NUM_REQUESTS_OF_BATCH, scenario)
        yield stage.requests(users, places, newest=arm.newest, groups=groups)


def listed(model: EncDec, stage: Stage, *, newest: int) -> Tensor:
    """The best ten items [U, 10] for every user's last event."""
    users = torch.arange(stage.world.config.num_users)
    found = []
    for part in users.split(300):
        batch = stage.requests(part, torch.full_like(part, stage.test_place), newest=newest)
        selected = model.select(stage.with_instructions(batch), None)
        with torch.no_grad():
            beams = search(model.decoding({}, selected), stage.trie, width=model.config.beam)
        found.append(expand(stage.trie, beams, 10).positions)
    return torch.cat(found)


def improve(model: EncDec, stage: Stage, kind: PolicyKind, seed: int) -> dict[str, object]:
    """Improves a model for the world's utility: paths are drawn, then learned from in a few updates."""
    policy = Policy(PolicyConfig(kind=kind, warn_every=10**6))
    optimizer = torch.optim.Adam(model.parameters(), lr=POLICY_LR)
    for number in range(POLICY_STEPS):
        rng = Rng(seed, 10_000 + number)
        users, places = stage.draw_requests(rng, POLICY_REQUESTS)
        batch = stage.requests(users, places, newest=47)
        conditioned, utilities = stage.with_instructions(batch), stage.utilities(users, places)
        samples = torch.arange(len(users))
        with torch.no_grad():
            drawn = draw_paths(
                model.decoding({}, conditioned), stage.trie, num=policy.config.group_size, rng=rng, samples=samples
            )
        items = stage.trie.leaf_items.index_select(0, drawn.leaves.flatten()).view_as(drawn.leaves)
        last = batch.items.offsets[1:] - 1
        assert batch.targets is not None
        logged = batch.targets.values.index_select(0, last).unsqueeze(1)
        leaves = stage.trie.item_nodes[:, -1].index_select(0, logged.flatten()).unsqueeze(1)
        for _ in range(POLICY_UPDATES):
            # One decoding for both: the logged item is one more path.
            new = path_log_probs(model.decoding({}, conditioned), stage.trie, torch.cat([drawn.leaves, leaves], 1))
            loss = policy.loss(
                new[:, :-1],
                drawn.log_probs,
                utilities.gather(1, items),
                utilities.gather(1, logged).squeeze(1),
                sft_loss=-new[:, -1].sum(),
            )
            optimizer.zero_grad()
            (loss / len(users)).backward()
            optimizer.step()
    share = policy.num_suppressed / policy.num_positive if policy.num_positive else 0.0
    return {"suppressed": round(share, 3)}


def state_of(model: EncDec, seed: int) -> TrainState:
    """A model ready for the engine, on one rank."""
    ranks, rows = Ranks.single(), EmbeddingConfig(num_buckets=1)
    tables = {one.name: Table(one, OPTIMIZERS[rows.optimizer](rows), seed=seed, config=rows) for one in model.tables}
    embedding = ShardedTables(tables, ranks.channel("keys"), ranks.channel("rows"), Owners(1, 1))
    embedding.row_access = {name: InPlaceRows(table) for name, table in tables.items()}
    dense = DenseParams(model, DenseConfig(), ranks.channel("dense"))
    return TrainState(model=model, embedding=embedding, dense=dense, control=ranks.channel("control"), seed=seed)
