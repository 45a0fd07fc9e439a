"""Partitioned ingest under Ray Data: one task per shard, merged by the driver.

Shards are written beside the result, as OUT.shards/I-of-N, on a disk that all machines share, and removed after the merge.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.data.array_files import check_place
from nestpipe.data.ingest import BuildOptions, SideTable, check_job, input_files
from nestpipe.data.log_reader import LogSource, expand
from nestpipe.data.remote_files import is_url, name_of
from nestpipe.data.schema import Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.shards import merge_shards, write_shard
from nestpipe.errors import ConfigError, DataError, NestPipeError

_OBJECT_STORE_BYTES = 80 << 20  # about Ray's minimum; no event goes through it


@dataclass(frozen=True, slots=True)
class RayShards:
    """Ingest in a number of shards on a Ray cluster."""

    num_shards: int
    address: str = "local"
    """Ray cluster; local: one on this machine alone, which ends with the ingest."""

    def ingest(
        self,
        out: str | Path,
        *,
        schema: Schema,
        log: LogSource,
        items: SideTable | None = None,
        users: SideTable | None = None,
        options: BuildOptions | None = None,
    ) -> Sequences:
        """The folder that `write_sequences` would write, read by as many tasks as there are shards."""
        options = options or BuildOptions()
        check_job(schema, items=items, users=users, options=options)
        num_files = len(expand(log))
        if not 1 <= self.num_shards <= num_files:
            raise ConfigError(
                f"{self.num_shards} shards of a log of {num_files} files: a shard has at least one whole file. Use at most {num_files} (--ray), or write the log into more files."
            )
        target = Path(out).absolute()
        check_place(target, overwrite=options.overwrite, inputs=input_files(log, items, users))
        scratch = target.with_name(f"{target.name}.shards")
        quiet = dataclasses.replace(options, overwrite=True, progress=BuildOptions().progress)
        job = {"schema": schema, "log": _absolute(log), "items": items, "users": users, "options": quiet}
        shards = [scratch / f"{number}-of-{self.num_shards}" for number in range(1, self.num_shards + 1)]
        try:
            self._run(shards, job)
            return merge_shards(target, shards, options=options)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _run(self, shards: list[Path], job: dict[str, Any]) -> None:
        """Writes all shards, one Ray task each; raises DataError with the message of the first that fails."""
        if self.address == "local":
            os.environ |= private_ray_environment()
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray Data ({error}); install it with: pip install 'nestpipe[ray]'") from None
        local = {"num_cpus": len(shards), "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        ray.init(address=self.address, logging_level="WARNING", **(local if self.address == "local" else {}))
        try:
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = context.print_on_execution_start = False

            def write(row: dict[str, Any]) -> dict[str, Any]:
                return {"problem": _write(shards, int(row["item"]), job)}

            tasks = ray.data.from_items(list(range(len(shards))), override_num_blocks=len(shards))
            problems = [row["problem"] for row in tasks.map(write, num_cpus=1).take_all() if row["problem"]]
        finally:
            ray.shutdown()
        if problems:
            raise DataError(problems[0])


def private_ray_environment() -> dict[str, str]:
    """The environment of a Ray on this machine alone; Ray reads some of it when it is imported."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",  # Ray may report that it does not report
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its name for 'one machine': ports are on loopback
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # but some inner ports are on every address, and want this
    }


def _write(shards: list[Path], place: int, job: dict[str, Any]) -> str:
    """Writes one shard; returns the message of an error of ours, whose type Ray would not keep."""
    try:
        write_shard(shards[place], shard=(place + 1, len(shards)), **job)
    except NestPipeError as error:
        return f"shard {place + 1}/{len(shards)}: {error}"
    return ""


def _absolute(log: LogSource) -> LogSource:
    """Workers have other working folders."""
    return dataclasses.replace(
        log, paths=tuple(name_of(path) if is_url(name_of(path)) else str(path.absolute()) for path in expand(log))
    )
