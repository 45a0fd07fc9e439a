"""The id -> slot index: both implementations against a dictionary."""

import gc
import resource
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.id_index import IdIndex, NativeIndex, TorchIndex, UnknownIdError, make_index
from nestpipe.ops import native_library

LOW, HIGH = -(2**63), 2**63 - 1
IDS = st.one_of(
    st.integers(-30, 30),
    st.integers(LOW, HIGH),
    st.sampled_from([LOW, LOW + 1, HIGH, 0, -1]),
    st.integers(-20, 20).map(lambda number: number << 32),
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "load"]), st.lists(IDS, max_size=40)), max_size=12)

try:
    COMPILER = native_library.find_compiler()
except native_library.BuildError:
    COMPILER = ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
both = pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_compiler)], ids=["torch", "native"])


class Oracle:
    """The contract in plain Python."""

    def __init__(self):
        self.slots, self.free, self.num_slots = {}, [], 0

    def add(self, ids):
        places = []
        for place, one in enumerate(ids):
            if one not in self.slots:
                places.append(place)
                self.slots[one] = self.free.pop() if self.free else self.num_slots
                self.num_slots = max(self.num_slots, self.slots[one] + 1)
        return [self.slots[one] for one in ids], places

    def remove(self, ids):
        freed = [self.slots.pop(one) for one in ids]
        self.free += freed
        return freed

    def load(self, ids, slots):
        self.slots = dict(zip(ids, slots, strict=True))
        self.num_slots = max(slots, default=-1) + 1
        self.free = sorted(set(range(self.num_slots)) - set(slots), reverse=True)


def tensor(values):
    return torch.tensor(values, dtype=torch.int64)


def lists(tensors):
    return [one.tolist() for one in tensors]


def check_same(index: IdIndex, oracle: Oracle, extra=()):
    assert len(index) == len(oracle.slots)
    assert index.num_slots == oracle.num_slots == len(oracle.slots) + len(oracle.free)
    ids = sorted(oracle.slots)
    assert lists(index.export()) == [ids, [oracle.slots[one] for one in ids]]
    queried = [*extra, *ids, *extra]
    assert index.find(tensor(queried)).tolist() == [oracle.slots.get(one, -1) for one in queried]


@both
@given(calls=CALLS)
def test_an_index_is_a_dictionary(native, calls):
    """Slots, places, errors and content, whatever the order of calls, through growth, removal and loading."""
    index, oracle = make_index(native=native), Oracle()
    for name, ids in calls:
        if name == "add":
            assert lists(index.find_or_add(tensor(ids))) == list(oracle.add(ids))
        elif name == "remove":
            if any(one not in oracle.slots for one in ids) or len(set(ids)) < len(ids):
                with pytest.raises(UnknownIdError):
                    index.remove(tensor(ids))
                check_same(index, oracle)
            ids = [one for one in dict.fromkeys(ids) if one in oracle.slots]  # noqa: PLW2901
            assert index.remove(tensor(ids)).tolist() == oracle.remove(ids)
        else:
            ids = list(dict.fromkeys(ids))  # noqa: PLW2901
            slots = [(5 * place + 3) % 101 for place in range(len(ids))]
            index.load(tensor(ids), tensor(slots))
            oracle.load(ids, slots)
        check_same(index, oracle, extra=ids)


