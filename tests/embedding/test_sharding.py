"""Sharded tables: the same training for any number of ranks and micro-batches, bitwise identical when repeated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.buckets import FINE_CHUNKS, Owners, divide, fewer_buckets, num_table_buckets, too_many_ranks
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import Lookup
from nestpipe.embedding.routing import own_requests, plan_table, route
from nestpipe.embedding.window import Window
from nestpipe.pipeline.stages import Clip
from tests.embedding.sharding_ranks import merged, train_steps
from tests.embedding.test_unique_ids import needs_compiler
from tests.rank_pool import run_ranks
from tests.small_runs import small_log, write_log

KINDS = [
    ("hstu", "sampled", "adam"),
    ("sasrec", "full", "adagrad"),
    ("hstu", "full", "adagrad"),
    ("sasrec", "sampled", "adam"),
]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("sharded") / "log").path


def run(world_size, log, num_steps, **settings):
    return merged(run_ranks(world_size, train_steps, log, settings, num_steps))


def worst(a, b):
    """The largest difference, relative to the largest weight of the tensor's kind."""
    assert a.keys() == b.keys()
    assert torch.equal(a["ids"], b["ids"])
    names = [name for name in a if a[name].is_floating_point()]
    return max(
        float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-30))
        for name in names
        if a[name].numel()
    )


@pytest.mark.parametrize("number", [0, 1])
def test_every_world_size_trains_the_same_model(log, scale, number):
    """fp64; sums in another order differ in the last bits, and fifty steps of Adam must not make more of it.

    The first two kinds have both models, losses and optimizers; the others are for a soak.
    """
    for model, loss, optimizer in scale([KINDS[number]], KINDS[number::2]):
        settings = {"model": model, "loss": loss, "optimizer": optimizer}
        one = run(1, log, 50, **settings)
        assert one["loss"][-10:].mean() < one["loss"][:10].mean()
        for world_size in (2, 3, 4):
            assert worst(run(world_size, log, 50, **settings, micro_batches=scale(world_size % 3 + 1, 3)), one) < 1e-12


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_world_twice_has_the_same_bits_with_either_index(log, world_size):
    first, again, torch_index = (
        run(world_size, log, 10, dtype=torch.float32, micro_batches=2, native=native) for native in (None, None, False)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], torch_index[name]) for name in first)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_more_ranks_and_micro_batches_than_samples(log, micro_batches):
    """Empty ranks and empty micro-batches send their empty messages and change nothing."""
    few = {"batch_size": 2, "micro_batches": micro_batches}
    assert worst(run(4, log, 12, **few), run(1, log, 12, batch_size=2)) < 1e-12


@pytest.mark.parametrize("rows", [False, True])
def test_clipping_is_the_same_on_every_world_size(log, rows):
    clip = Clip(0.05, rows=rows)
    one, three = (run(size, log, 10, optimizer="sgd", clip=clip) for size in (1, 3))
    assert worst(three, one) < 1e-12
    assert worst(one, run(1, log, 10, optimizer="sgd")) > 1e-6, "the norm must be reached for this to mean anything"


LIMITS = {
    "few rows": {"max_rows": 290, "evict": "lru"},
    "second sight": {"admit_after": 2, "max_rows": 290, "evict": "lfu", "protect_steps": 3},
    "admission alone": {"admit_after": 6, "num_buckets": 4096},
}


