"""Instructions through the commands, in the synthetic world of the ablations: ingest, think, train, eval.

The ablations train models in one process, on vectors that they make themselves. Here a log of the world, whose column `wish`
has the instruction of each event, goes through `nestpipe data ingest`, `think --for-training --column wish` and
`train --instructions`, with the settings of the ablations as flags. Semantic ids are those of the world, as in the ablations:
its texts alone do not say which of topic, style and number comes first. The effects of both are compared: they agree if their
difference is within twice its error.

`nestpipe eval` then answers the last events without an instruction, with their own and with that of another event.

    python benchmarks/instruction_world.py            all arms and seeds; those with a record are not run again
    python benchmarks/instruction_world.py --write    no runs; writes the tables of the records into docs/concepts/generative.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import ablations
import align_world
import measure
import numpy as np
import polars as pl
import quality
import torch
from ablation_arms import EPOCHS, LR, REQUEST_STEPS
from ablation_world import Stage

from nestpipe.data.sequences import Sequences
from nestpipe.data.synthetic_scenarios import ScenarioLog, ScenarioLogConfig
from nestpipe.generative.config import SidConfig
from nestpipe.generative.semantic_ids import Registry
from nestpipe.training.run_folder import Run

NAME = "instruction_world"
MARKS = ("<!-- instructions through the commands -->", "<!-- end of instructions through the commands -->")
CONTROL_MARKS = ("<!-- shuffled instructions -->", "<!-- end of shuffled instructions -->")
HEADERS = ("claim", "ablations", "commands", "", "both")
CONTROL_HEADERS = (
    "seed",
    "NDCG@10 without",
    "own",
    "another event's",
    "effect [95 %]",
    "share that another's loses [95 %]",
)
FEATURES = (*align_world.FEATURES, "wish:id:event:encoding=dictionary")
_MODEL = (
    "--model.dim 32 --model.num-encoder 1 --model.num-decoder 1 --model.num-heads 2 --model.hidden-dim 64 --model.dropout 0.1 "
    "--model.no-item-rows --model.num-scenarios 3 --model.prefix-vectors 0 --model.reasoning-dim 0 --model.beam 32 "
    f"--data.max-len 47 --dense.lr {LR} --embedding.lr {LR} --train.warmup-steps 20 --eval.seen none"
)
_HISTORIES = f"--data.batch-size 48 --train.epochs {EPOCHS} --train.decay-epochs {EPOCHS}"
_REQUESTS = (
    f"--data.batch-size 192 --train.epochs 0 --train.steps {REQUEST_STEPS} --train.decay-steps {REQUEST_STEPS} "
    "--model.queries last --model.igr query --model.igr-recent 8 --model.igr-related 8 --model.igr-refresh-steps 25"
)
# Accuracy of the instructions, and flags of `nestpipe train`.
ARMS: dict[str, tuple[float, str]] = {
    "accuracy 0": (0.0, _HISTORIES),
    "accuracy 50": (0.5, _HISTORIES),
    "accuracy 90": (0.9, _HISTORIES),
    **{f"placement {one}": (0.9, f"{_HISTORIES} --model.placement {one}") for one in ("none", "before", "sum", "all")},
    "igr query": (0.9, _REQUESTS),
    "igr query, q2i": (0.9, f"{_REQUESTS} --model.q2i 0.1 --data.group-size 16"),
}
CLAIMS = [one for one in ablations.CLAIMS if one.more in ARMS and one.less in ARMS]


def prepare(stage: Stage, folder: Path) -> None:
    """The log in a sequence folder, semantic ids and the store of instructions."""
    align_world.write_log(stage, folder)
    texts = np.array(stage.world.instructions())[stage.world.named_topics.ravel()]
    log = pl.read_parquet(folder / "log.parquet").with_columns(pl.Series("wish", texts))
    log.write_parquet(folder / "log.parquet")
    align_world.ingest(folder, FEATURES)
    sequences = Sequences.open(folder / "data")
    # The number of an item in its own id, p042, is that of the world.
    names = sequences.vocabulary("item").own_ids(sequences.catalogue)
    places = torch.tensor([int(str(name)[1:]) for name in names])
    codes = torch.stack(torch.unravel_index(places, stage.world.config.sizes), 1)
    registry = Registry(
        encoder="hashed-words-512/title",
        preprocessing="unit length",
        config=SidConfig(levels=3, codes=max(stage.world.config.sizes), policy="keep"),
        codebooks=torch.zeros(3, max(stage.world.config.sizes), 1),
        items=torch.from_numpy(np.array(sequences.catalogue)),
        codes=codes,
    )
    registry.named_by(sequences).save(folder / "ids")
    store = ("--store", folder / "wishes.sqlite", "--quiet")
    align_world.command("think", folder / "data", "--for-training", "--column", "wish", "--ids", folder / "ids", *store)


def run_arm(arm: str, seed: int, stage: Stage, folder: Path) -> dict[str, object]:
    """Trains one arm in a prepared folder; its lists under the world's probabilities, and what `eval` says of instructions."""
    out = folder / arm.replace(" ", "-").replace(",", "")
    files = ("--data.path", folder / "data", "--model.ids", folder / "ids", "--instructions", folder / "wishes.sqlite")
    flags = (*_MODEL.split(), *ARMS[arm][1].split(), "--seed", str(seed), "--run", out)
    align_world.command("train", "scenarios", *files, *flags)
    utility, ndcg = align_world.measured(stage, Run.open(out)).mean(0).tolist()
    found: dict[str, object] = {"ndcg10": round(ndcg, 5), "utility1": round(utility, 5)}
    if "none" not in arm:
        align_world.command("eval", out, "--baselines", "popularity")
        effects = json.loads((out / "eval" / "test" / "instructions.json").read_text())["effects"]
        found["instructions"] = {scenario: one["wish"]["ndcg@10"] for scenario, one in effects.items()}
    return found


