"""A trained run in Python: recommendations as frames in own ids, similar items, evaluation.

run = nestpipe.load("runs/shop")
run.recommend(["alice", "bob"], k=10)      user, rank, item, score, path
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from nestpipe.atomic_files import replace_file
from nestpipe.data.vocabulary import OwnId
from nestpipe.errors import ConfigError
from nestpipe.eval.catalogue_predictor import Recommendation
from nestpipe.eval.eval_report import EvalReport
from nestpipe.eval.label_report import LabelReport
from nestpipe.eval.list_metrics import with_list_metrics
from nestpipe.eval.predictor import Predictor
from nestpipe.rules.rule_set import Rules
from nestpipe.training.run_folder import Run

DATA = "data"  # the sequence folder inside a saved run
_NOT_SAVED = {DATA, "serve", "lock"}  # copied from where it is; a service's own; a process's own


class TrainedRun:
    """A run folder that answers. Ids in and out are those of the log."""

    def __init__(self, run: Run, *, step: int | None = None):
        self.run = run
        self._step = step

    @property
    def folder(self) -> Path:
        return self.run.folder

    @cached_property
    def predictor(self) -> Predictor:
        """The model behind it; opened when it is first needed."""
        return self.run.predictor(self._step)

    @cached_property
    def users(self) -> list[OwnId]:
        """All users of the log."""
        return self.run.sequences.vocabulary("user").own_ids(self.run.sequences.users)

    @cached_property
    def items(self) -> list[OwnId]:
        """The catalogue."""
        return self.run.sequences.vocabulary("item").own_ids(self.run.sequences.catalogue)

    def recommend(
        self, users: OwnId | Iterable[OwnId], k: int = 10, *, rules: Rules | Mapping[str, Any] | None = None
    ) -> pl.DataFrame:
        """The best k items that each user has not had: columns user, rank, item, score, path.

        `rules` are those of a request, such as {"filter": {"category": "lamp"}, "max_per": {"brand": 2}}.
        """
        asked = [users] if isinstance(users, str | int | np.integer) else list(users)
        return recommendation_frame(asked, self.predictor.recommend_all(asked, k, rules=rules))

    def similar(self, item: OwnId, k: int = 10, *, rules: Rules | Mapping[str, Any] | None = None) -> pl.DataFrame:
        """The k items whose vectors point most in the direction of an item's: columns rank, item, score."""
        found = self.predictor.similar(item, k, rules=rules)
        return recommendation_frame([item], iter([found])).select("rank", "item", "score")

    def evaluate(self) -> EvalReport | LabelReport:
        """Metrics on the held-out targets of the log, with intervals."""
        found = self.predictor.evaluate(progress=False)
        if isinstance(found, LabelReport):
            return found
        return with_list_metrics(found, self.run.sequences, self.run.split, self.run.config)

    def save(self, folder: str | Path) -> TrainedRun:
        """Copies the run and its data into a folder of their own, where every command finds them; returns the copy."""
        target = Path(folder)
        if target.exists():
            raise ConfigError(f"{target} exists already; name a new folder, nothing was written.")
        draft = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        config = self.run.config
        moved = replace(config, data=replace(config.data, path=str((target / DATA).resolve())))
        try:
            draft.mkdir(parents=True)
            for path in self.run.folder.iterdir():
                if path.name not in _NOT_SAVED:
                    (shutil.copytree if path.is_dir() else shutil.copy2)(path, draft / path.name)
            shutil.copytree(self.run.sequences.path, draft / DATA)
            replace_file(draft / "config.json", moved.to_json().encode())
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return load(target, step=self._step)


def load(folder: str | Path, *, step: int | None = None) -> TrainedRun:
    """A run for recommendations: by default its best checkpoint if it validated, else the latest."""
    return TrainedRun(Run.open(folder), step=step)


def recommendation_frame(users: Sequence[OwnId], found: Iterator[Recommendation]) -> pl.DataFrame:
    """Recommendations as rows: user, rank, item, score, path."""
    lists = [next(found) for _ in users]
    return pl.DataFrame(
        {
            "user": _ids([user for user, one in zip(users, lists, strict=True) for _ in one.items]),
            "rank": pl.Series([place for one in lists for place in range(1, len(one.items) + 1)], dtype=pl.Int64),
            "item": _ids([item for one in lists for item in one.items]),
            "score": pl.Series([score for one in lists for score in one.scores], dtype=pl.Float32),
            "path": pl.Series([one.path for one in lists for _ in one.items], dtype=pl.String),
        }
    )


def _ids(own: list[OwnId]) -> pl.Series:
    """Own ids as a column: numbers if all are, else texts."""
    is_text = any(isinstance(one, str) for one in own)
    return pl.Series([str(one) if is_text else int(one) for one in own], dtype=pl.String if is_text else pl.Int64)