@pytest.fixture(scope="module")
def wide_log(tmp_path_factory):
    """Enough items that a batch sees a small part of them."""
    histories = {user: [(31 * user + 7 * k) % 600 for k in range(3 + user % 13)] for user in range(80)}
    return write_log(tmp_path_factory.mktemp("sharded") / "wide", histories).path


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_every_world_size_admits_and_evicts_the_same_ids(wide_log, limits):
    settings = {"limits": {"num_buckets": 8, **limits}, "batch_size": 3, "loss": "sampled"}
    one = run(1, wide_log, 25, **settings)
    free = run(1, wide_log, 25, batch_size=3)
    gone = set(free["ids"].tolist()) - set(one["ids"].tolist())
    assert len(gone) > 10, "ids must have been refused or evicted for this to mean anything"
    for world_size in (2, 3, 4):
        other = run(world_size, wide_log, 25, **settings, micro_batches=world_size % 3 + 1)
        assert worst(other, one) < 1e-12
        assert all(torch.equal(other[name], one[name]) for name in one if "index." in name or "pending." in name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resumed_run_admits_and_evicts_the_same_ids(wide_log, world_size):
    limits = {"num_buckets": 8, **LIMITS["second sight"]}
    settings = {"limits": limits, "batch_size": 3, "dtype": torch.float32}
    whole, resumed, torch_index = (
        run(world_size, wide_log, 30, **settings, **more) for more in ({}, {"resume_at": 13}, {"native": False})
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert all(torch.equal(whole[name], torch_index[name]) for name in whole)


def test_gradients_of_ids_without_a_row_do_not_count_in_the_norm(wide_log):
    settings = {"limits": {"num_buckets": 8, "admit_after": 99}, "batch_size": 3, "optimizer": "sgd"}
    clipped = [run(size, wide_log, 6, **settings, clip=Clip(0.05, rows=rows)) for size in (1, 3) for rows in (0, 1)]
    assert not len(clipped[0]["ids"])
    assert all(torch.equal(clipped[0][name], clipped[1][name]) for name in clipped[0])
    assert worst(clipped[3], clipped[0]) < 1e-12


def poisoned(world, path):
    from nestpipe.data.loader import Loader  # noqa: F401
    from nestpipe.errors import TrainError
    from nestpipe.jagged import Cursor
    from nestpipe.pipeline.sequential import step
    from nestpipe.pipeline.stages import Rates
    from tests.embedding.sharding_ranks import new_state

    state, loader = new_state(world, path, {})
    if world.rank == 1:
        with torch.no_grad():
            state.model.backbone.blocks[0].out.bias[0] = torch.inf
    before = state.dense.export()
    try:
        step(state, loader.batch(Cursor(0, 0)), Rates(0.1, 0.1))
    except TrainError as error:
        after = state.dense.export()
        table = state.embedding.tables["item"].export()
        same = all(torch.equal(a, b) for a, b in zip(before.values(), after.values(), strict=True))
        return str(error), same, torch.equal(table["rows"], state.embedding.tables["item"].initial(table["ids"]))
    return "no error", False, False


def test_a_non_finite_value_on_one_rank_stops_all_before_any_update(log):
    for message, dense_same, rows_same in run_ranks(3, poisoned, log):
        assert "at step 1 on rank 1; no parameter was updated" in message
        assert dense_same
        assert rows_same


def test_a_window_in_chunks_has_no_sums_of_all_micro_batches():
    with pytest.raises(ValueError, match="chunks are updated one after the other"):
        Window(tables=None, plan=None, number=0, weight=1.0, chunks="shared").owned_grads()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_buckets_cover_all_ranks_and_ids_do_not_move_between_buckets(world_size):
    owners = Owners(64, world_size)
    assert [b for rank in range(world_size) for b in owners.buckets_of(rank)] == list(range(64))
    ids = torch.cat([torch.arange(-5000, 5000), torch.tensor([-(2**63), 2**63 - 1])])
    bucket, owner = owners.bucket_of(ids), owners.owner_of(ids)
    assert torch.equal(bucket, Owners(64, 1).bucket_of(ids))
    assert all(int(b) in owners.buckets_of(int(o)) for b, o in zip(bucket, owner, strict=True))
    counts = torch.bincount(bucket, minlength=64).double()
    assert float((counts - counts.mean()).abs().max()) < 6 * float(counts.mean()) ** 0.5


def test_more_ranks_than_buckets_are_refused():
    with pytest.raises(ValueError, match="65 ranks cannot share 64 buckets"):
        Owners(64, 65)


@pytest.mark.parametrize(
    ("num_buckets", "max_rows", "expected"),
    [
        (64, 0, 64),
        (4096, 0, 4096),
        (4096, 4_000_000, 4096),
        (4096, 262_144, 4096),
        (4096, 262_143, 4095),
        (64, 100, 1),
        (64, 3, 1),
    ],
)
def test_a_bounded_table_has_64_rows_in_a_bucket(num_buckets, max_rows, expected):
    config = EmbeddingConfig(num_buckets=num_buckets, max_rows=max_rows)
    assert num_table_buckets(config) == expected
    assert too_many_ranks(config, expected) is None
    assert str(expected) in (too_many_ranks(config, expected + 1) or "")
    said = fewer_buckets(config)
    assert said.endswith(f"at most {expected} rank{'s' * (expected > 1)}.") if expected < num_buckets else not said


@given(total=st.integers(0, 10**7), num_buckets=st.integers(1, 65_536))
def test_a_limit_is_divided_and_the_first_buckets_get_the_remainder(total, num_buckets):
    shares = divide(total, num_buckets)
    assert int(shares.sum()) == total
    assert len(shares) == num_buckets
    assert bool((shares.diff() <= 0).all())
    assert int(shares[0] - shares[-1]) <= 1


def test_a_plan_sends_each_id_once_with_its_first_micro_batch_and_back_with_its_last():
    micro_batches = [
        {"x": Lookup(table="t", ids=torch.tensor(ids, dtype=torch.int64))} for ids in ([5, 9, 5], [], [9, 2], [2, 7])
    ]
    owners = Owners(64, 3)
    routed = route(micro_batches, ["t"], owners)
    plan = routed.tables["t"]
    first, last = {5: 0, 9: 0, 2: 2, 7: 3}, {5: 0, 9: 2, 2: 3, 7: 3}
    ids = plan.ids.tolist()
    assert sorted(ids) == [2, 5, 7, 9]
    number = {one: divmod(int(owners.fine_chunks_of(torch.tensor([one]))), FINE_CHUNKS) for one in ids}
    keys = [(number[one][0], first[one], number[one][1], one) for one in ids]
    assert keys == sorted(keys)
    assert plan.last_use.tolist() == [last[one] for one in ids]
    local_rows = [
        sorted((one for one in set(micro_batch["x"].ids.tolist())), key=ids.index) for micro_batch in micro_batches
    ]
    for micro_batch, local in enumerate(local_rows):
        assert [local[place] for place in routed.index[micro_batch]["x"].tolist()] == micro_batches[micro_batch][
            "x"
        ].ids.tolist()
        assert [local[place] for place in plan.repeated[micro_batch].tolist()] == [
            one for one in local if first[one] < micro_batch
        ]
        sources = [divmod(source, 1 << 32) for source in plan.source[micro_batch].tolist()]
        assert [local_rows[number][place] for number, place in sources] == [
            one for one in local if first[one] < micro_batch
        ]
        assert [local[place] for place in plan.ending[micro_batch].tolist()] == [
            one for one in local if last[one] == micro_batch
        ]
        assert [one for fresh in plan.fresh(micro_batch) for one in local[fresh]] == [
            one for one in local if first[one] == micro_batch
        ]
    for owner, counts in enumerate(plan.first_counts):
        assert counts == [sum(key[:2] == (owner, micro_batch) for key in keys) for micro_batch in range(4)]


@needs_compiler
@given(
    rows=st.lists(st.lists(st.integers(-9, 9) | st.integers(-(2**63), 2**63 - 1), max_size=12), min_size=1, max_size=5),
    world_size=st.integers(1, 4),
)
def test_native_plans_are_those_of_torch(rows, world_size):
    ids, sizes = torch.tensor([one for row in rows for one in row], dtype=torch.int64), [len(row) for row in rows]
    (ours, index), (other, other_index) = (
        plan_table(ids, sizes, Owners(64, world_size), native=native) for native in (True, False)
    )
    assert index.tolist() == other_index.tolist()
    assert as_lists(ours) == as_lists(other)
    # The same ids as requests of so many requesters, each with the micro-batch of its last use.
    counts = [[len(micro_batch) // world_size] * len(rows) for micro_batch in rows[:1]] * world_size
    num_asked = sum(map(sum, counts))
    if num_asked <= len(ids):
        last_micro_batch = torch.arange(num_asked).remainder(len(rows)).to(torch.uint8)
        found = [own_requests(ids[:num_asked], last_micro_batch, counts, native=native) for native in (True, False)]
        assert as_lists(found[0]) == as_lists(found[1])


@needs_compiler
def test_many_micro_batches_on_many_ranks_do_not_overflow_the_byte_of_the_last_micro_batch():
    counts = [[1] * 200] * 3
    ids, last_micro_batch = torch.arange(600), torch.arange(200).repeat(3).to(torch.uint8)
    found = [own_requests(ids, last_micro_batch, counts, native=native) for native in (True, False)]
    assert as_lists(found[0]) == as_lists(found[1])
    assert found[1].arrival_counts == [[1, 1, 1]] * 200


def as_lists(plan):
    """All fields of a dataclass, tensors as lists."""
    values = [getattr(plan, name) for name in plan.__dataclass_fields__]
    listed = [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
    return [[one.tolist() for one in value] if isinstance(value, tuple) else value for value in listed]
