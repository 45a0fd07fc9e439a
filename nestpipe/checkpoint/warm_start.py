"""Warm start: a new run initialised with the weights of another.

Tables and dense tensors are matched by name and shape. Every difference between the two runs is rejected unless `allow` names it:

    added       only in the new model; initialised
    dropped     only in the checkpoint; not loaded
    reshaped    of another shape; initialised
    optimizer   of another optimizer; weights are loaded, optimizer state is initialised
    model       another kind of model or other model settings, which may give the same weights another meaning
    data        the checkpoint was trained on other data; not if the folder has only grown since (data append)

Rows of exact Adam are caught up to the step of the checkpoint. A row keeps its optimizer state if both optimizers have the same state. The dense optimizer counts steps once for all tensors, so
its state is kept only if every tensor is loaded. Admission counts and usage of rows are not loaded: rows count as used once,
before the first batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table as Shown

from nestpipe.checkpoint.chain import BucketRange
from nestpipe.checkpoint.config import Word
from nestpipe.checkpoint.manifest import ROWS, STATE, Manifest
from nestpipe.checkpoint.origin import Origin
from nestpipe.checkpoint.places import Place
from nestpipe.checkpoint.reader import current_rows, dense_shapes, read_dense, table_facts, table_sections
from nestpipe.data.sequences import Sequences
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import WEIGHTS, Table
from nestpipe.errors import ConfigError
from nestpipe.pipeline.stages import TrainState

_WEIGHTS, _STATE = "weights.", "state."
_HARMLESS = ("model.dropout",)  # does not change the meaning of weights


@dataclass(frozen=True, slots=True)
class WarmStartLine:
    """One compared table, tensor or setting."""

    name: str
    before: str
    now: str
    what: str  # loaded, initialised, dropped, or differs
    state: str = ""  # of the optimizer: kept or fresh
    word: Word | None = None  # that `allow` must contain

    def __str__(self) -> str:
        fresh = ", with fresh optimizer state" if self.what == "loaded" else ""
        return f"{self.name}: {self.before or 'nothing'} there, {self.now or 'nothing'} here; {self.what}{fresh} ({self.word})"


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What a run was initialised with."""

    origin: Origin
    lines: tuple[WarmStartLine, ...]

    def __rich__(self) -> Shown:
        shown = Shown("", "there", "here", "weights", "optimizer state")
        shown.title = f"initialised from {self.origin.checkpoint} (step {self.origin.step:,})"
        shown.caption = (
            "row state is kept if the optimizer is the same; dense state if, in addition, every tensor is loaded"
        )
        for line in self.lines:
            shown.add_row(line.name, line.before, line.now, line.what, line.state)
        return shown


def compare(
    state: TrainState, folder: Place, manifest: Manifest, *, settings: Mapping[str, str], data: Sequences
) -> list[WarmStartLine]:
    """Compares a new state with a checkpoint; reads file headers only."""
    lines = list(_compare_tables(state, folder, manifest))
    lines += _compare_dense(state, dense_shapes(folder, manifest))
    before = manifest.progress.get("settings", {})
    for key in sorted(before | settings):
        decides = key in {"model", "data.max_len"} or (key.startswith("model.") and key not in _HARMLESS)
        if decides and key in before and before[key] != settings.get(key):  # a new setting has its default
            lines.append(WarmStartLine(key, before.get(key, ""), settings.get(key, ""), "differs", word="model"))
    digest = manifest.progress.get("data", "unknown")
    if digest != data.digest:  # known ids keep their rows if the folder only grew
        word: Word | None = None if data.grew_from(digest) else "data"
        what = "grew" if word is None else "differs"
        lines.append(WarmStartLine("data", digest[:12], data.digest[:12], what, word=word))
    return lines


def _compare_tables(state: TrainState, folder: Place, manifest: Manifest) -> Iterator[WarmStartLine]:
    saved, tables = {facts.name: facts for facts in table_facts(folder, manifest)}, state.embedding.tables
    for name, table in tables.items():
        title, now, facts = f"table '{name}'", f"dim {table.spec.dim}", saved.get(name)
        if facts is None:
            yield WarmStartLine(title, "", now, "initialised", "fresh", "added")
        elif facts.dim != table.spec.dim:
            yield WarmStartLine(title, f"dim {facts.dim}", now, "initialised", "fresh", "reshaped")
        else:
            kept = facts.state == _row_state(table)
            there = f"dim {facts.dim}, {facts.num_rows:,} rows"
            if kept:
                yield WarmStartLine(title, there, now, "loaded", "kept")
            else:
                there, now = f"{there}, {_listed(facts.state)}", f"{now}, {_listed(_row_state(table))}"
                yield WarmStartLine(title, there, now, "loaded", "fresh", "optimizer")
    for name, facts in saved.items():
        if name not in tables:
            yield WarmStartLine(
                f"table '{name}'", f"dim {facts.dim}, {facts.num_rows:,} rows", "", "dropped", "", "dropped"
            )


