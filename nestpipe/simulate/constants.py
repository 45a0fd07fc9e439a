"""Costs of a worker and its network: one set of numbers for every case, schedule and number of workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nestpipe.atomic_files import replace_file
from nestpipe.errors import DataError
from nestpipe.profiling.trace_file import KINDS

_FORMAT, _VERSION = "nestpipe constants", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Per worker and batch. The work of a batch does not depend on the number of workers (weak scaling)."""

    source: str  # their origin, in words
    base_workers: int  # number of workers they were fitted on; growth and efficiency are relative to it
    work_s: Mapping[str, float] = field(
        default_factory=dict
    )  # core seconds by kind of event, all micro-batches together
    device_s: float = 0.0  # device time of the dense part; takes no core
    micro_batch_s: float = 0.0  # core seconds that each micro-batch adds to compute
    num_rows: float = 0.0  # distinct rows that a worker requests
    row_bytes: float = 0.0  # one row on the wire, one way
    key_bytes: float = 0.0  # one key on the wire
    dense_bytes: float = 0.0  # gradients of the dense part
    first_use: float = 1.0  # after a share x of the batch, x ** first_use of its rows have been used; 1: no row twice
    duplicates: float = 1.0  # uses of a row in a batch: rows sent without dedupe over rows sent with it
    bytes_per_s: float = float("inf")  # bandwidth of a worker's link, in each direction
    burst_bytes: float = 0.0  # sent at once on an idle link
    fabric_bytes_per_s: float = float("inf")  # bandwidth shared by all workers
    delay_s: float = 0.0  # latency: from the last byte sent to its arrival
    peer_s: float = 0.0  # core seconds per peer of each message, beyond those in `work_s`
    wire_cpu_s: float = 0.0  # core seconds per byte sent, in background threads
    idle_share: float = 0.0  # share of a core that the idle threads of a worker use (polling)
    congestion: float = 0.0  # transfer time grows by (workers in the exchange / base) ** congestion
    lookup_growth: float = 0.0  # key routing and retrieval grow by (workers / base) ** lookup_growth
    jitter: float = 0.0  # standard deviation of compute over workers and steps, relative to its median

    def __post_init__(self) -> None:
        if self.base_workers < 1:
            raise ValueError(f"constants of {self.base_workers} workers; there must be at least 1")
        if unknown := self.work_s.keys() - set(KINDS):
            raise ValueError(f"unknown kind of event '{min(unknown)}'")
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in {"source", "work_s"}}
        for name, value in {**numbers, **self.work_s}.items():
            if not value >= 0:
                raise ValueError(f"constant '{name}' is {value}; it must not be negative")

    def save(self, path: Path) -> None:
        """Writes JSON; infinite values are null."""
        content = {key: None if value == float("inf") else value for key, value in asdict(self).items()}
        header = {"format": _FORMAT, "version": _VERSION}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**header, **content}, indent=2).encode() + b"\n")

    @staticmethod
    def load(path: Path) -> Constants:
        """Reads a file of `save`; raises DataError if it is damaged or something else."""
        try:
            content: Any = json.loads(path.read_bytes())
            if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
                raise ValueError("it is not a file of constants")
            if (version := content.pop("version", None)) != _VERSION:
                raise ValueError(f"it is of version {version}, this nestpipe reads version {_VERSION}")
            limits: dict[str, Any] = {key: float("inf") if value is None else value for key, value in content.items()}
            return Constants(**limits)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} cannot be used: {error}. 'nestpipe simulate --from RUN --save FILE' writes one."
            ) from error
