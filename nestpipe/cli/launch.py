"""`nestpipe launch`: a command on several ranks of this machine, or of several machines, over torchrun's agent.

    launcher ── agent ──┬── rank: nestpipe train ...   its error goes to a file that the agent reads
                        └── rank: nestpipe train ...   a rank ends with its launcher

The agent restarts all ranks when one fails. What a rank died of is the last thing on the screen.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from nestpipe.cli import importing
from nestpipe.distributed.local_host import interface_of, place_of, resolve, usable_cores
from nestpipe.errors import CommError, ConfigError

COMMANDS = ("train", "align", "eval", "recommend", "tune")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Runs a command on several ranks: on this machine, or started the same way on every host of a list.

    After a failure all ranks start again; with 'train --resume' they continue from the last complete checkpoint.

    Example: nestpipe launch -n 2 train tiny --train.epochs 1 --run runs/two

    On several machines, on each of them: nestpipe launch --hosts 10.0.0.1,10.0.0.2 -n 8 train hstu --resume --run /shared/run
    """

    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 1
    """Ranks per host."""
    hosts: Annotated[str, tyro.conf.arg(metavar="A,B,...", help_behavior_hint="")] = ""
    """Names or addresses of all hosts, the same list on each of them [default: this machine]."""
    host_index: Annotated[int | None, tyro.conf.arg(metavar="I", help_behavior_hint="")] = None
    """Which of the hosts this machine is, from 0 [default: the one whose address it has]."""
    port: int = 29400
    """Port of the rendezvous on the first host; another one for each job on these hosts."""
    interface: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """Network interface of the exchanges [default: the one that has this host's address]."""
    max_restarts: int = 3
    """How often all ranks are started again after a failure."""
    wait_s: int = 120
    """How long to wait for the other hosts, at the start and after a failure."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The options, and the command that every rank runs."""

    options: LaunchOptions
    command: tuple[str, ...]
    module: tuple[str, ...] = ("nestpipe.cli",)


def parse(words: list[str]) -> Launch:
    """Splits the options of the launcher from the command. Raises ConfigError."""
    size = 0
    while size < len(words) and words[size].startswith("-"):
        size += 1 if "=" in words[size] or words[size] in ("-h", "--help") else 2
    options = tyro.cli(LaunchOptions, prog="nestpipe launch", args=words[:size])
    command = tuple(words[size:])
    if not command or command[0] not in COMMANDS:
        given = f"'{command[0]}' is none of them" if command else "none is given"
        raise ConfigError(
            f"name the command that the ranks run, one of {', '.join(COMMANDS)}; {given}. "
            "Options of the launcher come before it: nestpipe launch -n 2 train tiny."
        )
    if options.ranks < 1:
        raise ConfigError(f"-n is {options.ranks}; a host has at least one rank.")
    return Launch(options, command)


def main(launch: Launch) -> int:
    """Runs until all ranks have ended; the exit code of the rank that failed first. Raises ConfigError."""
    options, hosts = launch.options, [host for host in launch.options.hosts.split(",") if host]
    index, address = place_of(hosts, options.host_index) if hosts else (0, "")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // options.ranks)))
    is_one = len(hosts) < 2
    if interface := options.interface or ("" if is_one else interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else c10d warns of hosts without a name
    with importing():
        from nestpipe.distributed.exchange import named_ranks
        from nestpipe.distributed.rank_agent import LauncherStoppedError, RankJob, run_ranks

    job = RankJob(
        command=(sys.executable, "-u", "-m", *launch.module, *launch.command),
        num_ranks=options.ranks,
        num_hosts=max(len(hosts), 1),
        host_index=index,
        name="" if is_one else _job_name(hosts, launch),
        endpoint="" if is_one else f"{resolve(hosts[0])}:{options.port}",
        address="" if is_one else address,
        max_restarts=options.max_restarts,
        wait_s=options.wait_s,
    )
    try:
        failures = run_ranks(job)
    except LauncherStoppedError as error:
        print(f"nestpipe launch: {error}; the same command with --resume continues", file=sys.stderr)
        return 130
    except CommError as error:
        others = ", ".join(host for number, host in enumerate(hosts) if number != index)
        raise ConfigError(
            f"{error}. Is the same command running on {others}, and can this machine reach port {options.port} of {hosts[0]}?"
        ) from None
    said: dict[str, list[int]] = {}
    for failure in failures:
        said.setdefault(failure.message, []).append(failure.rank)
    for message, ranks in said.items():
        print(f"{named_ranks(sorted(ranks))}: {message}", file=sys.stderr, flush=True)
    return abs(failures[-1].exit_code) if failures else 0


def _job_name(hosts: Sequence[str], launch: Launch) -> str:
    """The same on every host, and another for another command."""
    content = repr((*hosts, launch.options.ranks, launch.command))
    return f"nestpipe-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
