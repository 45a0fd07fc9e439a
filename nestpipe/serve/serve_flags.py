"""The flags of `nestpipe serve` and of Ray replicas."""

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
    """Folder of a run of any kind."""
    step: int | None = None
    """Checkpoint to serve [default: the best one if the run validated, else the latest]."""
    label: str = ""
    """Label to order by [default: the model's first]."""
    compare: Path | None = None
    """Folder of a second run on the same data, which serves a share of the users."""
    share: float = 0.1
    """That share of the users, 0 .. 1, by a hash of the user."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8701
    """Port for requests; 0 takes a free one."""
    admin_port: int = 8751
    """Port for administration; 0 takes a free one. Its token is in RUN/serve/token."""
    admin_host: str = "127.0.0.1"
    """Address for administration, apart from --host: clients of the service need no access to it."""
    name: str = ""
    """Name of the instance, which must outlive restarts [default: host name and port]."""
    notes: Path | None = None
    """File of the model versions set by 'nestpipe swap', which a restarted process serves again."""
    state: str = ""
    """Address of a PostgreSQL database for events, catalogue and users, postgresql://... [default: files in RUN/serve]."""
    prefix_store_bytes: int = 4 << 30
    """Disk space for KV prefixes of a ranker, which outlive restarts; 0: none. See docs/how-to/prefix-store.md."""
    prefix_store: Path | None = None
    """Folder for them, of this process alone [default: RUN/serve/prefixes/1, or the next number that no process uses]."""
    num_threads: int = 1
    """Threads of the model."""
    device: str = "auto"
    """Where a ranker and its KV prefixes are: auto (the accelerator if there is one, else the CPU), cpu, cuda or npu."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    limits: Limits = field(default_factory=Limits)
    instances: int = 0
    """Start this many instances and a gateway on --port in front of them; see docs/how-to/fleet.md."""
    ray: int = 0
    """Start this many replicas under Ray Serve instead, with its proxy on --port; see docs/how-to/fleet.md."""
    retrieval: Path | None = None
    """Folder of a trained next-item run that finds candidates for a ranker [default: means of its own item vectors]."""
    stages: Stages = field(default_factory=Stages)
    request_instructions: bool = True
    """Take instruction texts in requests of a generative run that was trained on instructions."""
    rules: Path | None = None
    """JSON file of named sets of rules, {"front_page": {"filter": {...}}}, which requests name; see docs/how-to/rules.md."""
    page: bool = False
    """Serve the operator's page at /, read-only; it shows the history of any user. See docs/how-to/operate.md."""
    demo: bool = False
    """A gateway with --instances (at least one) and --page."""
    print_nginx: bool = False
    """Print an nginx configuration that replaces the gateway, and exit."""

    def check(self) -> None:
        problems = [f"engine.{problem}" for problem in self.engine.problems()]
        problems += [f"trigger.{problem}" for problem in self.trigger.problems()]
        problems += [f"limits.{problem}" for problem in self.limits.problems()]
        problems += [f"stages.{problem}" for problem in self.stages.problems()]
        if self.state and not self.state.startswith(("postgresql://", "postgres://")):
            problems.append(f"state is {self.state.partition('@')[0][:40]!r}; it must begin with postgresql://")
        if self.prefix_store_bytes < 0:
            problems.append(f"prefix_store_bytes is {self.prefix_store_bytes}; it must be 0 or more")
        if not 0 <= self.share <= 1:
            problems.append(f"share is {self.share}; it must be in 0 .. 1")
        if self.instances < 0:
            problems.append(f"instances is {self.instances}; it must be 0 (no gateway) or more")
        if self.notes is not None and (self.instances or self.demo):
            problems.append(
                f"notes is {self.notes}; it is for one instance; the instances of a fleet have their own files"
            )
        if self.ray < 0:
            problems.append(f"ray is {self.ray}; it must be 0 (no Ray) or more")
        others = [name for name in ("instances", "demo", "page", "print_nginx", "notes") if getattr(self, name)]
        if self.ray and others:
            problems.append(
                f"ray is {self.ray}, but {others[0].replace('_', '-')} is for a gateway or a single instance"
            )
        if problems:
            raise ConfigError("the configuration has problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


def parse(argv: Sequence[str]) -> ServeArguments:
    """The flags of a command line, checked."""
    example = "Example: nestpipe serve runs/ranking --port 8701 --trigger.budget-ms 50"
    text = f"Serves a run of any kind as one instance: recommendations, similar items, events; see docs/how-to/serve.md.\n\n{example}"
    arguments = tyro.cli(ServeArguments, prog="nestpipe serve", description=text, args=argv)
    arguments.check()
    return arguments
