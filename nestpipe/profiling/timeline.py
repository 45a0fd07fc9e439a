"""A drawing of a few steps that a person can read: an SVG without outside assets, for light and dark backgrounds.

Ranks are stacked, lanes are rows, time runs to the right. A bar is an event, hatched where it waits inside; the compute
lane also shows, pale, why it was idle. Bars too narrow for their name have it as a tooltip. All its styles begin with its
class, so that it can also stand in a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from nestpipe.profiling.overlap import CAUSE_OF_WAIT, CAUSES, StepTimes, TimePiece
from nestpipe.profiling.perfetto import LETTERS, num_micro_batches_of, title
from nestpipe.profiling.recorder import KINDS, MICRO_BATCH_KINDS, STREAMS, RankTrace, Span

_WIDTH, _LEFT, _RIGHT = 1200, 76, 12
_STREAM, _GAP, _RANK_GAP, _HEAD = 20, 4, 30, 52  # heights
_LETTER = 6.4  # width of a letter at 11 px
_COLOURS = {  # kind -> fill; the text on all of them is dark
    "read": "#c9b79c",
    "keys": "#e0c341",
    "retrieve": "#e99a3c",
    "post": "#a9b8c9",
    "rows": "#6fb1e8",
    "compute": "#6cc28a",
    "grads": "#a99ae6",
    "collect": "#d3c8f2",
    "merge": "#8fa3c9",
    "flag": "#e58fb5",
    "dense sum": "#7fd0cf",
    "norm": "#9fdcc8",
    "dense step": "#3f9e63",
    "update": "#d98880",
    "write": "#b9a7a0",
    "arrive": "#a8dbba",
    "unshared rows": "#b3d6f3",
    "unshared grads": "#cfc6f1",
    "unshared collect": "#e6e0f8",
    "unshared update": "#ecc3be",
    "chunk rows": "#94c4ee",
    "chunk grads": "#bfb4ec",
    "chunk collect": "#dfd7f6",
    "chunk update": "#e4a9a2",
}
_PALE = {"lookup": "#e9a94c", "communication": "#5c9fe0", "bubble": "#999999"}  # causes of idle time
_STYLE = """
.timeline text{font:11px ui-sans-serif,system-ui,"DejaVu Sans",sans-serif;fill:#1c1e21}
.timeline .head{font-weight:600;font-size:12px}.timeline .on{fill:#14161a;pointer-events:none}.timeline .soft{fill:#5b616a}
.timeline .edge{stroke:#fff;stroke-width:.8}.timeline .back{fill:#fff}.timeline .row{fill:#f3f4f6}
.timeline .grid{stroke:#c3c8cf;stroke-width:1}.timeline .step{stroke:#4b5158;stroke-width:1;stroke-dasharray:4 3}
@media screen and (prefers-color-scheme:dark){.timeline text{fill:#e4e6ea}.timeline .on{fill:#14161a}.timeline .soft{fill:#a2a9b3}
.timeline .edge{stroke:#15181c}.timeline .back{fill:#15181c}.timeline .row{fill:#1f2329}.timeline .grid{stroke:#3a4048}.timeline .step{stroke:#aab1ba}}
"""


def draw(traces: Sequence[RankTrace], steps: Sequence[Sequence[StepTimes]]) -> str:
    """The chosen steps of the given ranks (the same batches for each) as an SVG."""
    begin = min(step.begin_ns for own in steps for step in own)
    end = max(step.end_ns for own in steps for step in own)
    scale = _TimeScale(begin, end)
    num_micro_batches, body, top = num_micro_batches_of(traces), list[str](), _HEAD
    streams = [stream for stream in STREAMS if any(_visible(trace, stream, scale) for trace in traces)]
    block = len(streams) * (_STREAM + _GAP)
    for trace, own in zip(traces, steps, strict=True):
        body.append(_text(8, top + 14, f"rank {trace.rank}", "head"))
        body += _steps(own, scale, top, block)
        top += 20
        for stream in streams:
            body += _stream(trace, stream, own, scale, top, num_micro_batches)
            top += _STREAM + _GAP
        top += _RANK_GAP - 20 + 8
    batches = f"batches {steps[0][0].batch} to {steps[0][-1].batch}"
    axis = [_text(8, 18, f"{batches}, time in ms", "head"), *_axis(scale, top - 8)]
    seen = {span.kind for trace in traces for stream in streams for span in _visible(trace, stream, scale)}
    legend, height = _legend(top + 4, seen)
    shown = "\n".join([*_frame(height), *axis, *body, *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="timeline of {batches}">\n{shown}\n</svg>\n'
    )


def middle(steps: Sequence[Sequence[StepTimes]], most: int) -> list[Sequence[StepTimes]]:
    """At most so many steps of each rank, from the middle of what was recorded."""
    number = len(steps[0])
    begin = max(number - most, 0) // 2
    return [own[begin : begin + most] for own in steps]


class _TimeScale:
    """Nanoseconds to pixels."""

    def __init__(self, begin_ns: int, end_ns: int):
        self.begin_ns, self.end_ns = begin_ns, end_ns
        self._per_ns = (_WIDTH - _LEFT - _RIGHT) / (end_ns - begin_ns)

    def x(self, at_ns: int) -> float:
        inside = min(max(at_ns, self.begin_ns), self.end_ns)
        return _LEFT + (inside - self.begin_ns) * self._per_ns

    def shows(self, begin_ns: int, end_ns: int) -> bool:
        return begin_ns < self.end_ns and end_ns > self.begin_ns


def _visible(trace: RankTrace, stream: str, scale: _TimeScale) -> list[Span]:
    return [span for span in trace.stream(stream) if scale.shows(span.begin_ns, span.end_ns)]


def _stream(
    trace: RankTrace, stream: str, steps: Sequence[StepTimes], scale: _TimeScale, top: int, num_micro_batches: int
) -> Iterator[str]:
    """One row: its background, idle causes on the compute lane, bars, waits, names."""
    yield f'<rect class="row" x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_STREAM}"/>'
    yield _text(_LEFT - 8, top + 14, stream, "soft", anchor="end")
    if stream == "compute":
        for piece in (piece for step in steps for piece in step.pieces if piece.cause != "busy"):
            yield _idle(piece, scale, top)
    for span in _visible(trace, stream, scale):
        yield from _bar(span, scale, top, num_micro_batches)


def _bar(span: Span, scale: _TimeScale, top: int, num_micro_batches: int) -> Iterator[str]:
    left, right = scale.x(span.begin_ns), scale.x(span.end_ns)
    duration = f"{(span.end_ns - span.begin_ns) / 1e6:.3f} ms"
    tip = escape(f"{title(span, num_micro_batches)}: {duration}")
    edge = ' class="edge"' if right - left > 5 else ""  # narrower bars would vanish in it
    yield _rect(left, right, top, f'fill="{_COLOURS[span.kind]}"{edge}', tip)
    widest = (left, left)  # the widest stretch without a wait holds the name
    reached = left
    for wait in span.waits:
        first, last = scale.x(wait.begin_ns), scale.x(wait.end_ns)
        if last - first >= 0.5:
            what = f"wait for {wait.name}: {(wait.end_ns - wait.begin_ns) / 1e6:.3f} ms"
            yield _rect(first, last, top, 'class="back" fill-opacity=".55"', "")
            yield _rect(first, last, top, f'fill="url(#{CAUSE_OF_WAIT[wait.name]})"', what)
        widest = max(widest, (reached, first), key=lambda pair: pair[1] - pair[0])
        reached = last
    widest = max(widest, (reached, right), key=lambda pair: pair[1] - pair[0])
    letter = LETTERS[span.kind]
    first = 2 if span.kind.startswith("chunk ") else 1  # the first slice is in the plain stages
    names = (
        (f"{letter}{span.micro_batch + first}",)
        if span.kind in MICRO_BATCH_KINDS
        else (f"{letter} t={span.batch}", letter)
    )
    for name in names:
        if len(name) * _LETTER + 4 <= widest[1] - widest[0]:
            yield _text((widest[0] + widest[1]) / 2, top + 14, name, "on", anchor="middle")
            break


def _idle(piece: TimePiece, scale: _TimeScale, top: int) -> str:
    tip = f"{piece.cause}: {(piece.end_ns - piece.begin_ns) / 1e6:.3f} ms"
    return _rect(
        scale.x(piece.begin_ns), scale.x(piece.end_ns), top, f'fill="{_PALE[piece.cause]}" fill-opacity=".35"', tip
    )


def _steps(steps: Sequence[StepTimes], scale: _TimeScale, top: int, block: int) -> Iterator[str]:
    """The borders of a rank's steps, and above each what it took."""
    for step in steps:
        left, right = scale.x(step.begin_ns), scale.x(step.end_ns)
        for x in (left, right):
            yield f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 4}" y2="{top + 20 + block}"/>'
        shares = {cause: step.time_ns(cause) / step.total_ns for cause in CAUSES}
        texts = [f"t={step.batch}", f"{step.total_ns / 1e6:.1f} ms", f"busy {shares['busy']:.0%}"]
        texts += [f"{cause} {shares[cause]:.0%}" for cause in ("lookup", "communication", "bubble")]
        while texts and sum(map(len, texts)) * _LETTER + 18 * (len(texts) - 1) + 12 > right - left:
            texts.pop()
        if texts:
            yield _text(left + 5, top + 14, " · ".join(texts), "soft")


def _axis(scale: _TimeScale, bottom: int) -> Iterator[str]:
    """Lines at round times, named at the top."""
    wide_ms = (scale.end_ns - scale.begin_ns) / 1e6
    tick = next(size for power in range(-5, 9) for one in (1, 2, 5) if wide_ms / (size := one * 10.0**power) <= 12)
    for number in range(int(wide_ms / tick) + 1):
        x = scale.x(scale.begin_ns + round(number * tick * 1e6))
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 8}" y2="{bottom}" stroke-opacity=".5"/>'
        if x < _WIDTH - 40:
            yield _text(x, _HEAD - 14, f"{number * tick:g}", "soft", anchor="middle")


def _frame(height: int) -> Iterator[str]:
    yield f"<style>{_STYLE}</style>"
    yield "<defs>"
    for cause, colour in _PALE.items():
        yield f'<pattern id="{cause}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        yield f'<rect width="2.4" height="6" fill="{colour}"/></pattern>'
    yield "</defs>"
    yield f'<rect class="back" width="{_WIDTH}" height="{height}"/>'


def _legend(top: int, seen: set[str]) -> tuple[list[str], int]:
    """What the colours mean; and the height of the whole drawing."""
    names = {kind: kind if LETTERS[kind] == kind else f"{LETTERS[kind]}: {kind}" for kind in KINDS if kind in seen}
    fills = [(name, f'fill="{_COLOURS[kind]}"') for kind, name in names.items()]
    idle = [(f"idle: {cause}", f'fill="{colour}" fill-opacity=".35"') for cause, colour in _PALE.items()]
    waits = [(f"waits inside for {cause}", f'fill="url(#{cause})"') for cause in ("lookup", "communication")]
    found, x, y = list[str](), float(_LEFT), top
    for text, fill in [*fills, *idle, *waits]:
        wide = 18 + len(text) * _LETTER + 14
        if x + wide > _WIDTH - _RIGHT:
            x, y = float(_LEFT), y + 20
        found.append(f'<rect x="{x:.1f}" y="{y}" width="14" height="12" rx="2" {fill}/>')
        found.append(_text(x + 18, y + 10, text, ""))
        x += wide
    return found, y + 26


def _rect(left: float, right: float, top: int, paint: str, tip: str) -> str:
    wide = max(right - left, 0.7)  # an event that is there must be seen
    inner = f"<title>{tip}</title>" if tip else ""
    return f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_STREAM}" {paint}>{inner}</rect>'


def _text(x: float, y: float, text: str, style: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
