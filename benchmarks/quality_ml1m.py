"""Quality on MovieLens-1M: HR and NDCG of a full ranking, one table for each order of equal times, with published figures of that order.

Protocol: all ratings in log order, equal times as the folder was ingested (--ties), longest history 200, test = each user's last
item ranked among all movies but those of the input history. Settings are chosen on the second-last item (`--choose`: every candidate
of a model trains without the last two items of a user; recorded as such). Then one training on all but the last item, with a
number of epochs fixed beforehand; the test items are ranked once, at its end. Without a recorded choice a model uses the
settings of its recipe, its first candidate.

`--sizes` trains HSTU with 2, 4 and 8 blocks for the same number of epochs, fewer than published: the effect of more parameters.
`--stale` trains HSTU exactly and with rows stale by one step (the first epoch exact), and compares the two per user.

Each (model, seed) is appended to results/quality_ml1m.jsonl when it is done and is not run again; an interrupted run resumes.
`--write` renders the file into docs/performance/quality.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import measure
from quality import Record, collect, done, mean_and_deviation, settings_of, spread

from nestpipe import recipes
from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.data.tie_order import FILE, META
from nestpipe.eval.compare import compare
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.predictor import popularity
from nestpipe.training.loop import INTERRUPTED, train_to_end
from nestpipe.training.run_state import load_state

NAME = "quality_ml1m"
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance" / "quality.md"
BEGIN, END = "<!-- quality_ml1m -->", "<!-- end of quality_ml1m -->"
RECIPE = "recipe"
ORDERS = {FILE: "Equal times in the order of the file", META: "Equal times in Meta's order"}
PUBLISHED = {  # HR@10, NDCG@10, HR@50, HR@200 of others, by the order of equal times that they were measured in
    FILE: {"HSTU": (0.3037,), "eSASRec": (0.3133, 0.1772), "FuXi-alpha": (0.3164, 0.1813)},
    META: {
        "SASRec, Meta": (0.2853, 0.1603, 0.5474, 0.7528),
        "HSTU, Meta": (0.3097, 0.1720, 0.5754, 0.7716),
        "HSTU-large, Meta": (0.3294, 0.1893, 0.5935, 0.7839),
        "HSTU, RecTools": (0.3077,),
        "HSTU-large, RecTools": (0.3291, 0.1871),
    },
}


def _with_blocks(num_blocks: int) -> Callable[[], Config]:
    large = recipes.ml1m_hstu_large()
    return lambda: replace(large, model=replace(large.model, num_blocks=num_blocks))


BASES: dict[str, Callable[[], Config]] = {
    "sasrec": recipes.ml1m_sasrec,
    "sasrec_meta": recipes.ml1m_sasrec_meta,
    "esasrec": recipes.ml1m_esasrec,
    "hstu": recipes.ml1m_hstu,
    "hstu_meta": recipes.ml1m_hstu_meta,
    "hstu_large": recipes.ml1m_hstu_large,
    "fuxi_alpha": recipes.ml1m_fuxi_alpha,
    "fuxi_hybrid": recipes.ml1m_fuxi_hybrid,
}
SIZES = {f"hstu, {blocks} blocks": _with_blocks(blocks) for blocks in (2, 4, 8)}
BASE_EPOCHS, SIZES_EPOCHS, STALE_EPOCHS = 101, 10, 20
STEPS_PER_EPOCH = 48  # 6,040 users in batches of 128


def _stale() -> Config:
    base = recipes.ml1m_hstu()
    return replace(base, pipeline=base.pipeline.changed(staleness=1, sync_steps=STEPS_PER_EPOCH))


SHOWN = {"hstu, one update old": "hstu, rows stale by one step"}  # records keep the name that they were made under
STALE = {"hstu, exact": recipes.ml1m_hstu, "hstu, one update old": _stale}
DIFFERENCE = {"model": "hstu, one update old minus exact", "epochs": STALE_EPOCHS}
EPOCHS = dict.fromkeys(SIZES, SIZES_EPOCHS) | dict.fromkeys(STALE, STALE_EPOCHS)
POPULARITY = {"model": "popularity"}
METRICS = ("hr@10", "ndcg@10", "hr@50", "hr@200")


def candidates(model: str, epochs: int) -> dict[str, Config]:
    """Settings to choose from, by name; those of the recipe first."""
    base = (BASES | SIZES | STALE)[model]()
    base = replace(base, train=replace(base.train, epochs=epochs, save_steps=10 * STEPS_PER_EPOCH))
    falling = replace(base, train=replace(base.train, decay_epochs=epochs))
    return {RECIPE: base, "falling rate": falling}


def placed(config: Config, *, data: Path, seed: int, threads: int) -> Config:
    return replace(
        config,
        seed=seed,
        data=replace(config.data, path=str(data)),
        train=replace(config.train, num_threads=threads),
    )


def run_once(config: Config, folder: Path) -> dict[str, object]:
    """Trains (or resumes) a run and ranks its held-out items once."""
    start = time.monotonic()
    outcome = train_to_end(config, folder, resume=True)
    if outcome.stopped == INTERRUPTED:
        raise SystemExit("interrupted; the same command resumes here")
    target = "validation" if config.data.validation else "test"
    report = outcome.run.predictor(load_state(outcome.run)[1].step).evaluate(target)
    assert isinstance(report, EvalReport)
    report.save(folder / "eval" / target)
    return {"target": target, **figures_of(report), "minutes": round((time.monotonic() - start) / 60, 1)}


def figures_of(report: EvalReport) -> dict[str, object]:
    intervals = {name: report.metrics[name] for name in ("hr@10", "ndcg@10")}
    return {
        **{name: round(report.metrics[name].mean, 5) for name in METRICS},
        **{f"{name}, 95 % over users": [round(one.low, 5), round(one.high, 5)] for name, one in intervals.items()},
    }


def held_out(config: Config) -> Config:
    """The same settings without each user's last two items; evaluated only at its end, as in the final run."""
    return replace(config, data=replace(config.data, validation=True), train=replace(config.train, eval_epochs=1000))


