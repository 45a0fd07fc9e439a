"""HTTP client: train a small ranker, start `nestpipe serve`, rank, send an event, rank again, stop.

python examples/http_client.py
"""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from nestpipe.cli import main as nestpipe
from nestpipe.client import Client

USER, CANDIDATES, NOW = 7, [3, 7, 9, 12, 20], 1_702_600_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(folder: Path) -> Path:
    """A generated click log and a ranker after 20 steps."""
    nestpipe(f"data clicks --num-users 40 --num-items 30 --num-events 1500 --out {folder}/clicks".split())
    data = f"--data.path {folder}/clicks --data.split-time 2023-12-08 --data.max-len 32 --data.truncate-block 8"
    model = "--model.features category price --model.dim 16 --train.epochs 0 --train.steps 20"
    nestpipe(f"train ml1m_ranking {data} {model} --run {folder}/run".split())
    return folder / "run"


def main(folder: Path) -> None:
    run, port = train(folder), free_port()
    command = [sys.executable, "-m", "nestpipe.cli", "serve", str(run), "--port", str(port), "--admin-port", "0"]
    service = subprocess.Popen(command)
    try:
        with Client(f"http://127.0.0.1:{port}", timeout_s=30) as client:
            while not client.is_ready():
                if service.poll() is not None:
                    raise SystemExit("the service did not start; its message is above")
                time.sleep(0.1)
            before = client.rank(USER, CANDIDATES, request="a", k=3, query_time=NOW, deadline_ms=5000)
            print("best of the candidates:", before.items, "scored by", before.model)
            client.send_events([{"id": "e1", "user": USER, "item": 9, "time": NOW, "click": 1}])
            after = client.rank(USER, CANDIDATES, request="b", k=3, query_time=NOW + 60, deadline_ms=5000)
            print("after one more event:  ", after.items)
    finally:
        service.send_signal(signal.SIGINT)  # requests in flight are answered, then the service ends
        service.wait(30)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        main(Path(scratch))
