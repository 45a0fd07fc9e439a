"""Snapshots of rows that are read while they change, and the bound of their log."""

import threading

import pytest
import torch

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.prefetch_buffer import InPlaceRows, PrefetchBuffer
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.row_snapshot import RowSnapshot, by_section
from nestpipe.embedding.row_store import RowStore
from nestpipe.embedding.table import Table


def store_of(num_rows):
    store = RowStore({"rows": torch.empty(0, 2), "state.sum": torch.empty(0, 1)})
    store.grow(num_rows)
    store["rows"].copy_(torch.arange(num_rows).float().unsqueeze(1).expand(-1, 2))
    store["state.sum"].copy_(torch.arange(num_rows).float().unsqueeze(1))
    return store


def change(store, snapshot, slots):
    snapshot.preserve(slots)
    for name in store:
        store[name][slots[slots >= 0]] -= 1000


def test_rows_are_those_of_the_moment_whatever_changes_between_reads():
    store, slots = store_of(50), torch.randperm(40)  # ten slots are not of the snapshot
    snapshot = RowSnapshot(store, slots, concurrent=True)
    found = []
    for begin in range(0, 40, 8):
        change(store, snapshot, torch.cat([torch.randperm(50)[:20], torch.tensor([-1])]))
        found.append(snapshot.read(begin, begin + 8))
        store.grow(50 + begin)
    assert torch.equal(torch.cat([one["rows"] for one in found])[:, 1], slots.float())
    assert torch.equal(torch.cat([one["state.sum"] for one in found])[:, 0], slots.float())
    assert (store["rows"] < 0).any()


def test_an_update_waits_while_the_log_is_full_and_never_holds_up_the_reader():
    store = store_of(100)
    snapshot = RowSnapshot(store, torch.arange(100), concurrent=True, log_rows=10)
    change(store, snapshot, torch.arange(90, 95))
    assert not snapshot.is_tight
    change(store, snapshot, torch.tensor([95, 96, 97, 90]))
    assert snapshot.is_tight
    update = threading.Thread(target=change, args=(store, snapshot, torch.arange(40, 60)))
    update.start()
    update.join(0.2)
    assert update.is_alive(), "eight of ten are in use, and twenty are wanted"
    rows = [snapshot.read(0, 50)]
    update.join(0.2)
    assert update.is_alive(), "ten of them have been read, ten are still wanted"
    rows.append(snapshot.read(50, 58))
    update.join(20)
    assert not update.is_alive()
    rows.append(snapshot.read(58, 100))
    assert torch.equal(torch.cat([one["rows"] for one in rows])[:, 0], torch.arange(100.0))


def test_nobody_waits_for_a_reader_that_has_failed():
    store = store_of(100)
    snapshot = RowSnapshot(store, torch.arange(100), concurrent=True, log_rows=10)
    update = threading.Thread(target=change, args=(store, snapshot, torch.arange(60)))
    update.start()
    update.join(0.1)
    assert update.is_alive()
    snapshot.close()
    update.join(20)
    assert not update.is_alive()


@pytest.mark.parametrize("limits", [{}, {"admit_after": 2, "max_rows": 12}], ids=["free", "limits"])
def test_deltas_applied_one_after_the_other_give_the_table(limits):
    """A model of `checkpoint/chain.py` in a dictionary: every batch counts, also one whose update is skipped."""
    config = EmbeddingConfig(optimizer="adagrad", num_buckets=4, **limits)
    table = Table(TableSpec(name="item", dim=2), OPTIMIZERS["adagrad"](config), seed=0, config=config, num_buckets=4)
    owners, rows, counts = Owners(4, 1), {}, {}
    table.track_changes()
    sizes = []
    for step in range(60):
        ids = torch.randperm(40)[:6].sort().values
        ids = torch.cat([own["ids"] for _, own in by_section({"ids": ids}, owners, range(4), rows_per_section=1)])
        slots = table.advance(ids, step)
        if step % 5:
            table.update(slots, torch.ones(len(ids), 2), 0.1)
        if step % 3 == 0:
            for section in table.snapshot(owners, range(4), extra={}, delta=step > 0).read():
                index = section.index
                for left in index.get("gone", torch.empty(0)).tolist():
                    del rows[left]
                for left in index.get("pending.gone", torch.empty(0)).tolist():
                    del counts[left]
                of_rows = {name: one for name, one in index.items() if name in {"index.last_step", "index.frequency"}}
                of_rows |= section.rows
                for place, one in enumerate(index["ids"].tolist()):
                    rows[one] = {name: values[place] for name, values in of_rows.items()}
                for place, one in enumerate(index.get("pending.ids", torch.empty(0)).tolist()):
                    counts[one] = [int(index[f"pending.{name}"][place]) for name in ("last_step", "frequency")]
                sizes.append(len(index["ids"]))
            whole = table.export()
            assert [*sorted(rows)] == whole["ids"].tolist()
            for place, one in enumerate(sorted(rows)):
                assert all(torch.equal(values, whole[name][place]) for name, values in rows[one].items())
            if limits:
                assert [*sorted(counts)] == whole["pending.ids"].tolist()
                assert [counts[one][1] for one in sorted(counts)] == whole["pending.frequency"].tolist()
    assert min(sizes) < len(rows)


@pytest.mark.parametrize("access", [InPlaceRows, PrefetchBuffer])
@pytest.mark.parametrize("limits", [{}, {"max_rows": 16}], ids=["free", "limits"])
def test_a_table_is_read_as_it_was_while_rows_are_updated_added_and_evicted(limits, access):
    config = EmbeddingConfig(optimizer="adagrad", num_buckets=4, **limits)
    table = Table(TableSpec(name="item", dim=2), OPTIMIZERS["adagrad"](config), seed=0, config=config, num_buckets=4)
    owners, rows = Owners(4, 1), access(table)

    def train(first, step):
        own = {"ids": torch.arange(first, first + 9)}
        refs = rows.take(
            torch.cat([one["ids"] for _, one in by_section(own, owners, range(4), rows_per_section=1)]), step
        )
        rows.update(refs, torch.ones(9, 2), 0.1)
        rows.release(refs)

    train(0, 0)
    train(5, 1)
    before = table.export()
    sections = table.snapshot(owners, range(4), extra={}, concurrent=True).read()
    found = []
    for step in range(5, 9):
        train(3 * step, step)
        found.append(next(sections, None))
    found = [one for one in [*found, *sections] if one]
    table.end_snapshot()
    order = torch.cat([one.index["ids"] for one in found]).argsort()
    assert {*before["ids"].tolist()} != {*table.export()["ids"].tolist()}
    for name in found[0].rows:
        assert torch.equal(torch.cat([one.rows[name] for one in found])[order], before[name])
