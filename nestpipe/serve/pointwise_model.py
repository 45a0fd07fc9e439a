"""A run of a model without histories (DCN), opened for serving: items are scored from features of user and item."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences
from nestpipe.embedding.row_reader import TableRows
from nestpipe.errors import ConfigError
from nestpipe.jagged import Batch
from nestpipe.models.build_model import inputs_of
from nestpipe.models.dcn import DCN
from nestpipe.serve.known_items import Ints, KnownItems, known_items
from nestpipe.serve.model import rows_in_files, without_events
from nestpipe.training.run_folder import Run


class PointwiseModel:
    """A model in use; candidates are ordered by `label`."""

    def __init__(
        self, model: DCN, rows: TableRows, builder: BatchBuilder, known: KnownItems, *, name: str, label: str = ""
    ):
        self._model, self._rows, self._builder = model, rows, builder
        self.known, self.name = known, name
        self._column = [one.name for one in model.tasks.labels].index(label) if label else 0

    def prepare(self, events: Sequences, items: Sequence[int] | Ints, sequences: Sequences) -> Batch:
        """Items as events of a user that have not happened, with the features of the catalogue; raises DataError.

        Nothing of the history is read but the user and their features.
        """
        user = self._builder.request(events, len(events.items), query_s=None)
        return self._builder.over(sequences).candidate_events(user, np.asarray(items, np.int64))

    @torch.no_grad()
    def scores(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The predictions of the label for the items of each batch, in one call."""
        joined = Batch.concat(batches)
        logits = self._model.event_scores(self._rows.read_each(self._model.event_lookups(joined)), joined)
        column = self._model.tasks.predict(logits)[:, self._column]
        return list(column.split([one.num_tokens for one in batches]))


def open_pointwise(
    run: Run, *, step: int | None = None, label: str = "", folder: Path, memory_bytes: int = 1 << 30
) -> PointwiseModel:
    """A checkpoint of a run, by default the best validated one, else the latest; its tables are files in `folder`."""
    loaded = run.load_model(step, rows=rows_in_files(folder, memory_bytes))
    model, manifest = loaded.model, loaded.manifest
    if not isinstance(model, DCN):
        raise ConfigError(f"{run.folder} has a model of kind '{type(model).__name__}', which is not pointwise.")
    if label and label not in (names := [one.name for one in model.tasks.labels]):
        raise ConfigError(f"the model of {run.folder} has no label '{label}' to order by; it has {names}.")
    inputs = inputs_of(run.config, run.sequences)
    return PointwiseModel(
        model,
        loaded.rows,
        BatchBuilder(without_events(run.sequences), None, inputs, statistics=run.statistics()),
        known_items(run, loaded),
        name=f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}",
        label=label,
    )
