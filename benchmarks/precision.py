"""What does `--train.precision bf16` cost in quality, and what in CPU time on this machine?

A generated log with planted transitions (`nestpipe data synthetic`), the recipes `sasrec` and `hstu`, several seeds. The arms alternate,
on one thread. Both are evaluated in fp32 on the same users.

`ndcg10_change`: bf16 minus fp32, NDCG@10 of each user averaged over the seeds, paired 95 % interval over users. `seed_deviation`: the
standard deviation of fp32 over seeds, to compare it with. `cpu_ratio`: CPU time of training, bf16 over fp32, by seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import measure
import numpy as np
import torch

from nestpipe import recipes, train
from nestpipe.config import Config
from nestpipe.data.config import SyntheticConfig
from nestpipe.data.synthetic_sequences import SequenceTruth, ingest_synthetic
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.topk_metrics import Array, paired_difference
from nestpipe.ops.precision import has_fast_bf16

NAME = "precision"
ARMS = ("fp32", "bf16")
RECIPES: dict[str, Callable[[], Config]] = {"sasrec": recipes.sasrec, "hstu": recipes.hstu}


def config_of(recipe: str, path: Path, precision: str, seed: int, epochs: int) -> Config:
    base = RECIPES[recipe]()
    return replace(
        base,
        seed=seed,
        data=replace(base.data, path=str(path), validation=False),
        train=replace(base.train, epochs=epochs, patience=0, num_threads=1, precision=precision, device="cpu"),
    )


def measured(recipe: str, path: Path, seeds: range, epochs: int, folder: Path) -> dict[str, object]:
    """The figures of one recipe."""
    ndcg: dict[str, list[Array]] = {arm: [] for arm in ARMS}
    cpu_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        for arm in ARMS if seed % 2 else reversed(ARMS):
            began = time.process_time()
            run = train(config_of(recipe, path, arm, seed, epochs), folder / f"{recipe}-{arm}-{seed}", quiet=True)
            cpu_s[arm].append(time.process_time() - began)
            report = run.predictor().evaluate(progress=False)
            assert isinstance(report, EvalReport)
            ndcg[arm].append(report.user_metrics((10,))["ndcg@10"])
    means = {arm: np.mean(values, axis=0) for arm, values in ndcg.items()}
    change = paired_difference(means["fp32"], means["bf16"], seed=0)
    ratios = measure.ratio(cpu_s["bf16"], cpu_s["fp32"])
    return {
        "ndcg10": {arm: round(float(one.mean()), 4) for arm, one in means.items()},
        "ndcg10_change": [round(one, 5) for one in (change.mean, change.low, change.high)],
        "seed_deviation": round(float(np.std([one.mean() for one in ndcg["fp32"]], ddof=1)), 5),
        "verdict": "met" if change.low <= 0 <= change.high else "missed",
        "cpu_ratio": round(ratios.median, 3),
        "cpu_ratio_range": ratios.range,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="few users and epochs, nothing is recorded")
    options = parser.parse_args()
    size = SyntheticConfig(num_users=300) if options.quick else SyntheticConfig()
    epochs, seeds = (2, range(2)) if options.quick else (options.epochs, range(options.seeds))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        log = ingest_synthetic(folder / "data", size)
        best = SequenceTruth.read(log.path).ndcg10
        figures = {name: measured(name, log.path, seeds, epochs, folder) for name in RECIPES}
    settings = {"users": size.num_users, "items": size.num_items, "seeds": len(seeds), "epochs": epochs, "threads": 1}
    settings |= {"fast_bf16": has_fast_bf16(torch.device("cpu")), "optimum_ndcg10": round(best, 4)}
    if not options.quick:
        measure.append(NAME, measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps({**figures, **settings}))


if __name__ == "__main__":
    main()
