"""The model against the published table: fitted to the TorchRec row alone, it must predict the other rows.

1,536 NPUs, HSTU, batch 512 per worker, about 8 micro-batches [NestPipe paper, arXiv 2604.06956, from public digests]. Which constant follows from which figure of the TorchRec row:

    step - lookup - communication     the dense part
    lookup                            key routing and retrieval, half each; any other division gives the same step as long
                                      as neither takes longer than the rest
    communication                     rows and gradients, half each
    scaling efficiency                step on 128 workers, the base; one exponent for lookup and communication

Not published: the number of workers in a group (128 here, the only other published number of workers), and delays as opposed to
bandwidth (0 here, so that more micro-batches cost nothing). No constant is fitted to another row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nestpipe.simulate.cases import CASES, Case, CaseSettings, results
from nestpipe.simulate.constants import Constants

WORKERS, BASE, MICRO_BATCHES, SMALL_MICRO_BATCHES = 1_536, 128, 8, 32
GROUP_SIZES = (64, 128, 256)  # the middle one is what the table shows


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """A row of the published table, in ms; None where there is no figure."""

    title: str
    case: str
    step: float | None = None
    lookup: float | None = None  # exposed
    communication: float | None = None  # exposed
    raw: float | None = None  # all communication, hidden or not
    efficiency: float | None = None
    micro_batches: int = MICRO_BATCHES


TORCHREC = PublishedRow(
    title="TorchRec",
    case="torchrec",
    step=5793.83,
    lookup=2870.99,
    communication=1207.85,
    raw=1207.85,
    efficiency=0.4434,
)
ROWS = (
    PublishedRow(title="2D-SP", case="2d", step=4914.01, communication=438.36, efficiency=0.4932),
    PublishedRow(
        title="UniEmb (asynchronous prefetch)", case="prefetch", step=2919.76, lookup=23.49, efficiency=0.6762
    ),
    PublishedRow(
        title="NestPipe", case="nested", step=1895.98, lookup=30.19, communication=154.23, raw=1185, efficiency=0.9407
    ),
    PublishedRow(
        title="NestPipe + 2D-SP", case="nested-2d", step=5793.83 / 3.18, communication=55.64, raw=452, efficiency=0.9717
    ),
    PublishedRow(title="micro-batches of 16", case="nested", raw=1331, micro_batches=SMALL_MICRO_BATCHES),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One figure of one row, published and predicted."""

    row: str
    figure: str
    published: float
    model: float

    @property
    def error(self) -> float:
        return self.model / self.published - 1


def fit(row: PublishedRow = TORCHREC) -> Constants:
    """The constants of a row of a system that hides nothing."""
    if row.step is None or row.lookup is None or row.communication is None or row.efficiency is None:
        raise ValueError(f"row '{row.title}' lacks a figure that the constants come from")
    dense = row.step - row.lookup - row.communication
    at_base = row.efficiency * row.step - dense  # of lookup and communication
    crossing, base_crossing = (WORKERS - 1) / WORKERS, (BASE - 1) / BASE  # rows that a worker owns itself are not sent
    now = row.lookup + row.communication * base_crossing / crossing
    growth = math.log(now / at_base) / math.log(WORKERS / BASE)
    lookup_s, communication_s = (1e-3 * ms * (BASE / WORKERS) ** growth for ms in (row.lookup, row.communication))
    return Constants(
        source=f"published table, {row.title} row alone",
        base_workers=BASE,
        work_s={"keys": lookup_s / 2, "retrieve": lookup_s / 2},
        device_s=dense / 1e3,
        num_rows=1e6,  # arbitrary: only the time of all rows together is known
        row_bytes=communication_s / 2 / crossing,
        bytes_per_s=1e6,
        congestion=growth,
        lookup_growth=growth,
    )


def predictions(
    constants: Constants, *, rows: Sequence[PublishedRow] = ROWS, group_size: int = GROUP_SIZES[1]
) -> Iterator[Prediction]:
    """Predictions for all figures of rows that were not fitted."""
    cases = {case.name: case for case in CASES}
    for row in rows:
        case, settings = cases[row.case], CaseSettings(micro_batches=row.micro_batches, group_size=group_size)
        if row.step is not None:
            (found,) = results(case, constants, [WORKERS], settings)
            figures = {
                "step": (row.step, 1e3 * found.step_s),
                "exposed lookup": (row.lookup, 1e3 * found.cause_s["lookup"]),
                "exposed communication": (row.communication, 1e3 * found.cause_s["communication"]),
                "efficiency": (row.efficiency, found.efficiency),
            }
            for name, (published, model) in figures.items():
                if published is not None:
                    yield Prediction(row.title, name, published, model)
        if row.raw is not None:
            yield Prediction(row.title, "all communication", row.raw, 1e3 * _raw_s(case, constants, settings))


def _raw_s(case: Case, constants: Constants, settings: CaseSettings) -> float:
    """All communication of a step: the exposed communication of the same micro-batches when nothing is hidden."""
    plain = Case(
        name="plain",
        title="plain",
        mode="serial",
        in_micro_batches=case.in_micro_batches,
        dedupe=case.dedupe,
        groups=case.groups,
    )
    (found,) = results(plain, constants, [WORKERS], settings)
    return found.cause_s["communication"]


def table() -> str:
    """All predictions with their errors, as Markdown; docs/how-to/simulate.md holds it."""
    constants = fit()
    lines = [
        "| model, fitted to the TorchRec row alone | figure | published | model | error |",
        "|---|---|---|---|---|",
    ]
    for one in predictions(constants):
        share = one.figure == "efficiency"
        published, model = (f"{number:.2%}" if share else f"{number:,.1f} ms" for number in (one.published, one.model))
        lines.append(f"| {one.row} | {one.figure} | {published} | {model} | {one.error:+.1%} |")
    return "\n".join(lines)


def by_group_size() -> str:
    """Predictions for the two rows with groups, one line per group size."""
    constants, lines = fit(), []
    in_groups = [row for row in ROWS if row.case in ("2d", "nested-2d")]
    for size in GROUP_SIZES:
        found = predictions(constants, rows=in_groups, group_size=size)
        shown = [one for one in found if one.figure in ("step", "exposed communication")]
        texts = (f"{one.row} {one.figure} {one.model:,.1f} ms ({one.error:+.1%})" for one in shown)
        lines.append(f"groups of {size}: {', '.join(texts)}")
    return "\n".join(lines)
