"""`nestpipe doctor --device`: every check of a device, with date and hardware, as a table and as a record.

    streams, row kernels, attention, negatives     training/device_checks.py       in this process
    schedules, bf16, buffer, waits of the host     training/device_trainings.py    in this process
    two ranks, kill and resume                     doctor_runs.py                  `nestpipe train` in other processes

docs/how-to/devices.md is generated from the records that are in benchmarks/results/devices.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nestpipe.atomic_files import replace_file
from nestpipe.cli.arguments import DoctorArguments
from nestpipe.cli.doctor_runs import run_probes
from nestpipe.errors import ConfigError
from nestpipe.training.device import resolve_device
from nestpipe.training.device_checks import DeviceCheck, DeviceProbe, kernel_probes
from nestpipe.training.device_trainings import training_probes
from nestpipe.training.start_line import cpu_model

_COLOURS = {"pass": "green", "fail": "bold red", "absent": "yellow"}


def probes(only: str = "") -> list[DeviceProbe]:
    """All checks, or those whose name contains one of some texts. Raises ConfigError if there is none."""
    every = [*kernel_probes(), *training_probes(), *run_probes()]
    texts = [text.strip() for text in only.split(",") if text.strip()]
    chosen = [one for one in every if not texts or any(text in one.name for text in texts)]
    if not chosen:
        raise ConfigError(f"no check has a name with {only!r}; there are: {'; '.join(one.name for one in every)}.")
    return chosen


def hardware(device: torch.device) -> dict[str, Any]:
    """What a record says about a device."""
    facts: dict[str, Any] = {"type": device.type, "count": 1, "name": cpu_model()}
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
        facts |= {"name": name, "count": torch.accelerator.device_count()}
        facts["memory_bytes"] = module.mem_get_info(device)[1] if hasattr(module, "mem_get_info") else 0
    facts |= {name: found for name in ("cuda", "hip") if (found := getattr(torch.version, name, None))}
    return facts


def software() -> dict[str, str]:
    names = ["nestpipe", "torch", *(["triton"] if importlib.util.find_spec("triton") else [])]
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def examine(device: torch.device, chosen: Sequence[DeviceProbe], console: Console) -> list[DeviceCheck]:
    """Runs the checks one after the other, and says which one is running and how it ended."""
    found = []
    for number, probe in enumerate(chosen, start=1):
        console.print(f"[{number}/{len(chosen)}] {probe.name} ...", end=" ", markup=False)
        found.append(check := probe.on(device))
        console.print(f"[{_COLOURS[check.result]}]{check.result}[/], {check.seconds:.1f} s")
    return found


def show(record: dict[str, Any], console: Console) -> None:
    """The table."""
    device = record["device"]
    table = Table(
        title=f"{device['count']} x {device['name']} ({device['type']}), {record['date']}", title_justify="left"
    )
    for column in ("check", "result", "found", "s"):
        table.add_column(column, overflow="fold")
    for one in record["checks"]:
        result = f"[{_COLOURS[one['result']]}]{one['result']}[/]"
        table.add_row(escape(one["name"]), result, escape(one["detail"]), f"{one['seconds']:.1f}")
    console.print(table)
    counts = Counter(one["result"] for one in record["checks"])
    console.print(", ".join(f"{counts[name]} {name}" for name in _COLOURS if counts[name]))


def main(arguments: DoctorArguments) -> int:
    """Returns 1 if any check failed; raises ConfigError for a device that is not there."""
    device, chosen = resolve_device(arguments.device, flag="--device"), probes(arguments.only)
    checks = examine(device, chosen, Console(stderr=True, highlight=False))
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "device": hardware(device),
        "versions": software(),
        "complete": not arguments.only,
        "checks": [{**dataclasses.asdict(one), "seconds": round(one.seconds, 3)} for one in checks],
    }
    if arguments.json:
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        show(record, Console(highlight=False))
    if arguments.write:
        replace_file(arguments.write, (json.dumps(record, indent=2) + "\n").encode())
    return int(any(one.result == "fail" for one in checks))