def settings_of(arm: str) -> dict[str, object]:
    accuracy, flags = ARMS[arm]
    return {"arm": arm, "accuracy": accuracy, "flags": f"{_MODEL} {flags}"}


def run_all(arms: list[str], seeds: list[int]) -> None:
    for seed in seeds:
        for accuracy in dict.fromkeys(ARMS[arm][0] for arm in arms):
            todo = [
                arm
                for arm in arms
                if ARMS[arm][0] == accuracy
                and seed not in {one["seed"] for one in quality.done(NAME, settings_of(arm))}
            ]
            if not todo:
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                stage = Stage(ScenarioLog.make(ScenarioLogConfig(accuracy=accuracy, seed=seed)))
                prepare(stage, folder)
                for arm in todo:
                    figures = run_arm(arm, seed, stage, folder)
                    measure.append(NAME, measure.record(seed=seed, figures=figures, settings=settings_of(arm)))


def rows_of() -> list[list[str]]:
    """One line for each claim: its effect in the ablations and through the commands, and whether they agree."""
    here = {arm: {one["seed"]: one["figures"] for one in quality.done(NAME, settings_of(arm))} for arm in ARMS}
    there, rows = ablations.recorded(), []
    for claim in CLAIMS:
        found = []
        for records in (there, here):
            seeds = [seed for seed in ablations.SEEDS if seed in records[claim.more] and seed in records[claim.less]]
            if len(seeds) < len(ablations.SEEDS):
                break
            pairs = ([float(records[arm][seed][claim.metric]) for seed in seeds] for arm in (claim.more, claim.less))
            found.append(ablations.effect(*pairs))
        if len(found) < 2:
            rows.append([claim.text, "", "", "", "open: seeds are missing"])
            continue
        (old, old_error), (new, new_error) = found
        error = (old_error**2 + new_error**2) ** 0.5
        agree = "agree" if abs(new - old) <= 2 * error else "differ"
        effects = [f"{old:+.4f} ± {old_error:.4f}", f"{new:+.4f} ± {new_error:.4f}"]
        rows.append([claim.text, *effects, ablations.verdict(new, new_error), agree])
    return rows


def control_rows() -> list[list[str]]:
    """One line for each seed: what instructions of 90 % accuracy are worth in `eval`, and what shuffled ones lose."""
    rows = []
    for one in sorted(quality.done(NAME, settings_of("accuracy 90")), key=lambda record: int(record["seed"])):
        found = one["figures"]["instructions"]["all"]
        means = [f"{found[name]:.4f}" for name in ("without", "own", "shuffled")]
        effect, lost = found["effect"], found["lost"]
        shown = f"{effect['mean']:+.4f} [{effect['low']:+.4f}, {effect['high']:+.4f}]"
        rows.append([str(one["seed"]), *means, shown, f"{lost['mean']:.0%} [{lost['low']:.0%}, {lost['high']:.0%}]"])
    return rows


def page(text: str) -> str:
    """The page with both tables."""
    text = ablations.page(text, rows_of(), HEADERS, MARKS)
    return ablations.page(text, control_rows(), CONTROL_HEADERS, CONTROL_MARKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(ablations.SEEDS))
    parser.add_argument("--write", action="store_true", help="write the tables of the records; run nothing")
    options = parser.parse_args()
    if options.write:
        ablations.PAGE.write_text(page(ablations.PAGE.read_text()))
    else:
        torch.set_num_threads(1)
        run_all(options.arms, options.seeds)
    rows = rows_of()
    print(measure.table(HEADERS, rows))
    print(json.dumps({row[0]: row[-2:] for row in rows}))


if __name__ == "__main__":
    main()
