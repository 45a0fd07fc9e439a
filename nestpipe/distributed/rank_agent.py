"""torchrun's agent with one change: an error that a restart cannot mend ends the job at once."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_backends
from torch.distributed.elastic.rendezvous.api import RendezvousError

from nestpipe.distributed.rank_failure import RankFailure
from nestpipe.errors import CommError

_SHUTDOWN_S = 1800  # a stopped rank finishes its step and its checkpoint
_MONITOR_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """The ranks of one host. `endpoint` is the store on the first host; empty for a job of this machine alone."""

    command: Sequence[str]
    num_ranks: int
    num_hosts: int = 1
    host_index: int = 0
    name: str = ""
    endpoint: str = ""
    address: str = ""
    max_restarts: int = 0
    wait_s: int = 120


class RankAgent(LocalElasticAgent):
    """Starts, watches and restarts the ranks of one host."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if any(failure.error_file_data.get("permanent") for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


class LauncherStoppedError(CommError):
    """The launcher received a signal; its ranks have stopped."""


def run_ranks(job: RankJob) -> list[RankFailure]:
    """Runs the ranks of this host to their end; the failures of the last start, the cause last.

    Raises LauncherStoppedError if this process is told to stop, and CommError if other hosts are missing.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported by the caller
    try:
        failures = _run_agent(job)
    except RendezvousError as error:
        raise CommError(
            f"not all {job.num_hosts} hosts were there within {job.wait_s} s ({type(error).__name__})"
        ) from None
    except SignalException as signalled:
        raise LauncherStoppedError(f"stopped by {signalled.sigval.name}") from None
    ordered = sorted(failures.items(), key=lambda one: (not _is_consequence(one[1]), -one[1].timestamp))
    return [
        RankFailure(
            rank=rank,
            exit_code=failure.exitcode,
            message=_message(failure),
            is_consequence=_is_consequence(failure),
        )
        for rank, failure in ordered
    ]


def _is_consequence(failure: ProcessFailure) -> bool:
    return bool(failure.error_file_data.get("lost_peer")) or failure.exitcode == -signal.SIGTERM


def _message(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"killed by signal {-failure.exitcode} ({failure.signal_name()})"
    said = failure.error_file_data.get("message")
    return said if isinstance(said, str) else f"ended with exit code {failure.exitcode}; its traceback is above"


def _run_agent(job: RankJob) -> dict[int, ProcessFailure]:
    """The failed ranks of the last start."""
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    settings: dict[str, Any] = {
        "is_host": job.host_index == 0,
        "join_timeout": job.wait_s,
        "read_timeout": job.wait_s,
    }
    handler = rendezvous_backends.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=job.endpoint or "localhost:0",
            run_id=job.name or uuid.uuid4().hex,
            min_nodes=job.num_hosts,
            max_nodes=job.num_hosts,
            local_addr=job.address or None,
            **settings,
        )
    )
    program, *arguments = job.command
    spec = WorkerSpec(
        role="rank",
        local_world_size=job.num_ranks,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=job.max_restarts,
        monitor_interval=_MONITOR_S,
        local_addr=job.address or None,
    )
    closes = True
    try:
        return dict(RankAgent(spec, DefaultLogsSpecs(), shutdown_timeout=_SHUTDOWN_S).run().failures)
    except SignalException:
        closes = False  # this host may come back: a closed rendezvous would refuse it
        raise
    finally:
        if closes:
            handler.shutdown()
