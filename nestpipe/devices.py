"""What runs where: components x devices, from the tables that decide it. docs/devices.md shows it."""

from __future__ import annotations

from nestpipe.comm import EXCHANGES
from nestpipe.ops.backends import TABLE, Standing

DEVICES = ("cpu", "cuda", "npu")
_UNTRIED: Standing = "written, not run"


def components() -> dict[str, dict[str, Standing]]:
    """For every component how far it was tried on each device."""
    found: dict[str, dict[str, Standing]] = {}
    for name, entry in TABLE.items():
        found[f"attention: {name} ({entry.about})"] = {"cpu": entry.cpu, "cuda": entry.cuda, "npu": entry.npu}
    for device, library in EXCHANGES.items():
        here: Standing = "tested here" if device == "cpu" else _UNTRIED
        found[f"exchange: {library}"] = {other: here if other == device else "absent" for other in DEVICES}
    # Models, losses and dense optimizers are plain torch; indices and rows live in the memory of the host.
    found["models, losses, dense optimizers (torch)"] = {"cpu": "tested here", "cuda": _UNTRIED, "npu": _UNTRIED}
    found["id index, embedding rows, row optimizers (host memory)"] = {
        "cpu": "tested here",
        "cuda": "absent",
        "npu": "absent",
    }
    return found


def markdown() -> str:
    """The table of docs/devices.md."""
    lines = ["| component | CPU | CUDA | NPU |", "|---|---|---|---|"]
    for name, standing in components().items():
        lines.append(f"| {name} | " + " | ".join(standing[device] for device in DEVICES) + " |")
    return "\n".join(lines) + "\n"
