"""Rows of the scoreboard about quality: every figure with its protocol and number of seeds, references of the same protocol only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from quality import mean_and_deviation
from scoreboard import Figures, Row, records

FILE, META = "file", "meta"
ORDERS = {FILE: "file order", META: "Meta's order"}  # of equal times
MODELS = ("hstu", "hstu_meta", "hstu_large", "sasrec", "sasrec_meta", "esasrec", "fuxi_alpha", "fuxi_hybrid")
PUBLISHED = {  # HR@10 of others on MovieLens-1M, in the same order of equal times
    (FILE, "hstu"): "HSTU .3037",
    (FILE, "esasrec"): "eSASRec .3133",
    (FILE, "fuxi_alpha"): "FuXi-alpha .3164",
    (META, "hstu"): "Meta's HSTU .3097",
    (META, "hstu_meta"): "Meta's HSTU .3097",
    (META, "hstu_large"): "Meta's HSTU-large .3294",
    (META, "sasrec_meta"): "Meta's SASRec .2853",
}
BEAUTY = {"generative": "TIGER .0648", "sasrec": "SASRec with sampled softmax .0921", "esasrec": "eSASRec .0928"}


def quality_rows() -> Iterator[Row]:
    for ties, order in ORDERS.items():
        for model in MODELS:
            found = ml1m(model, ties)
            if found:
                title = f"HR@10 on MovieLens-1M, equal times in {order}, {model}, 101 epochs, {seeds(found)}"
                published = PUBLISHED.get((ties, model))
                reference = f"published in this order: {published}" if published else "none published in this order"
                yield title, shown(found, "hr@10, 95 % over users"), reference, f"quality_ml1m.py --models {model}"
    for one in records("quality_ml1m", lambda settings: settings["model"] == "hstu, one update old minus exact")[-1:]:
        stale = one["figures"]["hr@10"]
        low, high = stale["95 %"]
        title = "HR@10 of HSTU on MovieLens-1M in file order, rows stale by one step minus exact, 20 epochs; range: 95 %, paired by user"
        reference = "first epoch exact; every row of a batch is also in the previous batch"
        yield title, f"{stale['difference']:+.4f} ({low:+.4f} to {high:+.4f})", reference, "quality_ml1m.py --stale"
    for arm, note in BEAUTY.items():
        found = beauty(arm)
        if found:
            title = f"HR@10 on Amazon Beauty, {arm}, {seeds(found)}"
            yield title, shown(found, "hr@10, 95 %"), note, f"quality_beauty.py --arms {arm}"


def ml1m(model: str, ties: str) -> list[Figures]:
    """The figures of a full training whose last items were ranked, one for each seed; not those of a choice of settings."""

    def is_test(settings: Figures) -> bool:
        if settings["model"] != model or settings.get("ties", FILE) != ties or "config" not in settings:
            return False
        return bool(settings["config"]["train"]["epochs"] == 101 and not settings["config"]["data"]["validation"])

    return _by_seed("quality_ml1m", is_test)


def beauty(arm: str) -> list[Figures]:
    """The figures of an arm, one for each seed."""
    return _by_seed("quality_beauty", lambda settings: settings["arm"] == arm)


def shown(found: list[Figures], interval: str) -> str:
    """Mean and deviation over seeds; of one seed its value and the 95 % interval over users."""
    low, high = found[0][interval]
    users = f" ({low:.4f}-{high:.4f} over users)" if len(found) == 1 else ""
    return mean_and_deviation([one["hr@10"] for one in found]) + users


def seeds(found: list[Figures]) -> str:
    return f"{len(found)} seeds" if len(found) > 1 else "one seed"


def _by_seed(name: str, keep: Callable[[Figures], bool]) -> list[Figures]:
    """The last figures of each seed, of the records with the settings of the last one."""
    wanted = records(name, keep)
    last = json.dumps(wanted[-1]["settings"], sort_keys=True) if wanted else ""
    own = {one["seed"]: one["figures"] for one in wanted if json.dumps(one["settings"], sort_keys=True) == last}
    return [own[seed] for seed in sorted(own)]
