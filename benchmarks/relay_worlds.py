"""The served systems of relay.py: data, a run, and instances as processes pinned to a core.

`relay-long`: 20,000 users, histories `lengths-kuai` times 2 (up to 4,096 events), 128 candidates, an HSTU ranker. Its weights are
untrained: the cost of a request does not depend on them. `relay-ml1m`: the real histories of MovieLens-1M under
the ranking recipe, 512 candidates.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np
import polars as pl
import torch

from nestpipe import recipes
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.state import StateSnapshot
from nestpipe.config import Config
from nestpipe.data.config import DataConfig
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.gateway.router import InstanceAddress
from nestpipe.jagged import Cursor
from nestpipe.models.config import RankingConfig
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import new_state

SEED = 0
NUM_ITEMS = 10_000
_START_S = 1_700_000_000
_NUM_SMALL_IDS = 4096  # of other tables than that of items; levels of actions and features are far below


@dataclass(frozen=True, slots=True)
class World:
    """A run to serve, and its workload."""

    run: Path
    users: np.ndarray  # ids
    lengths: np.ndarray
    last_s: np.ndarray  # time of each user's last event
    items: np.ndarray  # the catalogue
    num_candidates: int
    max_len: int


def relay_long(folder: Path, num_users: int, *, times: float = 2.0) -> World:
    """`lengths-kuai` times a number, which is 2 in the workload; made once per folder."""
    drawn = np.exp(np.random.default_rng(SEED).normal(6.0, 1.1, num_users)).clip(max=2048)
    lengths = np.ceil(times * drawn).astype(np.int64)
    return _made(folder, f"long-{num_users}-{times:g}", lengths, max_len=int(2048 * times))


def relay_history(folder: Path, rungs: Sequence[int], *, users_per_rung: int, max_len: int) -> World:
    """The same model for longer histories: so many users with each length of a ladder."""
    lengths = np.repeat(np.array(rungs, np.int64), users_per_rung)
    return _made(folder, f"history-{len(rungs)}-{users_per_rung}-{max_len}", lengths, max_len=max_len)


def _made(folder: Path, name: str, lengths: np.ndarray, *, max_len: int) -> World:
    """Data and run of users with these lengths, made once per folder."""
    data, run, num_users = folder / name, folder / f"{name}-run", len(lengths)
    if not data.exists():
        random, total = np.random.default_rng(SEED + 1), int(lengths.sum())
        user = np.repeat(np.arange(num_users), lengths)
        place = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        log = pl.DataFrame(
            {
                "user": user,
                "item": random.zipf(1.2, total) % NUM_ITEMS,
                "time": _START_S + 600 * place + random.integers(0, 600, total),
                "liked": random.random(total, dtype=np.float32).round(),
            }
        )
        label = Label(name="like", kind="binary", feature="liked")
        schema = Schema(features=(Feature(name="liked", kind="number"),), labels=(label,))
        write_sequences(data, schema=schema, log=log)
    if not Run.exists(run):
        block = max(max_len // 16, 10)
        settings = DataConfig(
            path=str(data), max_len=max_len, truncate_block=block, split="time", split_time=_last_second(data)
        )
        model = RankingConfig(dim=64, num_blocks=2, num_heads=2, qk_dim=32, v_dim=32, dropout=0.0)
        base = recipes.ml1m_ranking()
        _new_run(replace(base, data=replace(base.data, **_fields(settings)), model=model), run)
    return _world(run, num_candidates=128)


def relay_ml1m(folder: Path, data: Path) -> World:
    """The ranking recipe on a sequence folder of MovieLens-1M."""
    run = folder / "ml1m-run"
    if not Run.exists(run):
        base = recipes.ml1m_ranking()
        _new_run(replace(base, data=replace(base.data, path=str(data))), run)
    return _world(run, num_candidates=512)


def _last_second(data: Path) -> str:
    """The time of the last event, so that both sides of the split have events; serving reads all of them."""
    times = Sequences.open(data).times
    assert times is not None
    return datetime.fromtimestamp(int(times.max()) // 1000, UTC).isoformat()


def _fields(config: DataConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in ("path", "max_len", "truncate_block", "split", "split_time")}


def _new_run(config: Config, folder: Path) -> None:
    """A run with the weights of a new model, and a row for every id: after training there are no initial ones to draw."""
    from nestpipe.data.batch_builder import BatchBuilder
    from nestpipe.models.build_model import inputs_of

    run = Run.create(config, folder)
    builder = BatchBuilder(run.sequences, run.split, inputs_of(config, run.sequences))
    run.folder.mkdir(parents=True, exist_ok=True)
    run.write(statistics=builder.statistics, facts={"recipe": None, "num_ranks": 1})
    state, ids = new_state(run), torch.from_numpy(np.array(run.sequences.catalogue))
    for name, table in state.embedding.tables.items():
        table.advance(ids if name == "item" else torch.arange(_NUM_SMALL_IDS), 0)
    checkpoint_writer.save_checkpoint(
        run.checkpoints, 1, Cursor(0, 0), {"settings": run.settings}, StateSnapshot(state).content()
    )


def _world(run: Path, *, num_candidates: int) -> World:
    opened = Run.open(run)
    sequences = opened.sequences
    assert sequences.times is not None
    last_s = np.array(sequences.times[sequences.offsets[1:] - 1]) // 1000
    items = np.array(sequences.catalogue)
    users, lengths = np.array(sequences.users), np.diff(sequences.offsets)
    return World(run, users, lengths, last_s, items, num_candidates, opened.config.data.max_len)


@dataclass(frozen=True, slots=True)
class Arm:
    """How an instance is set: when it computes ahead, and what it may keep."""

    mode: str = "on"
    host_bytes: int = 8 << 30
    device_bytes: int = 1 << 30
    num_instances: int = 1


ARMS = {
    "full": Arm(mode="off", host_bytes=0),
    "always": Arm(mode="always"),
    "no affinity": Arm(host_bytes=4 << 30, num_instances=2),
    "no host tier": Arm(host_bytes=0),
    "everything": Arm(),
}


@contextmanager
def instance(
    world: World, arm: Arm, *, name: str, budget_ms: float, core: int
) -> Iterator[tuple[InstanceAddress, int]]:
    """A process of `nestpipe serve` on a core, when it is ready; its address and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = {
        "name": name,
        "port": port,
        "admin-port": 0,
        "engine.device-bytes": arm.device_bytes,
        "engine.host-bytes": arm.host_bytes,
        "engine.host-ttl-s": 3600.0,
        "trigger.mode": arm.mode,
        "trigger.budget-ms": budget_ms,
        "trigger.rate-ms-per-s": 900.0,
    }
    command = [sys.executable, "-m", "nestpipe.cli", "serve", str(world.run)]
    command += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(process.pid, {core})  # before it has started any thread
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"instance {name} did not start")
            time.sleep(0.1)
        yield InstanceAddress(name=name, url=url), process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=0.5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
