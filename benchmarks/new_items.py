"""Does a model with item features recommend items that no training event has, and what does it cost the others?

A generated log (`nestpipe data content`): 30,000 users, 6,000 items in 300 series, of which one item each is new: it occurs as a
test target only. The recipe `sasrec`, small, with and without `--model.item-features`, and content kNN, on the same targets.

`cold_over_chance`: HR@10 of new items over that of a random order of the whole catalogue. `cold_over_knn`: model minus content kNN,
HR@10 of new items, paired 95 % interval. `warm_change`: with features over without, HR@10 of old items, as a share of the latter.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import measure
import numpy as np

from nestpipe import recipes, train
from nestpipe.config import Config
from nestpipe.data.config import ContentLogConfig
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.data.synthetic_content import ingest_content
from nestpipe.eval.baselines import evaluate_baselines
from nestpipe.eval.catalogue_predictor import training_counts
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.topk_metrics import Array, Interval, paired_difference

NAME = "new_items"
FEATURES = ("brand", "category", "tags", "price", "look", "title")
SIZE = ContentLogConfig(num_users=30_000, num_series=300, series_items=20, new_items=1, stay=0.25, move=0.55)
OVER_CHANCE, WARM_LOSS, MIN_WARM = 10.0, -0.02, 20_000


def config_of(path: Path, *, epochs: int, features: tuple[str, ...]) -> Config:
    """A small SASRec with the loss of the recipe."""
    recipe = recipes.sasrec()
    return replace(
        recipe,
        data=replace(recipe.data, path=str(path), validation=False, batch_size=256),
        model=replace(recipe.model, dim=32, num_blocks=1, item_features=features, text_encoder="words"),
        train=replace(recipe.train, epochs=epochs, patience=0, num_threads=1),
    )


def hits(report: EvalReport) -> Array:
    """HR@10 of each user, in the order of the folder."""
    return report.user_metrics((10,))["hr@10"]


def rounded(interval: Interval, over: float = 1.0) -> list[float]:
    return [round(one / over, 4) for one in (interval.mean, interval.low, interval.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few users, nothing is recorded")
    options = parser.parse_args()
    size = replace(SIZE, num_users=2000, num_series=60) if options.quick else SIZE
    cpu_s: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        log: Sequences = ingest_content(folder / "data", size)
        reports: dict[str, EvalReport] = {}
        for name, features in (("without", ()), ("with", FEATURES)):
            began = time.process_time()
            run = train(config_of(log.path, epochs=options.epochs, features=features), folder / name, quiet=True)
            found = run.predictor().evaluate(progress=False)
            assert isinstance(found, EvalReport)
            reports[name], cpu_s[name] = found, round(time.process_time() - began, 1)
        config = config_of(log.path, epochs=1, features=FEATURES)
        split = make_split(log, config.data)
        reports["content kNN"] = evaluate_baselines(log, split, config, names=["content_knn"])["content_knn"]
        is_cold = training_counts(log, split)[reports["with"].target] == 0
        assert all(np.array_equal(one.user, reports["with"].user) for one in reports.values()), "users differ"
        figures = figures_of(reports, is_cold, len(log.catalogue))
    rows = [
        [name, f"{hits(one)[is_cold].mean():.4f}", f"{hits(one)[~is_cold].mean():.4f}"] for name, one in reports.items()
    ]
    print(measure.table(["arm", "HR@10, new items", "HR@10, others"], rows))
    figures["cpu_s"] = cpu_s
    if not options.quick:
        settings = {"users": size.num_users, "items": figures["num_items"], "epochs": options.epochs, "dim": 32}
        measure.append(NAME, measure.record(seed=0, figures=figures, settings=settings))
    print(json.dumps(figures))


def figures_of(reports: dict[str, EvalReport], is_cold: np.ndarray, num_items: int) -> dict[str, object]:  # type: ignore[type-arg]
    """What is recorded; each verdict says whether the whole interval is on the right side."""
    cold = {name: hits(one)[is_cold] for name, one in reports.items()}
    warm = {name: hits(one)[~is_cold] for name, one in reports.items()}
    over_knn = paired_difference(cold["content kNN"], cold["with"], seed=0)
    change = paired_difference(warm["without"], warm["with"], seed=0)
    base = float(warm["without"].mean())
    ratio = float(cold["with"].mean()) / (10 / num_items)
    return {
        "num_items": num_items,
        "num_cold": int(is_cold.sum()),
        "num_warm": int((~is_cold).sum()),
        "cold_hr10": {name: round(float(one.mean()), 4) for name, one in cold.items()},
        "warm_hr10": {name: round(float(one.mean()), 4) for name, one in warm.items()},
        "cold_over_chance": round(ratio, 1),
        "cold_over_chance_verdict": "met" if ratio >= OVER_CHANCE else "missed",
        "cold_over_knn": rounded(over_knn),
        "cold_over_knn_verdict": "met" if over_knn.low >= 0 else "missed" if over_knn.high < 0 else "undecided",
        "warm_change": rounded(change, base),
        "warm_change_verdict": "met" if change.low / base > WARM_LOSS and (~is_cold).sum() >= MIN_WARM else "missed",
    }


if __name__ == "__main__":
    main()
