"""What a launcher must know about its own machine: its cores, its place among the hosts and its network interface.

No torch in here: `nestpipe launch --help` answers without it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from nestpipe.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_PR_SET_PDEATHSIG = 1  # Linux: a signal when the parent ends


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: its affinity, and the quota of its cgroup, rounded down, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_quota(cgroup) or cores)))


def _quota(cgroup: Path) -> float | None:
    """The quota in cores, of cgroup version 2 or 1; None without one."""
    try:
        if (file := cgroup / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        return None if quota.strip() in ("max", "-1") else float(quota) / float(period)
    except (OSError, ValueError):  # no cgroup is mounted, or another system
        return None


def place_of(hosts: Sequence[str], index: int | None = None) -> tuple[int, str]:
    """The place of this machine in a list of hosts and its address there. Raises ConfigError."""
    if index is None:
        index = _own_place(hosts)
    elif not 0 <= index < len(hosts):
        raise ConfigError(f"--host-index is {index}, but --hosts names {len(hosts)} hosts, numbered from 0.")
    address = resolve(hosts[index])
    if len(hosts) > 1 and ip_address(address).is_loopback:
        raise ConfigError(
            f"host '{hosts[index]}' is {address} on this machine, which other machines cannot reach; "
            "give its network address in --hosts."
        )
    return index, address


def resolve(host: str) -> str:
    """The IPv4 address of a host. Raises ConfigError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"host '{host}' has no address here ({error}); give an address in --hosts.") from None


def _own_place(hosts: Sequence[str]) -> int:
    own = [place for place, host in enumerate(hosts) if is_local(host)]
    if len(own) == 1:
        return own[0]
    found = f"{len(own)} of them are" if own else "none of them is"
    raise ConfigError(
        f"--hosts names {', '.join(hosts)}, but {found} this machine ({socket.gethostname()}); "
        "say which one it is with --host-index, counted from 0."
    )


def is_local(host: str) -> bool:
    """Whether a name or an address is this machine's: only then can a socket be bound to it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.gethostbyname(host), 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """The network interface with an IPv4 address; None if no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def address_towards(host: str) -> str:
    """The address that this machine sends from to reach a host; "" if it cannot. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def end_with_parent() -> None:
    """Sends this process SIGTERM when its parent ends, so that no rank outlives a killed launcher. Linux only."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except AttributeError:  # another system
        return
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)
