"""Checkpoints behind a URL: what is written there in which order, and everything that can read them back."""

import shutil
import signal
from dataclasses import replace

import fsspec
import pytest

from nestpipe import train
from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.origin import InitFrom
from nestpipe.checkpoint.places import RemotePath
from nestpipe.cli import main
from nestpipe.cli.demo import differing_tensors
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.training.loop import train_to_end
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.rank_pool import exit_code_of, run_ranks
from tests.small_runs import small_config, small_log

# Dies by SIGKILL at the n-th file that it writes to the URL.
KILLED = """
import os, signal, sys
from nestpipe import Config, train
from nestpipe.checkpoint.places import RemotePath
calls = 0
def dying(original):
    def function(*arguments):
        global calls
        calls += 1
        if calls == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    return function
RemotePath.writing, RemotePath.write_last = dying(RemotePath.writing), dying(RemotePath.write_last)
train(Config.from_json(open(sys.argv[1]).read()), sys.argv[2], resume=True, quiet=True)
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("places") / "log").path


@pytest.fixture
def memory():
    """A URL of a file system that lives in this process."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://bucket/run"
    system.store.clear()


def steps_at(url):
    return checkpoint_folders.complete_steps(RemotePath.of(url) / "checkpoints")


def names(url):
    system, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root).lstrip("/") for path in system.find(root))


def test_checkpoints_are_at_the_url_alone_and_old_ones_are_pruned(log, tmp_path, memory):
    run = train(small_config(log, checkpoints=memory, keep_last=2), tmp_path / "run", quiet=True)
    assert steps_at(memory) == [10, 12]
    assert not (run.folder / "checkpoints").exists()
    found = names(memory)
    assert [name for name in found if "/" not in name] == ["config.json", "run.json"]
    for step in (10, 12):
        manifest, part = (name for name in found if f"step-{step:06d}/" in name)
        assert manifest.endswith("/manifest.json")
        assert part.endswith("-0.pack")
    assert len(found) == 6
    calm = train(small_config(log), tmp_path / "calm", quiet=True)
    assert not differing_tensors(run.folder, calm.folder)
    assert Run.open(run.folder).predictor().evaluate("test", progress=False).scalars() == (
        calm.predictor().evaluate("test", progress=False).scalars()
    )


def test_the_manifest_comes_last(log, tmp_path, memory, monkeypatch):
    order = []
    for name in ("writing", "write_last"):
        original = getattr(RemotePath, name)
        monkeypatch.setattr(
            RemotePath, name, lambda self, *a, original=original: (order.append(self.name), original(self, *a))[1]
        )
    train(small_config(log, checkpoints=memory, steps=1), tmp_path / "run", quiet=True)
    assert [name.partition("-")[0] for name in order] == ["run.json", "config.json", "part", "manifest.json"]


