"""`torchrun --nnodes 2`: two machines with folders of their own and one shared run folder, here two network namespaces."""

import json
import os
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
STEPS = 12


def calm_run(world, config, folder):
    return train_to_end(config, folder, quiet=True, world=world).stopped


def hosts(lab, tmp_path, *command, max_restarts=0, timeout_s=150):
    """Runs torchrun on both hosts, each in its own folder; what each said."""
    processes, files = [], [tmp_path / f"stderr{host}" for host in range(2)]
    for host, file in enumerate(files):
        options = f"--nnodes 2 --nproc-per-node 1 --max-restarts {max_restarts} --monitor-interval 0.05".split()
        meeting = f"--rdzv-backend c10d --rdzv-endpoint 198.18.0.1:29400 --local-addr 198.18.0.{host + 1}".split()
        meeting += ["--rdzv-conf", f"is_host={int(host == 0)}"]  # torchrun asks the name service, which knows no lab
        launch = [sys.executable, "-m", "torch.distributed.run", *options, *meeting, "-m", "--", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lab0"}
        with file.open("w") as stderr:
            processes.append(
                subprocess.Popen(
                    lab.command(host, launch), cwd=tmp_path / f"host{host}", env=environment, stderr=stderr
                )
            )
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.terminate()  # torchrun ends its ranks
        process.wait(60)
    said = [file.read_text() for file in files]
    assert codes == [0, 0], "\n---\n".join(text[-6000:] for text in said)
    return said


@pytest.mark.timeout(400)
@pytest.mark.parametrize("plan", [[[1, "step", 8]]], ids=["a rank dies"])
def test_two_hosts_train_bitwise_identically_to_one(tmp_path, plan):
    """`plan` is that of dying_rank."""
    if netlab.refusal():
        pytest.skip(REASON)
    tiny = recipes.tiny()
    for host in range(2):
        small_log(tmp_path / f"host{host}" / "log")
    config = replace(
        tiny,
        data=replace(tiny.data, path=str(tmp_path / "host0" / "log"), batch_size=16),
        train=replace(tiny.train, epochs=0, steps=STEPS, save_steps=5, num_threads=1),
    )
    run_ranks(2, calm_run, config, tmp_path / "calm")
    settings = f"--data.path log --data.batch-size 16 --train.epochs 0 --train.steps {STEPS} --train.save-steps 5"
    shared = ["--run", str(tmp_path / "shared" / "run"), "--train.num-threads", "1", "--resume"]
    with netlab.Lab(2) as lab:
        program = ["tests.training.dying_rank", json.dumps(plan), "train", "tiny"]
        said = "".join(hosts(lab, tmp_path, *program, *settings.split(), *shared, max_restarts=2))
    assert [said.count("rank 1 dies"), said.count("stopped at step 12")] == [len(plan), 1]
    assert not differing_tensors(tmp_path / "calm", tmp_path / "shared" / "run")
    assert [sorted(path.name for path in (tmp_path / f"host{host}").iterdir()) for host in range(2)] == [["log"]] * 2
