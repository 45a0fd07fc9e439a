"""Usage of ids: the linked lists against the sort, victim by victim, through loads on other numbers of ranks."""

import resource
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.buckets import Owners, divide
from nestpipe.embedding.id_index import UnknownIdError
from nestpipe.embedding.usage_ledger import NativeLedger, TorchLedger, export_usage, make_ledger
from nestpipe.ops import native_library

try:
    native_library.find_compiler()
    HAS_COMPILER = True
except native_library.BuildError:
    HAS_COMPILER = False
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
both = pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_compiler)], ids=["torch", "native"])

IDS = st.one_of(st.integers(-9, 14), st.integers(-9, 14), st.sampled_from([-(2**63), 2**63 - 1]))
BATCHES = st.lists(
    st.tuples(
        st.sets(IDS, max_size=9),  # the ids of the batch; those that have a slot are touched, the others admitted
        st.sets(IDS, max_size=2),  # removed after it, if they are there
        st.integers(1, 4),  # the frequency of new ids: they may have waited
        st.sampled_from(["", "", "trim", "load", "reload"]),
    ),
    max_size=20,
)


def tensor(ids):
    return torch.tensor(sorted(ids), dtype=torch.int64)


def batch(ledger, ids, step, *, protect, limits, waited=1):
    """One batch; returns the ids that found no room and those that were evicted, both in order."""
    slots = ledger.touch(ids, step)
    new = (slots < 0).nonzero().flatten()
    fresh, evicted = ledger.admit(
        ids[new], torch.full_like(new, waited), step=step, before=step - protect, limits=limits
    )
    slots[new] = fresh
    ledger.append(slots)
    assert torch.equal(ledger.index.find(ids), slots)
    assert bool((ledger.index.find(evicted.ids) < 0).all())
    return ids[slots < 0].tolist(), evicted.ids.tolist()


def same(one, other):
    a, b = export_usage(one), export_usage(other)
    assert all(torch.equal(a[name], b[name]) for name in a)


def reloaded(ledgers, num_buckets, order):
    """The content of ledgers, each with some buckets, in another one, bucket after bucket as checkpoints have them."""
    content = [export_usage(one) for one in ledgers]
    joined = {name: torch.cat([one[name] for one in content]) for name in content[0]}
    last_first = Owners(num_buckets, 1).bucket_of(joined["ids"]).argsort(stable=True).flip(0)
    new = make_ledger(num_buckets, order)
    new.load({name: values[last_first] for name, values in joined.items()})
    return new


@needs_compiler
@given(
    order=st.sampled_from(["lru", "lfu"]),
    num_buckets=st.integers(1, 3),
    most=st.integers(0, 14),
    protect=st.integers(0, 3),
    batches=BATCHES,
)
def test_the_lists_evict_what_the_sort_evicts(order, num_buckets, most, protect, batches):
    ours, expected = make_ledger(num_buckets, order, native=True), make_ledger(num_buckets, order, native=False)
    limits = divide(most, num_buckets)
    for step, (ids, removed, waited, then) in enumerate(batches):
        settings = {"protect": protect, "limits": limits, "waited": waited}
        refused, evicted = batch(ours, tensor(ids), step, **settings)
        wanted = batch(expected, tensor(ids), step, **settings)
        assert (refused, sorted(evicted)) == (wanted[0], sorted(wanted[1]))
        gone = tensor(one for one in removed if int(expected.index.find(tensor([one]))) >= 0)
        ours.remove(gone)
        expected.remove(gone)
        if then == "trim":
            fewer = (limits - 2).clamp(min=0)
            assert sorted(ours.trim(tensor(ids), fewer).ids.tolist()) == sorted(
                expected.trim(tensor(ids), fewer).ids.tolist()
            )
        elif then == "load":
            ours = reloaded([ours], num_buckets, order)
        elif then == "reload":
            ours.load(export_usage(ours))
        same(ours, expected)


