"""A checkpoint of four ranks on any number of ranks, and what is refused: by every rank, at once, with a reason."""

import json
import shutil
import time
from dataclasses import replace

import pytest
import torch

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.difference import dense_differences, table_differences
from nestpipe.checkpoint.state import StateSnapshot
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import NestPipeError
from nestpipe.pipeline.channels import Channels
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.rank_pool import run_ranks
from tests.small_runs import small_config, small_log, write_log


def train(world, config, folder):
    return train_to_end(config, folder, resume=True, quiet=True, world=world).stopped


def reshard(world, folder, out, groups):
    """Loads the latest checkpoint on these ranks and saves it again; returns this rank's ids and rows."""
    channels = Channels.of(world).in_groups(groups)
    state, manifest = load_state(Run.open(folder), channels=channels)
    checkpoint_writer.save_checkpoint(
        out, manifest.step, manifest.cursor, manifest.progress, StateSnapshot(state).content(), channels.control
    )
    return state.embedding.tables["item"].export()


def refusal(world, configs, folders):
    """Class, message and seconds of the error with which training ends on this rank; it may have settings of its own."""
    start = time.monotonic()
    try:
        train(world, configs[world.rank % len(configs)], folders[world.rank % len(folders)])
    except NestPipeError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", 0.0


def refusals(world_size, config, folder, *, seconds=20):
    """The messages of all ranks, after checking that none had to wait for a deadline."""
    configs, folders = ([one] if not isinstance(one, list) else one for one in (config, folder))
    found = run_ranks(world_size, refusal, configs, folders)
    assert all(spent < seconds for *_, spent in found), found
    return [(kind, message) for kind, message, _ in found]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("reshard") / "log").path


@pytest.fixture(scope="module")
def wide_log(tmp_path_factory):
    """Twice as many items as the table of a limited run has rows."""
    histories = {user: [(31 * user + 97 * k) % 1000 for k in range(3 + user % 13)] for user in range(120)}
    return write_log(tmp_path_factory.mktemp("reshard") / "wide", histories).path


KINDS = {
    "adam": {"optimizer": "adam"},
    "rowwise": {"optimizer": "rowwise_adagrad"},
    "limits": {"optimizer": "adam", "admit_after": 2, "max_rows": 450},
}


@pytest.fixture(scope="module", params=KINDS)
def saved(request, log, wide_log, tmp_path_factory):
    """A run of four ranks with checkpoints of steps 5 and 9."""
    config = small_config(
        wide_log if "max_rows" in KINDS[request.param] else log, steps=9, pipeline={"micro_batches": 2}
    )
    config = replace(config, embedding=replace(config.embedding, num_buckets=7, **KINDS[request.param]))
    folder = tmp_path_factory.mktemp("reshard") / "run"
    run_ranks(4, train, config, folder)
    if config.embedding.max_rows:
        before, after = (ids_of_step(folder, step) for step in (5, 9))
        assert len(before - after) > 10, "rows must have been evicted for this to mean anything"
    return config, folder


def ids_of_step(run, step):
    """The ids with a row in a checkpoint."""
    _, content = checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(run / "checkpoints", step))
    return {one for name, bucket in content.items() if name != "dense" for one in bucket["ids"].tolist()}


def damaged(saved, tmp_path):
    """A copy of the run whose latest checkpoint is that of step 5, and the folder of the latter."""
    config, folder = saved
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000009")
    return config, tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000005"


