"""A timeline of a few steps as a self-contained SVG, for light and dark backgrounds.

Ranks are stacked, streams are rows, time runs to the right. A bar is an event, hatched where it waits for messages. On the
compute stream, idle time has the pale colour of its cause. A bar too narrow for its name shows it as a tooltip. All style rules
are scoped to the class `timeline`, so the SVG can be embedded in a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nestpipe.profiling.overlap import CAUSE_OF_WAIT, CAUSES, StepTimes, TimeSegment
from nestpipe.profiling.perfetto import LETTERS, num_micro_batches_of, title
from nestpipe.profiling.svg import LinearScale, Markup, drawing, element, label, pixel, ticks
from nestpipe.profiling.trace_file import KINDS, MICRO_BATCH_KINDS, STREAMS, RankTrace, Span

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
    "chunk rows": "#94c4ee",
    "chunk grads": "#bfb4ec",
    "chunk collect": "#dfd7f6",
    "chunk merge": "#b1bfda",
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
    num_micro_batches, body, top = num_micro_batches_of(traces), list[Markup](), _HEAD
    streams = [stream for stream in STREAMS if any(_visible(trace, stream, scale) for trace in traces)]
    block = len(streams) * (_STREAM + _GAP)
    for trace, own in zip(traces, steps, strict=True):
        body.append(label(8, top + 14, f"rank {trace.rank}", kind="head"))
        body += _steps(own, scale, top, block)
        top += 20
        for stream in streams:
            body += _stream(trace, stream, own, scale, top, num_micro_batches)
            top += _STREAM + _GAP
        top += _RANK_GAP - 20 + 8
    batches = f"batches {steps[0][0].batch} to {steps[0][-1].batch}"
    axis = [label(8, 18, f"{batches}, time in ms", kind="head"), *_axis(scale, top - 8)]
    shown = {span.kind for trace in traces for stream in streams for span in _visible(trace, stream, scale)}
    legend, height = _legend(top + 4, shown)
    content = (*_frame(height), *axis, *body, *legend)
    return drawing(*content, kind="timeline", width=_WIDTH, height=height, about=f"timeline of {batches}")


def middle(steps: Sequence[Sequence[StepTimes]], most: int) -> list[Sequence[StepTimes]]:
    """At most `most` steps of each rank, from the middle of the recording."""
    number = len(steps[0])
    begin = max(number - most, 0) // 2
    return [own[begin : begin + most] for own in steps]


class _TimeScale:
    """Nanoseconds to pixels, clipped to the drawing."""

    def __init__(self, begin_ns: int, end_ns: int):
        self.begin_ns, self.end_ns = begin_ns, end_ns
        self._scale = LinearScale(begin_ns, end_ns, _LEFT, _WIDTH - _RIGHT)

    def x(self, at_ns: int) -> float:
        return self._scale(min(max(at_ns, self.begin_ns), self.end_ns))

    def shows(self, begin_ns: int, end_ns: int) -> bool:
        return begin_ns < self.end_ns and end_ns > self.begin_ns


def _visible(trace: RankTrace, stream: str, scale: _TimeScale) -> list[Span]:
    return [span for span in trace.stream(stream) if scale.shows(span.begin_ns, span.end_ns)]


def _stream(
    trace: RankTrace, stream: str, steps: Sequence[StepTimes], scale: _TimeScale, top: int, num_micro_batches: int
) -> Iterator[Markup]:
    """One row: background, idle causes on the compute stream, bars, waits, names."""
    yield element("rect", class_="row", x=_LEFT, y=top, width=_WIDTH - _LEFT - _RIGHT, height=_STREAM)
    yield label(_LEFT - 8, top + 14, stream, kind="soft", anchor="end")
    if stream == "compute":
        for segment in (one for step in steps for one in step.segments if one.cause != "busy"):
            yield _idle(segment, scale, top)
    for span in _visible(trace, stream, scale):
        yield from _bar(span, scale, top, num_micro_batches)


def _bar(span: Span, scale: _TimeScale, top: int, num_micro_batches: int) -> Iterator[Markup]:
    left, right = scale.x(span.begin_ns), scale.x(span.end_ns)
    duration = f"{(span.end_ns - span.begin_ns) / 1e6:.3f} ms"
    edge = "edge" if right - left > 5 else None  # would cover a narrower bar
    tip = f"{title(span, num_micro_batches)}: {duration}"
    yield _rect(left, right, top, tip, fill=_COLOURS[span.kind], class_=edge)
    widest = (left, left)  # the widest stretch without a wait holds the name
    reached = left
    for wait in span.waits:
        first, last = scale.x(wait.begin_ns), scale.x(wait.end_ns)
        if last - first >= 0.5:
            what = f"wait for {wait.name}: {(wait.end_ns - wait.begin_ns) / 1e6:.3f} ms"
            yield _rect(first, last, top, "", class_="back", fill_opacity=".55")
            yield _rect(first, last, top, what, fill=f"url(#{CAUSE_OF_WAIT[wait.name]})")
        widest = max(widest, (reached, first), key=lambda pair: pair[1] - pair[0])
        reached = last
    widest = max(widest, (reached, right), key=lambda pair: pair[1] - pair[0])
    letter = LETTERS[span.kind]
    first = 2 if span.kind.startswith("chunk ") else 1  # the plain stages hold the first chunk
    names = (
        (f"{letter}{span.micro_batch + first}",)
        if span.kind in MICRO_BATCH_KINDS
        else (f"{letter} t={span.batch}", letter)
    )
    for name in names:
        if len(name) * _LETTER + 4 <= widest[1] - widest[0]:
            yield label((widest[0] + widest[1]) / 2, top + 14, name, kind="on", anchor="middle")
            break


def _idle(segment: TimeSegment, scale: _TimeScale, top: int) -> Markup:
    tip = f"{segment.cause}: {(segment.end_ns - segment.begin_ns) / 1e6:.3f} ms"
    left, right = scale.x(segment.begin_ns), scale.x(segment.end_ns)
    return _rect(left, right, top, tip, fill=_PALE[segment.cause], fill_opacity=".35")


def _steps(steps: Sequence[StepTimes], scale: _TimeScale, top: int, block: int) -> Iterator[Markup]:
    """The borders of a rank's steps, with duration and causes above each."""
    for step in steps:
        left, right = scale.x(step.begin_ns), scale.x(step.end_ns)
        for x in (pixel(left), pixel(right)):
            yield element("line", class_="step", x1=x, x2=x, y1=top + 4, y2=top + 20 + block)
        shares = {cause: step.time_ns(cause) / step.total_ns for cause in CAUSES}
        texts = [f"t={step.batch}", f"{step.total_ns / 1e6:.1f} ms", f"busy {shares['busy']:.0%}"]
        texts += [f"{cause} {shares[cause]:.0%}" for cause in ("lookup", "communication", "bubble")]
        while texts and sum(map(len, texts)) * _LETTER + 18 * (len(texts) - 1) + 12 > right - left:
            texts.pop()
        if texts:
            yield label(left + 5, top + 14, " · ".join(texts), kind="soft")


