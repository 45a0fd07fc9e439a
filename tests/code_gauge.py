"""How much code one step enters: files and lines, by package, traced.

`python -m tests.code_gauge` writes the table into docs/project/tour.md. A list of files that its subject may edit is no gauge; a trace is.
A file counts with all its lines as soon as one of its functions is called.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import nestpipe
from nestpipe.distributed.process_group import World
from nestpipe.jagged import Cursor
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.train_batches import train_batches
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import new_state

ROOT = Path(nestpipe.__file__).resolve().parent
TOUR = ROOT.parent / "docs" / "project" / "tour.md"
BEGIN, END = "<!-- gauge -->", "<!-- end of gauge -->"
NOT_CORE = ("data", "models", "ops")


def files_entered(action: Callable[[], Any]) -> dict[Path, int]:
    """The package's files whose functions an action calls, in any thread that it starts, with their numbers of lines."""
    seen: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = {path for path in map(Path, seen) if path.is_relative_to(ROOT) and path.suffix == ".py"}
    return {path: len(path.read_text().splitlines()) for path in sorted(paths)}


def by_package(files: dict[Path, int]) -> dict[str, tuple[int, int]]:
    """Files and lines of each package; the modules of the root are 'nestpipe'."""
    found: dict[str, tuple[int, int]] = {}
    for path, num_lines in files.items():
        folders = path.relative_to(ROOT).parts[:-1]
        name = folders[0] if folders else "nestpipe"
        num_files, so_far = found.get(name, (0, 0))
        found[name] = (num_files + 1, so_far + num_lines)
    return found


def training_step(run: Run, mode: Any) -> dict[Path, int]:
    """Files that one step enters; with a mode two batches overlap. Batches are read before."""
    from nestpipe.data.loader import Loader
    from nestpipe.models.build_model import inputs_of

    config = run.config
    loader = Loader(run.sequences, run.split, config.data, seed=config.seed, inputs=inputs_of(config, run.sequences))
    batches = [loader.batch(Cursor(0, number)) for number in range(4)]
    state = new_state(run, Channels.of(World.single()))
    train_batches(state, batches[:2], num_batches=2, mode=mode)
    return files_entered(lambda: train_batches(state, batches[2:], num_batches=2 if mode else 1, mode=mode))


def ranking_request(folder: Path) -> dict[Path, int]:
    """Files that one ranking request enters, from HTTP bytes to HTTP bytes, on a warm instance."""
    import httpx

    from nestpipe.serve.api import Instance
    from nestpipe.serve.config import Limits
    from tests.serve.small_rankers import make_engine, make_log, make_run

    folder.mkdir()
    run = make_run(make_log(folder), folder / "run", "hstu")
    engine = make_engine(run, folder)
    instance = Instance(engine, name="gauge", secret=b"s" * 32, limits=Limits())
    user, items = int(run.sequences.users[3]), run.sequences.catalogue[:8].tolist()
    body = {"request": "r", "user": user, "candidates": items, "query_time": 1_702_600_000, "deadline_ms": 5000}

    async def send() -> None:
        transport = httpx.ASGITransport(instance.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://instance") as client:
            answer = await client.post("/v1/rank", json=body)
            assert answer.status_code == 200, answer.text

    step, seen = engine.step, dict[Path, int]()

    def traced_step() -> bool:
        """The worker thread runs before the tracing begins, so it is traced from inside its step."""
        done: list[bool] = []
        seen.update(files_entered(lambda: done.append(step())))
        return done[0]

    engine.start()
    try:
        asyncio.run(send())
        engine.step = traced_step  # type: ignore[method-assign]
        seen.update(files_entered(lambda: asyncio.run(send())))
    finally:
        engine.stop()
    return dict(sorted(seen.items()))


def measure(folder: Path) -> dict[str, dict[Path, int]]:
    """The files that each of the three actions enters."""
    from tests.small_runs import small_config, small_log

    log = small_log(folder / "log")
    run = Run(folder / "run", small_config(log.path, pipeline={"micro_batches": 2}))
    return {
        "one sequential step": training_step(run, None),
        "two nested steps": training_step(run, "nested"),
        "one ranking request": ranking_request(folder / "serving"),
    }


def table(found: dict[str, dict[Path, int]]) -> str:
    """The measurement as a Markdown table: files / lines."""
    packages = sorted({name for files in found.values() for name in by_package(files)})
    lines = [f"| package | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    for name in packages:
        cells = [by_package(files).get(name) for files in found.values()]
        lines.append(f"| {name} | " + " | ".join(f"{cell[0]} / {cell[1]:,}" if cell else "" for cell in cells) + " |")
    for title, left_out in (("all", ()), ("without data, models, ops", NOT_CORE)):
        sums = []
        for files in found.values():
            own = [size for name, size in by_package(files).items() if name not in left_out]
            sums.append(f"{sum(size[0] for size in own)} / {sum(size[1] for size in own):,}")
        lines.append(f"| **{title}** | " + " | ".join(f"**{one}**" for one in sums) + " |")
    return "\n".join(lines) + "\n"


def write(page: Path = TOUR) -> None:
    """Puts the table between the markers of a page."""
    with tempfile.TemporaryDirectory() as folder:
        shown = table(measure(Path(folder)))
    head, _, rest = page.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{shown}{END}{tail}")
    print(shown)


if __name__ == "__main__":
    write()
