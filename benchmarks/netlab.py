"""Network lab: network namespaces joined by a switch with a given bandwidth and delay.

    with Lab(2, rate="1gbit", delay_ms=2) as lab:
        outputs = lab.run([sys.executable, "program.py"])     # one process per rank; stdout by rank

    rate only:   rank 0 [lab0 tbf]---veth---[tbf bridge tbf]---veth---[tbf lab0] rank 1      all in the kernel
    with delay:  rank 0 [lab0 tbf]---tun---- relay process ----tun---[tbf lab0] rank 1      delays each packet

On loopback all communication is CPU work, so overlap cannot show; here the link itself takes time. The relay process replaces
netem, which the kernel may lack. Addresses are 198.18.0.x (reserved for benchmarks) without a route out, and the switch has its
own namespace, so the machine's network is not touched. Everything is removed at the end, also after a failure; the next run
removes what a killed run left behind.

Needs root, and ip and tc (Debian: iproute2). `python benchmarks/netlab.py` measures what rate and delay are achieved.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

DEVICE = "lab0"
_PREFIX = "nestpipe-lab"
_MTU_OF_TUN = 60_000  # larger packets are fewer packets for the relay, which handles each one in Python
_MTU_OF_VETH, _IP_AND_TCP = 1500, 52  # the latter with time stamps
_BURST_S = 1e-3  # tbf lets so much pass at once; with less, a CPU that is busy for a moment costs bandwidth
_MIN_BURST_BYTES = 64_000  # it must hold the largest packet
_KEPT = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "PYTHONPATH", "OMP_NUM_THREADS")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class LabError(RuntimeError):
    """The lab cannot be made here, or a rank in it failed."""


def bits_per_s(rate: str) -> float:
    """'1gbit' -> 1e9."""
    found = re.fullmatch(r"([\d.]+)([kmg]bit)", rate)
    if not found:
        raise LabError(f"cannot parse rate '{rate}'; write it like 1gbit or 500mbit.")
    return float(found[1]) * _BITS[found[2]]


def payload_share(delay_ms: float) -> float:
    """Share of a link's rate that is payload of a long stream; the rest is headers."""
    packet, link_header = (_MTU_OF_TUN, 0) if delay_ms else (_MTU_OF_VETH, 14)
    return (packet - _IP_AND_TCP) / (packet + link_header)


def burst_bytes(rate: str) -> int:
    """Burst in bytes of an idle link of this rate."""
    return max(round(bits_per_s(rate) / 8 * _BURST_S), _MIN_BURST_BYTES)


def refusal() -> str | None:
    """Why no lab can be made here, or None."""
    if os.geteuid() != 0:
        return "needs root: network namespaces"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc: apt-get install iproute2"
    name = f"{_PREFIX}-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else "needs root: 'ip netns add' was refused"