def _axis(scale: _TimeScale, bottom: int) -> Iterator[Markup]:
    """Grid lines at round times, labelled at the top."""
    for value in ticks(0.0, (scale.end_ns - scale.begin_ns) / 1e6, most=13):
        x = scale.x(scale.begin_ns + round(value * 1e6))
        line = {"x1": pixel(x), "x2": pixel(x), "y1": _HEAD - 8, "y2": bottom}
        yield element("line", class_="grid", **line, stroke_opacity=".5")
        if x < _WIDTH - 40:
            yield label(x, _HEAD - 14, f"{value:g}", kind="soft", anchor="middle")


def _frame(height: int) -> Iterator[Markup]:
    yield element("style", Markup(_STYLE))
    hatching = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    stripes = {cause: element("rect", width=2.4, height=6, fill=colour) for cause, colour in _PALE.items()}
    yield element("defs", *(element("pattern", stripe, id=cause, **hatching) for cause, stripe in stripes.items()))
    yield element("rect", class_="back", width=_WIDTH, height=height)


def _legend(top: int, kinds: set[str]) -> tuple[list[Markup], int]:
    """Legend of colours, and the height of the whole drawing."""
    names = {kind: kind if LETTERS[kind] == kind else f"{LETTERS[kind]}: {kind}" for kind in KINDS if kind in kinds}
    samples: list[tuple[str, str, str | None]] = [(name, _COLOURS[kind], None) for kind, name in names.items()]
    samples += [(f"idle: {cause}", colour, ".35") for cause, colour in _PALE.items()]
    samples += [(f"blocked on {cause}", f"url(#{cause})", None) for cause in ("lookup", "communication")]
    legend, x, y = list[Markup](), float(_LEFT), top
    for text, fill, opacity in samples:
        wide = 18 + len(text) * _LETTER + 14
        if x + wide > _WIDTH - _RIGHT:
            x, y = float(_LEFT), y + 20
        box = {"x": pixel(x), "y": y, "width": 14, "height": 12, "rx": 2}
        legend += [element("rect", **box, fill=fill, fill_opacity=opacity), label(x + 18, y + 10, text)]
        x += wide
    return legend, y + 26


def _rect(left: float, right: float, top: int, tip: str, **paint: str | None) -> Markup:
    width = max(right - left, 0.7)  # keeps the shortest event visible
    box = {"x": f"{left:.2f}", "y": top, "width": f"{width:.2f}", "height": _STREAM}
    return element("rect", *([element("title", tip)] if tip else []), **box, **paint)
