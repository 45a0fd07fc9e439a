"""Quality on Amazon Beauty: popularity, our full-softmax SASRec and the generative model under one protocol.

Leave-one-out, full ranking over items (never over codes), histories of at most 50 events, seen items excluded. Settings and
checkpoint are chosen on the second-last item of each user (validation). The last item is evaluated once per run, when its record
is written. An interrupted run resumes; an arm that has a record is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import measure
import torch
from quality import done

from nestpipe import recipes
from nestpipe.cli.sid import item_vectors
from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.eval.config import EvalConfig
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.predictor import make_predictor, popularity
from nestpipe.generative.semantic_ids import Registry, SidConfig
from nestpipe.generative.sid_stats import diagnose
from nestpipe.models.config import EncDecConfig
from nestpipe.training.loop import INTERRUPTED, train_to_end
from nestpipe.training.run_state import load_state

NAME = "quality_beauty"
KS = (1, 5, 10, 20)
MUST_HR10, AIM_HR10, AIM_NDCG10 = 0.056, 0.0648, 0.0384
SID = SidConfig(levels=3, codes=256, policy="suffix")
BEHAVIOUR = 0.5  # share of co-occurrence vectors, the rest is title vectors
Figures = dict[str, object]


def config_of(arm: str, options: argparse.Namespace) -> Config:
    """The arm's recipe on the given data; all arms have the same split, history, seen items and lists."""
    config = recipes.beauty_sasrec() if arm == "sasrec" else recipes.beauty_sid()
    if isinstance(config.model, EncDecConfig):
        config = replace(config, model=replace(config.model, ids=str(options.runs / "ids")))
    return replace(
        config,
        seed=options.seed,
        data=replace(config.data, path=str(options.data)),
        train=replace(
            config.train,
            minutes=options.minutes,
            num_threads=options.threads,
            epochs=options.epochs or config.train.epochs,
        ),
        eval=EvalConfig(ks=KS, num_bootstrap=config.eval.num_bootstrap),
    )


def measured(report: EvalReport) -> Figures:
    """HR and NDCG with their 95 % intervals over users."""
    names = ("hr@1", "hr@5", "hr@10", "hr@20", "ndcg@5", "ndcg@10")
    found: Figures = {name: round(report.metrics[name].mean, 5) for name in names}
    for name in ("hr@10", "ndcg@10"):
        found[f"{name}, 95 %"] = [round(report.metrics[name].low, 5), round(report.metrics[name].high, 5)]
    return {**found, "coverage@10": round(report.coverage["coverage@10"], 4), "num_users": report.num_users}


def run_popularity(config: Config) -> Figures:
    sequences = Sequences.open(config.data.path)
    return measured(popularity(sequences, make_split(sequences, config.data), config))


def run_model(config: Config, folder: Path) -> Figures:
    """Trains (or resumes) one run, then ranks all test items with its best checkpoint."""
    start = time.monotonic()
    outcome = train_to_end(config, folder, resume=True)
    if outcome.stopped == INTERRUPTED:
        raise SystemExit("interrupted; the same command resumes here")
    run = outcome.run
    memory = load_state(run)[1].progress
    best = memory["best"]
    state, manifest = load_state(run, best["step"] if best else None)
    report = make_predictor(state.model, state.embedding, run.sequences, run.split, run.config).evaluate("test")
    assert isinstance(report, EvalReport)
    return {
        **measured(report),
        "validation": {"metric": config.train.metric, "value": round(best["value"], 5)},
        "step": manifest.step,
        "training_minutes": round(memory["seconds"] / 60, 1),
        "minutes_of_this_call": round((time.monotonic() - start) / 60, 1),
        "stopped": outcome.stopped,
    }


def make_ids(data: Path, folder: Path) -> None:
    """Builds the ids if they are not there."""
    if not (folder / "ids.json").exists():
        items, vectors, encoder = item_vectors(Sequences.open(data), behaviour=BEHAVIOUR)
        Registry.build(items, vectors, SID, encoder=encoder).save(folder)


def figures_of_ids(data: Path, folder: Path) -> Figures:
    items, vectors, _ = item_vectors(Sequences.open(data), behaviour=BEHAVIOUR)
    registry = Registry.load(folder)
    figures = json.loads(json.dumps(asdict(diagnose(registry, items, vectors))))
    reached = torch.unique(registry.trie(items).leaf_items)
    return {**figures, "encoder": registry.encoder, "reachable": len(reached) == len(items)}


def settings_of(arm: str, config: Config | None, **more: object) -> dict[str, object]:
    """What makes two records comparable: everything but seed, places and limits of time."""
    if config is None:
        return {"arm": arm}
    content = json.loads(config.to_json())
    content.pop("seed")
    content["data"].pop("path")
    content["model"].pop("ids", None)
    for name in ("minutes", "num_threads"):
        content["train"].pop(name)
    return {"arm": arm, "config": content, **more}


def recorded(arm: str, seed: int, settings: Mapping[str, object], run: Callable[[], Figures]) -> Figures:
    """The arm's figures: from the file, or new and then in the file."""
    for line in done(NAME, settings):
        if line["seed"] == seed:
            return dict(line["figures"])
    figures = run()
    measure.append(NAME, measure.record(seed=seed, figures=figures, settings=settings))
    print(f"{arm}, seed {seed}: {json.dumps(figures)}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="Beauty as written by 'nestpipe data amazon --texts'")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/quality_beauty"), help="folder of the runs, which are resumed"
    )
    parser.add_argument("--arms", nargs="+", default=["popularity", "sasrec", "generative"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=0, help="epochs of training; 0: those of the recipe")
    parser.add_argument("--minutes", type=float, default=0.0, help="limit of each training in minutes; 0: none")
    options = parser.parse_args()
    found: dict[str, Figures] = {}
    for arm in options.arms:
        config = config_of(arm, options)
        if arm == "popularity":
            found[arm] = recorded(arm, options.seed, settings_of(arm, None), lambda c=config: run_popularity(c))
            continue
        if arm == "generative":
            options.runs.mkdir(parents=True, exist_ok=True)
            ids = options.runs / "ids"
            made = {"arm": "ids", **asdict(SID), "behaviour": BEHAVIOUR}
            make_ids(options.data, ids)
            found["ids"] = recorded("ids", SID.seed, made, lambda f=ids: figures_of_ids(options.data, f))
        folder = options.runs / f"{arm}-{options.seed}"
        more = {"ids": found["ids"]["version"]} if arm == "generative" else {}
        settings = settings_of(arm, config, **more)
        found[arm] = recorded(arm, options.seed, settings, lambda c=config, f=folder: run_model(c, f))
    rows = [
        [arm, *(f"{one[name]:.4f}" for name in ("hr@5", "hr@10", "ndcg@10", "coverage@10"))]
        for arm, one in found.items()
        if arm != "ids"
    ]
    print(measure.table(["arm", "HR@5", "HR@10", "NDCG@10", "coverage@10"], rows))
    keys: Figures = {
        f"{arm}_{name}": one[name] for arm, one in found.items() if arm != "ids" for name in ("hr@10", "ndcg@10")
    }
    if generative := found.get("generative"):
        hr, ndcg = float(str(generative["hr@10"])), float(str(generative["ndcg@10"]))
        keys |= {"must_met": hr >= MUST_HR10, "aim_met": hr >= AIM_HR10 and ndcg >= AIM_NDCG10}
        if sasrec := found.get("sasrec"):
            keys["hr@10_of_sasrec"] = round(hr / float(str(sasrec["hr@10"])), 4)
    print(json.dumps(keys))


if __name__ == "__main__":
    main()