def settings_in(config: Config, model: str, ties: str) -> dict[str, object]:
    """The settings of a record; one without an order of equal times has that of the file."""
    return settings_of(config, model) | ({"ties": ties} if ties != FILE else {})


def choices(model: str, epochs: int, ties: str) -> dict[str, Record]:
    """The candidates with a validation on record, seed 0."""
    found = {}
    for name, config in candidates(model, epochs).items():
        for one in done(NAME, settings_in(held_out(config), model, ties)):
            if one["seed"] == 0:
                found[name] = one
    return found


def chosen(model: str, epochs: int, ties: str) -> tuple[str, Config]:
    tried = choices(model, epochs, ties)
    name = max(tried, key=lambda one: tried[one]["figures"]["ndcg@10"]) if tried else RECIPE
    return name, candidates(model, epochs)[name]


def run_popularity(data: Path) -> dict[str, object]:
    """The popularity baseline: the items with most training events, for every user."""
    config = placed(BASES["hstu"](), data=data, seed=0, threads=0)
    sequences = Sequences.open(data)
    report = popularity(sequences, make_split(sequences, config.data), config)
    return figures_of(report)


def stale_difference(runs: Path) -> dict[str, object]:
    """The effect of rows stale by one step: mean difference over users and its 95 % interval."""
    exact, stale = (EvalReport.load(folder_of(runs, model, RECIPE, 0) / "eval" / "test") for model in STALE)
    found = compare(exact, stale, seed=0).differences
    return {
        name: {
            "difference": round(one.interval.mean, 5),
            "95 %": [round(one.interval.low, 5), round(one.interval.high, 5)],
        }
        for name, one in found.items()
        if name in METRICS
    }


def folder_of(runs: Path, model: str, choice: str, seed: int, ties: str = FILE) -> Path:
    order = "" if ties == FILE else f"-{ties.replace(':', '-')}"
    return runs / f"{model}-{choice}-{seed}{order}".replace(",", "").replace(" ", "-")


def rows_of(model: str, records: list[Record], choice: str) -> list[str]:
    figures = [one["figures"] for one in records]
    shown = []
    for metric in METRICS:
        shown.append(mean_and_deviation([one[metric] for one in figures]))
    low, high = figures[0]["hr@10, 95 % over users"]
    return [SHOWN.get(model, model), choice, str(len(records)), *shown, f"{low:.4f}-{high:.4f}"]


HEADER = ["model", "settings", "seeds", *METRICS, "hr@10, 95 % over users (first seed)"]


def published_rows(ties: str) -> list[list[str]]:
    return [
        [f"*{name}*", "published", "?", *(f"{one:.4f}" for one in found), *["-"] * (len(HEADER) - 3 - len(found))]
        for name, found in PUBLISHED[ties].items()
    ]


