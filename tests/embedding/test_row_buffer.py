"""The buffer of rows in files: bitwise the memory tier, never above its bound, and every rule of retention has a mutant."""

from __future__ import annotations

import errno
from collections import deque
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import pytest
import torch

from nestpipe.embedding import row_file
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.position_clock import PositionClock
from nestpipe.embedding.prefetch_buffer import BufferedRows, rows_where_they_are
from nestpipe.embedding.row_buffer import RowBuffer
from nestpipe.embedding.row_file import RowFile
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import Table
from nestpipe.errors import TrainError

DIM, NUM_IDS, NUM_STEPS = 64, 700, 32
LIMITS = {"admit_after": 2, "max_rows": 240, "num_buckets": 4}
BOUND = 150_000  # of bytes: about 130 rows of Adam


def new_table(folder=None, optimizer="adam", native=None, bound=BOUND, **limits):
    more = {"tier": "files", "files_folder": str(folder), "buffer_bytes": bound} if folder else {}
    config = EmbeddingConfig(optimizer=optimizer, **limits, **more)
    return Table(TableSpec(name="item", dim=DIM), OPTIMIZERS[optimizer](config), seed=0, config=config, native=native)


def batch(step):
    """Distinct ids, some of them frequent, and their gradients."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(50, generator=generator) ** 3 * NUM_IDS).long().unique()
    return ids, torch.randn(len(ids), DIM, generator=generator)


def check(table):
    """The bound, and that nothing is kept of ids without a row."""
    buffer, file = table.buffer, table.buffer._below
    assert buffer.memory_bytes <= BOUND, "above the bound"
    known = set(table._index.export()[1].tolist())
    stored = (file._records["record"] >= 0).nonzero().flatten().tolist()
    assert set(buffer.slots.tolist()) <= known, "an evicted id is in the buffer"
    assert set(stored) <= known, "an evicted id is in the file"
    assert known == set(buffer.slots.tolist()) | set(stored), "a row is nowhere"


@contextmanager
def rules_of_eviction():
    """Evicted rows are not written back, and new ids start in slots of which nothing is kept."""
    drop, append, start, dropping = RowBuffer.drop, RowFile._append, Table._start, []

    def dropping_(buffer, slots):
        dropping.append(1)
        drop(buffer, slots)
        dropping.pop()

    def appending(file, slots):
        assert not dropping or not len(slots), "an evicted row is written back"
        append(file, slots)

    def starting(table, ids, slots):
        old = slots[slots < table.buffer._clock.num_slots]
        assert not bool((table.buffer._clock.find(old) >= 0).any()), "in the buffer"
        assert not bool(table.buffer._below.has(old).any()), "in the file"
        start(table, ids, slots)

    with (
        patch.object(RowBuffer, "drop", dropping_),
        patch.object(RowFile, "_append", appending),
        patch.object(Table, "_start", starting),
    ):
        yield


def trained(table, num_steps=NUM_STEPS):
    """All that a training reads, with two batches in flight, skipped updates, barriers, peeks and exports."""
    access, flight, seen = rows_where_they_are(table), deque(), []

    def end_first():
        refs, grads, step = flight.popleft()
        if step % 7 != 3:  # else the update is skipped
            access.update(refs, grads, 0.1)
        access.release(refs)

    for step in range(num_steps):
        ids, grads = batch(step)
        table.record_rate(step, 0.1)
        refs = access.take(ids, step)
        seen.append(access.gather(refs).clone())
        flight.append((refs, grads, step))
        if len(flight) == 2:
            end_first()
        if table.buffer is not None:
            check(table)
        if step % 8 == 7:  # a barrier
            while flight:
                end_first()
            before = None if table.buffer is None else table.buffer.slots
            seen += [table.peek(torch.arange(NUM_IDS)), *table.export().values()]
            assert before is None or torch.equal(before, table.buffer.slots), "reading retains"
    while flight:
        end_first()
    return [*seen, *table.export().values()]


@cache
def trained_in_memory():
    return trained(new_table(**LIMITS))


def differs(folder, expected, **settings):
    """Why a training in files is not the one in memory: an error, a difference, or nothing."""
    try:
        with rules_of_eviction():
            found = trained(new_table(folder, **settings))
    except (AssertionError, KeyError, IndexError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    equal = len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return "" if equal else "differs"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(row_file, "SEGMENT_BYTES", 8_000)  # 10 records of Adam
    monkeypatch.setattr(row_file, "_DEAD_PER_LIVE", 0.1)  # so that compaction copies live records


LFU = {**LIMITS, "evict": "lfu", "admit_after": 1}
EVERY = [("adam", limits, native) for limits in ({}, LIMITS, LFU) for native in (None, False)]
EVERY += [(optimizer, LIMITS, None) for optimizer in sorted(OPTIMIZERS) if optimizer != "adam"]


@pytest.mark.parametrize(("optimizer", "limits", "native"), EVERY)
def test_rows_in_files_are_bitwise_those_in_memory(tmp_path, optimizer, limits, native):
    expected = trained(new_table(optimizer=optimizer, **limits))
    compactions, moved = [], RowFile._free_segment
    leave, left = RowBuffer._leave, []
    with (
        patch.object(RowFile, "_free_segment", lambda file, own: (compactions.append(own), moved(file, own))),
        patch.object(RowBuffer, "_leave", lambda buffer, own: (left.append(len(own)), leave(buffer, own))[1]),
    ):
        found = differs(tmp_path, expected, optimizer=optimizer, native=native, **limits)
    assert found == ""
    if optimizer == "adam":
        assert sum(left) > 100, "the buffer is too large to show anything"
        assert compactions


def evicted_stay():
    return patch.object(RowBuffer, "drop", lambda buffer, slots: None)


def evicted_stay_in_the_file():
    return patch.object(RowFile, "drop", lambda file, slots: None)


def evicted_are_written_back():
    drop = RowBuffer.drop

    def dropping(buffer, slots):
        positions = buffer._clock.find(slots)
        buffer._evict(positions[positions >= 0])
        drop(buffer, slots)

    return patch.object(RowBuffer, "drop", dropping)


def dropped_after_their_slot_is_reused():
    def advance(table, ids, step):
        change = table._admission.advance(ids, step)
        table._start(change.admitted, change.admitted_slots)
        table.buffer.drop(change.evicted.slots)
        return change.slots

    return patch.object(Table, "advance", advance)


def dropped_one_batch_late():
    advance, late = Table.advance, {}

    def advancing(table, ids, step):
        with patch.object(RowBuffer, "drop", lambda buffer, slots: late.update({step: slots})):
            slots = advance(table, ids, step)
        if len(late.get(step - 1, ())):
            RowBuffer.drop(table.buffer, late[step - 1])
        return slots

    return patch.object(Table, "advance", advancing)


def readers_ask_the_file_first():
    def copy(buffer, slots, out):
        is_stored = buffer._below.has(slots)
        buffer._below.read(slots[is_stored], out, is_stored.nonzero().flatten())
        rest = (~is_stored).nonzero().flatten()
        positions = buffer._clock.find(slots[rest])
        for name, rows in out.items():
            rows.index_copy_(0, rest, buffer.rows.gather(name, positions))

    return patch.object(RowBuffer, "_copy_rows", copy)


def updates_are_not_dirty():
    def update(access, refs, grads, lr):
        access.table.step(access._buffer.rows, refs.slots, grads, lr, batch=refs.step)

    return patch.object(BufferedRows, "update", update)


def new_rows_are_not_dirty():
    write = RowBuffer.write

    def writing(buffer, slots, rows):
        with patch.object(RowBuffer, "mark_dirty", lambda *_: None):
            write(buffer, slots, rows)

    return patch.object(RowBuffer, "write", writing)


def ids_without_a_row_are_retained():
    hold = RowBuffer.hold

    def holding(buffer, slots):
        rowless = (slots < 0).nonzero().flatten()
        free = torch.arange(len(rowless)) + buffer._clock.num_slots
        buffer.grow(buffer._clock.num_slots + len(rowless))
        zeros = {name: one.new_zeros(len(free), *one.shape[1:]) for name, one in buffer.rows.columns.items()}
        buffer.write(free, zeros)
        return hold(buffer, slots.index_copy(0, rowless, free))

    return patch.object(RowBuffer, "hold", holding)


def held_rows_are_replaced():
    hold = RowBuffer._hold

    def holding(buffer, slots, **more):
        positions = hold(buffer, slots, **more)
        buffer._clock.release(positions)
        return positions

    return patch.multiple(RowBuffer, _hold=holding, release=lambda *_: None)


def state_is_not_written_back():
    append = RowFile._append

    def appending(file, slots):
        begin = file._offsets["state.mean"]
        file._staging[:, begin : begin + 4 * DIM] = 0
        append(file, slots)

    return patch.object(RowFile, "_append", appending)


def compaction_keeps_old_records():
    def free(file, segment):
        file._live[segment] = 0
        file._free.append(segment)

    return patch.object(RowFile, "_free_segment", free)


def the_bound_is_ignored():
    beside = RowBuffer._rows_beside
    return patch.object(RowBuffer, "_rows_beside", lambda buffer, num_slots: 3 * beside(buffer, num_slots) // 2)


def slots_do_not_count():
    def grow(buffer, num_slots):
        buffer._capacity = buffer._capacity or buffer._rows_beside(1)
        buffer._clock.grow(max(num_slots, buffer._clock.num_slots))
        buffer._below.grow(buffer._clock.num_slots)

    return patch.object(RowBuffer, "grow", grow)


MUTANTS = [
    evicted_stay,
    evicted_stay_in_the_file,
    evicted_are_written_back,
    dropped_after_their_slot_is_reused,
    dropped_one_batch_late,
    readers_ask_the_file_first,
    updates_are_not_dirty,
    new_rows_are_not_dirty,
    ids_without_a_row_are_retained,
    held_rows_are_replaced,
    state_is_not_written_back,
    compaction_keeps_old_records,
    the_bound_is_ignored,
    slots_do_not_count,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_rule_of_retention_has_a_mutant_that_is_caught(tmp_path, mutant):
    with mutant():
        found = differs(tmp_path, trained_in_memory(), **LIMITS)
    assert found, f"{mutant.__name__} is not caught"


def test_the_bound_holds_while_the_table_grows(tmp_path):
    """Slots take bytes from rows: the buffer of a growing table becomes smaller, and returns its memory."""
    table = new_table(tmp_path)
    access, capacities = rows_where_they_are(table), []
    for step, ids in enumerate(torch.arange(5_000).split(50)):
        refs = access.take(ids, step)
        assert table.buffer.memory_bytes <= BOUND
        access.update(refs, torch.ones(len(ids), DIM), 0.1)
        access.release(refs)
        capacities.append(table.buffer._capacity)
        assert len(table.buffer.rows) <= capacities[-1]
    assert capacities[0] > capacities[-1] + 40
    memory = new_table()
    for step, ids in enumerate(torch.arange(5_000).split(50)):
        memory.update(memory.advance(ids, step), torch.ones(len(ids), DIM), 0.1, batch=step)
    assert all(torch.equal(a, b) for a, b in zip(memory.export().values(), table.export().values(), strict=True))


def test_a_batch_that_does_not_fit_is_refused_with_the_numbers(tmp_path):
    table = new_table(tmp_path)
    with pytest.raises(TrainError, match=r"use 1,000 rows of table 'item' at once.* room for \d+\. Set --embedding"):
        rows_where_they_are(table).take(torch.arange(1_000), 0)
    with pytest.raises(TrainError, match=r"the index of .* rows of table 'item' takes .* leaves no room for a row"):
        table.advance(torch.arange(30_000), 1)


def test_no_row_is_read_after_one_was_lost(tmp_path, monkeypatch):
    """A full disk while rows move: what the file has of them is old, and a save in flight must not take it."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    table = new_table(tmp_path)
    trained(table, 6)
    monkeypatch.setattr(row_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        trained(table)
    for read in (lambda: table.peek(torch.arange(NUM_IDS)), table.export, lambda: table.advance(torch.arange(50), 99)):
        with pytest.raises(TrainError, match="rows of table 'item' were lost"):
            read()


def test_a_table_can_be_loaded_again(tmp_path):
    table, other = new_table(tmp_path, **LIMITS), new_table(**LIMITS)
    trained(table), trained(other, 20)
    content = other.export()
    table.load(content)
    check(table)
    assert all(torch.equal(values, content[name]) for name, values in table.export().items())


@pytest.mark.parametrize("seed", range(3))
def test_native_and_torch_take_the_same_positions(seed):
    clocks = [PositionClock(native=native) for native in (True, False)]
    generator = torch.Generator().manual_seed(seed)
    held = deque()
    for clock in clocks:
        clock.grow(2_000)
        clock.release(clock.add(300))
    for _ in range(200):
        slots = (torch.rand(60, generator=generator) ** 2 * 2_000).long().unique()
        found = []
        for clock in clocks:
            positions, missing = clock.hold(slots)
            taken = clock.take(len(missing), 300)
            before = clock.slots_at(taken)
            clock.unlink(before[before >= 0], taken)
            clock.link(slots[missing], taken)
            found.append(positions.index_copy(0, missing, taken))
        assert torch.equal(*found)
        held.append(found[0])
        if len(held) == 3:
            for clock in clocks:
                clock.release(held[0])
            held.popleft()
        assert clocks[0].num_held == clocks[1].num_held == len(torch.cat(list(held)).unique())
        assert torch.equal(clocks[0].slots, clocks[1].slots)
