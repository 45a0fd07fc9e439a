"""`nestpipe train` with rows in files: in every mode and on 1 to 4 ranks bitwise the run with rows in memory, resumed too."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from nestpipe.cli.demo import differing_tensors
from nestpipe.embedding import buckets, row_file
from nestpipe.embedding.row_buffer import RowBuffer
from nestpipe.training.loop import train_to_end
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log

LIMITS = {"admit_after": 2, "max_rows": 120, "protect_steps": 3, "num_buckets": 4}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("tiers") / "log", num_items=300).path


def train(world, config, folder):
    """Trains with buffers that hold no row more than the batches in flight; returns how many rows left them."""
    hold, leave, num_left = RowBuffer._hold, RowBuffer._leave, 0

    def tight(buffer, slots, **more):
        positions = buffer._clock.find(slots)
        num_held = int(buffer._clock.is_held(positions[positions >= 0]).sum())
        buffer._capacity = buffer._clock.num_held + len(slots) - num_held
        return hold(buffer, slots, **more)

    def counted(buffer, positions):
        nonlocal num_left
        num_left += len(positions)
        return leave(buffer, positions)

    with (
        patch.object(row_file, "SEGMENT_BYTES", 4096),
        patch.object(buckets, "MIN_ROWS_PER_BUCKET", 30),  # so that four ranks evict rows of a small log
        patch.object(RowBuffer, "_hold", tight),
        patch.object(RowBuffer, "_leave", counted),
    ):
        train_to_end(config, folder, resume=True, quiet=True, world=world)
    return num_left


def config_of(log, optimizer, mode, *, files=None, **settings):
    config = small_config(log, pipeline={"mode": mode, "micro_batches": 2}, **settings)
    embedding = replace(config.embedding, optimizer=optimizer, **LIMITS)
    if files:
        embedding = replace(embedding, tier="files", files_folder=str(files), buffer_bytes=1 << 20)
    return replace(config, embedding=embedding, data=replace(config.data, batch_size=3))


@pytest.mark.parametrize(
    ("world_size", "optimizer", "mode"),
    [
        (1, "adam", "nested"),
        (2, "rowwise_adagrad", "sequential"),
        (3, "adagrad", "dual-buffer"),
        (4, "sgd", "nested"),
    ],
)
def test_rows_in_files_train_and_resume_to_the_bits_of_rows_in_memory(log, tmp_path, world_size, optimizer, mode):
    whole = config_of(log, optimizer, "sequential", epochs=0, steps=12, save_steps=12)
    run_ranks(world_size, train, whole, tmp_path / "memory")
    for num_steps in (7, 12):
        config = config_of(log, optimizer, mode, files=tmp_path, epochs=0, steps=num_steps, save_steps=12)
        assert sum(run_ranks(world_size, train, config, tmp_path / "files")) > 5
    assert not differing_tensors(tmp_path / "memory", tmp_path / "files")
