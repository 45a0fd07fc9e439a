"""Ablations on synthetic data: instructions, their placement, IGR, Q2I, one model for all scenarios, and SA-GCPO.

A run trains one arm with one seed and takes less than 60 s on one core. The seed determines data, weights and draws, so the
difference of two arms is taken per seed. Effect ± standard error of three seeds: "confirmed" if it is more than twice the error,
"refuted" if it is as far on the other side, else "open". The value of an arm is its expectation under the probabilities that
generated the data.

    python benchmarks/ablations.py                 all arms; those with a record are not run again
    python benchmarks/ablations.py --write         no runs; writes the table of the records into docs/concepts/generative.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import ablation_arms
import measure
import quality
import torch
from ablation_arms import ARMS

NAME = "ablations"
SEEDS = (0, 1, 2)
PAGE = measure.ROOT / "docs" / "concepts" / "generative.md"
BEGIN, END = "<!-- ablations -->", "<!-- end of ablations -->"


@dataclass(frozen=True, slots=True)
class Claim:
    """One arm is worth more than another."""

    text: str
    more: str
    less: str
    metric: str = "ndcg10"


CLAIMS = (
    Claim("instructions that are right in 50 % beat those that say nothing", "accuracy 50", "accuracy 0"),
    Claim("90 % beat 50 %", "accuracy 90", "accuracy 50"),
    Claim("SA-GCPO improves the model that it starts from (utility)", "sa_gcpo", "log only", "utility1"),
    Claim("SA-GCPO beats GSPO (utility)", "sa_gcpo", "gspo", "utility1"),
    Claim("SA-GCPO beats GRPO (utility)", "sa_gcpo", "grpo", "utility1"),
    Claim("IGR beats as many newer events", "igr query", "igr recency"),
    Claim("Q2I beats IGR without it", "igr query, q2i", "igr query"),
    Claim("an instruction token after BOS beats none", "accuracy 90", "placement none"),
    Claim("one model beats one per scenario, at equal steps", "igr recency", "per scenario"),
    Claim("IGR beats the 8 newest events alone", "igr query", "recent 8"),
    Claim("IGR beats a random choice", "igr query", "igr random"),
    Claim("after BOS beats before it", "accuracy 90", "placement before"),
    Claim("after BOS beats adding to it", "accuracy 90", "placement sum"),
    Claim("after BOS beats adding to all tokens", "accuracy 90", "placement all"),
)


def settings_of(arm: str) -> dict[str, object]:
    """Everything that makes two records of an arm comparable."""
    names = ("LR", "NUM_USERS_OF_BATCH", "NUM_REQUESTS_OF_BATCH", "EPOCHS", "REQUEST_STEPS", "GROUP")
    names += ("POLICY_START_EPOCHS", "POLICY_STEPS", "POLICY_REQUESTS", "POLICY_LR", "POLICY_UPDATES")
    training = {name.lower(): getattr(ablation_arms, name) for name in names}
    content: dict[str, object] = json.loads(json.dumps({"arm": arm, **asdict(ARMS[arm]), "training": training}))
    return content


def recorded() -> dict[str, dict[int, Mapping[str, float]]]:
    """The figures of every arm with the present settings, by seed."""
    return {arm: {one["seed"]: one["figures"] for one in quality.done(NAME, settings_of(arm))} for arm in ARMS}


def effect(more: Sequence[float], less: Sequence[float]) -> tuple[float, float]:
    """The mean of the differences and its standard error."""
    differences = [a - b for a, b in zip(more, less, strict=True)]
    return statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5


def verdict(mean: float, error: float) -> str:
    """The verdict on the claim that the effect is above 0."""
    return "confirmed" if mean > 2 * error else "refuted" if mean < -2 * error else "open"


def rows_of(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[list[str]]:
    """One line for each claim; without all seeds it is open."""
    rows = []
    for claim in CLAIMS:
        seeds = [seed for seed in SEEDS if seed in found[claim.more] and seed in found[claim.less]]
        more, less = ([found[arm][seed][claim.metric] for seed in seeds] for arm in (claim.more, claim.less))
        if len(seeds) < len(SEEDS):
            rows.append([claim.text, "", "", "", f"open: {len(seeds)} of {len(SEEDS)} seeds"])
            continue
        mean, error = effect(more, less)
        values = [f"{statistics.mean(less):.4f}", f"{statistics.mean(more):.4f}", f"{mean:+.4f} ± {error:.4f}"]
        rows.append([claim.text, *values, verdict(mean, error)])
    return rows


def page(
    text: str,
    rows: Sequence[Sequence[str]],
    headers: Sequence[str] = ("claim", "without", "with", "effect", ""),
    marks: tuple[str, str] = (BEGIN, END),
) -> str:
    """A page with the table between its marks."""
    before, rest = text.split(marks[0])
    after = rest.split(marks[1])[1]
    lines = ["| " + " | ".join(row) + " |" for row in (headers, *rows)]
    lines.insert(1, "|" + "---|" * len(headers))
    return f"{before}{marks[0]}\n\n" + "\n".join(lines).replace("|  |", "| |") + f"\n\n{marks[1]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="run only these")
    parser.add_argument("--write", action="store_true", help="write the table of the records; run nothing")
    options = parser.parse_args()
    if not options.write:
        torch.set_num_threads(1)
        order = dict.fromkeys(arm for claim in CLAIMS for arm in (claim.more, claim.less))
        for arm in options.arms or order:
            quality.collect(
                NAME, arm, SEEDS, settings_of(arm), lambda seed, one=arm: ablation_arms.run(ARMS[one], seed)
            )
    rows = rows_of(recorded())
    if options.write:
        PAGE.write_text(page(PAGE.read_text(), rows))
    print(measure.table(["claim", "without", "with", "effect", ""], rows))
    print(json.dumps({row[0]: row[-1] for row in rows}))


if __name__ == "__main__":
    main()
