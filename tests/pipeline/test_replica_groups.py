"""Groups of ranks: every grid trains what one process trains, replicas have the same bytes, and every mode is bitwise identical."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from nestpipe.distributed.process_group import World
from nestpipe.jagged import Batch, Jagged
from nestpipe.pipeline import sequential, stages
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.stages import Clip
from tests.pipeline.mutants import broken_edges
from tests.pipeline.recorded_runs import content, delays, differences, tapped
from tests.pipeline.toy_training import Case, new_toy, toy_batches
from tests.rank_pool import run_ranks
from tests.small_runs import small_log, write_log

NUM_STEPS = 20
DOUBLE = Case(buffered=False, optimizer="adam", depth=2, dtype=torch.float64)
MODES = ("dual-buffer", "frozen-window", "nested")


def sequentially(case, channels, batches):
    """The final state, and the rows of every update as bytes."""
    state, log = new_toy(case, channels), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequential, "update", tapped(log).batch["update"])
        for number, batch in enumerate(batches):
            sequential.step(state, batch, case.rates(number))
    return state, sorted(log)


def beside_each_other(case, channels, batches, mode, chunks, seed):
    state, log = new_toy(replace(case, buffered=True), channels), []
    named = {"clip_rows": case.clip.rows, "groups": case.groups > 1, "chunks": chunks}
    schedule, taps = Schedule.of(mode, case.num_micro_batches, depth=case.depth, **named), tapped(log)
    runner = Runner(
        state,
        schedule,
        batch_stages={**stages.BATCH_STAGES, **taps.batch},
        micro_batch_stages={**stages.MICRO_BATCH_STAGES, **taps.micro_batch},
        before=delays(seed, 0.001),
    )
    runner.run(BatchFeed(batches=batches, rates=case.rates, num_batches=NUM_STEPS))
    return state, sorted(log)


def train(world, cases):
    """Of each case: the state in the end, its bytes, and the modes that have other bits."""
    channels, found = Channels.of(world), []
    grids = {groups: channels.in_groups(groups) for groups in {case.groups: None for case in cases}}
    for number, case in enumerate(cases):
        own = grids[case.groups]
        plain, log = sequentially(case, own, islice(toy_batches(world.rank), NUM_STEPS))
        wrong = []
        arms = [(mode, 1) for mode in MODES] if case.clip.rows else [("nested", chunks) for chunks in (1, "shared", 2)]
        for arm in arms:
            state, other = beside_each_other(case, own, toy_batches(world.rank), *arm, 10 * number + world.rank)
            wrong += [arm] if (content(state), other) != (content(plain), log) else []
        tensors = {**plain.embedding.tables["item"].export(), **plain.dense.export()}
        found.append((tensors, content(plain), log, wrong))
    return found


def joined(num_ranks):
    """The batches of all ranks as those of one."""
    for shares in zip(*(toy_batches(rank) for rank in range(num_ranks)), strict=True):
        rows = [shares_row.tolist() for share in shares for shares_row in share.items.values.split(sizes(share))]
        ids = torch.cat([share.sample_ids for share in shares])
        yield Batch(cursor=shares[0].cursor, sample_ids=ids, items=Jagged.from_rows(rows))


def sizes(batch):
    return batch.items.offsets.diff().tolist()


def one_process(case, num_ranks):
    state, _ = sequentially(replace(case, groups=1), Channels.of(World.single()), islice(joined(num_ranks), NUM_STEPS))
    return {**state.embedding.tables["item"].export(), **state.dense.export()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_ranks", "grids"), [(4, (1, 2, 4)), (2, (2,))])
def test_every_grid_trains_what_one_process_trains(num_ranks, grids):
    """fp64: sums in another order differ in the last bits, and twenty steps must not make more of it."""
    cases = [replace(DOUBLE, groups=groups) for groups in grids]
    cases += [replace(cases[-1], optimizer="adagrad", clip=Clip(0.05, rows=True))]
    results = run_ranks(num_ranks, train, cases, deadline_s=280)
    for number, case in enumerate(cases):
        ranks, shards = [result[number] for result in results], num_ranks // case.groups
        assert [wrong for *_, wrong in ranks] == [[]] * num_ranks
        for rank, (_, state, log, _) in enumerate(ranks):
            assert (state, log) == ranks[rank % shards][1:3], "replicas are not the same"
        one, waiting = one_process(case, num_ranks), "pending.ids"
        tables = [tensors for tensors, *_ in ranks[:shards]]
        order = {key: torch.cat([table[key] for table in tables]).argsort() for key in ("ids", waiting)}
        assert len(one["ids"]) > 8
        assert len(one[waiting]) > 4
        for name, wanted in one.items():
            found = tables[0][name]
            if not name.startswith(("weights.", "state.")) or wanted.shape[:1] == one["ids"].shape:
                found = torch.cat([table[name] for table in tables])[
                    order[waiting if name.startswith("pending.") else "ids"]
                ]
            if wanted.is_floating_point():
                assert float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)) < 1e-12, name
            else:
                assert torch.equal(found, wanted), name


def test_rows_one_update_old_in_groups(tmp_path):
    """Nested with staleness 1 against its plain loop, each with barriers."""
    settings = {"batch_size": 7, "micro_batches": 2, "groups": 2, "stale": True, "sync_steps": 2}
    arms = [{"mode": "nested", "buffered": True, "depth": 2, "barriers": (4,), "seed": 0}]
    log = small_log(tmp_path / "log").path
    assert run_ranks(2, differences, log, settings, 7, arms) == [[], []]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_chunks_in_every_grid(tmp_path, scale, groups):
    """Grids (groups, ranks per group) of four ranks: (1, 4), (2, 2) and (4, 1)."""
    limits = {"num_buckets": 64, "admit_after": 2, "max_rows": 243, "evict": "lfu", "protect_steps": 4}
    settings = {"batch_size": 3, "micro_batches": 3, "groups": groups, "limits": limits}
    histories = {user: [(31 * user + 7 * k) % 600 for k in range(3 + user % 13)] for user in range(80)}
    log = write_log(tmp_path / "wide", histories).path
    arms = [
        {"mode": "nested", "chunks": chunks, "buffered": seed % 2 == 0, "depth": 1 + seed % 3, "seed": seed}
        for seed, chunks in enumerate(("shared", 2, "shared", 5) * scale(1, 8))
    ]
    assert run_ranks(4, differences, log, settings, 14, arms, deadline_s=280) == [[]] * 4


@pytest.mark.timeout(300)
def test_every_dropped_edge_of_groups_is_caught():
    edges = [
        *("collect(t.0) -> merge(t.0)", "collect(t.1) -> merge(t.1)", "merge(t.0) -> merge(t.1)"),
        *("merge(t.1) -> update(t)", "merge(t.1) -> norm(t)"),
        *("chunk collect(t.0) -> chunk merge(t.0)", "merge(t.0) -> chunk merge(t.0)"),
        "chunk merge(t.0) -> chunk update(t.0)",
    ]
    cases = [Case(buffered=True, groups=2), Case(buffered=True, groups=2, clip=Clip(0.05, rows=True))]
    cases += [Case(buffered=True, groups=2, chunks=chunks) for chunks in ("shared", 2)]
    found = run_ranks(2, broken_edges, cases, edges, deadline_s=280)[0]
    assert {edge for _, edge, _ in found} == set(edges)
    assert [tried for *_, tried in found if tried["by one event"] == "equal"] == []
