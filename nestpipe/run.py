"""A run folder: what was asked for, what it was trained on, and the checkpoints.

RUN/config.json   run.json (data digest, versions, machine)   metrics.jsonl   checkpoints/   eval/   tensorboard/   profile/
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars
import torch
from torch import Tensor

from nestpipe import checkpoint, warm_start
from nestpipe.checkpoint import Manifest
from nestpipe.comm import Lane, World
from nestpipe.config import Config, flat
from nestpipe.data.numbers import NumberStats
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import Split, make_split
from nestpipe.embedding.groups import Replicas, join
from nestpipe.embedding.held import Holder, InPlace, Pool
from nestpipe.embedding.lagging import Kept, Lagging, split_kept
from nestpipe.embedding.optim import OPTIMIZERS
from nestpipe.embedding.owner import Owners
from nestpipe.embedding.sharded import Sharded
from nestpipe.embedding.table import Table
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.instruct.semantic_ids import Registry
from nestpipe.instruct.trie import Trie
from nestpipe.metrics import replace_file
from nestpipe.mirror import local_copy
from nestpipe.models.build import build_model
from nestpipe.models.encdec_config import EncDecConfig
from nestpipe.pipeline.dense import Dense
from nestpipe.pipeline.stages import TrainState
from nestpipe.scoring import AnyScorer, make_scorer
from nestpipe.warm_start import Origin

# Limits, reporting and where things lie may differ when a run goes on; everything else decides the bits.
FREE_KEYS = (
    "data.path",
    "model.ids",
    "train.epochs",
    "train.steps",
    "train.minutes",
    "train.save_steps",
    "train.keep_last",
    "train.log_steps",
    "train.tensorboard",
    "train.async_save",
    "train.mirror",
    "pipeline.groups",
    "pipeline.mode",
    "pipeline.depth",
    "pipeline.rows",
    "pipeline.split",
    "pipeline.slices",
    "pipeline.tune",
    "pipeline.adapt",
    "pipeline.follow",
    "pipeline.trace_steps",
    "embedding.tier",
    "embedding.mmap_folder",
    "embedding.memory_bytes",
)
_SAVE_S = 1800.0  # one rank may have so much more to write or to copy than another


@dataclass(frozen=True, slots=True)
class Lanes:
    """The message lanes of a run. Each is used by one thread at a time: that of the saves by the saver, others by the runner."""

    control: Lane
    keys: Lane
    rows: Lane
    dense: Lane
    saves: Lane
    replicas: Replicas | None = None  # of groups; then `keys` and `rows` are those of this rank's group

    @staticmethod
    def of(world: World) -> Lanes:
        """A meeting of all ranks."""
        control, keys, rows, dense = (world.lane(name) for name in ("control", "keys", "rows", "dense"))
        return Lanes(control, keys, rows, dense, world.lane("saves", deadline_s=max(_SAVE_S, world.deadline_s)))

    def in_groups(self, num_groups: int) -> Lanes:
        """The same with all tables in each of so many groups of ranks; a meeting of all ranks."""
        if num_groups == 1:
            return self
        keys, rows, replicas = join(self.rows.world, num_groups, everyone=self.rows)
        return replace(self, keys=keys, rows=rows, replicas=replicas)


@dataclass(frozen=True)
class Run:
    """A run folder and its configuration; data and model are opened when they are first needed."""

    folder: Path
    config: Config
    origin: Origin | None = None  # the checkpoint it was initialised from

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether the folder holds a run."""
        return (Path(folder) / "config.json").exists()

    @staticmethod
    def create(config: Config, folder: str | Path, *, origin: Origin | None = None) -> Run:
        """A run in a new folder, which `write` will make; raises ConfigError if there is one already."""
        config.validate()
        run = Run(Path(folder), config, origin)
        if Run.exists(folder) or checkpoint.complete_steps(run.checkpoints):
            raise ConfigError(
                f"{run.folder} already holds a run; add --resume to go on with it, or name another folder with --run."
            )
        return run

    @staticmethod
    def open(folder: str | Path, *, data_path: str | None = None) -> Run:
        """An existing run, by default with its data where it was; raises CheckpointError if the data is another."""
        config = Config.load(Path(folder) / "config.json")
        if data_path is not None:
            config = replace(config, data=replace(config.data, path=data_path))
        facts = read_facts(Path(folder))
        origin = facts.get("init_from")
        run = Run(Path(folder), config, Origin.from_json(origin) if origin else None)
        if run.sequences.digest not in {facts["data_digest"], facts.get("next_digest")}:  # see serve/forget.py
            raise CheckpointError(
                f"{run.folder} was trained on other data: {run.config.data.path} now has digest "
                f"{run.sequences.digest[:12]}, the run started with {facts['data_digest'][:12]}."
            )
        return run

    def write(self, *, statistics: Mapping[str, NumberStats], facts: Mapping[str, Any]) -> None:
        """Writes the configuration, what else decides about the bits, and facts about this start for readers."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        content = {
            **facts,
            "data_digest": self.sequences.digest,
            "statistics": {name: stats.to_json() for name, stats in statistics.items()},
            "versions": versions(),
            "init_from": asdict(self.origin) if self.origin else None,
        }
        replace_file(self.folder / "run.json", (json.dumps(content, indent=2) + "\n").encode())
        replace_file(self.folder / "config.json", self.config.to_json().encode())

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences.open(self.config.data.path)

    @cached_property
    def split(self) -> Split:
        return make_split(self.sequences, self.config.data)

    def statistics(self) -> dict[str, NumberStats]:
        """Those of the number features, as they were fitted when the run started."""
        found = read_facts(self.folder).get("statistics", {})
        return {name: NumberStats.from_json(one) for name, one in found.items()}

    @cached_property
    def ids(self) -> Trie | None:
        """The semantic ids of the catalogue, for a model that generates them."""
        model = self.config.model
        if not isinstance(model, EncDecConfig):
            return None
        return Registry.load(model.ids).trie(torch.from_numpy(np.array(self.sequences.catalogue)))

    def identity(self) -> dict[str, str]:
        """What must be the same on every rank, by name: versions, code, data, configuration (its path apart)."""
        settings = {
            key: repr(value) for key, value in flat(self.config).items() if key not in {"data.path", "model.ids"}
        }
        facts = {"code of nestpipe": _code_digest()[:12], "data": self.sequences.digest[:12]}
        if self.origin:
            facts["init_from"] = self.origin.digest[:12]
        return {**{f"version of {name}": one for name, one in versions().items()}, **facts, **settings, **self.settings}

    @property
    def settings(self) -> dict[str, str]:
        """All settings that decide the bits; they stand in every checkpoint."""
        facts = {"model": type(self.config.model).__name__}
        if self.ids is not None:
            facts["semantic ids"] = f"{self.ids.version}/{self.ids.digest}"
        return {**facts, **{key: repr(one) for key, one in flat(self.config).items() if key not in FREE_KEYS}}

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def new_state(self, lanes: Lanes | None = None) -> TrainState:
        """The state before the first step, on one of the ranks."""
        config, lanes = self.config, lanes or Lanes.of(World.single())
        if lanes.rows.world.size > config.embedding.num_buckets:
            raise ConfigError(
                f"{lanes.rows.world.size} ranks cannot share embedding.num_buckets = {config.embedding.num_buckets}: "
                "each rank needs a bucket of its own. Start a run with more buckets, or use fewer ranks."
            )
        model = build_model(config, self.sequences, ids=self.ids)
        tables = {}
        for spec in model.tables:
            settings = spec.optimizer or config.embedding
            optimizer = OPTIMIZERS[settings.optimizer](settings)
            tables[spec.name] = Table(spec, optimizer, seed=config.seed, config=config.embedding)
        owners = Owners(config.embedding.num_buckets, lanes.rows.world.size)
        embedding = Sharded(tables, lanes.keys, lanes.rows, owners, lanes.replicas)
        embedding.holders = {name: _holder(table, config) for name, table in tables.items()}
        return TrainState(
            model=model,
            embedding=embedding,
            dense=Dense(model, config.dense, lanes.dense),
            control=lanes.control,
            seed=config.seed,
            cut=config.pipeline,
            skip_nonfinite=config.train.skip_nonfinite,
        )

    def load_state(self, step: int | None = None, lanes: Lanes | None = None) -> tuple[TrainState, Manifest]:
        """The state of a checkpoint, by default the latest, on one of the ranks; any number of ranks can load it."""
        state = self.new_state(lanes)
        embedding = state.embedding
        folder = checkpoint.folder_of(self.checkpoints, step)
        manifest = Manifest.read(folder)
        self._check_origin(folder, manifest)
        state.dense.load(checkpoint.read(folder, manifest, "dense"))
        for name, table in embedding.tables.items():
            files = [bucket_name(name, number) for number in embedding.owners.buckets_of(embedding.rank)]
            # The index first, then one bucket of rows after the other: a table may be larger than the memory.
            light = [checkpoint.read(folder, manifest, file, lambda key: not _is_of_rows(key)) for file in files]
            content = {key: torch.cat([part[key] for part in light]) for key in light[0]}
            table.load_index(content)
            for file in files:
                table.load_rows(checkpoint.read(folder, manifest, file, _is_row_or_id, verify=False))
            if isinstance(holder := embedding.holders[name], Lagging):
                holder.kept = Kept.read(content)
        state.num_steps = manifest.step
        return state, manifest

    def warm_state(self, lanes: Lanes | None = None) -> tuple[TrainState, warm_start.Report]:
        """The state before the first step with what fits of the origin's weights, on one of the ranks."""
        if self.origin is None:
            raise ValueError(f"{self.folder} has no origin")
        state = self.new_state(lanes)
        with local_copy(self.origin.checkpoint) as folder:
            manifest = self.origin.check(Manifest.read(folder))
            lines = warm_start.compare(
                state, folder, manifest, settings=self.settings, data_digest=self.sequences.digest
            )
            warm_start.check(lines, self.origin, self.folder)
            warm_start.load_into(state, folder, manifest, lines)
        return state, warm_start.Report(self.origin, tuple(lines))

    def _check_origin(self, folder: Path, manifest: Manifest) -> None:
        before, now = manifest.progress.get("settings", {}), self.settings
        changed = [f"{key}: {before[key]} -> {now[key]}" for key in before if before[key] != now.get(key, before[key])]
        if changed:
            raise CheckpointError(
                f"{folder} was saved under another configuration than that of {self.folder}; it belongs to another run:\n"
                + "\n".join(f"  - {line}" for line in changed)
            )

    def scorer(self, step: int | None = None) -> AnyScorer:
        """Scores with a checkpoint: by default the best one if the run validated, else the latest."""
        if step is None:
            step = Manifest.read(checkpoint.best_folder(self.checkpoints)).step
        state, _ = self.load_state(step)
        return make_scorer(state, self.sequences, self.split, self.config)


