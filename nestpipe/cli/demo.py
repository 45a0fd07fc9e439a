"""`nestpipe demo`: every capability once, on generated data. Each step is an ordinary command: printed, checked, timed.

It begins as a new user does, with a log that has text ids, and continues with what is behind.

A step is a function that returns its result in words, or raises `StepError`. `STEPS` lists them in order.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint.difference import same_bits
from nestpipe.cli.arguments import DemoArguments
from nestpipe.cli.demo_generation import generate
from nestpipe.cli.demo_serving import relay, serve, shut_down
from nestpipe.cli.demo_shop import ask, recommend, show_page, start
from nestpipe.cli.demo_stage import DemoStage, InterruptedDemo, check, scratch_in, signals_interrupt
from nestpipe.data.sequences import Sequences
from nestpipe.errors import NestPipeError
from nestpipe.eval.eval_report import EvalReport
from nestpipe.profiling.overlap import CAUSES, steps_of
from nestpipe.profiling.trace_file import load as load_trace

_MARKER = "made-by-nestpipe-demo"
_MICRO_BATCHES = ("--pipeline.micro-batches", "3", "--train.num-threads", "1")
_NESTED = (*_MICRO_BATCHES, "--pipeline.mode", "nested")


def main(arguments: DemoArguments) -> int:
    _empty_folder(arguments.out)
    demo = DemoStage(arguments.out, quick=arguments.quick, console=Console(emoji=False))
    with signals_interrupt(), scratch_in(demo.out / "scratch"):
        try:
            return _run(demo)
        finally:
            demo.processes.end()


def _run(demo: DemoStage) -> int:
    """Runs the steps until one fails; returns an exit code."""
    table, name, passed = Table("step", "passed", "seconds", "result"), "", True
    try:
        for name, step in STEPS:
            demo.console.rule(name)
            passed = _run_step(demo, name, step, table)
            if not passed:
                break  # later steps build on earlier ones
    except InterruptedDemo as stopped:
        demo.processes.end()
        end = f"its processes have ended, its files are in {demo.out}."
        print(f"nestpipe demo: {stopped} in step '{name}'; {end}", file=sys.stderr)
        return 128 + stopped.number
    demo.console.print(table)
    if not passed:
        demo.say(f"The demo stopped at a step that failed; its files are in {demo.out}.")
        return 1
    shop = shlex.quote(str(demo.out / "shop"))
    demo.say(f"All {len(STEPS)} steps passed. Reports: {demo.out / 'shop' / 'run' / 'report.html'}, {demo.report}")
    demo.say(
        f"Next: nestpipe serve {shop}/ranker --retrieval {shop}/run --port 8700 --demo, and open http://127.0.0.1:8700/"
    )
    demo.say(
        "      nestpipe start YOUR_LOG.csv --out FOLDER; docs/get-started/own-data.md; the code: docs/project/tour.md"
    )
    return 0


def _run_step(demo: DemoStage, name: str, step: Callable[[DemoStage], str], table: Table) -> bool:
    """Runs a step and adds it to the table; whether it passed."""
    started = time.monotonic()
    try:
        result, passed = step(demo), True
    except NestPipeError as error:
        result, passed = str(error), False
    demo.say(result)
    table.add_row(name, "yes" if passed else "NO", f"{time.monotonic() - started:.1f}", escape(result))
    return passed


def ingest(demo: DemoStage) -> str:
    """A log with planted signal becomes a sequence folder."""
    demo.command("data", "synthetic", "--out", str(demo.data), *(["--num-users", "300"] if demo.quick else []))
    demo.command("data", "verify", str(demo.data))
    counts = Sequences.open(demo.data).meta["counts"]
    check(counts["read"] == counts["kept"] + counts["quarantined"] > 0, f"records do not add up: {counts}")
    return f"{counts['read']:,} records read = {counts['kept']:,} kept + {counts['quarantined']:,} quarantined"


def train_nested(demo: DemoStage) -> str:
    """Trains the tiny recipe on two ranks, with lookup and communication overlapped with compute."""
    traced = ["--pipeline.advanced.trace-steps", "20"]
    demo.command(
        "train", "tiny", "--run", str(demo.out / "run"), *_NESTED, *traced, *_data(demo), *_few_epochs(demo), ranks=2
    )
    lines = [json.loads(line) for line in (demo.out / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    check(losses[-1] < losses[0], f"the loss did not fall: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {lines[-1]['summary']['steps']:,} steps"


def show_overlap(demo: DemoStage) -> str:
    """Where the time of a step went: the four shares add up to it exactly."""
    demo.say(demo.command("trace", str(demo.out / "run")))
    steps = [step for trace in load_trace(demo.out / "run") for step in steps_of(trace)]
    total = sum(step.total_ns for step in steps)
    shares = {cause: sum(step.time_ns(cause) for step in steps) for cause in CAUSES}
    check(bool(steps) and sum(shares.values()) == total, f"{shares} do not add up to {total}")
    return ", ".join(f"{cause} {share / total:.0%}" for cause, share in shares.items()) + f" of {len(steps)} steps"


def survive_a_kill(demo: DemoStage) -> str:
    """A nested run that loses a rank to SIGKILL resumes and ends bitwise identical to an uninterrupted sequential run."""
    limits = [
        *_data(demo),
        "--train.steps",
        "40",
        "--train.save-steps",
        "10",
        "--train.keep-last",
        "9",
        *_MICRO_BATCHES,
    ]
    whole, killed = demo.out / "uninterrupted", demo.out / "killed"
    demo.command("train", "tiny", "--run", str(whole), *limits, ranks=2)
    marker = killed / "checkpoints" / "step-000020" / "manifest.json"
    demo.kill_a_rank(
        marker, "train", "tiny", "--run", str(killed), "--resume", *limits, "--pipeline.mode", "nested", ranks=2
    )
    differing = differing_tensors(whole, killed)
    check(not differing, f"these tensors differ: {differing}")
    return "nested, a rank killed after step 20: every tensor is bitwise identical to that of the sequential run"


def evaluate(demo: DemoStage) -> str:
    """Quality next to the popularity baseline and the best possible ranking, which the generator knows."""
    demo.say(demo.command("eval", str(demo.out / "run")))
    report = EvalReport.load(demo.out / "run" / "eval" / "test")
    best = json.loads((demo.data / "truth.json").read_text())["hr10"]
    hr10 = report.metrics["hr@10"].mean
    check(demo.quick or hr10 >= 0.95 * best, f"HR@10 {hr10:.4f} is below 95 % of the known optimum {best:.4f}")
    return f"HR@10 {hr10:.4f}, the best possible is {best:.4f}"


def write_report(demo: DemoStage) -> str:
    """One self-contained file about the run, with loss curve, timeline and quality."""
    demo.say(demo.command("report", str(demo.out / "run")))
    text = demo.report.read_text()
    missing = [word for word in ("Training loss", 'class="timeline"', "popularity baseline") if word not in text]
    check(not missing, f"{demo.report} lacks {missing}")
    check(
        "<script" not in text and " src=" not in text,
        f"{demo.report} is not self-contained: it loads or runs something",
    )
    return f"{demo.report}: {len(text) / 1000:,.0f} kB, self-contained"


STEPS: list[tuple[str, Callable[[DemoStage], str]]] = [
    ("start", start),
    ("recommend", recommend),
    ("serve", ask),
    ("page", show_page),
    ("ingest", ingest),
    ("train", train_nested),
    ("overlap", show_overlap),
    ("kill, resume, compare", survive_a_kill),
    ("evaluate", evaluate),
    ("report", write_report),
    ("fleet", serve),
    ("relay", relay),
    ("generate", generate),
    ("shut down", shut_down),
]


def differing_tensors(a: Path, b: Path) -> list[str]:
    """Names of the tensors that are not bitwise identical in the latest checkpoints of two runs."""
    contents = [
        checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(checkpoint_folders.checkpoints_of(run)))[
            1
        ]
        for run in (a, b)
    ]
    flat = [
        {f"{file}/{name}": tensor for file, tensors in content.items() for name, tensor in tensors.items()}
        for content in contents
    ]
    return [
        name
        for name in flat[0] | flat[1]
        if name not in flat[0] or name not in flat[1] or not same_bits(flat[0][name], flat[1][name])
    ]


def _data(demo: DemoStage) -> list[str]:
    return ["--data.path", str(demo.data)]


def _few_epochs(demo: DemoStage) -> list[str]:
    return ["--train.epochs", "3", "--train.log-steps", "1"] if demo.quick else []


def _empty_folder(folder: Path) -> None:
    """Makes the folder, replacing that of an earlier demo; refuses any other folder with something in it."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER).exists():
            raise NestPipeError(f"{folder} is not empty and was not made by the demo; name another folder with --out.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).touch()
