"""Flags of `nestpipe checkpoint`: the docstring of a class is the help of its command. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True, kw_only=True)
class ImportHSTU:
    """Makes a run of a checkpoint of Meta's HSTU, as generative-recommenders saves it.

    Items must have the numbers that it was trained with. The run can be evaluated, served and trained further.

    Example: nestpipe checkpoint import-hstu ckpts/ml-1m_ep100 --data data/ml1m-meta --run runs/meta

    Next: nestpipe eval runs/meta
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The checkpoint file."""
    data: Annotated[Path, tyro.conf.arg(metavar="DATA")]
    """Sequence folder, such as that of 'nestpipe data movielens --ties meta'."""
    run: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """Folder of the new run."""
    num_heads: int = 1
    """Attention heads, which the file does not say; 2 for HSTU-large."""
    max_len: int = 0
    """Longest history; 0 means 11 less than the checkpoint has positions, as in Meta's published settings."""