class Loopback:
    """The same interface without a network of its own: all ranks on 127.0.0.1."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._port = _free_port()

    def environment(self, rank: int) -> dict[str, str]:
        return _environment(rank, self.world_size, "127.0.0.1", "lo", self._port)

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def run(self, command: Sequence[str], *, timeout_s: float = 120) -> list[str]:
        """Runs the command once per rank; what each wrote to stdout. Raises LabError with all outputs if one fails."""
        commands = [self.command(rank, command) for rank in range(self.world_size)]
        return _run_all(commands, [self.environment(rank) for rank in range(self.world_size)], timeout_s)


class Lab(Loopback):
    """A namespace per rank, or per host of several ranks that share its link, joined by a switch; a context manager."""

    def __init__(self, world_size: int, *, rate: str = "1gbit", delay_ms: float = 0, ranks_per_host: int = 1):
        super().__init__(world_size)
        self.rate, self.delay_ms = rate, delay_ms
        self.num_hosts, self._ranks_per_host = -(-world_size // ranks_per_host), ranks_per_host
        bits_per_s(rate)
        self._switch = f"{_PREFIX}-{os.getpid()}-switch"
        self._relay: subprocess.Popen[str] | None = None
        self._port = 29_500  # always free inside the namespaces

    def namespace(self, host: int) -> str:
        return f"{_PREFIX}-{os.getpid()}-{host}"

    def environment(self, rank: int) -> dict[str, str]:
        return _environment(rank, self.world_size, _address(0), DEVICE, self._port)

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command as it runs in the rank's namespace."""
        return ["ip", "netns", "exec", self.namespace(rank // self._ranks_per_host), *command]

    def __enter__(self) -> Lab:
        if reason := refusal():
            raise LabError(f"no network lab here: {reason}.")
        _remove_leftovers()
        try:
            for name in self._namespaces():
                _call("ip", "netns", "add", name)
                _call("ip", "-n", name, "link", "set", "lo", "up")
            if self.delay_ms:
                self._join_by_relay()
            else:
                self._join_by_bridge()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _namespaces(self) -> list[str]:
        return [self._switch, *map(self.namespace, range(self.num_hosts))]

    def _join_by_bridge(self) -> None:
        _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in range(self.num_hosts):
            port, name = f"port{host}", self.namespace(host)
            _call("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
            _call("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            self._raise_device(host)
            self._shape(self._switch, port)  # traffic of several hosts to one shares its link

    def _join_by_relay(self) -> None:
        program = [sys.executable, str(Path(__file__)), "--relay", str(self.num_hosts), str(self.delay_ms)]
        command = ["ip", "netns", "exec", self._switch, *program]
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_clean_environment())
        if self._relay.stdout is None or self._relay.stdout.readline().strip() != "ready":
            raise LabError("the relay that delays packets did not start; its message is above.")
        for host in range(self.num_hosts):
            port, name = f"port{host}", self.namespace(host)
            _call("ip", "-n", self._switch, "link", "set", port, "netns", name)  # the relay keeps its end
            _call("ip", "-n", name, "link", "set", port, "name", DEVICE, "mtu", str(_MTU_OF_TUN))
            self._raise_device(host)

    def _raise_device(self, host: int) -> None:
        name = self.namespace(host)
        _call("ip", "-n", name, "address", "add", f"{_address(host)}/24", "dev", DEVICE)
        _call("ip", "-n", name, "link", "set", DEVICE, "up")
        # Whatever the machine's default is: BBR pauses every few round trips to probe the link, and an exchange
        # that is over sooner pays for that. Reno is the one that a namespace may always choose.
        _call("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
        # A connection that was silent for 200 ms would feel its way again, in the middle of training (docs/how-to/many-machines.md).
        _call("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
        self._shape(name, DEVICE)

    def _shape(self, namespace: str, device: str) -> None:
        shape = ("tbf", "rate", self.rate, "burst", str(burst_bytes(self.rate)), "latency", "50ms")
        _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)

    def _remove(self) -> None:
        if self._relay:
            self._relay.kill()
            self._relay.wait()
            if self._relay.stdout:
                self._relay.stdout.close()
            self._relay = None
        for name in self._namespaces():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # may not exist yet


def _address(rank: int) -> str:
    return f"198.18.0.{rank + 1}"


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


def _remove_leftovers() -> None:
    """Deletes namespaces whose lab was killed before it could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name, pid in re.findall(rf"^({_PREFIX}-(\d+)-\w+)", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _clean_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def _environment(rank: int, size: int, address: str, device: str, port: int) -> dict[str, str]:
    """What torchrun would set, plus the interface for gloo."""
    own = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}
    return _clean_environment() | {name: str(value) for name, value in own.items()} | {"GLOO_SOCKET_IFNAME": device}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run_all(commands: list[list[str]], environments: list[dict[str, str]], timeout_s: float) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"out-{rank}") for rank in range(len(commands))]
        errs = [Path(folder, f"err-{rank}") for rank in range(len(commands))]
        codes = _exit_codes(commands, environments, outs, errs, time.monotonic() + timeout_s)
        texts = [path.read_text() for path in outs]
        if any(code != 0 for code in codes):
            said = [
                f"--- rank {rank}: {'not finished' if code is None else f'exit code {code}'}\n{text}{err.read_text()}"
                for rank, (code, text, err) in enumerate(zip(codes, texts, errs, strict=True))
            ]
            raise LabError(f"'{' '.join(commands[0])}' failed\n" + "\n".join(said))
        return texts


def _exit_codes(
    commands: list[list[str]], environments: list[dict[str, str]], outs: list[Path], errs: list[Path], end: float
) -> list[int | None]:
    """Runs the commands side by side; None for those that had to be killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment, out, err in zip(commands, environments, outs, errs, strict=True):
            with out.open("w") as out_file, err.open("w") as err_file:
                processes.append(subprocess.Popen(command, stdout=out_file, stderr=err_file, env=environment))
        failed = False
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if not failed and any(process.poll() for process in processes):
                failed, end = True, min(end, time.monotonic() + 5)  # the others get a moment to say why
            time.sleep(0.02)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def relay(num_ports: int, delay_ms: float) -> None:
    """Moves packets between tun devices, each `delay_ms` after it came; runs until it is killed."""
    ports = []
    for rank in range(num_ports):
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", f"port{rank}".encode(), _IFF_TUN | _IFF_NO_PI))
        ports.append(port)
    print("ready", flush=True)
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        left = max(held[0][0] - time.monotonic(), 0) if held else None
        ready, _, _ = select.select(ports, [], [], left)
        for port in ready:
            with suppress(BlockingIOError):
                for _ in range(64):  # not for ever: due packets wait meanwhile
                    packet = os.read(port, 65_536)
                    target = packet[19] - 1  # the last byte of an IPv4 destination
                    if packet[0] >> 4 == 4 and 0 <= target < num_ports:
                        held.append((time.monotonic() + delay_ms / 1e3, ports[target], packet))
        while held and held[0][0] <= time.monotonic():
            _, target, packet = held.popleft()
            os.write(target, packet)


def probe() -> None:
    """Run by two ranks: rank 0 prints the one-way delay and the rate of a long stream from rank 1."""
    rank, address, num_bytes = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], 64 << 20
    if rank == 0:
        with socket.create_server((address, 5000)) as server, server.accept()[0] as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(101):
                peer.sendall(peer.recv(1))
            delay_ms = float(peer.recv(16, socket.MSG_WAITALL))
            received, start = 0, 0.0
            while received < num_bytes:
                received += len(peer.recv(1 << 20))
                if not start and received >= num_bytes // 4:  # the stream has found its speed
                    first, start = received, time.perf_counter()
            rate = (received - first) * 8 / (time.perf_counter() - start)
            print(json.dumps({"rate": rate, "delay_ms": delay_ms}))
    elif rank == 1:
        with _connect(address) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(101):
                start = time.perf_counter()
                peer.sendall(b"x")
                peer.recv(1)
                trips.append(time.perf_counter() - start)
            peer.sendall(f"{statistics.median(trips) / 2 * 1e3:16.6f}".encode())
            peer.sendall(bytes(num_bytes))
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)  # returns when the peer has read everything and closes


def _connect(address: str) -> socket.socket:
    for _ in range(250):  # the other rank may not listen yet
        with suppress(ConnectionRefusedError):
            return socket.create_connection((address, 5000), timeout=30)
        time.sleep(0.02)
    raise LabError("rank 0 does not listen.")


def measured(lab: Lab) -> dict[str, float]:
    """Achieved `rate` (bits per second of payload) and `delay_ms` (one way) between ranks 0 and 1."""
    found: dict[str, float] = json.loads(lab.run([sys.executable, str(Path(__file__)), "--probe"])[0])
    return found


def end_on_sigterm() -> None:
    """Makes SIGTERM an exception, so that what was started is ended then too, and a lab removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the network lab itself.")
    parser.add_argument("--relay", nargs=2, metavar=("PORTS", "DELAY_MS"), help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.relay:
        relay(int(options.relay[0]), float(options.relay[1]))
    elif options.probe:
        probe()
    else:
        end_on_sigterm()
        print(f"{'configured':>16}  {'delay':>6}  {'achieved':>14}  {'share':>6}  {'one way':>8}")
        for rate, delay_ms in (("1gbit", 0.0), ("1gbit", 2.0), ("200mbit", 0.0), ("2gbit", 0.0)):
            with Lab(2, rate=rate, delay_ms=delay_ms) as lab:
                found = measured(lab)
            share = found["rate"] / bits_per_s(rate)
            print(
                f"{rate:>16}  {delay_ms:>3.0f} ms  {found['rate'] / 1e6:>7,.0f} Mbit/s  {share:>6.1%}  {found['delay_ms']:>5.2f} ms"
            )


if __name__ == "__main__":
    try:
        main()
    except LabError as problem:
        sys.exit(str(problem))
