"""Quality over the length of the history that is served, on data where long histories matter: why anybody wants the relay.

Every user likes each item or not, for good; a label repeats that, and is wrong in one of ten events. Items are drawn at random, so
what a user did with a candidate before may be far back: with 200 items the last 32 events contain it in 15 % of the requests, the
last 512 in 92 %. One HSTU ranker is trained on whole histories; then each user's last event is ranked from the last 32, 64, ... events
before it. *AUC* is over the last labels of all users. The bound is the AUC of who knows those events and counts.

    python benchmarks/history_quality.py            # about 6 minutes on a quiet machine
    python benchmarks/history_quality.py --quick    # a small world, nothing is recorded
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import measure
import numpy as np
import polars as pl
import torch

from nestpipe import recipes
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.eval.label_metrics import auc
from nestpipe.models.config import RankingConfig
from nestpipe.serve.model import open_served
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.user_history import of_user, stored
from nestpipe.training.loop import train
from nestpipe.training.run_folder import Run

SEED, START_S, WRONG = 0, 1_700_000_000, 0.1


@dataclass(frozen=True, slots=True)
class LikeWorld:
    """Items [users, events] and labels [users, events] of a log."""

    items: np.ndarray
    liked: np.ndarray

    @staticmethod
    def draw(num_users: int, num_events: int, num_items: int) -> LikeWorld:
        random = np.random.default_rng(SEED)
        likes = random.random((num_users, num_items)) < 0.5
        items = random.integers(0, num_items, (num_users, num_events))
        liked = np.take_along_axis(likes, items, axis=1) ^ (random.random(items.shape) < WRONG)
        return LikeWorld(items, liked)

    def log(self) -> pl.DataFrame:
        num_users, num_events = self.items.shape
        return pl.DataFrame(
            {
                "user": np.repeat(np.arange(num_users), num_events),
                "item": self.items.ravel(),
                "time": np.tile(START_S + 600 * np.arange(num_events), num_users),
                "liked": self.liked.ravel().astype(np.float32),
            }
        )

    def bound(self, length: int) -> float:
        """AUC of the labels of the candidate in the last events before it, counted."""
        before, signs = self.items[:, -1 - length : -1], 2.0 * self.liked[:, -1 - length : -1] - 1
        votes = (signs * (before == self.items[:, -1:])).sum(1)
        return auc(votes, self.liked[:, -1].astype(np.float64))


def trained(world: LikeWorld, folder: Path, *, epochs: int) -> Run:
    """A ranker of all events but the last of each user."""
    num_events = world.items.shape[1]
    schema = Schema(
        features=(Feature(name="liked", kind="number"),), labels=(Label(name="like", kind="binary", feature="liked"),)
    )
    write_sequences(folder / "data", schema=schema, log=world.log())
    base = recipes.ml1m_ranking()
    data = replace(
        base.data,
        path=str(folder / "data"),
        split="last",
        split_time=None,
        max_len=num_events,
        truncate_block=max(num_events // 4, 10),
        batch_size=16,
    )
    model = RankingConfig(dim=64, num_blocks=2, num_heads=2, qk_dim=32, v_dim=32, dropout=0.0)
    own = replace(base.train, epochs=epochs, decay_epochs=epochs, save_steps=10_000)
    return train(replace(base, data=data, model=model, train=own), folder / "run", quiet=True)


def served_auc(served: ServedModel, run: Run, world: LikeWorld, length: int) -> float:
    """AUC of the last labels, each ranked from so many events before it."""
    own, scores = run.sequences, []
    offsets = own.offsets.tolist()
    for user in range(len(world.items)):
        first, last = offsets[user], offsets[user + 1]
        events = of_user(own, int(own.users[user]), stored(own, np.arange(first, last - 1)))
        assert own.times is not None
        inputs = served.shorter(served.prepare(events, int(own.times[last - 1]) // 1000), length)
        candidates = served.candidates([int(own.items[last - 1])], own)
        (found,) = served.scores([inputs], [candidates])
        scores.append(float(found[0]))
    return auc(np.array(scores), world.liked[:, -1].astype(np.float64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small world, nothing is recorded")
    parser.add_argument("--epochs", type=int, default=0)
    options = parser.parse_args()
    num_users, num_events, num_items = (150, 64, 20) if options.quick else (1500, 512, 200)
    epochs = options.epochs or (2 if options.quick else 8)
    torch.manual_seed(SEED)
    world = LikeWorld.draw(num_users, num_events + 1, num_items)
    lengths = [one for one in (8, 16, 32, 64, 128, 256, 512) if num_events // 16 <= one <= num_events]
    with tempfile.TemporaryDirectory() as name:
        run = trained(world, Path(name), epochs=epochs)
        served = open_served(run, folder=Path(name) / "rows")
        found = {length: served_auc(served, run, world, length) for length in lengths}
    rows = [[f"{length:,}", f"{one:.4f}", f"{world.bound(length):.4f}"] for length, one in found.items()]
    print(measure.table(["events served", "AUC", "bound"], rows))
    figures = {
        **{f"auc {length}": round(one, 4) for length, one in found.items()},
        **{f"bound {length}": round(world.bound(length), 4) for length in found},
        "auc_longest_minus_shortest": round(found[lengths[-1]] - found[lengths[0]], 4),
    }
    if not options.quick:
        settings = {"users": num_users, "events": num_events, "items": num_items, "epochs": epochs}
        measure.append("history_quality", measure.record(seed=SEED, figures=figures, settings=settings))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
