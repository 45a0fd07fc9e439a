"""Flags of `nestpipe prefill`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nestpipe.cli.arguments import OptionalFile, OptionalFolder, OptionalStep, RunFolder


@dataclass(frozen=True, kw_only=True)
class PrefillArguments:
    """Stores the KV prefixes of a ranker's users, so that their next requests are hits.

    Running instances do it while no request waits. If none runs, the command fills the store that the next 'nestpipe serve'
    opens. What is stored already is passed over: repeat an interrupted command, and it continues.

    Example: nestpipe prefill runs/ranking --top 1000

    Next: nestpipe serve runs/ranking
    """

    run: RunFolder
    """Folder of a ranking run."""
    instances: Annotated[tuple[str, ...], tyro.conf.arg(metavar="URL [URL ...]", help_behavior_hint="")] = ()
    """Admin addresses of running instances; of a fleet those of all, and each stores its own users
    [default: http://127.0.0.1:8751 if a process uses the store, else none]."""
    users: OptionalFile = None
    """File of users, one own id per line [default: the users of the log, the longest histories first]."""
    top: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Only so many of them."""
    rate: Annotated[float | None, tyro.conf.arg(metavar="MS", help_behavior_hint="")] = None
    """Compute of each instance for this, in milliseconds per second [default: its --trigger.nearline-ms-per-s]."""
    step: OptionalStep = None
    """Checkpoint, if no instance runs [default: the best one if the run validated, else the latest]."""
    prefix_store: OptionalFolder = None
    """The --prefix-store of 'nestpipe serve' [default: RUN/serve/prefixes/1]."""
    prefix_store_bytes: int = 4 << 30
    """The --prefix-store-bytes of 'nestpipe serve'."""
    state: str = ""
    """The --state of 'nestpipe serve'."""

    @property
    def folder(self) -> Path:
        """The store of the instance to come."""
        return self.prefix_store or self.run / "serve" / "prefixes" / "1"
