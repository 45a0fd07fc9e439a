"""Model versions of a running service: another model is loaded, tested and measured before it is used.

    load  ->  self-test  ->  measure  ->  VersionedWorker.use

What `load` does is a kind's own, in open_service.py. A failure before the last step changes nothing. After it new requests get the new model; tickets, prefills and queued requests keep
the old one. When nothing refers to the old model any more, its memory is freed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.atomic_files import replace_file
from nestpipe.data.folder_lineage import why_no_extension
from nestpipe.errors import ConfigError, NestPipeError
from nestpipe.serve.latency_model import measure_costs
from nestpipe.serve.model import open_served
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.prefix_store import PrefixStore
from nestpipe.serve.user_history import UserHistories
from nestpipe.serve.versioned_worker import ModelVersions, VersionedWorker
from nestpipe.training.run_folder import Run

_log = logging.getLogger("nestpipe.serve")


Load = Callable[[Path, int | None], Any]  # run folder, step or None for the best -> a model of the engine's kind
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # for scores of order one
_NUM_USERS, _NUM_CANDIDATES = 8, 32


class ParityError(NestPipeError):
    """Scores with a cached prefix differ from those of full inference."""


def load_version(
    histories: UserHistories,
    folder: Path,
    *,
    step: int | None,
    label: str,
    tables: Path,
    chunk: int,
    store: PrefixStore | None = None,
    device: torch.device | None = None,
) -> ServedModel:
    """Loads a checkpoint of another run on the same data, tests and measures it. Raises NestPipeError or OSError."""
    run = open_version(folder, histories)
    served = open_served(run, step=step, label=label, folder=tables, device=device)
    check_parity(served, histories, chunk=chunk)
    served.costs = measure_costs(served, histories, chunk=chunk, store=store)
    return served


def open_version(folder: Path, histories: UserHistories) -> Run:
    """Another run on the same data, or on a folder that has grown from it, whose histories are served then. Raises ConfigError."""
    run = Run.open(folder)
    histories.refresh()
    served, own = histories.sequences, run.sequences
    if Path(served.path).resolve() == Path(own.path).resolve():
        return run
    if not (problem := why_no_extension(served, own)):
        histories.move_to(own)
    elif why_no_extension(own, served):  # else it is an earlier folder, whose events the present one has
        raise ConfigError(
            f"{folder} was trained on the sequence folder {own.path}, which {problem}, so it cannot serve the histories of "
            f"{served.path}. Start another instance for it, or train it on a folder that 'nestpipe data append' has grown."
        )
    return run


def check_parity(served: ServedModel, histories: UserHistories, *, chunk: int) -> None:
    """Raises ParityError unless scores with prefixes, prefilled chunk by chunk, equal those of full inference."""
    wanted = served.candidates(histories.sequences.catalogue[:_NUM_CANDIDATES].tolist(), histories.sequences)
    allowed = TOLERANCE.get(served.ranker.model.place.dtype, min(TOLERANCE.values()))
    for user in _sample_users(histories):
        events = histories.of(user)
        last = 0 if events.times is None else int(events.times[-1] // 1000)
        inputs = served.prepare(events, last + 60)
        kept = served.fill_all(inputs, chunk=chunk)
        (full,), (cached,) = served.scores([inputs], [wanted]), served.scores([inputs], [wanted], [kept])
        apart = float((full - cached).abs().max() / full.abs().max().clamp(min=1.0))
        if not apart <= allowed:  # NaN fails too
            raise ParityError(
                f"{served.name} failed its parity self-test: with a prefix of {kept.key.length} events its scores are {apart:.1e} "
                f"away from full inference, {allowed:.0e} is allowed. It is not served; the model in use stays."
            )


def _sample_users(histories: UserHistories) -> list[int]:
    """Users with histories of all lengths, from the shortest with a prefix to the longest."""
    own = histories.sequences
    lengths = np.diff(own.offsets)
    order = np.argsort(lengths, kind="stable")[int((lengths < 2).sum()) :]
    places = np.unique(np.linspace(0, len(order) - 1, _NUM_USERS).astype(np.int64)) if len(order) else order
    return [int(one) for one in own.users[order[places]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """Run folders and steps of the served models. Without `run`, the model of the command line is served."""

    run: str | None = None
    step: int | None = None
    compared: str | None = None
    compared_step: int | None = None
    share: float = 0.0


class VersionFile:
    """The served models, stored so that a restarted process serves them again; without a path they end with the process."""

    def __init__(self, path: Path | None = None, *, first: VersionRecord | None = None):
        """`first` is what the command line says; the file overrides it."""
        self._path, self._first = path, first or VersionRecord()
        self.record = _read(path) or self._first

    def store(self, record: VersionRecord) -> None:
        """Raises OSError, and then nothing has changed."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, (json.dumps(asdict(record), indent=2) + "\n").encode())
        self.record = record

    def follow(self, engine: VersionedWorker[Any], load: Load) -> None:
        """Loads the models into an engine; if those of the file fail, those of the command line. Raises what loading raises."""
        before = engine.versions
        try:
            _use(engine, self.record, load)
        except (NestPipeError, OSError) as error:
            if self.record == self._first:
                raise
            _log.warning("the models of %s cannot be served (%s); serving those of the command line", self._path, error)
            engine.use(before)
            self.record = self._first
            _use(engine, self.record, load)


def _use(engine: VersionedWorker[Any], record: VersionRecord, load: Load) -> None:
    if record.run is not None:
        engine.use(ModelVersions(load(Path(record.run), record.step)))
    if record.compared is not None:
        engine.use(ModelVersions(engine.versions.main, load(Path(record.compared), record.compared_step), record.share))


def _read(path: Path | None) -> VersionRecord | None:
    try:
        return None if path is None or not path.exists() else VersionRecord(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        _log.warning("%s cannot be read (%s); serving the models of the command line", path, error)
        return None
