"""Opens the checkpoint of a ranking run for serving: weights from safetensors, embedding tables in mapped files."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from nestpipe.data.batch_builder import BatchBuilder
from nestpipe.data.sequences import Sequences
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.errors import ConfigError
from nestpipe.models.build_model import inputs_of
from nestpipe.models.config import RankingConfig
from nestpipe.models.kv_prefix import describe_statistics
from nestpipe.models.prefix_inference import Ranker
from nestpipe.models.ranking import Ranking
from nestpipe.rules.item_attributes import without_arrays
from nestpipe.serve.known_items import known_items
from nestpipe.serve.known_rows import KnownRows
from nestpipe.serve.prefill import ServedModel
from nestpipe.training.run_folder import Run


def open_served(
    run: Run,
    *,
    step: int | None = None,
    label: str = "",
    folder: Path,
    memory_bytes: int = 1 << 30,
    device: torch.device | None = None,
) -> ServedModel:
    """A checkpoint of a run, by default the best validated one, else the latest; its tables are files in `folder`.

    The model and its KV prefixes are on `device` [default: the CPU].
    """
    if not isinstance(run.config.model, RankingConfig):
        raise ConfigError(
            f"{run.folder} has a model of kind '{type(run.config.model).__name__}', which has no histories with candidates to rank. "
            "Serve a run of a ranking recipe such as ml1m_ranking."
        )
    loaded = run.load_model(step, rows=rows_in_files(folder, memory_bytes))
    model, manifest = cast(Ranking, loaded.model), loaded.manifest
    if label and label not in (names := [one.name for one in model.tasks.labels]):
        raise ConfigError(f"the model of {run.folder} has no label '{label}' to order by; it has {names}.")
    statistics = run.statistics()
    rows = KnownRows(loaded.rows, run.sequences.catalogue)
    schema = describe_statistics(statistics)
    ranker = Ranker(model, rows.read_each, weights=manifest.digest, schema=schema, device=device)
    builder = BatchBuilder(
        without_events(run.sequences), None, inputs_of(run.config, run.sequences), statistics=statistics
    )
    name = f"{run.folder.name}/step-{manifest.step}/{manifest.digest[:12]}"
    known = known_items(run, loaded)
    return ServedModel(ranker, builder, known, name=name, label=label, block=run.config.data.truncate_block)


def rows_in_files(folder: Path, memory_bytes: int) -> EmbeddingConfig:
    """Tables in files, with at most this much memory per table."""
    folder.mkdir(parents=True, exist_ok=True)
    return EmbeddingConfig(optimizer="sgd", tier="files", files_folder=str(folder), buffer_bytes=memory_bytes)


def without_events(sequences: Sequences) -> Sequences:
    """The schema and encodings without events: a mapped file that stays open could not be forgotten."""
    return without_arrays(sequences)
