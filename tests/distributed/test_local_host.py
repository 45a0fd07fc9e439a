"""What a launcher finds out about its own machine."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nestpipe.distributed.local_host import interface_of, is_local, place_of, usable_cores
from nestpipe.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("400000 100000", 4)]
)
def test_cores_obey_the_quota_of_the_cgroup(tmp_path, content, cores):
    (tmp_path / "cpu.max").write_text(content)
    own = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (own if cores is None else min(own, cores))


def test_cores_without_a_cgroup_are_those_of_the_affinity(tmp_path):
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_the_place_among_hosts_is_found_by_address():
    assert place_of(["127.0.0.1"]) == (0, "127.0.0.1")
    assert [is_local("127.0.0.1"), is_local("198.18.0.77")] == [True, False]
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.18.0.77") is None


@pytest.mark.parametrize(
    ("hosts", "index", "said"),
    [
        (["198.18.0.76", "198.18.0.77"], None, "none of them is this machine"),
        (["127.0.0.1", "127.0.0.2"], None, "2 of them are this machine"),
        (["127.0.0.1", "198.18.0.77"], 0, "other machines cannot reach"),
        (["198.18.0.76", "198.18.0.77"], 2, "numbered from 0"),
        (["no-such-host.invalid"], 0, "has no address here"),
    ],
)
def test_a_place_that_is_unclear_is_refused(hosts, index, said):
    with pytest.raises(ConfigError, match=said):
        place_of(hosts, index)


def test_a_process_ends_with_its_parent():
    """The parent is killed by SIGKILL, so it cannot end its child itself."""
    child = "from nestpipe.distributed.local_host import end_with_parent; import time; end_with_parent(); print(1, flush=True); time.sleep(60)"
    parent = textwrap.dedent(f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
        child.stdout.readline()
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    number = int(process.stdout.readline())
    os.kill(number, 0)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    end = time.monotonic() + 10
    while time.monotonic() < end and _is_alive(number):
        time.sleep(0.02)
    assert not _is_alive(number)


def _is_alive(number):
    stat = Path(f"/proc/{number}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
