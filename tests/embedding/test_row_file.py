"""Rows in a file of records: what is read is what was written last, dead records are reused, and both ways agree."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import torch

from nestpipe.embedding import row_file
from nestpipe.embedding.row_file import EACH, MAPPED, RING, RowFile

NUM_SLOTS = 500


def columns(num_rows=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(num_rows, 5, generator=generator),
        "step": torch.randint(0, 1 << 30, (num_rows, 1), generator=generator, dtype=torch.int32),
        "half": torch.randn(num_rows, 3, generator=generator).to(torch.bfloat16),
    }


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(row_file, "SEGMENT_BYTES", 1600)  # 42 records


def new_file(folder, native=None, append_bytes=400):
    file = RowFile(columns(), folder, append_bytes=append_bytes, native=native)
    file.grow(NUM_SLOTS)
    return file


def read(file, slots):
    out = {name: torch.zeros(len(slots), *one.shape[1:], dtype=one.dtype) for name, one in columns().items()}
    file.read(slots, out, torch.arange(len(slots)))
    return out


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_the_newest_row_is_read_whatever_was_written_dropped_and_compacted(tmp_path, small_segments, native):
    file, expected = new_file(tmp_path, native), {}
    generator = torch.Generator().manual_seed(1)
    largest = 0
    for step in range(60):
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: 1 + step]
        rows, places = columns(NUM_SLOTS, seed=step), torch.randperm(NUM_SLOTS, generator=generator)[: len(slots)]
        file.write(slots, rows, places)
        assert file.num_dead <= max(file.num_live, 2 * 42), "dead records are compacted"
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            expected[slot] = {name: one[place] for name, one in rows.items()}
        dropped = slots[: step % 7]
        file.drop(dropped)
        file.drop(torch.tensor([slot for slot in range(NUM_SLOTS) if slot not in expected][:3], dtype=torch.int64))
        for slot in dropped.tolist():
            del expected[slot]
        assert file.num_live == len(expected)
        largest = max(largest, file.file_bytes)
    slots = torch.tensor(list(expected))
    for name, found in read(file, slots).items():
        assert torch.equal(found, torch.stack([expected[slot][name] for slot in slots.tolist()]))
    assert largest < 4 * NUM_SLOTS * 38, "segments are reused"
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_native_and_torch_write_the_same_bytes(tmp_path, small_segments):
    files = [new_file(tmp_path, native) for native in (False, True)]
    generator = torch.Generator().manual_seed(2)
    for step in range(30):
        slots = torch.randperm(NUM_SLOTS, generator=generator)[:90]
        for file in files:
            file.write(slots, columns(100, seed=step), torch.arange(90))
    contents = [os.pread(file._file, file.file_bytes, 0) for file in files]
    assert contents[0] == contents[1]
    assert torch.equal(files[0]._live, files[1]._live)


def test_every_way_reads_the_same(tmp_path, small_segments):
    file, slots = new_file(tmp_path, native=True), torch.randperm(NUM_SLOTS)
    file.write(slots, columns(NUM_SLOTS), torch.arange(NUM_SLOTS))
    found = []
    for how in (MAPPED, RING, EACH):
        file.how = how
        found.append(read(file, slots))
    for name, rows in columns(NUM_SLOTS).items():
        assert all(torch.equal(one[name], rows) for one in found)
    some = torch.zeros(NUM_SLOTS, 5)
    file.read(slots[:9], {"rows": some}, torch.arange(9) * 2)
    assert torch.equal(some[:18:2], columns(NUM_SLOTS)["rows"][:9]), "some of the columns"


@pytest.mark.parametrize(("native", "how"), [(False, EACH), (True, EACH), (True, RING), (True, MAPPED)])
def test_an_exchange_is_a_write_and_then_a_read(tmp_path, small_segments, native, how):
    one, other = new_file(tmp_path, native), new_file(tmp_path, native)
    one.how = how
    every = torch.arange(NUM_SLOTS)
    for file in (one, other):
        file.write(every, columns(NUM_SLOTS, seed=3), every)
    generator = torch.Generator().manual_seed(4)
    for step in range(20):
        leaving, arriving = torch.randperm(NUM_SLOTS, generator=generator)[:160].view(2, 80)
        places = torch.randperm(100, generator=generator)[:80]
        clean = torch.rand(80, generator=generator) < 0.3
        found, expected = columns(100, seed=step), columns(100, seed=step)
        one.exchange(leaving.masked_fill(clean, -1), arriving, found, places)
        other.write(leaving[~clean], expected, places[~clean])
        other.read(arriving, expected, places)
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert all(
            torch.equal(a, b) for a, b in zip(read(one, every).values(), read(other, every).values(), strict=True)
        )


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the cache cannot be emptied")
def test_records_that_the_system_does_not_cache_are_read_by_calls(tmp_path):
    file, slots = new_file(tmp_path, native=True), torch.arange(NUM_SLOTS)
    file.write(slots, columns(NUM_SLOTS), slots)
    os.fsync(file._file)
    os.posix_fadvise(file._file, 0, 0, os.POSIX_FADV_DONTNEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    found = read(file, slots)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt == before, "waited for a page"
    assert all(torch.equal(found[name], rows) for name, rows in columns(NUM_SLOTS).items())


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_a_record_of_another_slot_is_refused(tmp_path, native):
    file = new_file(tmp_path, native)
    file.write(torch.arange(9), columns(9), torch.arange(9))
    os.pwrite(file._file, (77).to_bytes(8, "little"), 4 * file._record_bytes)
    with pytest.raises(OSError, match=r"row of slot 4 from .*: its record belongs to another slot"):
        read(file, torch.arange(9))
    os.ftruncate(file._file, 100)
    with pytest.raises(OSError, match=r"row of slot .*: the file ends before it"):
        read(file, torch.tensor([5, 6]))
    with pytest.raises(KeyError, match="slot 30 has no row"):
        read(file, torch.tensor([1, 30]))


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = new_file(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"has no space for .* bytes more .*No space left.*embedding.files_folder"):
        file.write(torch.arange(3), columns(3), torch.arange(3))
