"""Another model while the service runs: loaded beside the one in use, tested against itself, measured; then it may be used.

    load  ->  parity self-test  ->  measure  ->  Engine.use

Whatever goes wrong before the last step changes nothing. After it new requests get the new model, and what was begun with the
old one (tickets, prefills, ranks that wait) is ended with it; then nothing refers to the old one and its memory is free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from nestpipe.errors import ConfigError, NestPipeError
from nestpipe.run import Run
from nestpipe.serve.histories import Histories
from nestpipe.serve.measure import measure
from nestpipe.serve.model import open_served
from nestpipe.serve.prefix import Served

Load = Callable[[Path, int | None], Served]  # a folder of a run, and a step of it or the best
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # of scores of order one: the contract of prefixes
_NUM_USERS, _NUM_CANDIDATES = 8, 32


class ParityError(NestPipeError):
    """A model whose scores depend on what was kept of a history."""


def load_beside(
    histories: Histories, folder: Path, *, step: int | None, label: str, tables: Path, chunk: int
) -> Served:
    """A checkpoint of another run on the same data, tested and measured. Raises NestPipeError or OSError."""
    run = Run.open(folder)
    ours, theirs = (Path(one).resolve() for one in (histories.sequences.path, run.sequences.path))
    if ours != theirs:
        raise ConfigError(
            f"{folder} is on the sequence folder {theirs}, but the histories here are those of {ours}. "
            "Start another instance for it, or train it on the same folder."
        )
    served = open_served(run, step=step, label=label, folder=tables)
    check_parity(served, histories, chunk=chunk)
    served.costs = measure(served, histories, chunk=chunk)
    return served


def check_parity(served: Served, histories: Histories, *, chunk: int) -> None:
    """Raises ParityError unless scores with prefixes, filled chunk by chunk, are those of full inference."""
    wanted = served.candidates(histories.sequences.catalogue[:_NUM_CANDIDATES].tolist(), histories.sequences)
    allowed = TOLERANCE.get(served.ranker.model.place.dtype, min(TOLERANCE.values()))
    for user in _sample_users(histories):
        events = histories.of(user)
        last = 0 if events.times is None else int(events.times[-1] // 1000)
        asked = served.ask(events, last + 60)
        kept = served.fill_all(asked, chunk=chunk)
        (full,), (cached,) = served.scores([asked], [wanted]), served.scores([asked], [wanted], [kept])
        apart = float((full - cached).abs().max() / full.abs().max().clamp(min=1.0))
        if not apart <= allowed:  # not a number is not allowed either
            raise ParityError(
                f"{served.name} failed its parity self-test: with a prefix of {kept.key.length} events its scores are {apart:.1e} "
                f"away from full inference, {allowed:.0e} is allowed. It is not served; the model in use goes on."
            )


def _sample_users(histories: Histories) -> list[int]:
    """Users with histories of all lengths, from the shortest that has a prefix to the longest."""
    own = histories.sequences
    lengths = np.diff(own.offsets)
    order = np.argsort(lengths, kind="stable")[int((lengths < 2).sum()) :]
    places = np.unique(np.linspace(0, len(order) - 1, _NUM_USERS).astype(np.int64)) if len(order) else order
    return [int(one) for one in own.users[order[places]]]
