"""Four ranks with private folders and an S3 server: ranks are killed, requests are refused and cut; the bits are the same."""

import os
import random
import select
import signal
import socket
import socketserver
import threading
from dataclasses import replace

import pytest
from moto.server import ThreadedMotoServer

from nestpipe.checkpoint import packed_file
from nestpipe.checkpoint.difference import dense_differences, table_differences
from nestpipe.checkpoint.folders import checkpoint_folder, complete_steps
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.places import RemotePath
from nestpipe.cli import main
from nestpipe.errors import NestPipeError
from nestpipe.training import loop
from nestpipe.training.loop import train_to_end
from tests.rank_pool import RanksError, run_ranks
from tests.small_runs import small_config, small_log

URL = "s3://bucket/run"


class FaultyProxy(socketserver.ThreadingTCPServer):
    """Passes connections on to a server; refuses some, and cuts some after a number of bytes."""

    daemon_threads = True

    def __init__(self, port, *, share):
        self.target, self.share, self.random, self.num_faults = port, share, random.Random(7), 0
        super().__init__(("127.0.0.1", 0), _Connection)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self):
        proxy = self.server
        faulty, limit = proxy.random.random() < proxy.share, proxy.random.choice([0, 100, 2_000, 9_000])
        left = limit if faulty else 1 << 60
        proxy.num_faults += faulty
        with socket.create_connection(("127.0.0.1", proxy.target)) as server:
            while left > 0:
                for source in select.select([self.request, server], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    (server if source is self.request else self.request).sendall(data[:left])
                    left -= len(data)


@pytest.fixture(scope="module")
def server():
    own = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    own.start()
    yield own.get_host_and_port()[1]
    own.stop()


def use_endpoint(port):
    import s3fs

    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    s3fs.S3FileSystem.clear_instance_cache()
    return s3fs.S3FileSystem()


def dying(original, call):
    """A function whose n-th call ends the process."""
    calls = 0

    def function(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    return function


POINTS = {
    "step": (loop._Loop, "_after_step"),
    "blob": (packed_file.PackWriter, "add_section"),
    "manifest": (RemotePath, "write_last"),
    "finished file": (packed_file.PackWriter, "add_dense"),
}


def train(world, config, folder, port, death):
    """Trains with a folder of this rank's own; `death` is who dies, where and at which call."""
    use_endpoint(port)
    if death and death[0] == world.rank:
        holder, name = POINTS[death[1]]
        setattr(holder, name, dying(getattr(holder, name), death[2]))
    try:
        return train_to_end(config, folder / f"rank-{world.rank}", resume=True, quiet=True, world=world).stopped
    except NestPipeError as error:
        return f"{type(error).__name__}: {error}"


def calm_run(world, config, folder):
    return train_to_end(config, folder, quiet=True, world=world).stopped


@pytest.mark.timeout(300)
def test_kills_and_faults_of_the_store_end_with_the_same_bits(server, tmp_path, scale, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")
    log = small_log(tmp_path / "log", num_users=60, num_items=400).path
    config = small_config(log, epochs=0, steps=6, save_steps=2, keep_last=3, pipeline={"mode": "nested"})
    run_ranks(4, calm_run, config, tmp_path / "calm")
    use_endpoint(server).mkdir("bucket")
    far = replace(config, train=replace(config.train, checkpoints=URL))
    deaths = [
        (0, "manifest", 1),
        (2, "blob", 1),
        (0, "manifest", 4),
        (1, "step", 3),
        (0, "finished file", 1),
        (3, "blob", 2),
    ]
    for death in deaths[: scale(1, 6)]:
        with pytest.raises(RanksError, match="died with exit code -9"):
            run_ranks(4, train, far, tmp_path / "run", server, death)
    with FaultyProxy(server, share=0.1) as proxy:
        for _ in range(10):
            found = run_ranks(4, train, far, tmp_path / "run", proxy.server_address[1], None)
            if found == ["6 steps done"] * 4:
                break
            assert all(one.startswith("CheckpointError: ") for one in found), found
        assert found == ["6 steps done"] * 4
        assert proxy.num_faults > 0
        proxy.shutdown()
    use_endpoint(server)
    parent = RemotePath.of(URL) / "checkpoints"
    ours, theirs = checkpoint_folder(parent), checkpoint_folder(tmp_path / "calm" / "checkpoints")
    assert (ours.name, theirs.name) == ("step-000006", "step-000006")
    assert not dense_differences(ours, theirs)
    assert all(one.is_equal for one in table_differences(ours, theirs))
    assert len({blob.file for blob in Manifest.read(ours).blobs}) == 4
    assert complete_steps(parent)[-3:] == [2, 4, 6]
    assert not list((tmp_path / "run").rglob("*.pack")), "nothing of a checkpoint is in the private folders"
    assert main(["checkpoint", "inspect", str(tmp_path / "run" / "rank-3")]) == 0
