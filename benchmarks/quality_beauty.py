"""Quality on Amazon Beauty: popularity, our full-softmax SASRec and the generative model under one protocol.

Leave-one-out, full ranking over items (never over codes), histories of at most 50 events, seen items excluded. Settings and
checkpoint are chosen on the second-last item of each user (validation). The last item is evaluated once per run, when its record
is written. An interrupted run resumes; an arm that has a record is not run again. `--quick --write` renders
all records into docs/performance/quality.md.
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
from quality import done, mean_and_deviation, spread

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
MUST_HR10, AIM_HR10, AIM_NDCG10 = 0.0863, 0.0927, 0.0555  # the first seed on record; our SASRec
SID = SidConfig(levels=2, codes=256, policy="suffix")
BEHAVIOUR = 0.5  # share of co-occurrence vectors, the rest is title vectors
ARMS: dict[str, Callable[[], Config]] = {
    "sasrec": recipes.beauty_sasrec,
    "esasrec": recipes.beauty_esasrec,
    "generative": recipes.beauty_sid,
}
PUBLISHED = {  # HR@10, NDCG@10 of others on the same files, full ranking
    "SASRec, sampled softmax": (0.0921, 0.0531),
    "eSASRec": (0.0928, 0.0523),
    "BSARec": (0.1008, 0.0611),
    "TIGER, generative": (0.0648, 0.0384),
    "ActionPiece, generative": (0.0775, 0.0424),
    "LC-Rec, generative": (0.0791,),
    "OneRec 8B, generative": (0.0924,),
}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance" / "quality.md"
BEGIN, END = "<!-- quality_beauty -->", "<!-- end of quality_beauty -->"
HEADER = ["model", "seeds", "HR@10", "NDCG@10", "HR@5", "coverage@10"]
Figures = dict[str, object]


def config_of(arm: str, seed: int, options: argparse.Namespace) -> Config:
    """The arm's recipe on the given data; all arms have the same split, history, seen items and lists."""
    config = ARMS.get(arm, recipes.beauty_sasrec)()
    if isinstance(config.model, EncDecConfig):
        config = replace(config, model=replace(config.model, ids=str(options.runs / "ids")))
    return replace(
        config,
        seed=seed,
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


def run_arm(arm: str, seed: int, options: argparse.Namespace) -> Figures:
    """The figures of an arm and seed, run if they are not on record."""
    config = config_of(arm, seed, options)
    if arm == "popularity":
        return recorded(arm, seed, settings_of(arm, None), lambda: run_popularity(config))
    more = {}
    if arm == "generative":
        options.runs.mkdir(parents=True, exist_ok=True)
        ids = options.runs / "ids"
        make_ids(options.data, ids)
        # Ids of another text encoder or release are other ids: their runs are another result, not another seed.
        more["ids"] = Registry.load(ids).version
        made = {"arm": "ids", **asdict(SID), "behaviour": BEHAVIOUR, "version": more["ids"]}
        recorded("ids", SID.seed, made, lambda: figures_of_ids(options.data, ids))
    folder = options.runs / f"{arm}-{seed}"
    return recorded(arm, seed, settings_of(arm, config, **more), lambda: run_model(config, folder))


def on_record(arm: str, options: argparse.Namespace) -> list[Figures]:
    """The figures of all recorded seeds of an arm; of the generative one those of the ids with most seeds."""
    if arm == "popularity":
        return [dict(one["figures"]) for one in done(NAME, settings_of(arm, None))]
    config = config_of(arm, 0, options)
    lines = (measure.RESULTS / f"{NAME}.jsonl").read_text().splitlines()
    ids = {one["settings"].get("ids") for one in map(json.loads, lines) if one["settings"]["arm"] == arm}
    groups = (done(NAME, settings_of(arm, config, **({"ids": one} if one else {}))) for one in sorted(ids, key=str))
    return [dict(one["figures"]) for one in max(groups, key=len, default=[])]


def row_of(arm: str, found: list[Figures]) -> list[str]:
    """Mean ± standard deviation over seeds."""
    names = ("hr@10", "ndcg@10", "hr@5", "coverage@10")
    return [arm, str(len(found)), *(mean_and_deviation([float(str(one[name])) for one in found]) for name in names)]


def page(rows: list[list[str]]) -> str:
    """docs/performance/quality.md with the table in its place."""
    published = [
        [f"*{name}*", "?", *(f"{one:.4f}" for one in found), *["-"] * (len(HEADER) - 2 - len(found))]
        for name, found in PUBLISHED.items()
    ]
    table = [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER), *rows, *published)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + "\n".join([BEGIN, "", *table, "", END]) + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("data/beauty"), help="Beauty as written by 'nestpipe data amazon --texts'"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/quality_beauty"), help="folder of the runs, which are resumed"
    )
    parser.add_argument("--arms", nargs="+", choices=["popularity", *ARMS], default=["popularity", *ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=0, help="epochs of training; 0: those of the recipe")
    parser.add_argument("--minutes", type=float, default=0.0, help="limit of each training in minutes; 0: none")
    parser.add_argument("--quick", action="store_true", help="show all seeds on record; train nothing")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance/quality.md")
    options = parser.parse_args()
    found = {
        arm: on_record(arm, options)
        if options.quick
        else [run_arm(arm, seed, options) for seed in (options.seeds if arm != "popularity" else [0])]
        for arm in options.arms
    }
    found = {arm: figures for arm, figures in found.items() if figures}
    rows = [row_of(arm, figures) for arm, figures in found.items()]
    print(measure.table(HEADER, rows))
    if options.write:
        PAGE.write_text(page(rows))
    mean = {
        (arm, name): spread([float(str(one[name])) for one in figures])[0]
        for arm, figures in found.items()
        for name in ("hr@10", "ndcg@10")
    }
    keys: Figures = {f"{arm}_{name}": round(value, 5) for (arm, name), value in mean.items()}
    if "generative" in found:
        hr, ndcg = mean["generative", "hr@10"], mean["generative", "ndcg@10"]
        keys |= {"must_met": hr >= MUST_HR10, "aim_met": hr >= AIM_HR10 and ndcg >= AIM_NDCG10}
        if "sasrec" in found:
            keys["hr@10_of_sasrec"] = round(hr / mean["sasrec", "hr@10"], 4)
    print(json.dumps(keys))


if __name__ == "__main__":
    main()