def _compare_dense(state: TrainState, there: Mapping[str, list[int]]) -> Iterator[WarmStartLine]:
    here = {name: list(tensor.shape) for name, tensor in state.dense.export().items()}
    own, old = ({key: one for key, one in shapes.items() if key.startswith(_WEIGHTS)} for shapes in (here, there))
    there = {key: one for key, one in there.items() if key.startswith((_WEIGHTS, _STATE))}
    kept = "kept" if here == there else "fresh"
    for key in own | old:
        title = f"dense '{key.removeprefix(_WEIGHTS)}'"
        if key not in old:
            yield WarmStartLine(title, "", str(own[key]), "initialised", "fresh", "added")
        elif key not in own:
            yield WarmStartLine(title, str(old[key]), "", "dropped", "", "dropped")
        elif own[key] != old[key]:
            yield WarmStartLine(title, str(old[key]), str(own[key]), "initialised", "fresh", "reshaped")
        else:
            yield WarmStartLine(title, str(old[key]), str(own[key]), "loaded", kept)
    state_there, state_here = _dense_state(there), _dense_state(here)
    if state_there != state_here:
        yield WarmStartLine("dense state", _listed(state_there), _listed(state_here), "differs", "fresh", "optimizer")


def check(lines: Sequence[WarmStartLine], origin: Origin, folder: Path) -> None:
    """Raises ConfigError listing all differences that are not allowed, with the words that would allow them."""
    refused = [line for line in lines if line.word and line.word not in origin.allow]
    if refused:
        words = dict.fromkeys((*origin.allow, *(line.word for line in refused if line.word)))
        raise ConfigError(
            f"{folder} differs from {origin.checkpoint}, which --init-from names:\n"
            + "\n".join(f"  - {line}" for line in refused)
            + f"\nAdd --allow {' '.join(words)} to start anyway, or change the recipe."
        )
    if not any(line.what == "loaded" for line in lines):
        raise ConfigError(f"no tensor of {origin.checkpoint} matches the model of {folder}; start without --init-from.")


def load_into(state: TrainState, folder: Place, manifest: Manifest, lines: Sequence[WarmStartLine]) -> None:
    """Loads what `compare` marked as loaded: dense tensors, and the rows that this rank owns."""
    loaded = {line.name: line for line in lines if line.what == "loaded"}
    dense = state.dense.export()
    keeps_state = all(line.state == "kept" for line in lines if line.name.startswith("dense "))
    for key, tensor in read_dense(folder, manifest).items():
        if keeps_state if key.startswith(_STATE) else f"dense '{key.removeprefix(_WEIGHTS)}'" in loaded:
            dense[key] = tensor
    state.dense.load(dense)
    for name, table in state.embedding.tables.items():
        if line := loaded.get(f"table '{name}'"):
            _load_rows(state, folder, manifest, table, keep_state=line.state == "kept")


def _load_rows(state: TrainState, folder: Place, manifest: Manifest, table: Table, *, keep_state: bool) -> None:
    """The rows that this rank owns, section by section; the number of buckets may differ."""
    embedding, name = state.embedding, table.spec.name
    own = BucketRange(embedding.owners, embedding.owners.buckets_of(embedding.rank))
    ids = [section.index["ids"] for section in table_sections(folder, manifest, name, own)]
    table.load_index({"ids": torch.cat(ids)})
    settings = table.spec.optimizer or table.config
    current = current_rows(folder, manifest, name)
    if current is not None and keep_state:
        table.load_rates(current.rates, 0)
    for section in table_sections(folder, manifest, name, own):
        rows = section.rows((ROWS, STATE) if keep_state or current is not None else (ROWS,))
        if current is not None:
            rows = current.rows(rows)
        if not keep_state:
            rows = {WEIGHTS: rows[WEIGHTS]}
            fresh = OPTIMIZERS[settings.optimizer](settings).new_state(len(section.index["ids"]), table.spec.dim)
            rows |= {_STATE + key: values for key, values in fresh.items()}
        table.load_rows({"ids": section.index["ids"], **rows})


def _row_state(table: Table) -> dict[str, list[int]]:
    """The optimizer state of one row: name -> shape."""
    return {
        name.removeprefix(_STATE): list(values.shape[1:])
        for name, values in sorted(table.export().items())
        if name.startswith(_STATE)
    }


def _dense_state(shapes: Mapping[str, list[int]]) -> dict[str, bool]:
    """The dense optimizer state: name -> whether it has one value per weight."""
    num_weights = sum(math.prod(shape) for key, shape in shapes.items() if key.startswith(_WEIGHTS))
    states = {key.removeprefix(_STATE): shape for key, shape in sorted(shapes.items()) if key.startswith(_STATE)}
    return {name: math.prod(shape) == num_weights for name, shape in states.items()}


def _listed(state: Mapping[str, object]) -> str:
    return ", ".join(state) or "none"
