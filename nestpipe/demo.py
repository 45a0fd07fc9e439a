"""`nestpipe demo`: the product once, on generated data. Each step is an ordinary command, printed, checked and timed.

A step is a function that returns what it saw or raises `StepError`; the list `STEPS` is the demo.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nestpipe import checkpoint
from nestpipe.data.sequences import Sequences
from nestpipe.errors import NestPipeError
from nestpipe.evaluate import Report
from nestpipe.run import Run

_MARKER = "made-by-nestpipe-demo"


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    out: Path = Path("demo-out")
    """Folder for everything the demo writes; an earlier demo's folder is replaced."""
    quick: bool = False
    """Train for a moment only: checks the commands, not the quality."""


class StepError(NestPipeError):
    """A step of the demo did not hold."""


class Demo:
    """What the steps share: the folder, and commands run as a user would."""

    def __init__(self, out: Path, *, quick: bool, console: Console):
        self.out, self.quick, self._console = out, quick, console

    @property
    def data(self) -> Path:
        return self.out / "data"

    def command(self, *arguments: str) -> str:
        """Runs `nestpipe ARGUMENTS`, returns what it printed; raises StepError if it fails."""
        self._console.print(f"[bold]$ nestpipe {escape(' '.join(arguments))}[/bold]", soft_wrap=True)
        done = subprocess.run([*_nestpipe(), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise StepError(
                f"'nestpipe {' '.join(arguments)}' exited with {done.returncode}:\n{done.stderr or done.stdout}"
            )
        return done.stdout

    def kill_after(self, marker: Path, *arguments: str) -> None:
        """Starts `nestpipe ARGUMENTS` and kills it without warning once a file exists."""
        self._console.print(
            f"[bold]$ nestpipe {escape(' '.join(arguments))}   (killed in the middle)[/bold]", soft_wrap=True
        )
        process = subprocess.Popen(
            [*_nestpipe(), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            deadline = time.monotonic() + 120
            while not marker.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise StepError(
                        f"the run ended or stalled before it wrote {marker}: {process.communicate(timeout=5)[1]}"
                    )
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()


def main(argv: list[str]) -> int:
    description = (
        "Runs the product once on generated data and checks every step.\n\nExample: nestpipe demo --out demo-out"
    )
    arguments = tyro.cli(_Arguments, prog="nestpipe demo", description=description, args=argv)
    console = Console()
    _empty_folder(arguments.out)
    demo = Demo(arguments.out, quick=arguments.quick, console=console)
    table = Table("step", "held", "seconds", "what was seen")
    failed = 0
    for name, step in STEPS:
        console.rule(name)
        started = time.monotonic()
        try:
            seen, held = step(demo), True
        except NestPipeError as error:
            seen, held = str(error), False
        failed += not held
        console.print(escape(seen))
        table.add_row(name, "yes" if held else "NO", f"{time.monotonic() - started:.1f}", escape(seen))
        if not held:
            break  # later steps build on earlier ones
    console.print(table)
    if failed:
        console.print(f"The demo stopped at a step that did not hold; its files are in {arguments.out}.")
        return 1
    console.print(
        f"All {len(STEPS)} steps held. Next: nestpipe eval {arguments.out / 'run'}   or   nestpipe train tiny --help"
    )
    return 0


def ingest(demo: Demo) -> str:
    """A log with planted signal becomes a sequence folder."""
    demo.command("data", "synthetic", "--out", str(demo.data), *(["--num-users", "300"] if demo.quick else []))
    demo.command("data", "verify", str(demo.data))
    counts = Sequences.open(demo.data).meta["counts"]
    _check(counts["read"] == counts["kept"] + counts["quarantined"] > 0, f"records do not add up: {counts}")
    return f"{counts['read']:,} records read = {counts['kept']:,} kept + {counts['quarantined']:,} quarantined"


def train_once(demo: Demo) -> str:
    """The tiny recipe, from start to end."""
    demo.command("train", "tiny", "--run", str(demo.out / "run"), *_data(demo), *_few_epochs(demo))
    lines = [json.loads(line) for line in (demo.out / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    _check(losses[-1] < losses[0], f"the loss did not fall: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {lines[-1]['summary']['steps']:,} steps"


def survive_a_kill(demo: Demo) -> str:
    """A run killed without warning and resumed ends with the bits of one that was left alone."""
    limits = [*_data(demo), "--train.steps", "40", "--train.save-steps", "10", "--train.keep-last", "9"]
    calm, killed = demo.out / "calm", demo.out / "killed"
    demo.command("train", "tiny", "--run", str(calm), *limits)
    demo.kill_after(
        killed / "checkpoints" / "step-000020" / "manifest.json", "train", "tiny", "--run", str(killed), *limits
    )
    before = checkpoint.complete_steps(killed / "checkpoints")
    _check(bool(before) and before[-1] < 40, f"the kill came too late to mean anything: checkpoints {before}")
    demo.command("train", "tiny", "--run", str(killed), "--resume", *limits)
    differing = differing_tensors(calm, killed)
    _check(not differing, f"these tensors differ: {differing}")
    return f"killed after step {before[-1]}, resumed to step 40: every tensor equal bit for bit"


def evaluate(demo: Demo) -> str:
    """Quality against the popularity floor and against the best possible ranking, which the generator knows."""
    print(demo.command("eval", str(demo.out / "run")))
    report = Report.load(demo.out / "run" / "eval" / "test")
    best = json.loads((demo.data / "truth.json").read_text())["hr10"]
    hr10 = report.metrics["hr@10"].mean
    _check(demo.quick or hr10 >= 0.95 * best, f"HR@10 {hr10:.4f} is below 95 % of the known optimum {best:.4f}")
    return f"HR@10 {hr10:.4f}, the best possible is {best:.4f}"


def recommend(demo: Demo) -> str:
    """Ten items for one user, none of which it has had."""
    run = Run.open(demo.out / "run")
    user = int(run.sequences.users[0])
    items = run.scorer().recommend(user, 10).items
    had = set(run.sequences.items[: run.sequences.offsets[1]].tolist())
    _check(
        len(set(items)) == 10 and not had & set(items), f"bad recommendation {items} for a user who had {sorted(had)}"
    )
    return f"user {user}: {items}"


STEPS: list[tuple[str, Callable[[Demo], str]]] = [
    ("ingest", ingest),
    ("train", train_once),
    ("kill and resume", survive_a_kill),
    ("evaluate", evaluate),
    ("recommend", recommend),
]


def differing_tensors(a: Path, b: Path) -> list[str]:
    """Names of the tensors whose bits differ between the latest checkpoints of two runs."""
    contents = [checkpoint.load(checkpoint.folder_of(run / "checkpoints"))[1] for run in (a, b)]
    flat = [
        {f"{file}/{name}": tensor for file, tensors in content.items() for name, tensor in tensors.items()}
        for content in contents
    ]
    return [
        name
        for name in flat[0] | flat[1]
        if name not in flat[0] or name not in flat[1] or not _same_bits(flat[0][name], flat[1][name])
    ]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _check(held: bool, message: str) -> None:
    if not held:
        raise StepError(message)


def _data(demo: Demo) -> list[str]:
    return ["--data.path", str(demo.data)]


def _few_epochs(demo: Demo) -> list[str]:
    return ["--train.epochs", "8", "--train.log-steps", "1"] if demo.quick else []


def _nestpipe() -> list[str]:
    return [sys.executable, "-m", "nestpipe.cli"]


def _empty_folder(folder: Path) -> None:
    """Makes the folder, replacing that of an earlier demo; refuses any other folder with something in it."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER).exists():
            raise NestPipeError(f"{folder} is not empty and was not made by the demo; name another folder with --out.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).touch()
