"""The flags of `nestpipe serve`, which Ray replicas are given too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from nestpipe.errors import ConfigError
from nestpipe.serve.config import EngineConfig, Limits, Stages, TriggerConfig


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """The flags of the command."""

    run: tyro.conf.Positional[Path | None] = None
    """Folder of a run that ranks, or of one that generates."""
    step: int | None = None
    """Checkpoint to serve [default: the best one if the run validated, else the latest]."""
    label: str = ""
    """Label to order by [default: the model's first]."""
    compare: Path | None = None
    """Folder of a second run on the same data, which answers a share of the users."""
    share: float = 0.1
    """How many of the users those are, 0 .. 1, by a hash of the user."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8701
    """Port for requests; 0 takes a free one."""
    admin_port: int = 8751
    """Port for administration; 0 takes a free one. Its token is in RUN/serve/token."""
    admin_host: str = "127.0.0.1"
    """Address for administration: another one than --host, so that who is let in for requests is not let in there."""
    name: str = ""
    """Name of the instance, which must outlive restarts [default: host name and port]."""
    notes: Path | None = None
    """File of what the instance is told to serve by 'nestpipe swap': a process that starts with it goes on with that."""
    num_threads: int = 1
    """Threads of the model."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    limits: Limits = field(default_factory=Limits)
    instances: int = 0
    """Start so many instances and a gateway in front of them, which takes --port; docs/how-to/fleet.md says more."""
    ray: int = 0
    """Start so many replicas under Ray Serve instead, whose proxy takes --port; docs/how-to/fleet.md says more."""
    retrieval: Path | None = None
    """Folder of a trained retrieval run for the gateway [default: means of this run's item vectors]."""
    stages: Stages = field(default_factory=Stages)
    demo: bool = False
    """Show a page at the gateway's address to try it with; whoever opens it may read histories."""
    print_nginx: bool = False
    """Print a configuration of nginx for the gateway's place, and end."""

    def check(self) -> None:
        found = [f"engine.{problem}" for problem in self.engine.problems()]
        found += [f"trigger.{problem}" for problem in self.trigger.problems()]
        found += [f"limits.{problem}" for problem in self.limits.problems()]
        found += [f"stages.{problem}" for problem in self.stages.problems()]
        if not 0 <= self.share <= 1:
            found.append(f"share is {self.share}; it must be in 0 .. 1")
        if self.instances < 0:
            found.append(f"instances is {self.instances}; it must be 0 (no gateway) or more")
        if self.notes is not None and (self.instances or self.demo):
            found.append(f"notes is {self.notes}; that is for one instance, those of a fleet have files of their own")
        if self.ray < 0:
            found.append(f"ray is {self.ray}; it must be 0 (no Ray) or more")
        beside = [
            name
            for name in ("instances", "demo", "print_nginx", "compare", "retrieval", "notes")
            if getattr(self, name)
        ]
        if self.ray and beside:
            found.append(f"ray is {self.ray}, but {beside[0].replace('_', '-')} is for a gateway or a single instance")
        if found:
            raise ConfigError("the configuration has problems:\n" + "\n".join(f"  - {problem}" for problem in found))


def parse(argv: Sequence[str]) -> ServeArguments:
    """The flags of a command line, checked."""
    example = "Example: nestpipe serve runs/ranking --port 8701 --trigger.budget-ms 50"
    text = f"Serves a run that ranks or generates, as one instance; docs/how-to/serve.md says more.\n\n{example}"
    arguments = tyro.cli(ServeArguments, prog="nestpipe serve", description=text, args=argv)
    arguments.check()
    return arguments