def _holder(table: Table, config: Config) -> Holder:
    """Rows in files are copied to a pool when several batches are in flight, so that one lane alone touches the files."""
    rows, settings = config.pipeline.rows, config.pipeline
    pools = rows == "pool" or (rows == "auto" and config.embedding.tier == "mmap" and settings.looks_ahead)
    holder: Holder = Pool(table) if pools else InPlace(table)
    return Lagging(holder, sync_steps=settings.sync_steps) if settings.staleness else holder


def read_facts(folder: Path) -> dict[str, Any]:
    """What the folder of a run says about its last start; raises CheckpointError if it does not."""
    path = folder / "run.json"
    try:
        facts = json.loads(path.read_text())
        if isinstance(facts["data_digest"], str):
            return dict(facts)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(f"{path} is missing or damaged, so nobody can tell which data the run was trained on.")


def files_of(state: TrainState) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What a rank contributes to a checkpoint, as copies: its buckets, of which replicas take turns, and rank 0 the dense part."""
    embedding = state.embedding
    if state.control.world.rank == 0:
        yield "dense", state.dense.export()
    for name, table in embedding.tables.items():
        buckets = embedding.owners.buckets_of(embedding.rank)[embedding.group :: embedding.num_groups]
        holder = embedding.holders[name]
        kept = holder.kept.export() if isinstance(holder, Lagging) and holder.kept else {}
        beside = dict(split_kept(kept, embedding.owners, buckets))
        for number, part in table.export_buckets(embedding.owners, buckets):
            yield bucket_name(name, number), {**part, **beside.get(number, {})}


def _is_of_rows(key: str) -> bool:
    """Whether a tensor of a bucket file has weights or optimizer state, which are as large as the table."""
    return key == "rows" or key.startswith("state.")


def _is_row_or_id(key: str) -> bool:
    return key == "ids" or _is_of_rows(key)


def bucket_name(table: str, bucket: int) -> str:
    return f"{table}.{bucket:03d}"


def _code_digest() -> str:
    """Of every source file of the package, native ones included."""
    package = Path(__file__).parent
    content = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.cpp", "*.h") for path in package.rglob(kind)):
        content.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return content.hexdigest()


def versions() -> dict[str, str]:
    """The versions that can change a run's bits."""
    return {
        "nestpipe": version("nestpipe"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "polars": polars.__version__,
        "machine": platform.machine(),
    }
