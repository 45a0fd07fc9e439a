"""Baselines on public data: HR and NDCG of a full ranking and the CPU time they take, one table column for each protocol.

Every baseline of `nestpipe eval` is fitted on the training events and ranked in the protocol of the recipes: MovieLens-1M as
in `ml1m_hstu`, Amazon Beauty as in `beauty_sasrec`. `--sasrec` also trains the SASRec baseline, which takes minutes. A record is
not made again. `--write` renders the records into docs/concepts/evaluation.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import measure
from quality import collect, done, mean_and_deviation
from scoreboard import Figures
from scoreboard_quality import beauty, ml1m

from nestpipe import recipes
from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.data.tie_order import FILE, META
from nestpipe.eval.baselines import Baseline, evaluate_baselines
from nestpipe.eval.eval_report import EvalReport
from nestpipe.training.loop import INTERRUPTED, train_to_end
from nestpipe.training.sasrec_baseline import baseline_config

NAME = "baselines"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "concepts" / "evaluation.md"
BEGIN, END = "<!-- baselines -->", "<!-- end of baselines -->"
FITTED: tuple[Baseline, ...] = ("popularity", "last_item", "transitions", "item_knn")
SASREC = "sasrec"
RECIPES: dict[str, Callable[[], Config]] = {"MovieLens-1M": recipes.ml1m_hstu, "Amazon Beauty": recipes.beauty_sasrec}
COLUMNS = (("MovieLens-1M", FILE), ("MovieLens-1M", META), ("Amazon Beauty", "none"))
LEAST_TRANSITIONS = 0.20  # HR@10 on MovieLens-1M in file order


def settings_of(dataset: str, ties: str, baseline: str) -> dict[str, object]:
    return {"dataset": dataset, "ties": ties, "baseline": baseline}


def config_of(dataset: str, data: Path, threads: int) -> Config:
    config = RECIPES[dataset]()
    return replace(
        config,
        data=replace(config.data, path=str(data)),
        train=replace(config.train, num_threads=threads),
        eval=replace(config.eval, ks=(10,)),
    )


def fitted(name: Baseline, config: Config) -> dict[str, object]:
    """Figures of a baseline that is fitted, with the CPU time of fitting and ranking."""
    sequences = Sequences.open(config.data.path)
    start = time.process_time()
    report = evaluate_baselines(sequences, make_split(sequences, config.data), config, names=[name])[name]
    return figures_of(report, time.process_time() - start)


def trained(config: Config, folder: Path) -> dict[str, object]:
    """Figures of SASRec with cross-entropy, trained as `nestpipe eval --baselines sasrec` does."""
    start = time.process_time()
    own = baseline_config(config, Sequences.open(config.data.path))
    outcome = train_to_end(own, folder, resume=True)
    if outcome.stopped == INTERRUPTED:
        raise SystemExit("interrupted; the same command resumes here")
    report = replace(outcome.run, config=replace(outcome.run.config, eval=config.eval)).predictor().evaluate("test")
    assert isinstance(report, EvalReport)
    return figures_of(report, time.process_time() - start)


def figures_of(report: EvalReport, cpu_s: float) -> dict[str, object]:
    hits = report.metrics["hr@10"]
    assert report.protocol is not None
    return {
        "hr@10": round(hits.mean, 5),
        "ndcg@10": round(report.metrics["ndcg@10"].mean, 5),
        "hr@10, 95 % over users": [round(hits.low, 5), round(hits.high, 5)],
        "num_users": report.num_users,
        "protocol": str(report.protocol),
        "cpu_s": round(cpu_s, 1),
    }


def rows() -> list[list[str]]:
    """One row per baseline; a column is one protocol."""
    found = []
    for baseline in (*FITTED, SASREC):
        row = [f"`{baseline}`"]
        for dataset, ties in COLUMNS:
            records = done(NAME, settings_of(dataset, ties, baseline))
            one = records[-1]["figures"] if records else None
            row.append(f"{one['hr@10']:.4f} / {one['ndcg@10']:.4f}, {one['cpu_s']:.0f} s" if one else "-")
        if set(row[1:]) != {"-"}:
            found.append(row)
    of_recipes = [ml1m("sasrec", FILE), ml1m("sasrec", META), beauty("sasrec")]
    return [*found, ["SASRec of our recipes", *(_of_recipe(one) for one in of_recipes)]]


def _of_recipe(seeds: list[Figures]) -> str:
    """A training of a quality benchmark in the same protocol, as long as its recipe says; minutes on two cores."""
    if not seeds:
        return "-"
    hits, gain = (mean_and_deviation([one[name] for one in seeds]) for name in ("hr@10", "ndcg@10"))
    minutes = next((seeds[0][name] for name in ("minutes", "training_minutes") if name in seeds[0]), None)
    return f"{hits} / {gain}" + (f", {minutes:.0f} min" if minutes else "")


def page() -> str:
    """docs/concepts/evaluation.md with the table in its place."""
    names = [dataset if dataset != "MovieLens-1M" else f"{dataset}, ties {ties}" for dataset, ties in COLUMNS]
    table = [f"| {' | '.join(row)} |" for row in (["baseline", *names], ["---"] * 4, *rows())]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + "\n".join([BEGIN, "", *table, "", END]) + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, help="a folder written by 'nestpipe data movielens' or 'nestpipe data amazon'"
    )
    parser.add_argument("--dataset", choices=list(RECIPES), default="MovieLens-1M")
    parser.add_argument("--sasrec", action="store_true", help="train the SASRec baseline too")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/baselines"), help="folder of its runs, which are resumed"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the table into docs/concepts/evaluation.md")
    options = parser.parse_args()
    if options.data:
        ties = Sequences.open(options.data).ties
        config = config_of(options.dataset, options.data, options.threads)
        arms: dict[str, Callable[[int], dict[str, object]]] = {
            name: lambda seed, name=name: fitted(name, config) for name in FITTED
        }
        if options.sasrec:
            folder = options.runs / f"{options.dataset}-{ties}".replace(" ", "-")
            arms[SASREC] = lambda seed: trained(config, folder)
        for name, run in arms.items():
            collect(NAME, f"{options.dataset}, ties {ties}, {name}", [0], settings_of(options.dataset, ties, name), run)
    print(measure.table(["baseline", *(f"{dataset}, ties {ties}" for dataset, ties in COLUMNS)], rows()))
    if options.write:
        PAGE.write_text(page())
    transitions = done(NAME, settings_of("MovieLens-1M", FILE, "transitions"))
    if transitions:
        best = transitions[-1]["figures"]["hr@10"]
        print(json.dumps({"transitions_hr10_file_order": best, "at_least_.20": best >= LEAST_TRANSITIONS}))


if __name__ == "__main__":
    main()
