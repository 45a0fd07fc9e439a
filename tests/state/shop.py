"""A small shop with ids that are texts, a run on it, and instances of that run as processes that tests can kill."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import polars as pl

from nestpipe import train
from nestpipe.data.ingest import SideTable, write_sequences
from nestpipe.data.schema import Feature, Schema
from nestpipe.training.run_folder import Run
from tests.small_runs import small_config

NUM_USERS, NUM_ITEMS = 12, 20
_FEATURES = (
    Feature(name="category", kind="id", scope="item", encoding="dictionary"),
    Feature(name="price", kind="number", scope="item"),
    Feature(name="city", kind="id", scope="user", encoding="dictionary"),
    Feature(name="page", kind="id", encoding="dictionary"),
)


def make_shop(folder: Path) -> Run:
    """Users 'u00' ..., items 'i00' ... of two categories, and a next-item run."""
    rows = [
        (f"u{user:02}", f"i{(user + 3 * place) % NUM_ITEMS:02}", 1_000_000 + 60 * place, ("home", "cart")[place % 2])
        for user in range(NUM_USERS)
        for place in range(4 + user % 3)
    ]
    items = {"item": [f"i{n:02}" for n in range(NUM_ITEMS)], "category": ["lamps", "rugs"] * (NUM_ITEMS // 2)}
    users = {"user": [f"u{n:02}" for n in range(NUM_USERS)], "city": ["Oslo", "Rome", "Kyiv"] * (NUM_USERS // 3)}
    write_sequences(
        folder / "data",
        schema=Schema(user_encoding="dictionary", item_encoding="dictionary", features=_FEATURES),
        log=pl.DataFrame(rows, schema=["user", "item", "time", "page"], orient="row"),
        items=SideTable(source=pl.DataFrame({**items, "price": [float(n) for n in range(NUM_ITEMS)]}), key="item"),
        users=SideTable(source=pl.DataFrame(users), key="user"),
    )
    return train(small_config(folder / "data", "sasrec", epochs=1), folder / "run", quiet=True)


def _serve(words: list[str], log: str) -> None:
    with open(log, "a") as out:  # noqa: PTH123
        sys.stdout = sys.stderr = out
        from nestpipe.cli import main

        main(["serve", *words])


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["nestpipe.cli.serve_instance", "nestpipe.state.postgres", "tests.state.shop"])


class InstanceProcess:
    """`nestpipe serve RUN` in a process forked from one that has imported everything."""

    def __init__(self, run: Path, folder: Path, name: str, *flags: object):
        with socket.socket() as free, socket.socket() as other:
            for one in (free, other):
                one.bind(("127.0.0.1", 0))
            self.port, admin_port = free.getsockname()[1], other.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{self.port}", folder / f"{name}.txt"
        words = [run, "--name", name, "--port", self.port, "--admin-port", admin_port]
        self._words = [str(one) for one in (*words, "--trigger.budget-ms", 30_000, *flags)]
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.start()

    def start(self) -> None:
        self._process = _CONTEXT.Process(target=_serve, args=(self._words, str(self._log)), daemon=True)
        self._process.start()

    def wait_ready(self, *, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not self.is_ready():
            if not self._process.is_alive() or time.monotonic() > end:
                raise AssertionError(self._log.read_text())
            time.sleep(0.02)

    def is_ready(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join()

    def ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        """The answer of a call; raises HTTPError unless it is 200."""
        answer = self.http.request(method, path, json=body or None)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        if self._process.is_alive():
            self.kill()
        self.http.close()
        self._process.close()
