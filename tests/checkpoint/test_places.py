"""Checkpoints behind a URL: what is copied there in which order, and everything that can read them back."""

import shutil
import signal
from dataclasses import replace

import fsspec
import pytest

from nestpipe import train
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.origin import InitFrom
from nestpipe.checkpoint.remote_copy import Mirror, local_copy
from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.rank_pool import exit_code_of, run_ranks
from tests.small_runs import small_config, small_log

# Dies by SIGKILL at the n-th file that it copies.
KILLED = """
import os, signal, sys
from fsspec.implementations.local import LocalFileSystem
from nestpipe import Config, train
original, calls = LocalFileSystem.put_file, 0
def dying(*arguments, **named):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **named)
LocalFileSystem.put_file = dying
train(Config.from_json(open(sys.argv[1]).read()), sys.argv[2], resume=True, quiet=True)
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("mirror") / "log").path


@pytest.fixture
def memory():
    """A URL of a file system that lives in this process."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://bucket/run"
    system.store.clear()


def names(url):
    system, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root).lstrip("/") for path in system.find(root))


def test_every_checkpoint_is_copied_and_old_ones_are_pruned(log, tmp_path, memory):
    run = train(small_config(log, mirror=memory, keep_last=2), tmp_path / "run", quiet=True)
    assert Mirror(memory).steps() == checkpoint_folders.complete_steps(run.checkpoints) == [10, 12]
    files = [f"checkpoints/{path.relative_to(run.checkpoints)}" for path in run.checkpoints.rglob("*.*")]
    assert names(memory) == sorted([*files, "config.json", "run.json"])
    with local_copy(memory) as copy:
        assert not differing_tensors(run.folder, copy)


def test_the_manifest_comes_last(log, tmp_path, memory, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    put, order = MemoryFileSystem.put_file, []
    monkeypatch.setattr(
        MemoryFileSystem, "put_file", lambda self, a, b, **k: (order.append(b.rpartition("/")[2]), put(self, a, b, **k))
    )
    train(small_config(log, mirror=memory, steps=1), tmp_path / "run", quiet=True)
    assert order[:2] == ["run.json", "config.json"]
    assert order[-1] == ".manifest.json"
    assert len(order) == 2 + 5 + 1


def test_a_lost_folder_is_restored_bitwise(log, tmp_path, memory):
    config = small_config(log, epochs=4, metric="hr@10", keep_last=1)
    config = replace(config, data=replace(config.data, validation=True))
    calm = train(config, tmp_path / "calm", quiet=True)
    mirrored = replace(config, train=replace(config.train, mirror=memory))
    train(replace(mirrored, train=replace(mirrored.train, steps=13)), tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run; add --resume to continue it"):
        train(mirrored, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    again = train(mirrored, tmp_path / "run", resume=True, quiet=True)
    assert not differing_tensors(calm.folder, again.folder)
    assert load_state(again)[1].progress["best"] == load_state(calm)[1].progress["best"]
    assert Mirror(memory).steps() == checkpoint_folders.complete_steps(again.checkpoints)
    other = replace(mirrored, seed=3)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="seed: 0 -> 3"):
        train(other, tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize(("count", "steps"), [(8, []), (9, [5])])
def test_killed_while_it_copies_leaves_nothing_half_complete(log, tmp_path, count, steps):
    """Files 1 and 2 make the run, 3 to 7 the first checkpoint, 8 its manifest."""
    url, settings = f"file://{tmp_path / 'far'}", tmp_path / "config.json"
    config = small_config(log, mirror=url)
    settings.write_text(config.to_json())
    assert exit_code_of(KILLED, str(settings), str(tmp_path / "run"), str(count)) == -signal.SIGKILL
    assert Mirror(url).steps() == steps
    shutil.rmtree(tmp_path / "run")
    again = train(config, tmp_path / "run", resume=True, quiet=True)
    assert [load_state(again)[1].step, *Mirror(url).steps()] == [12, 5, 10, 12]


def test_a_store_that_fails_ends_the_run_with_its_url_and_keeps_the_local_checkpoint(
    log, tmp_path, memory, monkeypatch
):
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "mv", lambda *_, **__: 1 / 0)
    with pytest.raises(CheckpointError, match="memory://bucket/run cannot be written: ZeroDivisionError"):
        train(small_config(log, mirror=memory), tmp_path / "run", quiet=True)
    assert checkpoint_folders.complete_steps(tmp_path / "run" / "checkpoints") == [5]
    assert Mirror(memory).steps() == []


@pytest.mark.parametrize(
    ("mirror", "message"),
    [
        ("runs/copy", "train.mirror is 'runs/copy'; it must be a URL"),
        ("nosuch://bucket/run", "nosuch://bucket/run cannot be reached: Protocol not known: nosuch"),
    ],
)
def test_a_url_that_nothing_can_talk_to_is_refused_before_anything_is_written(log, tmp_path, mirror, message):
    with pytest.raises(ConfigError, match=message):
        train(small_config(log, mirror=mirror), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_inspect_and_verify_read_a_url(log, tmp_path, memory, capsys):
    train(small_config(log, mirror=memory), tmp_path / "run", quiet=True)
    assert main(["checkpoint", "verify", memory]) == 0
    out = capsys.readouterr().out
    assert [line.partition(":")[2].partition(": ")[0] for line in out.splitlines()] == [
        f"//bucket/run/checkpoints/step-{step:06d}" for step in (5, 10, 12)
    ]
    assert main(["checkpoint", "inspect", f"{memory}/checkpoints/step-000005"]) == 0
    assert "memory://bucket/run/checkpoints/step-000005: step 5," in capsys.readouterr().out
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/run/checkpoints/step-000010/item.002.safetensors", b"damaged")
    assert main(["checkpoint", "verify", memory]) == 1
    out = capsys.readouterr().out
    assert "memory://bucket/run/checkpoints/step-000010/item.002.safetensors is not what was saved" in out
    system.rm_file("/bucket/run/checkpoints/step-000010/manifest.json")
    assert main(["checkpoint", "verify", memory, "--step", "10"]) == 2
    assert "memory://bucket/run has no complete checkpoint of step 10; it has [5, 12]" in capsys.readouterr().err
    assert main(["checkpoint", "verify", "memory://bucket/none"]) == 2
    assert "memory://bucket/none has no complete checkpoint" in capsys.readouterr().err


def start(world, config, folder, source):
    init_from = InitFrom(source) if source else None
    return train_to_end(config, folder, init_from=init_from, quiet=True, world=world).stopped


def test_several_ranks_mirror_and_start_from_a_url(log, tmp_path):
    url = f"file://{tmp_path / 'bucket'}"
    config = small_config(log, epochs=0, steps=4, mirror=url)
    run_ranks(2, start, config, tmp_path / "old", None)
    assert Mirror(url).steps() == [4]
    config = replace(config, train=replace(config.train, steps=1, mirror=""))
    for source, name in ((url, "far"), (str(tmp_path / "old"), "near")):
        assert run_ranks(3, start, config, tmp_path / name, source) == ["1 steps done"] * 3
    assert not differing_tensors(tmp_path / "far", tmp_path / "near")
    far, near = (Run.open(tmp_path / name).origin for name in ("far", "near"))
    assert far.digest == near.digest
    assert far.checkpoint == f"{url}/checkpoints/step-000004"
