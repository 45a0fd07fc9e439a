"""Flags of `nestpipe checkpoint`: the docstring of a class is the help of its command. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from nestpipe.cli.arguments import OptionalStep, RunFolder

CheckpointPlace = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_CHECKPOINT")]


@dataclass(frozen=True, kw_only=True)
class InspectCheckpoint:
    """Shows what a checkpoint holds: step, data position, progress, tables, dense parameters.

    Example: nestpipe checkpoint inspect runs/tiny
    """

    path: CheckpointPlace
    """Folder of a run or of one of its checkpoints, or the URL of either."""
    step: OptionalStep = None
    """Checkpoint of the run [default: the latest]."""


@dataclass(frozen=True, kw_only=True)
class VerifyCheckpoint:
    """Reads every file of a run's checkpoints and compares it with its digest.

    Names the damaged files; exit code 1 if there are any.

    Example: nestpipe checkpoint verify runs/tiny
    """

    path: CheckpointPlace
    """Folder of a run or of one of its checkpoints, or the URL of either."""
    step: OptionalStep = None
    """Checkpoint of the run [default: all]."""


@dataclass(frozen=True, kw_only=True)
class DiffCheckpoints:
    """Compares two checkpoints tensor by tensor and row by row, bitwise; number of ranks and deltas do not matter.

    Exit code 1 if they differ.

    Example: nestpipe checkpoint diff runs/tiny runs/other
    """

    path: CheckpointPlace
    """Folder of a run or of one of its checkpoints, or the URL of either."""
    other: CheckpointPlace
    """What to compare with."""
    step: OptionalStep = None
    """Checkpoint of both runs [default: the latest of each]."""


@dataclass(frozen=True, kw_only=True)
class CompactCheckpoint:
    """Rewrites a delta as a full checkpoint, which needs no earlier one.

    Example: nestpipe checkpoint compact runs/tiny
    """

    path: CheckpointPlace
    """Folder of a run or of one of its checkpoints, or the URL of either."""
    step: OptionalStep = None
    """Checkpoint of the run [default: the latest]."""


@dataclass(frozen=True, kw_only=True)
class RebucketCheckpoints:
    """Rewrites a run with another number of buckets, which is the largest number of ranks.

    Example: nestpipe checkpoint rebucket runs/tiny --buckets 4096
    """

    run: RunFolder
    """Folder of the run."""
    buckets: int
    """Number of buckets."""
