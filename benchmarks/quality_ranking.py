"""Quality of the ranking models vs. item mean and user and item biases; DCN vs. its known optimum.

MovieLens-1M with a time split: every event since --split-time is predicted (rating >= 4, rating = 5, stars) from the events
before it in log order; equal times keep the order of the file. GAUC is the AUC among the events of one user, averaged by their
number. Three seeds, with Student's t interval over seeds and the interval over users of the difference to the better baseline.
`by_second` predicts the events of one second from those strictly before it, so the history has no ratings of the same page. The
number of epochs was chosen on events before every reported date (`--split-time 2000-10-15 --until 2000-11-10 --epochs 4`, 8 and
12), the learning rates on the default date. The click log of `nestpipe data clicks` has a known best AUC.

Each (model, seed) is appended to results/quality_ranking.jsonl when it is done and is not run again.
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
import torch
from numpy.typing import NDArray
from quality import collect, settings_of, spread

from nestpipe import recipes, train
from nestpipe.config import Config
from nestpipe.data.sequences import truncate
from nestpipe.data.splits import parse_time_ms
from nestpipe.data.synthetic_clicks import ClicksConfig, ClickTruth, ingest_clicks
from nestpipe.eval.label_metrics import Ratio, gauc, ratio_difference
from nestpipe.eval.ranking_eval import Predictions, RankingPredictor, baselines
from nestpipe.jagged import Jagged, offsets_of
from nestpipe.models.config import RankingConfig
from nestpipe.models.prefix_inference import CandidateBatch
from nestpipe.training.loop import INTERRUPTED, train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state

NAME = "quality_ranking"
NUM_BY_SECOND = 60  # users


def ml1m_config(path: Path, backbone: str, seed: int, epochs: int, split_time: str) -> Config:
    config = recipes.ml1m_ranking()
    epochs = epochs or config.train.epochs
    assert isinstance(config.model, RankingConfig)
    return replace(
        config,
        seed=seed,
        data=replace(config.data, path=str(path), split_time=split_time),
        model=replace(config.model, backbone=backbone),
        train=replace(config.train, epochs=epochs, decay_epochs=epochs, num_threads=1, save_steps=200),
    )


def ratio_of(found: Predictions, label: int, num_users: int) -> Ratio:
    one = found.of(label, num_users).observed()
    return gauc(one.scores, one.answers, one.users, num_users)


def before(found: Predictions, times: NDArray[np.int64], until: str) -> Predictions:
    """The predictions of events before a date."""
    kept = np.flatnonzero(times[found.event] < parse_time_ms(until))
    return replace(
        found, **{name: getattr(found, name)[kept] for name in ("event", "user", "num_before", "answers", "scores")}
    )


def run_ml1m(config: Config, folder: Path, until: str | None) -> dict[str, object]:
    """Trains (or resumes) one run and measures it."""
    start = time.monotonic()
    outcome = train_to_end(config, folder, resume=True)
    if outcome.stopped == INTERRUPTED:
        raise SystemExit("interrupted; the same command resumes here")
    run = outcome.run
    scorer = run.predictor()
    assert isinstance(scorer, RankingPredictor)
    found = scorer.predict()
    if until:
        assert run.sequences.times is not None
        found = before(found, run.sequences.times, until)
    base = baselines(found, run.sequences, run.split)
    num_users = len(run.sequences.users)
    figures: dict[str, object] = {"num_events": len(found.event), "num_users": len(np.unique(found.user))}
    for label, declared in enumerate(found.labels):
        own = ratio_of(found, label, num_users)
        gauc = {name: ratio_of(one, label, num_users) for name, one in base.items()}
        best = max(gauc.values(), key=lambda one: one.value)
        better = ratio_difference(best, own, seed=config.seed)
        figures[declared.name] = {
            "gauc": round(own.value, 5),
            **{f"gauc, {name}": round(one.value, 5) for name, one in gauc.items()},
            "over the better": round(better.mean, 5),
            "over the better, 95 % over users": [round(better.low, 5), round(better.high, 5)],
        }
    figures["by_second"] = by_second(scorer, run, base["user and item bias"], found)
    figures["steps"] = load_state(run)[1].step
    figures["minutes"] = round((time.monotonic() - start) / 60, 1)
    return figures


def by_second(scorer: RankingPredictor, run: Run, baseline: Predictions, found: Predictions) -> dict[str, object]:
    """GAUC of some users when the events of a second are candidates of one request, ranked with `full`."""
    sequences, data = run.sequences, run.config.data
    ranker = scorer.ranker("of the run")
    users = np.unique(found.user)
    users = users[:: max(1, len(users) // NUM_BY_SECOND)]
    kept = np.flatnonzero(np.isin(found.user, users))
    assert sequences.times is not None
    scores = np.full((len(kept), len(found.labels)), np.nan)
    second = sequences.times[found.event[kept]] // 1000
    order = np.lexsort((second, found.user[kept]))
    is_new = np.diff(found.user[kept][order], prepend=-1) != 0
    is_new |= np.diff(second[order], prepend=-1) != 0
    groups = np.split(order, np.flatnonzero(is_new)[1:])
    for first in range(0, len(groups), 256):
        part = groups[first : first + 256]
        asked_by = np.array([found.user[kept[rows[0]]] for rows in part])
        asked = np.array([sequences.times[found.event[kept[rows[0]]]] for rows in part])
        begin, stop = sequences.offsets[asked_by], sequences.offsets[asked_by + 1]
        end = np.array(
            [
                np.searchsorted(sequences.times[b:s] // 1000, a // 1000)
                for b, s, a in zip(begin, stop, asked, strict=True)
            ]
        )
        history = scorer.builder.history(
            torch.from_numpy(asked_by), truncate(end, data.max_len, data.truncate_block), end, request_ms=asked
        )
        items = sequences.items[found.event[kept[np.concatenate(part)]]]
        lengths = torch.tensor([len(rows) for rows in part])
        wanted = CandidateBatch(
            Jagged(torch.from_numpy(items), offsets_of(lengths), int(lengths.max())),
            scorer.builder.item_features(items),
        )
        predicted = ranker.model.tasks.predict(ranker.full(history, wanted)).detach()
        scores[np.concatenate(part)] = predicted.numpy()
    strict = replace(
        found, **{n: getattr(found, n)[kept] for n in ("event", "user", "num_before", "answers")}, scores=scores
    )
    baseline = replace(strict, scores=baseline.scores[kept])
    num_users = len(sequences.users)
    return {
        "num_users": len(users),
        "num_requests": len(groups),
        **{
            label.name: {
                "gauc": round(ratio_of(strict, place, num_users).value, 5),
                "gauc, user and item bias": round(ratio_of(baseline, place, num_users).value, 5),
            }
            for place, label in enumerate(found.labels)
        },
    }


def run_dcn(seed: int, *, quick: bool) -> dict[str, object]:
    """A click log of its own for each seed, and the share of its best AUC that DCN reaches."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        size = ClicksConfig(seed=seed, num_events=60_000, num_items=100) if quick else ClicksConfig(seed=seed)
        ingest_clicks(folder / "clicks", size)
        config = recipes.clicks_dcn()
        config = replace(
            config,
            seed=seed,
            data=replace(config.data, path=str(folder / "clicks")),
            train=replace(config.train, num_threads=1),
        )
        report = train(config, folder / "run", quiet=not quick).predictor().evaluate()
        truth = ClickTruth.read(folder / "clicks")
        found = report.scalars()["auc/clicked"]
        return {"auc": round(found, 5), "best_auc": round(truth.auc, 5), "of_best": round(found / truth.auc, 5)}