def page(rows: Mapping[str, list[list[str]]]) -> str:
    """docs/performance/quality.md with a table for each order of equal times in its place."""
    lines = []
    for ties, title in ORDERS.items():
        shown = [*rows[ties], *published_rows(ties)]
        table = [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER), *shown)]
        lines += [f"### {title} (`--ties {ties}`)", "", *table, ""]
        lines += [] if rows[ties] else ["None of our models was run in this order yet.", ""]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + "\n".join([BEGIN, "", *lines[:-1], "", END]) + rest.partition(END)[2]


def recorded_rows(epochs: int, ties: str) -> tuple[list[list[str]], Mapping[str, object]]:
    """A row for every model with a finished test on record, and the figures by model."""
    popular = done(NAME, POPULARITY if ties == FILE else {**POPULARITY, "ties": ties})
    rows, keys = [rows_of("popularity", one, "-") for one in [popular] if one], {}
    for model in BASES | SIZES | STALE:
        num_epochs = EPOCHS.get(model, epochs)
        choice, config = chosen(model, num_epochs, ties)
        records = done(NAME, settings_in(config, model, ties))
        if records:
            shown = f"{choice}, {num_epochs} epochs" if model in EPOCHS else choice
            rows.append(rows_of(model, records, shown))
            keys[model] = {
                f"{name}10": spread([one["figures"][f"{name}@10"] for one in records])[0] for name in ("hr", "ndcg")
            }
    return rows, keys


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="MovieLens-1M as written by 'nestpipe data movielens'")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/quality_ml1m"), help="folder of the runs, which are resumed"
    )
    parser.add_argument("--models", nargs="+", choices=list(BASES | SIZES | STALE), help="by default hstu and sasrec")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=BASE_EPOCHS, help="epochs of training; default as published")
    parser.add_argument("--choose", action="store_true", help="try the candidates on the second-last item first")
    parser.add_argument("--threads", type=int, default=0, help="threads of an operation; 0: all cores")
    parser.add_argument(
        "--sizes", action="store_true", help=f"instead: HSTU of three sizes, {SIZES_EPOCHS} epochs each"
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help=f"instead: HSTU exact and with rows stale by one step, {STALE_EPOCHS} epochs",
    )
    parser.add_argument("--quick", action="store_true", help="show records and the popularity baseline; train nothing")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance/quality.md")
    options = parser.parse_args()
    kinds = list(SIZES) * options.sizes + list(STALE) * options.stale
    options.models = options.models or kinds or ["hstu", "sasrec"]
    return options


def run_model(model: str, options: argparse.Namespace, ties: str) -> None:
    """Trains what is not on record: the candidates, if settings are to be chosen, then every seed."""
    epochs = EPOCHS.get(model, options.epochs)

    def run(config: Config, name: str, choice: str) -> Callable[[int], Mapping[str, object]]:
        return lambda seed: run_once(
            placed(config, data=options.data, seed=seed, threads=options.threads),
            folder_of(options.runs, name, choice, seed, ties),
        )

    for name, config in candidates(model, epochs).items() if options.choose else ():
        own = held_out(config)
        settings = settings_in(own, model, ties)
        collect(NAME, f"{model}, {name}, validation", [0], settings, run(own, f"choose-{model}", name))
    choice, config = chosen(model, epochs, ties)
    settings = settings_in(config, model, ties)
    collect(NAME, f"{model}, {choice}", options.seeds, settings, run(config, model, choice))


def main() -> None:
    options = options_of()
    ties = Sequences.open(options.data).ties if options.data else FILE
    for model in [] if options.quick or not options.data else options.models:
        run_model(model, options, ties)
    if options.data:
        popular = POPULARITY if ties == FILE else {**POPULARITY, "ties": ties}
        collect(NAME, "popularity", [0], popular, lambda seed: run_popularity(options.data))
    if options.stale and options.data:
        collect(NAME, "difference", [0], DIFFERENCE, lambda seed: stale_difference(options.runs))
    recorded = {order: recorded_rows(options.epochs, order) for order in {**ORDERS, ties: ""}}
    for order, (rows, _) in recorded.items():
        if rows:
            print(f"ties {order}\n{measure.table(HEADER, rows)}")
    if options.write:
        PAGE.write_text(page({order: rows for order, (rows, _) in recorded.items()}))
    print(json.dumps(recorded[ties][1]))


if __name__ == "__main__":
    main()