@needs_compiler
@pytest.mark.parametrize("order", ["lru", "lfu"])
@pytest.mark.parametrize("num_buckets", [3, 4096])
def test_many_ids_on_any_number_of_ranks(order, num_buckets, scale):
    """Ranks that own some buckets each evict what one rank evicts, and go on as another number of ranks."""
    generator, limits = torch.Generator().manual_seed(num_buckets), divide(5_000, num_buckets)
    whole, ranks = make_ledger(num_buckets, order), [make_ledger(num_buckets, order)]
    expected = make_ledger(num_buckets, order, native=False)
    num_evicted = 0
    for step in range(scale(60, 600)):
        # The lower, the more frequent.
        ids = torch.rand(700, generator=generator, dtype=torch.float64).pow(3).mul(30_000).long().unique()
        if step in {20, 40}:
            num_ranks = {20: 3, 40: 2}[step]
            content, owners = export_usage(reloaded(ranks, num_buckets, order)), Owners(num_buckets, num_ranks)
            ranks = [make_ledger(num_buckets, order) for _ in range(num_ranks)]
            for rank, one in enumerate(ranks):
                own = owners.owner_of(content["ids"]) == rank
                one.load({name: values[own] for name, values in content.items()})
        wanted = batch(expected, ids, step, protect=2, limits=limits)
        refused, evicted = batch(whole, ids, step, protect=2, limits=limits)
        assert (refused, sorted(evicted)) == (wanted[0], sorted(wanted[1]))
        owner = Owners(num_buckets, len(ranks)).owner_of(ids)
        of_ranks = [batch(one, ids[owner == rank], step, protect=2, limits=limits) for rank, one in enumerate(ranks)]
        assert sorted(one for _, gone in of_ranks for one in gone) == sorted(evicted)
        num_evicted += len(evicted)
    same(whole, expected)
    same(reloaded(ranks, num_buckets, order), expected)
    assert num_evicted > 1_000


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_frequencies_that_no_row_has_take_no_memory():
    """Every row moves on in every step, so 4,096 lists of a frequency are left behind each time: 200 MB in all."""
    ledger, ids = make_ledger(4096, "lfu", native=True), torch.arange(4096)
    batch(ledger, ids, 0, protect=0, limits=None)
    before = resident_bytes()
    for step in range(1, 2001):
        ledger.append(ledger.touch(ids, step))
    assert resident_bytes() - before < 50 << 20
    assert set(export_usage(ledger)["frequency"].tolist()) == {2001}


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@both
def test_an_id_that_waited_long_is_placed_among_the_frequent_ones(native):
    ledger, limits = make_ledger(1, "lfu", native=native), torch.tensor([3])
    for step, ids in enumerate([[1, 2], [1, 2], [2]]):  # frequencies: 2 of id 1, 3 of id 2
        batch(ledger, tensor(ids), step, protect=0, limits=limits)
    batch(ledger, tensor([7]), 3, protect=0, limits=limits, waited=9)
    order = [batch(ledger, tensor([10 + step]), step, protect=0, limits=limits, waited=50)[1] for step in (5, 6, 7)]
    assert order == [[1], [2], [7]]


@both
def test_rows_of_the_batch_are_not_evicted_for_it(native):
    ledger, limits = make_ledger(1, "lru", native=native), torch.tensor([2])
    batch(ledger, tensor([1, 2]), 0, protect=0, limits=limits)
    assert batch(ledger, tensor([1, 3, 4]), 5, protect=0, limits=limits) == ([4], [2])


@both
def test_a_bucket_above_its_limit_shrinks_when_it_is_used(native):
    """A warm start may bring more rows than the limit allows."""
    ledger = make_ledger(1, "lru", native=native)
    ones = torch.ones(5, dtype=torch.int64)
    ledger.load({"ids": tensor(range(5)), "last_step": -ones, "frequency": ones})
    assert batch(ledger, tensor([9]), 3, protect=0, limits=torch.tensor([2])) == ([], [0, 1, 2, 3])


@both
def test_wrong_calls_are_refused(native):
    ledger = make_ledger(2, "lru", native=native)
    with pytest.raises(UnknownIdError, match="cannot remove id 5"):
        ledger.remove(tensor([5]))
    with pytest.raises(ValueError, match=r"2,147,483,648 is above 2,147,483,647"):
        ledger.touch(tensor([5]), 2**31)
    with pytest.raises(ValueError, match="1 ids but 2 last steps and 1 frequencies"):
        ledger.load({"ids": tensor([1]), "last_step": tensor([0, 3]), "frequency": tensor([2])})
    with pytest.raises(ValueError, match="stored in 32 bits"):
        ledger.load({"ids": tensor([1]), "last_step": tensor([0]), "frequency": tensor([2**40])})


def test_the_caller_chooses_the_implementation_of_a_ledger():
    assert isinstance(make_ledger(1, "lru", native=False), TorchLedger)
    assert isinstance(make_ledger(1, "lru"), NativeLedger if HAS_COMPILER else TorchLedger)
