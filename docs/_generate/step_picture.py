"""Draws docs/images/sequential-nested.svg: the same batches in a sequential and in a nested run, on one time axis.

    python docs/_generate/step_picture.py --train      # two ranks in network namespaces (root), then draw
    python docs/_generate/step_picture.py              # draw the traces of the last training again

The link has 1 Gbit/s and a delay of 2 ms. It also trains a sequential run without micro-batches, which is the fastest
sequential setting, and prints the step times of all three: the caption names both ratios.

Three rows per run, of rank 0:

    tables      read, routing of ids, retrieval, update
    messages    from launch until consumed; strong where a stream waited for them, pale where they were hidden
    compute     forward and backward of each micro-batch, without the waits inside
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from nestpipe.profiling.overlap import StepTimes
from nestpipe.profiling.overlap_report import choose
from nestpipe.profiling.trace_file import RankTrace, Span, load

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "build" / "step-picture"
MODES = ("sequential", "nested")
FASTEST = "sequential-1"  # one micro-batch
FIRST, NUM_STEPS = 23, 3
WIDTH, LEFT, RIGHT, ROW, GAP = 960, 84, 14, 24, 5
TABLES = {"read": "#d9b44a", "keys": "#d9b44a", "retrieve": "#d9b44a", "update": "#b98bc9", "write": "#b98bc9"}
CONSUMED_BY = {"rows": ("compute", "rows"), "grads": ("collect", "grads"), "dense sum": ("dense sum", "dense")}
STYLE = """
text{font:13px ui-sans-serif,system-ui,"DejaVu Sans",sans-serif;fill:#1c1e21}.head{font-weight:600;font-size:15px}.soft{fill:#59606a}
.on{fill:#10131a;font-size:11px}.back{fill:#fff}.row{fill:#f1f3f5}.step{stroke:#59606a;stroke-dasharray:4 3}
.hidden{fill:#b9d7f2}.waited{fill:#3b82c4}.busy{fill:#63b981;stroke:#fff;stroke-width:.7}
@media (prefers-color-scheme:dark){text{fill:#e6e8eb}.soft{fill:#a4abb5}.on{fill:#10131a}.back{fill:#14171b}.row{fill:#20252b}
.step{stroke:#a4abb5}.hidden{fill:#3d5a75}.waited{fill:#5aa2e6}.busy{stroke:#14171b}}
"""


def train() -> None:
    """Runs both modes on the same generated log, one rank per network namespace."""
    from benchmarks import netlab
    from nestpipe.cli import main

    main(f"data synthetic --out {RUNS}/data --overwrite --num-users 6000 --num-items 20000".split())
    settings = f"--data.path {RUNS}/data --data.batch-size 64 --loss.kind sampled --loss.num-negatives 256 --loss.source sample"
    settings += " --train.epochs 0 --train.steps 40 --train.num-threads 1 --pipeline.advanced.trace-steps 30"
    with netlab.Lab(2, rate="1gbit", delay_ms=2) as lab:
        for name, micro_batches in ((MODES[0], 2), (MODES[1], 2), (FASTEST, 1)):
            run = f"--pipeline.mode {name.partition('-')[0]} --pipeline.micro-batches {micro_batches} --run {RUNS}/{name} --resume"
            lab.run([sys.executable, "-m", "nestpipe.cli", "train", "tiny", *settings.split(), *run.split()])


def median_ms(steps: list[list[StepTimes]]) -> float:
    """Of the slowest rank of each step."""
    return statistics.median(max(step.total_ns for step in own) for own in zip(*steps, strict=True)) / 1e6


def draw() -> str:
    panels, width_ns, medians, busy = [], 0, {}, {}
    for mode in MODES:
        traces = load(RUNS / mode)
        steps = choose(traces)
        medians[mode] = median_ms(steps)
        busy[mode] = sum(step.time_ns("busy") for step in steps[0]) / sum(step.total_ns for step in steps[0])
        drawn = [step for step in steps[0] if FIRST <= step.batch < FIRST + NUM_STEPS]
        panels.append((mode, traces[0], drawn))
        width_ns = max(width_ns, drawn[-1].end_ns - drawn[0].begin_ns)
    per_ns, body, top = (WIDTH - LEFT - RIGHT) / width_ns, list[str](), 8
    for mode, trace, drawn in panels:
        body.append(
            text(8, top + 16, f"{mode}: {medians[mode]:.0f} ms per step, {busy[mode]:.0%} of it compute", "head")
        )
        body += panel(trace, drawn, per_ns, top + 26)
        top += 26 + 22 + 3 * (ROW + GAP) + 12
    body += legend(top + 6)
    height = top + 34
    times = {**medians, FASTEST: median_ms(choose(load(RUNS / FASTEST)))}
    print(*(f"{name} {ms:.1f} ms, {ms / times[MODES[1]]:.2f}x;" for name, ms in times.items()))
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
    label = "The same three batches: a sequential run above a nested one, on one time axis"
    frame = f'<style>{STYLE}</style>\n<rect class="back" width="{WIDTH}" height="{height}"/>'
    return f'{opening} aria-label="{label}">\n{frame}\n' + "\n".join(body) + "\n</svg>\n"


def panel(trace: RankTrace, steps: list[StepTimes], per_ns: float, top: int) -> Iterator[str]:
    """The three rows of one run."""
    begin, end = steps[0].begin_ns, steps[-1].end_ns

    def bar(row: int, first: int, last: int, paint: str, tip: str, name: str = "") -> Iterator[str]:
        left, right = (LEFT + (min(max(at, begin), end) - begin) * per_ns for at in (first, last))
        if last > begin and first < end:
            y = top + 22 + row * (ROW + GAP)
            yield f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 0.8):.1f}" height="{ROW}" {paint}><title>{escape(tip)}</title></rect>'
            if right - left > 9 * len(name) + 2 and name:
                yield text((left + right) / 2, y + 16, name, "on", "middle")

    for row, name in enumerate(("tables", "messages", "compute")):
        y = top + 22 + row * (ROW + GAP)
        yield f'<rect class="row" x="{LEFT}" y="{y}" width="{(end - begin) * per_ns:.1f}" height="{ROW}"/>'
        yield text(LEFT - 8, y + 16, name, "soft", "end")
    for span, last in messages(trace):
        yield from bar(
            1, span.begin_ns, last, 'class="hidden"', f"{span.kind} of batch {span.batch}: launched, not consumed"
        )
    for span in trace.spans:
        tip = f"{span.kind}, batch {span.batch}: {(span.end_ns - span.begin_ns) / 1e6:.1f} ms"
        waits = [wait for wait in span.waits if wait.name in ("rows", "grads", "dense", "flag")]
        for wait in waits:
            yield from bar(1, wait.begin_ns, wait.end_ns, 'class="waited"', f"wait for {wait.name}")
        if span.kind in TABLES:
            yield from bar(0, span.begin_ns, span.end_ns, f'fill="{TABLES[span.kind]}"', tip, str(span.batch))
        if span.kind in ("compute", "dense step"):
            first = max([span.begin_ns, *(wait.end_ns for wait in waits)])
            name = str(span.micro_batch + 1) if span.kind == "compute" else ""
            yield from bar(2, first, span.end_ns, 'class="busy"', tip, name)
    for step in steps:
        left, right = (LEFT + (at - begin) * per_ns for at in (step.begin_ns, step.end_ns))
        for x in (left, right):
            yield f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 22 + 3 * (ROW + GAP)}"/>'
        yield text(left + 5, top + 14, f"batch {step.batch}: {step.total_ns / 1e6:.0f} ms", "soft")


def messages(trace: RankTrace) -> Iterator[tuple[Span, int]]:
    """Each exchange, and when its content was consumed: at the end of the wait for it."""
    consumers = {(span.kind, span.batch, span.micro_batch): span for span in trace.spans}
    for span in trace.spans:
        kind, name = CONSUMED_BY.get(span.kind, ("", ""))
        if consumer := consumers.get((kind, span.batch, span.micro_batch)):
            yield span, max([consumer.begin_ns, *(wait.end_ns for wait in consumer.waits if wait.name == name)])


def legend(top: int) -> Iterator[str]:
    entries = [
        ('fill="#d9b44a"', "read, route, look up"),
        ('fill="#b98bc9"', "update rows"),
        ('class="waited"', "messages, waited for"),
        ('class="hidden"', "messages, hidden"),
        ('class="busy"', "forward and backward"),
    ]
    x = float(LEFT)
    for paint, name in entries:
        yield f'<rect x="{x:.0f}" y="{top}" width="16" height="13" rx="2" {paint}/>'
        yield text(x + 22, top + 11, name, "")
        x += 22 + 7.1 * len(name) + 16


def text(x: float, y: float, content: str, style: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(content)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", action="store_true", help="train both runs first; needs root")
    if parser.parse_args().train:
        train()
    (ROOT / "docs" / "images" / "sequential-nested.svg").write_text(draw())
