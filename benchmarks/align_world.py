"""`nestpipe align` in the synthetic world: it sees logged rewards alone; the world knows the true utility of every item.

A log of the world, with the utility of the logged items as a column, goes through the commands: ingest, sid build, train,
align. The start and the aligned run answer the last event of every user. Differences of the true utility of the first item
and of the expected NDCG@10 are paired over users; intervals are 95 %. The control has the same steps with equal rewards for all
items, so only its anchor, the next-code loss on logged items, trains on.

    python benchmarks/align_world.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import torch
from ablation_world import Stage
from measure import append, record
from torch import Tensor

from nestpipe.cli import main as nestpipe
from nestpipe.data.synthetic_scenarios import SCENARIOS, ScenarioLog, ScenarioLogConfig
from nestpipe.eval.predictor import EvalBatches
from nestpipe.models.build_model import inputs_of
from nestpipe.training.run_folder import Run

EPOCHS = 4
ARMS = {"aligned": "utility", "control": "format"}  # what is rewarded; the format of all drawn items is legal
_COLUMNS = ("--user", "customer", "--user-encoding", "dictionary", "--item", "product", "--item-encoding", "dictionary")
FEATURES = (
    "scenario:id:event:column=page:encoding=dictionary",
    "trigger:id:event:column=looked_at:encoding=item",
    "utility:number:event",
)
_MODEL = ("--model.reasoning-dim", "0", "--model.dim", "32", "--model.prefix-vectors", "0")


def write_log(stage: Stage, folder: Path) -> None:
    """The log, the texts and the scenario file."""
    world = stage.world
    num_users, num_events = world.items.shape
    users, places = torch.arange(num_users), torch.arange(num_events)
    rows = [stage.utilities(users, torch.full_like(users, place)) for place in places.tolist()]
    utilities = torch.stack([one[users, torch.from_numpy(world.items[:, at])] for at, one in enumerate(rows)], 1)
    log = {
        "customer": [f"u{user:04d}" for user in range(num_users) for _ in range(num_events)],
        "product": [f"p{item:03d}" for item in world.items.ravel()],
        "when": np.tile(1_700_000_000 + 60 * np.arange(num_events), num_users),
        "page": [SCENARIOS[one] for one in world.scenarios.ravel()],
        "looked_at": [f"p{item:03d}" if item >= 0 else None for item in world.triggers.ravel()],
        "utility": utilities.flatten().numpy(),
    }
    pl.DataFrame(log).write_parquet(folder / "log.parquet")
    items = [f"p{item:03d}" for item in range(world.config.num_items)]
    pl.DataFrame({"product": items, "title": world.texts()}).write_csv(folder / "titles.csv")
    for arm, reward in ARMS.items():
        records = [{"name": name, "reward_weights": {reward: 1.0}} for name in SCENARIOS]
        (folder / f"{arm}.json").write_text(json.dumps({"version": 1, "scenarios": records}))


def command(*words: str | Path) -> None:
    if code := nestpipe([str(word) for word in words]):
        raise SystemExit(code)


def ingest(folder: Path, features: Sequence[str]) -> None:
    words = [word for one in features for word in ("--feature", one)]
    texts = ("--time", "when", "--texts", folder / "titles.csv", "--out", folder / "data")
    command("data", "ingest", folder / "log.parquet", *_COLUMNS, *words, *texts)


def first_lists(run: Run) -> tuple[Tensor, Tensor]:
    """Numbers of users, and the ten items [U, 10] that a run shows each of them, as the world numbers them."""
    predictor, sequences = run.predictor(), run.sequences
    own = {name: sequences.vocabulary(name) for name in ("user", "item")}
    users, lists = [], []
    inputs = inputs_of(run.config, run.instructed)
    for sample in EvalBatches(run.instructed, run.split, run.config, "test", inputs=inputs):
        found = predictor.generate(sample.batch, 10).positions.numpy()  # type: ignore[union-attr]
        users += [int(str(one)[1:]) for one in own["user"].own_ids(sample.users.numpy())]
        items = own["item"].own_ids(np.asarray(sequences.catalogue)[found].ravel())
        lists.append(torch.tensor([int(str(one)[1:]) for one in items]).view(-1, 10))
    return torch.tensor(users), torch.cat(lists)


def measured(stage: Stage, run: Run) -> Tensor:
    """True utility of the first item, and expected NDCG@10, [U, 2] by user."""
    users, lists = first_lists(run)
    chances, utilities = stage._at(stage.test_place)
    gains = chances[users].gather(1, lists) / torch.arange(2, 12, dtype=torch.float64).log2()
    found = torch.stack([utilities[users].gather(1, lists[:, :1]).squeeze(1), gains.sum(1)], 1)
    return found[users.argsort()]


def run_seed(seed: int, num_users: int, folder: Path, flags: list[str]) -> Tensor:
    """Start, aligned and control, [U, 3, 2]."""
    stage = Stage(ScenarioLog.make(ScenarioLogConfig(seed=seed, num_users=num_users)))
    write_log(stage, folder)
    ingest(folder, FEATURES)
    data, ids = folder / "data", folder / "ids"
    command("sid", "build", data, "--out", ids, "--encoder", "words", "--sid.levels", "2", "--sid.codes", "16")
    limits = ("--train.epochs", str(EPOCHS), "--data.max-len", "48", "--eval.seen", "none", "--run", folder / "start")
    command("train", "scenarios", "--data.path", data, "--model.ids", ids, *_MODEL, *limits)
    for arm in ARMS:
        scenarios = ("--scenarios", folder / f"{arm}.json", "--run", folder / arm)
        command("align", folder / "start", *scenarios, "--quiet", *flags)
    return torch.stack([measured(stage, Run.open(folder / name)) for name in ("start", *ARMS)], 1)


def interval(differences: Tensor) -> dict[str, float]:
    error = 1.96 * float(differences.std()) / len(differences) ** 0.5
    mean = float(differences.mean())
    return {"mean": round(mean, 5), "low": round(mean - error, 5), "high": round(mean + error, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--users", type=int, default=1200)
    parser.add_argument("flags", nargs="*", help="flags of nestpipe align, after --")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_seed(seed, options.users, Path(folder), options.flags))
    pairs = torch.cat(found)
    names = ("utility1", "ndcg10")
    figures = {
        name: {
            **{arm: round(float(pairs[:, number, at].mean()), 5) for number, arm in enumerate(("start", *ARMS))},
            **{
                f"{more} - {less}": {
                    "all": interval(pairs[:, a, at] - pairs[:, b, at]),
                    "by_seed": [interval(one[:, a, at] - one[:, b, at]) for one in found],
                }
                for more, a, less, b in (
                    ("aligned", 1, "start", 0),
                    ("control", 2, "start", 0),
                    ("aligned", 1, "control", 2),
                )
            },
        }
        for at, name in enumerate(names)
    }
    settings = {"seeds": options.seeds, "users": options.users, "flags": options.flags, "epochs": EPOCHS}
    append("align_world", record(seed=options.seeds[0], figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
