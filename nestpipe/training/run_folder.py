"""A run folder: configuration, data digest, versions, checkpoints. Opening one needs no process group.

RUN/config.json   run.json (data digest, versions, machine)   metrics.jsonl   checkpoints/   eval/   tensorboard/   profile/
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe.atomic_files import replace_file
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.origin import Origin
from nestpipe.checkpoint.places import Place, run_checkpoints
from nestpipe.checkpoint.reader import load_table, load_weights
from nestpipe.config import FORMAT, Config, flat, upgraded_optimizer
from nestpipe.data.features import NumberStats
from nestpipe.data.item_feature_rows import catalogue_texts, text_columns
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split, make_split
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.row_reader import TableRows
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.eval.config import EvalConfig
from nestpipe.eval.predictor import Predictor, make_predictor
from nestpipe.eval.protocol import protocol_of
from nestpipe.generative.item_vectors import vectors_for
from nestpipe.generative.scenario_triggers import with_trigger_rules
from nestpipe.generative.scenarios import FILE as SCENARIO_FILE
from nestpipe.generative.scenarios import Scenario, Scenarios, scenario_numbers
from nestpipe.generative.semantic_ids import Registry
from nestpipe.generative.text_encoder import cache_folder, encode_texts
from nestpipe.generative.training_instructions import open_store
from nestpipe.generative.trie import Trie
from nestpipe.models.build_model import build_model
from nestpipe.models.config import EncDecConfig
from nestpipe.models.contract import Model
from nestpipe.registry import entry_of

# Settings that may change when a run is resumed: limits, reporting, paths, scheduling. All others affect the results.
FREE_KEYS = (
    *("data.path", "model.ids", "model.scenarios", "model.instructions", "model.start", "model.ranker"),
    *("train.epochs", "train.steps", "train.minutes", "train.save_steps", "train.keep_last", "train.log_steps"),
    *("train.device", "train.tensorboard", "train.async_save", "train.max_deltas", "train.checkpoints"),
    *("pipeline.groups", "pipeline.mode"),
    *(f"pipeline.advanced.{name}" for name in ("depth", "rows", "chunks", "trace_steps")),
    *("embedding.tier", "embedding.files_folder", "embedding.buffer_bytes", "embedding.device_bytes"),
    *(f"eval.{field.name}" for field in fields(EvalConfig)),
)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """The model of a checkpoint, its rows and its manifest."""

    model: Model
    rows: TableRows
    manifest: Manifest


@dataclass(frozen=True)
class Run:
    """A run folder and its configuration; data and model are opened on first use."""

    folder: Path
    config: Config
    origin: Origin | None = None  # the checkpoint it was initialised from
    asked: Config | None = None  # as configured, if `config` has chosen settings in its place

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether the folder holds a run."""
        return (Path(folder) / "config.json").exists()

    @staticmethod
    def create(config: Config, folder: str | Path, *, origin: Origin | None = None) -> Run:
        """A run in a new folder, which `write` creates; raises ConfigError if there is one already."""
        config.validate()
        run = Run(Path(folder), config, origin)
        if Run.exists(folder) or checkpoint_folders.complete_steps(run.folder / "checkpoints"):
            raise ConfigError(
                f"{run.folder} already holds a run; add --resume to continue it, or give another folder with --run."
            )
        return run

    @staticmethod
    def open(folder: str | Path, *, data_path: str | None = None) -> Run:
        """An existing run, with its data at the recorded path by default; raises CheckpointError if the data differs."""
        config = Config.load(Path(folder) / "config.json")
        if data_path is not None:
            config = replace(config, data=replace(config.data, path=data_path))
        facts = read_facts(Path(folder))
        origin = facts.get("init_from")
        run = Run(Path(folder), config, Origin.from_json(origin) if origin else None)
        started = facts["data_digest"]
        if run.sequences.digest not in {started, facts.get("next_digest")} and not run.sequences.grew_from(started):
            raise CheckpointError(
                f"{run.folder} was trained on other data: {run.config.data.path} now has digest "
                f"{run.sequences.digest[:12]}, the run started with {started[:12]}."
            )
        return run

    def check_same_data(self) -> None:
        """Raises CheckpointError if the sequence folder has grown since the run started: resuming would mix two logs."""
        started = read_facts(self.folder)["data_digest"]
        if self.sequences.grew_from(started):
            raise CheckpointError(
                f"{self.config.data.path} has grown since {self.folder} was started (digest {started[:12]}, now "
                f"{self.sequences.digest[:12]}), so it cannot be resumed. Start a new run with --init-from {self.folder}."
            )

    def write(self, *, statistics: Mapping[str, NumberStats], facts: Mapping[str, Any]) -> None:
        """Writes config.json, and run.json: data digest, versions, feature statistics, and `facts` about this start."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        content = {
            **facts,
            "data_digest": self.sequences.digest,
            "protocol": asdict(protocol_of(self.sequences, self.config, "test")),
            "statistics": {name: stats.to_json() for name, stats in statistics.items()},
            "versions": versions(),
            "init_from": asdict(self.origin) if self.origin else None,
            "instructions": self.settings.get("instructions", ""),
        }
        if self.scenarios is not None:
            replace_file(self.folder / SCENARIO_FILE, self.scenarios.to_json().encode())
        replace_file(self.folder / "run.json", (json.dumps(content, indent=2) + "\n").encode())
        replace_file(self.folder / "config.json", (self.asked or self.config).to_json().encode())

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences.open(self.config.data.path)

    @cached_property
    def instructed(self) -> Sequences:
        """The log as it is trained and evaluated: with the trigger rules of the run's scenarios, and with its instructions."""
        steered = (
            self.sequences if self.scenarios is None else with_trigger_rules(self.sequences, self.scenario_records)
        )
        store = getattr(self.config.model, "instructions", "")
        return open_store(store).attach(steered) if store else steered

    def _instructions_digest(self, store: str) -> str:
        """Of the store, or, where it is gone, the one that the run was started with."""
        if Path(store).exists() or not (self.folder / "run.json").exists():
            return open_store(store).digest()
        return str(read_facts(self.folder).get("instructions", ""))

    @cached_property
    def split(self) -> Split:
        return make_split(self.sequences, self.config.data)

    def statistics(self) -> dict[str, NumberStats]:
        """Statistics of the number features, fitted when the run started."""
        fitted = read_facts(self.folder).get("statistics", {})
        return {name: NumberStats.from_json(one) for name, one in fitted.items()}

    @cached_property
    def semantic_ids(self) -> Trie | None:
        """The semantic ids of the catalogue, if the model generates them."""
        model = self.config.model
        if not isinstance(model, EncDecConfig):
            return None
        return Registry.load(model.ids).trie_of(self.sequences)

    def item_statistics(self) -> dict[str, NumberStats] | None:
        """Statistics of the numbers among the item features, fitted when the run started; None before that."""
        if not (self.folder / "run.json").exists():
            return None
        fitted = read_facts(self.folder).get("item_statistics")
        return None if fitted is None else {name: NumberStats.from_json(one) for name, one in fitted.items()}

    @cached_property
    def item_texts(self) -> Tensor | None:
        """Vectors [I, W] of the items' texts, if the model compares them with instructions."""
        model = self.config.model
        if not isinstance(model, EncDecConfig) or not (model.compares and model.igr_texts):
            return None
        return vectors_for(Registry.load(model.ids), self.sequences)

    @cached_property
    def text_vectors(self) -> dict[str, Tensor]:
        """Vectors [I, D] of the item texts that the model reads, by column."""
        names = text_columns(self.sequences.schema, getattr(self.config.model, "item_features", ()))
        return {name: self.embedded(catalogue_texts(self.sequences, name)) for name in names}

    def embedded(self, texts: Sequence[str]) -> Tensor:
        """Vectors of texts [n, D] by the run's text encoder."""
        whole = len(texts) >= len(self.sequences.catalogue)  # of the catalogue, not of one new item
        return encode_texts(texts, encoder=self.config.model.text_encoder, cache=cache_folder() if whole else None)[0]

    @cached_property
    def scenarios(self) -> Scenarios | None:
        """The scenario file of a generative run, of which the folder keeps a copy."""
        model, kept = self.config.model, self.folder / SCENARIO_FILE
        if not isinstance(model, EncDecConfig) or not (model.scenarios or kept.exists()):
            return None
        return Scenarios.load(kept if kept.exists() else Path(model.scenarios))

    @cached_property
    def scenario_records(self) -> list[Scenario]:
        """The record of each scenario of a generative run, by number; with defaults where there is no file."""
        numbers = scenario_numbers(self.sequences, self.config.model.num_scenarios)
        if self.scenarios is None:
            return [Scenario(name=name) for name in numbers] or [Scenario(name="all")]
        return self.scenarios.by_number(numbers, str(self.sequences.path))

    def identity(self) -> dict[str, str]:
        """What must be equal on every rank: versions, code, data, configuration without paths."""
        paths = {"data.path", *(f"model.{name}" for name in ("ids", "scenarios", "instructions", "start", "ranker"))}
        settings = {key: repr(value) for key, value in flat(self.config).items() if key not in paths}
        facts = {"code of nestpipe": _code_digest()[:12], "data": self.sequences.digest[:12]}
        if not (entry := entry_of(self.config.model)).is_own:
            facts[f"code of {entry.kind}"] = hashlib.sha256(_source(entry.load())).hexdigest()[:12]
        if self.origin:
            facts["init_from"] = self.origin.digest[:12]
        return {**{f"version of {name}": one for name, one in versions().items()}, **facts, **settings, **self.settings}

    @property
    def settings(self) -> dict[str, str]:
        """All settings that affect the results; stored in every checkpoint."""
        facts = {"model": entry_of(self.config.model).kind, "format": str(FORMAT)}
        if self.semantic_ids is not None:
            facts["semantic ids"] = f"{self.semantic_ids.version}/{self.semantic_ids.digest}"
        if self.scenarios is not None:
            facts["scenarios"] = self.scenarios.digest
        if store := getattr(self.config.model, "instructions", ""):
            facts["instructions"] = self._instructions_digest(store)
        asked = flat(self.asked or self.config)
        return {**facts, **{key: repr(one) for key, one in asked.items() if key not in FREE_KEYS}}

    @property
    def checkpoints(self) -> Place:
        """Where the checkpoints are: in the folder, or at the URL that the run saves to."""
        return run_checkpoints(self.folder, self.config.train.checkpoints)

    def checkpoint(self, step: int | None = None) -> tuple[Place, Manifest]:
        """The folder and manifest of a checkpoint: by default the best one if the run validated, else the latest."""
        parent = self.checkpoints
        folder = (
            checkpoint_folders.best_checkpoint(parent)
            if step is None
            else checkpoint_folders.checkpoint_folder(parent, step)
        )
        return folder, Manifest.read(folder)

    def load_model(
        self, step: int | None = None, *, rows: EmbeddingConfig | None = None, ids: Trie | None = None
    ) -> LoadedModel:
        """The model of a checkpoint for inference, without process groups; raises CheckpointError.

        `rows` configures where rows are stored [default: as in training], `ids` which semantic ids to use [default: the latest].
        """
        folder, manifest = self.checkpoint(step)
        if ids is None:
            self.check_settings(folder, manifest)
        model = self.build_model(ids=ids)
        load_weights(cast(nn.Module, model), folder, manifest)
        own = self.config.embedding
        config = rows or EmbeddingConfig(
            optimizer="sgd", tier=own.tier, files_folder=own.files_folder, buffer_bytes=own.buffer_bytes
        )  # sgd has no state to load
        tables = {spec.name: load_table(spec, config, self.config.seed, folder, manifest) for spec in model.tables}
        return LoadedModel(model, TableRows(tables), manifest)

    def build_model(self, *, ids: Trie | None = None) -> Model:
        """The model with its initial weights; item features are transformed as when the run started."""
        return build_model(
            self.config,
            self.sequences,
            ids=ids or self.semantic_ids,
            igr_text=self.item_texts,
            texts=self.text_vectors,
            embed=self.embedded,
            statistics=self.item_statistics(),
        )

    def check_settings(self, folder: Place, manifest: Manifest) -> None:
        """Raises CheckpointError if a checkpoint was saved with other settings than those of this run."""
        before, now = dict(manifest.progress.get("settings", {})), self.settings
        if "format" not in before and (optimizer := before.get("embedding.optimizer")):
            before["embedding.optimizer"] = upgraded_optimizer(optimizer)
        changed = [f"{key}: {before[key]} -> {now[key]}" for key in before if before[key] != now.get(key, before[key])]
        if changed:
            raise CheckpointError(
                f"{folder} was saved with another configuration than that of {self.folder}; it belongs to another run:\n"
                + "\n".join(f"  - {line}" for line in changed)
            )

    def predictor(self, step: int | None = None) -> Predictor:
        """Scores with a checkpoint: by default the best one if the run validated, else the latest."""
        loaded = self.load_model(step)
        return make_predictor(loaded.model, loaded.rows, self.instructed, self.split, self.config)


def read_facts(folder: Path) -> dict[str, Any]:
    """The content of run.json; raises CheckpointError if it is missing or damaged."""
    path = folder / "run.json"
    try:
        facts = json.loads(path.read_text())
        if isinstance(facts["data_digest"], str):
            return dict(facts)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(f"{path} is missing or damaged, so the training data of the run is unknown.")


def _code_digest() -> str:
    """Digest of all source files of the package, native ones included."""
    package = Path(nestpipe.__file__).parent
    content = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.cpp", "*.h") for path in package.rglob(kind)):
        content.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return content.hexdigest()


def _source(cls: type[Any]) -> bytes:
    """The source file of a class; empty if it has none, as in a notebook."""
    try:
        return Path(inspect.getfile(cls)).read_bytes()
    except (OSError, TypeError):
        return b""


def versions() -> dict[str, str]:
    """The versions that can affect the results of a run."""
    return {
        "nestpipe": version("nestpipe"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "polars": polars.__version__,
        "machine": platform.machine(),
    }
