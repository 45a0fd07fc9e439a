"""Columns that grow and never move; run as a program it trains a table in memory or in files and reports memory."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nestpipe.embedding import row_store
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.row_store import RowStore
from nestpipe.embedding.table import Table
from nestpipe.errors import TrainError
from tests.embedding.one_batch_table import Plain

ROOT = Path(__file__).resolve().parents[2]


def columns():
    return {"rows": torch.empty(0, 3), "step": torch.empty(0, 1, dtype=torch.int32), "id": torch.empty(0).long()}


def table(config, dim):
    return Plain(Table(TableSpec(name="item", dim=dim), OPTIMIZERS[config.optimizer](config), seed=0, config=config))


def test_columns_grow_without_moving():
    one = RowStore(columns())
    one.grow(2)
    early = one["rows"]
    early[1] = 7.0
    for num_rows in (3, 50_000, 1_000):
        one.grow(num_rows)
    assert [one[name].shape for name in one] == [(50_000, 3), (50_000, 1), (50_000,)]
    assert one["rows"].data_ptr() == early.data_ptr()
    assert one["rows"].sum() == 21.0
    one.scatter("rows", torch.tensor([0, 49_999]), torch.ones(2, 3))
    assert early[0].tolist() == [1.0] * 3
    assert one.gather("rows", torch.tensor([49_999, 1, 2])).tolist() == [[1.0] * 3, [7.0] * 3, [0.0] * 3]
    one.shrink(1_000)
    one.grow(50_000)
    assert one["rows"].data_ptr() == early.data_ptr()
    assert one["rows"][1_000:].abs().sum() == 0
    assert early.tolist() == [[1.0] * 3, [7.0] * 3]


def test_rows_move_where_the_system_reserves_nothing(monkeypatch):
    class Refusing:
        def __getattr__(self, name):
            return getattr(mmap, name)

        def mmap(self, *_, **__):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(row_store, "mmap", Refusing())
    one = RowStore(columns())
    for num_rows in (2, 3, 5, 40):
        one.grow(num_rows)
        one.scatter("id", torch.tensor([num_rows - 1]), torch.tensor([num_rows]))
    assert [(place, int(value)) for place, value in enumerate(one["id"]) if value] == [(1, 2), (2, 3), (4, 5), (39, 40)]
    one.pinned = True  # other threads use them now
    with pytest.raises(TrainError, match=r"200 rows do not fit into the address space of 40.*ulimit -v"):
        one.grow(200)


def test_the_tier_of_files_needs_a_folder():
    config = EmbeddingConfig(tier="files", files_folder="", buffer_bytes=5)
    assert [problem.split(";")[0] for problem in config.problems()] == [
        "tier is 'files' but files_folder is empty",
        "buffer_bytes is 5",
    ]


FIRST_ROWS = 5_000


def trained(tier, folder, num_rows, dim, budget, num_steps):
    command = [sys.executable, "-m", "tests.embedding.test_row_store", tier, str(folder)]
    done = subprocess.run(
        [*command, *map(str, (num_rows, dim, budget, num_steps))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.timeout(3600)
def test_a_table_four_times_its_budget_trains_within_it(tmp_path, scale, record_property):
    """Rows and AdaGrad state of 10 M x 64 are 5.1 GB, the budget 1 GiB; the small version has wider rows, or the index would be most of it."""
    num_rows, dim, num_steps = scale(200_000, 10_000_000), scale(128, 64), scale(20, 200)
    budget = min(num_rows * dim * 8 * 10 // 43, 1 << 30)  # more than four times less than the table
    memory, files = (trained(tier, tmp_path, num_rows, dim, budget, num_steps) for tier in ("memory", "files"))
    record_property("memory", memory)
    record_property("files", files)
    assert memory["digest"] == files["digest"]
    uncounted = FIRST_ROWS * dim * 8  # they are in memory before the first look
    assert memory["private_bytes"] + uncounted > 4 * budget
    index_bytes = 16 << (num_rows * 8 // 5 - 1).bit_length()  # of ids, which the budget does not cover
    batch_bytes = 8 * FIRST_ROWS * dim * 8  # copies of one batch
    assert files["private_bytes"] < budget + 1.5 * index_bytes + batch_bytes
    assert files["buffer_bytes"] <= budget
    assert files["file_bytes"] <= files["mapped_bytes"], "only the file is mapped"


def _resident(kind):
    """Bytes of this process in memory: RssAnon is private, RssFile belongs to files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return 1024 * int(line.split()[1])
    raise ValueError(kind)


def main(tier, folder, num_rows, dim, budget, num_steps):
    """Fills a table, trains it, and prints a digest of all rows and the most memory seen above that at the start."""
    torch.set_num_threads(1)
    config = EmbeddingConfig(optimizer="adagrad", tier=tier, files_folder=folder, buffer_bytes=int(budget))
    one = table(config, dim=int(dim))
    one.fetch(torch.arange(FIRST_ROWS))  # what libraries take when first called does not count
    start, start_file = _resident("RssAnon"), _resident("RssFile")
    most = {"RssAnon": 0, "RssFile": 0}

    def look():
        for kind, value in most.items():
            most[kind] = max(value, _resident(kind))

    for ids in torch.arange(int(num_rows)).split(5_000):
        one.fetch(ids)
        look()
    generator = torch.Generator().manual_seed(0)
    for _ in range(int(num_steps)):
        ids = torch.randint(0, int(num_rows), (5_000,), generator=generator).unique()
        one.update(ids, one.fetch(ids), 0.1)
        look()
    digest = hashlib.sha256()
    for ids in torch.arange(int(num_rows)).split(5_000):
        digest.update(one.peek(ids).numpy().tobytes())
        look()
    result = {
        "digest": digest.hexdigest(),
        "private_bytes": most["RssAnon"] - start,
        "file_bytes": max(most["RssFile"] - start_file - (4 << 20), 0),  # code is mapped when it is first called
        "buffer_bytes": 0 if one.buffer is None else one.buffer.memory_bytes,
        "mapped_bytes": 0
        if one.buffer is None
        else one.buffer._below.file_bytes,  # by the system, which can take it back
    }
    print(json.dumps(result))


def advised(column):
    """Whether huge pages were requested for the column."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]
    for mapping in mappings:
        first, last = (int(edge, 16) for edge in mapping.partition(" ")[0].split("-"))
        if first <= column.data_ptr() < last:
            return "hg" in mapping.partition("VmFlags:")[2].split()
    raise AssertionError("the column lies nowhere")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc")
def test_a_large_column_lies_in_huge_pages():
    one = RowStore({"rows": torch.empty(0, 64)}, huge_bytes=1 << 20)
    one.grow(100)
    one["rows"].fill_(1)
    assert not advised(one["rows"])
    one.grow(5000)
    assert advised(one["rows"])
    assert one["rows"][:100].eq(1).all()


if __name__ == "__main__":
    main(*sys.argv[1:])
