"""A run's checkpoint, opened for serving: weights from safetensors, tables in mapped files, nothing of the training world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nestpipe import checkpoint
from nestpipe.checkpoint import Manifest
from nestpipe.checkpoint_facts import bucket_files
from nestpipe.data.batches import BatchBuilder
from nestpipe.data.sequences import Sequences
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.optim import OPTIMIZERS
from nestpipe.embedding.spec import Lookup, Rows, TableSpec
from nestpipe.embedding.table import Table
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.models.build import build_model, inputs_of
from nestpipe.models.prefix import describe_statistics
from nestpipe.models.ranker import Ranker
from nestpipe.models.ranking import Ranking
from nestpipe.run import Run
from nestpipe.serve.prefix import Served


class Tables:
    """Tables that are only read; an id without a row shows its initial value, as in training."""

    def __init__(self, tables: Mapping[str, Table]):
        self._tables = dict(tables)

    def rows(self, lookups: Mapping[str, Lookup]) -> dict[str, Rows]:
        """Every id finds a row of its own: for the few of a request, looking for equal ones costs more than it saves."""
        found = {}
        for table in {lookup.table for lookup in lookups.values()}:
            own = {name: lookup for name, lookup in lookups.items() if lookup.table == table}
            ids = torch.cat([lookup.ids.flatten() for lookup in own.values()])
            unique, places = self._tables[table].peek(ids), torch.arange(len(ids))
            for (name, lookup), index in zip(
                own.items(), places.split([lookup.ids.numel() for lookup in own.values()]), strict=True
            ):
                found[name] = Rows(unique, index.reshape(lookup.ids.shape), lookup)
        return found


def open_served(
    run: Run, *, step: int | None = None, label: str = "", folder: Path, memory_bytes: int = 1 << 30
) -> Served:
    """A checkpoint of a run, by default the best one if it validated, else the latest; rows lie in files in `folder`."""
    parent = run.checkpoints
    place = checkpoint.best_folder(parent) if step is None else checkpoint.folder_of(parent, step)
    manifest = Manifest.read(place)
    model = build_model(run.config, run.sequences)
    if not isinstance(model, Ranking):
        raise ConfigError(
            f"{run.folder} has a model of kind '{type(run.config.model).__name__}', which has no histories with candidates to rank. "
            "Serve a run of a ranking recipe such as ml1m_ranking."
        )
    if label and label not in (names := [one.name for one in model.tasks.labels]):
        raise ConfigError(f"the model of {run.folder} has no label '{label}' to order by; it has {names}.")
    load_dense(model, place, manifest)
    folder.mkdir(parents=True, exist_ok=True)
    config = EmbeddingConfig(optimizer="sgd", tier="mmap", mmap_folder=str(folder), memory_bytes=memory_bytes)
    tables = {spec.name: open_table(spec, config, run.config.seed, place, manifest) for spec in model.tables}
    statistics = run.statistics()
    ranker = Ranker(model, Tables(tables).rows, weights=manifest.digest, schema=describe_statistics(statistics))
    builder = BatchBuilder(
        without_events(run.sequences), None, inputs_of(run.config, run.sequences), statistics=statistics
    )
    name = f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}"
    return Served(ranker, builder, name=name, label=label, block=run.config.data.truncate_block)


def without_events(sequences: Sequences) -> Sequences:
    """What says how events are read, and none of them: whatever stays mapped here could not be forgotten."""
    nothing = np.empty(0, np.int64)
    return replace(
        sequences,
        users=nothing,
        offsets=np.zeros(1, np.int64),
        items=nothing,
        times=None if sequences.times is None else nothing,
        catalogue=nothing,
        event_features={},
        item_features={},
        user_features={},
    )


def load_dense(model: nn.Module, folder: Path, manifest: Manifest) -> None:
    """The weights of a checkpoint, which nothing will train; raises CheckpointError if one is missing or another."""
    found = checkpoint.read(folder, manifest, "dense", lambda key: key.startswith("weights."))
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        weights = found.get(f"weights.{name}")
        if weights is None or weights.shape != parameter.shape:
            seen = "nothing" if weights is None else list(weights.shape)
            raise CheckpointError(
                f"{folder} has {seen} for '{name}', but the configuration of the run asks for {list(parameter.shape)}."
            )
        parameter.copy_(weights)
    for name, buffer in model.named_buffers():
        if (saved := found.get(f"weights.{name}")) is not None:  # such as the snapshot that events are chosen by
            buffer.copy_(saved)


def open_table(spec: TableSpec, config: EmbeddingConfig, seed: int, folder: Path, manifest: Manifest) -> Table:
    """The index first, then one bucket of rows after the other: a table may be larger than the memory."""
    table = Table(spec, OPTIMIZERS[config.optimizer](config), seed=seed, config=config)
    files = [file.removesuffix(".safetensors") for file in bucket_files(manifest).get(spec.name, [])]
    ids = [checkpoint.read(folder, manifest, file, lambda key: key == "ids")["ids"] for file in files]
    table.load_index({"ids": torch.cat([torch.empty(0, dtype=torch.int64), *ids])})
    for file in files:
        table.load_rows(checkpoint.read(folder, manifest, file, lambda key: key in {"ids", "rows"}, verify=False))
    return table
