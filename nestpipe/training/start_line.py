"""The first line of a training run: where it runs, what it resumes from, and whether the result stays bitwise identical.

new run on 2 ranks (a: 0, b: 1), 1 thread each
resumed from step 50 (step-000050), 9 steps repeated, 2 ranks (before: 1), bitwise identical: no, other number of ranks
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.atomic_files import raw_records
from nestpipe.distributed.local_host import address_towards
from nestpipe.distributed.process_group import Channel
from nestpipe.training.run_folder import Run, read_facts, versions

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class EarlierStart:
    """What the folder of a resumed run says about its last start."""

    facts: Mapping[str, Any]
    num_steps: int  # logged so far

    @staticmethod
    def of(run: Run) -> EarlierStart | None:
        """None for a new run."""
        if not Run.exists(run.folder):
            return None
        metrics = run.folder / "metrics.jsonl"
        steps = [record["step"] for record in raw_records(metrics) if "step" in record] if metrics.exists() else []
        return EarlierStart(read_facts(run.folder), max(steps, default=0))


def cpu_model() -> str:
    """The name of the processor: another one may round differently."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gather_hosts(control: Channel) -> list[str]:
    """The host of each rank, with its address where hosts share a name, as containers may. Collective."""
    master = os.environ.get("MASTER_ADDR", "")
    own = [socket.gethostname(), address_towards(master) if master else ""]
    places = [tuple(json.loads(one)) for one in control.all_gather_bytes(json.dumps(own).encode(), name="hosts")]
    shared = Counter(name for name, _ in set(places))
    return [f"{name} at {address}" if shared[name] > 1 else name for name, address in places]


def start_line(run: Run, earlier: EarlierStart | None, hosts: list[str], *, step: int, checkpoint: str) -> str:
    """What rank 0 says before the first step."""
    num_ranks, threads = len(hosts), run.config.train.num_threads
    if earlier is None or not checkpoint:
        start = "new run" if earlier is None else "started again, because no checkpoint was complete,"
        each = " each" if num_ranks > 1 else ""
        mixed = ", matrix products in bf16" if run.config.train.precision == "bf16" else ""
        return f"{start} on {_places(hosts)}, {threads} thread{'s' if threads > 1 else ''}{each}{mixed}"
    before = earlier.facts.get("num_ranks", num_ranks)
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}" + (f" (before: {before})" if before != num_ranks else "")
    repeated = max(0, earlier.num_steps - step)
    reasons = _differences(earlier.facts, num_ranks)
    identical = f"no, {', '.join(reasons)}" if reasons else "yes"
    steps = f"{repeated} step{'' if repeated == 1 else 's'} repeated"
    return f"resumed from step {step:,} ({checkpoint}), {steps}, {ranks}, bitwise identical: {identical}"


def _places(hosts: list[str]) -> str:
    names = dict.fromkeys(hosts)
    if len(hosts) == 1:
        return "1 rank"
    ranks = [f"{name}: {', '.join(str(rank) for rank, host in enumerate(hosts) if host == name)}" for name in names]
    return f"{len(hosts)} ranks" + (f" ({'; '.join(ranks)})" if len(names) > 1 else "")


def _differences(facts: Mapping[str, Any], num_ranks: int) -> list[str]:
    """What differs from the last start and may change rounding."""
    found = ["other number of ranks"] if facts.get("num_ranks", num_ranks) != num_ranks else []
    before, model = facts.get("cpu_model"), cpu_model()
    if before and before != model:
        found.append(f"other processor ({model}; before: {before})")
    old = facts.get("versions", {})
    found += [
        f"other {name} ({now}; before: {old[name]})" for name, now in versions().items() if old.get(name, now) != now
    ]
    return found
