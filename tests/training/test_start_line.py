"""The first line of a run: what it resumes from, and why its result may differ."""

from dataclasses import replace

import pytest

from nestpipe import recipes
from nestpipe.training.run_folder import Run, versions
from nestpipe.training.start_line import EarlierStart, cpu_model, start_line

FACTS = {"num_ranks": 2, "cpu_model": cpu_model(), "versions": versions()}


@pytest.fixture
def run(tmp_path):
    tiny = recipes.tiny()
    return Run(tmp_path, replace(tiny, train=replace(tiny.train, num_threads=3)))


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (["a"], "new run on 1 rank, 3 threads"),
        (["a", "a"], "new run on 2 ranks, 3 threads each"),
        (["a", "b", "a"], "new run on 3 ranks (a: 0, 2; b: 1), 3 threads each"),
    ],
)
def test_a_new_run_says_where_it_runs(run, hosts, line):
    assert start_line(run, None, hosts, step=0, checkpoint="") == line


@pytest.mark.parametrize(
    ("facts", "ends"),
    [
        ({}, "2 ranks, bitwise identical: yes"),
        ({"num_ranks": 1}, "2 ranks (before: 1), bitwise identical: no, other number of ranks"),
        ({"cpu_model": "Z80"}, f"bitwise identical: no, other processor ({cpu_model()}; before: Z80)"),
        ({"versions": {**versions(), "torch": "1.0"}}, f"other torch ({versions()['torch']}; before: 1.0)"),
    ],
)
def test_a_resumed_run_says_what_is_repeated_and_what_changed(run, facts, ends):
    earlier = EarlierStart({**FACTS, **facts}, num_steps=59)
    line = start_line(run, earlier, ["a", "a"], step=50, checkpoint="step-000050")
    assert line.startswith("resumed from step 50 (step-000050), 9 steps repeated, 2 ranks")
    assert line.endswith(ends)


def test_a_run_without_a_complete_checkpoint_says_that_it_starts_again(run):
    line = start_line(run, EarlierStart(FACTS, num_steps=4), ["a"], step=0, checkpoint="")
    assert line == "started again, because no checkpoint was complete, on 1 rank, 3 threads"