def test_a_lost_folder_is_restored_bitwise(log, tmp_path, memory):
    config = small_config(log, epochs=4, metric="hr@10", keep_last=1)
    config = replace(config, data=replace(config.data, validation=True))
    calm = train(config, tmp_path / "calm", quiet=True)
    far = replace(config, train=replace(config.train, checkpoints=memory))
    train(replace(far, train=replace(far.train, steps=13)), tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run; add --resume to continue it"):
        train(far, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    again = train(far, tmp_path / "run", resume=True, quiet=True)
    assert not differing_tensors(calm.folder, again.folder)
    assert load_state(again)[1].progress["best"] == load_state(calm)[1].progress["best"]
    assert steps_at(memory) == checkpoint_folders.complete_steps(calm.checkpoints)
    other = replace(far, seed=3)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="seed: 0 -> 3"):
        train(other, tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize(("count", "steps"), [(3, []), (4, []), (5, [5])])
def test_killed_while_it_writes_leaves_nothing_half_complete(log, tmp_path, count, steps):
    """Files 1 and 2 make the run, 3 is the packed file of the first checkpoint, 4 its manifest."""
    url, settings = f"file://{tmp_path / 'far'}", tmp_path / "config.json"
    config = small_config(log, checkpoints=url)
    settings.write_text(config.to_json())
    assert exit_code_of(KILLED, str(settings), str(tmp_path / "run"), str(count)) == -signal.SIGKILL
    assert steps_at(url) == steps
    shutil.rmtree(tmp_path / "run")
    again = train(config, tmp_path / "run", resume=True, quiet=True)
    assert [load_state(again)[1].step, *steps_at(url)] == [12, 5, 10, 12]
    assert main(["checkpoint", "verify", url]) == 0, "what the killed save had written is gone"


def test_a_late_upload_of_a_killed_attempt_changes_nothing(log, tmp_path, memory, capsys):
    run = train(small_config(log, checkpoints=memory), tmp_path / "run", quiet=True)
    folder = RemotePath.of(memory) / "checkpoints" / "step-000012"
    with (folder / "part-00000000-0.pack").writing() as late:
        late.write(b"of another attempt")
    calm = train(small_config(log), tmp_path / "calm", quiet=True)
    assert not differing_tensors(run.folder, calm.folder)
    assert main(["checkpoint", "verify", str(run.folder)]) == 1
    assert "part-00000000-0.pack is not in the manifest: nothing reads it" in capsys.readouterr().out


def test_a_store_that_fails_ends_the_run_with_its_url(log, tmp_path, memory, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    move = MemoryFileSystem.mv
    monkeypatch.setattr(
        MemoryFileSystem, "mv", lambda self, a, b, **k: 1 / 0 if "manifest" in b else move(self, a, b, **k)
    )
    with pytest.raises(CheckpointError, match=r"memory://bucket/run/.*/manifest.json cannot be written: ZeroDiv"):
        train(small_config(log, checkpoints=memory), tmp_path / "run", quiet=True)
    assert steps_at(memory) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("runs/copy", "train.checkpoints is 'runs/copy'; it must be a URL"),
        ("nosuch://bucket/run", "nosuch://bucket/run cannot be reached: Protocol not known: nosuch"),
    ],
)
def test_a_url_that_nothing_can_talk_to_is_refused_before_anything_is_written(log, tmp_path, url, message):
    with pytest.raises(ConfigError, match=message):
        train(small_config(log, checkpoints=url), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_commands_read_a_url_and_a_run_that_saves_to_one(log, tmp_path, memory, capsys):
    train(small_config(log, checkpoints=memory), tmp_path / "run", quiet=True)
    for source in (memory, str(tmp_path / "run")):
        assert main(["checkpoint", "verify", source]) == 0
        out = capsys.readouterr().out
        assert [line.partition(":")[2].partition(": ")[0] for line in out.splitlines()] == [
            f"//bucket/run/checkpoints/step-{step:06d}" for step in (5, 10, 12)
        ]
    assert main(["checkpoint", "inspect", f"{memory}/checkpoints/step-000005"]) == 0
    assert "memory://bucket/run/checkpoints/step-000005: step 5," in capsys.readouterr().out
    assert main(["checkpoint", "diff", memory, str(tmp_path / "run")]) == 0
    system = fsspec.filesystem("memory")
    (part,) = system.glob("/bucket/run/checkpoints/step-000010/part-*.pack")
    system.pipe_file(part, b"damaged")
    assert main(["checkpoint", "verify", memory]) == 1
    assert f"memory:/{part} is not what was saved" in capsys.readouterr().out
    system.rm_file("/bucket/run/checkpoints/step-000010/manifest.json")
    assert main(["checkpoint", "verify", memory, "--step", "10"]) == 2
    assert "memory://bucket/run/checkpoints has no complete checkpoint of step 10; it has [5, 12]" in (
        capsys.readouterr().err
    )
    assert main(["checkpoint", "verify", "memory://bucket/none"]) == 2
    assert "memory://bucket/none/checkpoints has no complete checkpoint" in capsys.readouterr().err


def start(world, config, folder, source):
    init_from = InitFrom(source) if source else None
    own = folder / f"rank-{world.rank}" if config.train.checkpoints else folder
    return train_to_end(config, own, init_from=init_from, quiet=True, world=world).stopped


def test_ranks_with_private_folders_save_to_and_start_from_a_url(log, tmp_path):
    url = f"file://{tmp_path / 'bucket'}"
    config = small_config(log, epochs=0, steps=4, checkpoints=url)
    run_ranks(2, start, config, tmp_path / "old", None)
    assert steps_at(url) == [4]
    config = replace(config, train=replace(config.train, steps=1, checkpoints=""))
    for source, name in ((url, "far"), (str(tmp_path / "old" / "rank-1"), "near")):
        assert run_ranks(3, start, config, tmp_path / name, source) == ["1 steps done"] * 3
    assert not differing_tensors(tmp_path / "far", tmp_path / "near")
    far, near = (Run.open(tmp_path / name).origin for name in ("far", "near"))
    assert far.digest == near.digest
    assert far.checkpoint == near.checkpoint == f"{url}/checkpoints/step-000004"