@pytest.mark.parametrize(("world_size", "groups"), [(4, 1), (3, 1), (2, 1), (1, 1), (4, 2)])
def test_any_number_of_ranks_loads_the_same_rows_and_state(saved, tmp_path, world_size, groups):
    _, folder = saved
    before = checkpoint_folders.checkpoint_folder(folder / "checkpoints")
    table = checkpoint_reader.load_checkpoint(before)[1]["item"]
    exported = run_ranks(world_size, reshard, folder, tmp_path, groups)[: world_size // groups]
    again = checkpoint_folders.checkpoint_folder(tmp_path)
    assert len(list(again.glob("part-*.pack"))) == world_size
    assert not dense_differences(before, again)
    assert [one.is_equal for one in table_differences(before, again)] == [True]
    assert {*exported[0]} == {*table} > {"ids", "rows"}
    order = torch.cat([part["ids"] for part in exported]).argsort()
    for name in (name for name in table if not name.startswith("pending.")):  # those have ids of their own
        of_ranks = torch.cat([part[name] for part in exported])
        assert torch.equal(of_ranks[order], table[name])
        assert len(of_ranks) > 10


def test_the_next_steps_on_as_many_ranks_are_bitwise_identical(saved, tmp_path):
    config, folder, _ = damaged(saved, tmp_path)
    run_ranks(4, train, config, folder)
    assert checkpoint_folders.complete_steps(folder / "checkpoints") == [5, 9]
    assert not differing_tensors(saved[1], folder)


def test_a_run_goes_on_with_other_numbers_of_ranks(saved, tmp_path):
    """No bits to compare with: sums are in another order. The rows must be the same ones and close."""
    config, folder, _ = damaged(saved, tmp_path)
    run_ranks(3, train, config, folder)
    (_, ours), (_, calm) = (
        checkpoint_reader.load_checkpoint(checkpoint_folders.checkpoint_folder(run / "checkpoints"))
        for run in (folder, saved[1])
    )
    for file in calm:
        for name, tensor in calm[file].items():
            assert torch.allclose(ours[file][name], tensor, rtol=1e-3, atol=1e-5), (file, name)


def test_a_missing_file_is_refused_by_every_rank(saved, tmp_path):
    config, folder, step = damaged(saved, tmp_path)
    (part,) = step.glob("part-*-3.pack")  # of the last buckets, which rank 2 will own
    part.unlink()
    found = refusals(3, config, folder)
    assert all(kind == "CheckpointError" and f"lacks {part.name}" in message for kind, message in found), found
    assert [message.startswith("rank 2 stopped: ") for _, message in found] == [True, True, False]


def test_a_flipped_byte_is_refused_by_every_rank(saved, tmp_path):
    config, folder, step = damaged(saved, tmp_path)
    (part,) = step.glob("part-*-3.pack")
    data = bytearray(part.read_bytes())
    data[-3] ^= 16
    part.write_bytes(data)
    found = refusals(3, config, folder)
    for kind, message in found:
        assert kind == "CheckpointError"
        assert f"{part.name} is not what was saved: the digest of its state of table 'item', buckets 6 to 6" in message
    assert [message.startswith("rank 2 stopped: ") for _, message in found] == [True, True, False]


def test_a_foreign_configuration_is_refused_by_every_rank(saved, tmp_path):
    config, folder, _ = damaged(saved, tmp_path)
    other = replace(config, dense=replace(config.dense, lr=0.5))
    for kind, message in refusals(3, other, folder):
        assert kind == "ConfigError"
        assert "dense.lr: 0.002 -> 0.5" in message
    # A checkpoint that somebody has put into a run of the same shapes.
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(other.to_json().replace(other.data.path, config.data.path))
    assert json.loads(text) != json.loads((folder / "config.json").read_text())
    for kind, message in refusals(2, other, folder):
        assert kind == "CheckpointError"
        assert "was saved with another configuration" in message
        assert "dense.lr: 0.002 -> 0.5" in message


def test_more_ranks_than_buckets_are_a_mistake_of_the_configuration(log, tmp_path):
    config = small_config(log)
    config = replace(config, embedding=replace(config.embedding, num_buckets=2))
    for kind, message in refusals(3, config, tmp_path / "run"):
        assert kind == "ConfigError"
        assert "3 ranks cannot share embedding.num_buckets = 2" in message
    assert not (tmp_path / "run").exists()


def test_a_small_table_says_how_many_ranks_it_allows(log, tmp_path):
    config = small_config(log)
    config = replace(config, embedding=replace(config.embedding, max_rows=191))
    for kind, message in refusals(3, config, tmp_path / "run"):
        assert kind == "ConfigError"
        assert "embedding.max_rows = 191: it has 2 buckets of at least 64 rows" in message
        assert "--embedding.max-rows 192 or more, or use at most 2 ranks" in message


def test_ranks_that_do_not_run_the_same_say_so_at_the_start(log, tmp_path):
    config = small_config(log)
    for kind, message in refusals(3, [config, replace(config, seed=1), config], tmp_path / "run"):
        assert kind == "CommError"
        assert message == "the ranks do not agree on what to train:\n  - seed: 0 on ranks 0, 2; 1 on rank 1"
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_data_say_so_at_the_start(log, tmp_path):
    other = small_log(tmp_path / "log", num_users=20).path
    for kind, message in refusals(3, [small_config(log), small_config(log), small_config(other)], tmp_path / "run"):
        assert kind == "CommError"
        assert "data: " in message
        assert message.endswith("on rank 2")
    for number, (kind, message) in enumerate(
        refusals(2, [small_config(log), small_config(tmp_path / "none")], tmp_path / "run")
    ):
        assert kind == "DataError"
        assert message.startswith("rank 1 stopped: ") == (number == 0)


def test_ranks_that_do_not_share_the_run_folder_say_so_at_the_start(log, tmp_path):
    for kind, message in refusals(2, small_config(log), [tmp_path / "a", tmp_path / "b"]):
        assert kind == "ConfigError"
        assert "is not the folder that rank 0 writes to" in message
        assert str(tmp_path / "b") in message


def test_a_folder_in_use_is_refused_by_every_rank(log, tmp_path):
    from nestpipe.training.process import lock_run

    with lock_run(tmp_path / "run"):
        for kind, message in refusals(2, small_config(log), tmp_path / "run"):
            assert kind == "TrainError"
            assert "is training in" in message