@both
def test_ids_that_come_and_go_in_a_large_index(native, scale):
    """Half of the ids leave and others come, again and again, in tables that are nearly as full as they get."""
    index, oracle = make_index(native=native), Oracle()
    generator = torch.Generator().manual_seed(1)
    for _ in range(scale(6, 60)):
        ids = torch.randint(-6000, 6000, (9000,), generator=generator) * 0x9E3779B97F4A7C1
        assert lists(index.find_or_add(ids)) == list(oracle.add(ids.tolist()))
        known = tensor(list(oracle.slots))
        leaving = known[torch.randperm(len(known), generator=generator)[: len(known) // 2]]
        assert index.remove(leaving).tolist() == oracle.remove(leaving.tolist())
        check_same(index, oracle, extra=ids.tolist())


@both
def test_freed_slots_go_first_the_last_freed_before_the_others(native):
    index = make_index(native=native)
    assert lists(index.find_or_add(tensor([7, LOW, 7, 0, -1]))) == [[0, 1, 0, 2, 3], [0, 1, 3, 4]]
    assert index.remove(tensor([0, 7])).tolist() == [2, 0]
    assert lists(index.find_or_add(tensor([-1, 5, 6, 5, 8]))) == [[3, 0, 2, 0, 4], [1, 2, 4]]
    index.clear()
    assert (len(index), index.num_slots, lists(index.export())) == (0, 0, [[], []])
    index.reserve(100)
    assert lists(index.find_or_add(tensor([4]))) == [[0], [0]]


@both
def test_loaded_slots_leave_gaps_that_are_filled_from_below(native):
    index = make_index(native=native)
    index.load(tensor([9, -4]), tensor([3, 1]))
    assert (len(index), index.num_slots) == (2, 4)
    assert index.find_or_add(tensor([1, 2, 3]))[0].tolist() == [0, 2, 4]


@both
def test_a_refused_removal_names_the_id_and_changes_nothing(native):
    index = make_index(native=native)
    index.find_or_add(tensor(range(20)))
    before = lists(index.export())
    with pytest.raises(UnknownIdError, match=r"^cannot remove id -9 \(place 2 of 3\): it is not among the 20 ids"):
        index.remove(tensor([4, 11, -9]))
    with pytest.raises(KeyError, match=r"^cannot remove id 4 \(place 2 of 4\): it appears twice"):
        index.remove(tensor([4, 11, 4, 12]))
    assert (lists(index.export()), index.num_slots) == (before, 20)
    assert index.find_or_add(tensor([-9]))[0].tolist() == [20]  # no slot was freed


@both
def test_wrong_input_is_refused(native):
    index = make_index(native=native)
    for wrong in (torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)):
        for call in (index.find, index.find_or_add, index.remove):
            with pytest.raises(ValueError, match="int64 values in one dimension"):
                call(wrong)
    index.find_or_add(tensor([5]))
    for ids, slots, message in [
        ([1, 2], [0], "2 ids but 1 slots"),
        ([1, 2, 1], [0, 1, 2], "id 1 appears twice"),
        ([1, 2], [0, -3], "slot -3 is negative"),
        ([1, 2], [4, 4], "slot 4 belongs to 2 ids"),
    ]:
        with pytest.raises(ValueError, match=message):
            index.load(tensor(ids), tensor(slots))
    assert lists(index.export()) == [[5], [0]]


@both
def test_ids_need_not_lie_together_in_memory(native):
    index = make_index(native=native)
    ids = torch.arange(20).reshape(10, 2)
    assert index.find_or_add(ids[:, 1])[0].tolist() == list(range(10))
    assert index.find(ids.T.flatten()[10:]).tolist() == list(range(10))
    assert index.remove(ids[::5, 1]).tolist() == [0, 5]


@both
def test_the_bits_do_not_need_a_permission_to_be_random(native):
    """Training forbids operations whose result may vary; none is used here."""
    torch.use_deterministic_algorithms(True)
    try:
        index = make_index(native=native)
        index.find_or_add(tensor([3, 1, 3, 2]))
        index.remove(tensor([1]))
        index.load(*index.export())
        assert lists(index.find_or_add(tensor([9, 3]))) == [[1, 0], [0]]
    finally:
        torch.use_deterministic_algorithms(False)


@both
def test_concurrent_finds_are_right(native):
    ids = torch.randperm(150_000, generator=torch.Generator().manual_seed(0)) * 0x9E3779B97F4A7C1
    index = make_index(native=native, num_threads=3)
    expected, _ = index.find_or_add(ids)
    with ThreadPoolExecutor(4) as pool:
        for slots in pool.map(index.find, [ids.flip(0)] * 8):
            assert torch.equal(slots, expected.flip(0))


@needs_compiler
def test_memory_of_dead_indexes_is_given_back():
    """100 indexes of 16 MiB, of which one or two live at a time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        index = make_index(native=True)
        index.reserve(600_000)
    del index
    gc.collect()
    unit = 1024 if sys.platform == "linux" else 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 400 * 2**20


@needs_compiler
def test_a_lack_of_memory_is_an_error_not_a_crash():
    index = make_index(native=True)
    index.find_or_add(tensor([1, 2]))
    for num_ids in (2**62, 2**50):
        with pytest.raises(MemoryError, match="in an index of 2"):
            index.reserve(num_ids)
    assert index.find(tensor([2, 3])).tolist() == [1, -1]


def test_the_caller_chooses_the_implementation():
    assert isinstance(make_index(native=False), TorchIndex)
    assert isinstance(make_index(), NativeIndex if COMPILER else TorchIndex)
