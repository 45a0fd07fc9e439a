"""Every refusal of the pipeline's settings has its reason in docs/concepts/pipeline.md, and every row there is a refusal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nestpipe.pipeline import config
from nestpipe.pipeline.config import PipelineConfig

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "pipeline.md"
REFUSED = {  # first column of the table -> settings, each refused for one reason
    "`micro_batches` outside 1 .. 256": [{"micro_batches": 257}],
    "`ramp` outside (0, 1]": [{"ramp": 1.5}],
    "`depth` outside 1 .. 8": [{"depth": 9}],
    "`chunks` outside 1 .. 8": [{"chunks": 9, "mode": "nested"}],
    "`chunks`, but the mode is not `nested`": [{"chunks": "shared", "mode": "frozen-window"}],
    "`groups` negative": [{"groups": -1}],
    "`staleness` other than 0 or 1": [{"staleness": 2}],
    "`staleness` 1 in `dual-buffer`, `frozen-window`": [{"staleness": 1, "mode": "dual-buffer"}],
    "`staleness` 1 and `trace_steps` in `auto`, `sequential`": [{"staleness": 1, "trace_steps": 4}],
    "`sync_steps` negative, or without `staleness`": [{"sync_steps": -1, "staleness": 1}, {"sync_steps": 3}],
    "`trace_steps` negative": [{"trace_steps": -1}],
}


@pytest.mark.parametrize("settings", [one for own in REFUSED.values() for one in own])
def test_each_is_refused_for_one_reason(settings):
    (problem,) = PipelineConfig().changed(**settings).problems()
    assert next(iter(settings)) in problem


def test_the_page_has_them_all():
    section = PAGE.read_text().partition("## What is refused, and why")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| `")]
    assert rows == list(REFUSED)


def test_no_refusal_is_missing_here():
    tree = ast.parse(Path(config.__file__).read_text())
    assert sum(map(len, REFUSED.values())) == sum(isinstance(node, ast.Yield) for node in ast.walk(tree))
