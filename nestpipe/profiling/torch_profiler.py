"""Where the time of a training step goes: torch's profiler around a few steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def profiled(folder: Path, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Profiles steps 4 to 8, prints a table and writes it with a trace into the folder; yields what to call per step."""
    if not enabled:
        yield lambda: None
        return
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=5, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
        yield profiler.step
    if not profiler.events():
        print("nothing was profiled: that takes at least 4 steps")
        return
    folder.mkdir(parents=True, exist_ok=True)
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
    (folder / "table.txt").write_text(table)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    print(table)
    print(f"trace for Perfetto or chrome://tracing: {folder / 'trace.json'}")
