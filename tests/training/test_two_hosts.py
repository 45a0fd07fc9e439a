"""`nestpipe launch --hosts`: two machines with folders of their own and one shared run folder, here two network namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import netlab
from nestpipe import recipes
from nestpipe.cli.demo import differing_tensors
from nestpipe.training.loop import train_to_end
from tests.rank_pool import run_ranks
from tests.small_runs import small_log

ROOT = Path(__file__).resolve().parents[2]
REASON = "needs root: 'ip netns add' was refused"
HOSTS = "198.18.0.1,198.18.0.2"
STEPS = 12
SIZES = "--data.path log --data.batch-size 16 --train.epochs 0 --train.save-steps 5 --train.log-steps 1 --train.no-async-save"


def calm_run(world, config, folder):
    return train_to_end(config, folder, quiet=True, world=world).stopped


def start_hosts(lab, tmp_path, *command):
    """Starts the same command on both hosts, each in its own folder; the processes and the files of their stderr."""
    processes, files = [], [tmp_path / f"stderr{host}" for host in range(2)]
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    for host, file in enumerate(files):
        with file.open("w") as stderr:
            processes.append(
                subprocess.Popen(
                    lab.command(host, [sys.executable, "-m", *command]),
                    cwd=tmp_path / f"host{host}",
                    env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                    stderr=stderr,
                    stdout=subprocess.DEVNULL,
                )
            )
    return processes, files


def wait_for(condition, *, timeout_s):
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def stop(processes):
    for process in processes:
        process.terminate()  # a launcher ends its ranks
        process.wait(60)


@pytest.fixture
def lab(tmp_path):
    if netlab.refusal():
        pytest.skip(REASON)
    for host in range(2):
        small_log(tmp_path / f"host{host}" / "log")
    with netlab.Lab(2) as made:
        yield made


@pytest.mark.timeout(400)
def test_two_hosts_train_bitwise_identically_to_one_though_a_rank_dies(lab, tmp_path, scale):
    """Rank 1 dies; in a soak rank 0, whose host holds the rendezvous."""
    rank = scale(1, 0)
    tiny = recipes.tiny()
    config = replace(
        tiny,
        data=replace(tiny.data, path=str(tmp_path / "host0" / "log"), batch_size=16),
        train=replace(tiny.train, epochs=0, steps=STEPS, save_steps=5, num_threads=1),
    )
    run_ranks(2, calm_run, config, tmp_path / "calm")
    plan = [[rank, "_after_step", 8]]
    options = ["--hosts", HOSTS, "-n", "1", "--max-restarts", "2"]
    shared = ["--run", str(tmp_path / "shared" / "run"), "--resume", "--train.steps", str(STEPS)]
    command = ["tests.training.launch_dying", json.dumps(plan), *options, "train", "tiny", *SIZES.split(), *shared]
    processes, files = start_hosts(lab, tmp_path, *command)
    wait_for(lambda: all(process.poll() is not None for process in processes), timeout_s=150)
    codes = [process.poll() for process in processes]
    stop(processes)
    said = "\n---\n".join(file.read_text() for file in files)
    assert codes == [0, 0], said
    assert [said.count(f"rank {rank} dies"), said.count("stopped at step 12")] == [1, 1]
    assert "resumed from step 5 (step-000005)" in said
    assert "2 ranks on 2 machines" in said, "both have one name, but addresses of their own"
    assert "bitwise identical: yes" in said
    assert not differing_tensors(tmp_path / "calm", tmp_path / "shared" / "run")
    assert [sorted(path.name for path in (tmp_path / f"host{host}").iterdir()) for host in range(2)] == [["log"]] * 2


@pytest.mark.timeout(200)
def test_a_killed_launcher_ends_the_other_host_which_names_it(lab, tmp_path):
    run = tmp_path / "shared" / "run"
    options = f"launch --hosts {HOSTS} -n 1 --wait-s 5 train tiny --train.steps 100000 --run {run}".split()
    processes, files = start_hosts(lab, tmp_path, "nestpipe.cli", *options, *SIZES.split())
    try:
        metrics = run / "metrics.jsonl"
        assert wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, timeout_s=60), [
            file.read_text() for file in files
        ]
        processes[1].send_signal(signal.SIGKILL)
        assert wait_for(lambda: processes[0].poll() is not None, timeout_s=60)
    finally:
        stop(processes)
    said = files[0].read_text()
    assert processes[0].returncode != 0
    assert "198.18.0.2" in said.splitlines()[-1], said
    assert not subprocess.run(["pgrep", "-f", str(run)], capture_output=True, check=False).stdout