def report(model: str, records: list[dict[str, object]], keys: dict[str, object]) -> list[list[str]]:
    rows = []
    figures = [one["figures"] for one in records]
    for label in ("liked", "loved", "stars"):
        own = [one[label] for one in figures]  # type: ignore[index]
        mean, half = spread([one["gauc"] for one in own])
        gain, wide = spread([one["over the better"] for one in own])
        low = min(one["over the better, 95 % over users"][0] for one in own)
        references = [f"{own[0][f'gauc, {name}']:.4f}" for name in ("item mean", "user and item bias")]
        rows.append(
            [f"{model}, {label}", f"{mean:.4f} ± {half:.4f}", *references, f"{gain:+.4f} ± {wide:.4f}", f"{low:+.4f}"]
        )
        keys[f"gauc_{label}"] = round(mean, 5)
        keys[f"gauc_{label}_over_baselines"] = round(gain, 5)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small click log only; under 50 seconds")
    parser.add_argument("--data", type=Path, help="MovieLens-1M as written by 'nestpipe data movielens'")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/quality_ranking"), help="folder of the runs, which are resumed"
    )
    parser.add_argument("--split-time", default="2000-12-01", help="events from then on are predicted")
    parser.add_argument("--until", help="evaluate events before this date only, to choose settings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--backbones", nargs="+", default=["hstu"], choices=["hstu", "fuxi"])
    parser.add_argument("--epochs", type=int, default=0, help="of training; 0 for those of the recipe")
    options = parser.parse_args()
    seeds = options.seeds[:1] if options.quick else options.seeds
    keys: dict[str, object] = {}
    rows: list[list[str]] = []
    for backbone in options.backbones if options.data and not options.quick else []:
        configs = {
            seed: ml1m_config(options.data, backbone, seed, options.epochs, options.split_time) for seed in seeds
        }
        name = f"{backbone}-{options.split_time}-{options.epochs}"
        settings = settings_of(configs[seeds[0]], backbone) | ({"until": options.until} if options.until else {})
        records = collect(
            NAME,
            name,
            seeds,
            settings,
            lambda seed, configs=configs, name=name: run_ml1m(
                configs[seed], options.runs / f"{name}-{seed}", options.until
            ),
        )
        own: dict[str, object] = {}
        rows += report(backbone, records, own)
        keys[backbone] = own
    settings = {**settings_of(recipes.clicks_dcn(), "dcn"), "quick": options.quick}
    clicks = collect(NAME, "dcn", seeds, settings, lambda seed: run_dcn(seed, quick=options.quick))
    mean, half = spread([one["figures"]["of_best"] for one in clicks])  # type: ignore[index]
    keys["dcn_of_best_auc"] = round(mean, 5)
    if rows:
        print(measure.table(["gauc", "mean of seeds", "item mean", "user + item", "over the better", "lowest"], rows))
    print(f"dcn: {mean:.4f} ± {half:.4f} of the best AUC ({len(clicks)} seeds)")
    print(json.dumps(keys))


if __name__ == "__main__":
    main()
