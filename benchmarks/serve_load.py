"""How many useful answers does an instance give under overload, and what do an answer and a refusal cost? Against a commit before.

A small ranker, short histories, 128 candidates. A useful answer has status 200, is not degraded and meets its deadline. Both
commits serve at the same time, each pinned to the first core; the load comes from the last. Blocks alternate.

    capacity          wrk, closed loop, 8 connections: useful answers per second
    closed            the same with 200 connections, over `capacity` of the block
    open              Poisson arrivals at 3x the capacity, over `capacity`
    refusal           CPU of the process per refusal: requests whose deadline nothing can meet, 200 connections
    intake            CPU of the process per answer, without that of the model's calls: one connection

wrk has one latency distribution for all answers. If a share u of them is useful, at most a share 0.01 u of all is later than the
P99 of the useful ones, so the quantile 1 - 0.01 u of all is an upper bound of that P99. The open loop measures its own.

Needs wrk (Debian's package) and Linux. CPU time and ratios within a block; other load moves absolute rates.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import measure
import numpy as np
import open_loop
from relay_worlds import cpu_s

NAME = "serve_load"
BEFORE = "cf02c37"  # the commit before admission by predicted wait
DEADLINE_MS, HOPELESS_MS = 300.0, 0.001
FEW, MANY, OVER = 8, 200, 3.0
AT_LEAST, REFUSAL_MS, INTAKE = 0.7, 0.1, 0.5
LATE_MS, LATE_TRIES = 2.0, 3  # of the generator at its 99th percentile
IDLE_S, IDLE_SHARE = 0.5, 0.05  # idle: less CPU than this share of half a second
NUM_USERS, NUM_ITEMS, LONGEST, NUM_BODIES = 2000, 4000, 32, 512  # histories of 4 to 32 events

_SCRIPT = """
local bodies, place, threads = {}, 0, {}
local headers = {["Content-Type"] = "application/json"}
useful, degraded, refused, other = 0, 0, 0, 0
function setup(thread) table.insert(threads, thread) end
function init(args) for line in io.lines(args[1]) do table.insert(bodies, line) end end
function request()
  place = place % #bodies + 1
  return wrk.format("POST", "/v1/rank", headers, bodies[place])
end
function response(status, headers, body)
  if status == 200 and not string.find(body, '"degraded":true', 1, true) then useful = useful + 1
  elseif status == 200 then degraded = degraded + 1
  elseif status == 429 or status == 503 then refused = refused + 1
  else other = other + 1 end
end
function done(summary, latency, requests)
  local u, d, r, o = 0, 0, 0, 0
  for _, thread in ipairs(threads) do
    u = u + thread:get("useful"); d = d + thread:get("degraded")
    r = r + thread:get("refused"); o = o + thread:get("other")
  end
  local share = u / math.max(u + d + r + o, 1)
  print(string.format('JSON {"useful": %d, "degraded": %d, "refused": %d, "other": %d, "seconds": %.6f, ' ..
    '"p99_ms": %.3f, "errors": %d}', u, d, r, o, summary.duration / 1e6, latency:percentile(100 * (1 - 0.01 * share)) / 1e3,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout))
end
"""

# Counts the CPU time of the model's calls, which all happen in one thread, in a mapped file: telling it costs nothing.
_CHILD = """
import mmap, struct, sys, time
from nestpipe.serve.prefill import ServedModel
with open(sys.argv[1], "r+b") as file:
    told = mmap.mmap(file.fileno(), 8)
spent = [0.0]
def counted(name):
    inner = getattr(ServedModel, name)
    def call(*args, **kwargs):
        began = time.thread_time()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[0] += time.thread_time() - began
            struct.pack_into("d", told, 0, spent[0])
    setattr(ServedModel, name, call)
for name in ("scores", "scores_and_prefixes"):
    counted(name)
from nestpipe.cli import main
sys.exit(main(sys.argv[2:]))
"""

# A ranker with the weights of a new model: the cost of a request does not depend on them.
_MAKE = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import polars as pl
sys.path.insert(0, sys.argv[1])
import relay_worlds
from nestpipe import recipes
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Feature, Label, Schema
from nestpipe.models.config import RankingConfig
folder, num_users, num_items, longest = Path(sys.argv[2]), *map(int, sys.argv[3:])
random = np.random.default_rng(0)
lengths = random.integers(4, longest + 1, num_users)
total = int(lengths.sum())
place = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
items = random.permutation(np.arange(total) % num_items)
times = 1_700_000_000 + 600 * place + random.integers(0, 600, total)
liked = random.random(total, dtype=np.float32).round()
log = pl.DataFrame({"user": np.repeat(np.arange(num_users), lengths), "item": items, "time": times, "liked": liked})
label = Label(name="like", kind="binary", feature="liked")
schema = Schema(features=(Feature(name="liked", kind="number"),), labels=(label,))
write_sequences(folder / "data", schema=schema, log=log)
base = recipes.ml1m_ranking()
data = replace(base.data, path=str(folder / "data"), max_len=longest, truncate_block=16, split="last", split_time=None)
model = RankingConfig(dim=64, num_blocks=2, num_heads=2, qk_dim=32, v_dim=32, dropout=0.0)
relay_worlds._new_run(replace(base, data=data, model=model), folder / "run")
"""


@dataclass(frozen=True, slots=True)
class Serving:
    """An instance of one commit."""

    url: str
    pid: int
    model_s: Path  # mapped file with the CPU seconds of the model's calls
    bodies: Mapping[float, Path]  # by deadline
    script: Path

    def wrk(self, connections: int, seconds: float, *, deadline_ms: float = DEADLINE_MS) -> dict[str, float]:
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "20s", "-s", str(self.script)]
        command += [self.url, "--", str(self.bodies[deadline_ms])]
        before = cpu_s(self.pid)
        said = subprocess.run(pinned(command, -1), capture_output=True, text=True, check=True).stdout
        found: dict[str, float] = json.loads(said.rpartition("JSON ")[2])
        return found | {"cpu_s": cpu_s(self.pid) - before}

    def intake_ms(self, seconds: float) -> tuple[float, float]:
        """CPU per answer in milliseconds, without the model's calls and in all."""
        model_s, found = self._model_s(), self.wrk(1, seconds)
        model_s = self._model_s() - model_s
        return 1e3 * (found["cpu_s"] - model_s) / found["useful"], 1e3 * found["cpu_s"] / found["useful"]

    def settle(self) -> None:
        """Waits until it is idle: what an overload has left is not charged to the next load."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            before = cpu_s(self.pid)
            time.sleep(IDLE_S)
            if cpu_s(self.pid) - before <= IDLE_SHARE * IDLE_S:
                return
        raise RuntimeError("the instance is not idle 30 s after its last request")

    def _model_s(self) -> float:
        return float(struct.unpack("d", self.model_s.read_bytes())[0])


def pinned(command: Sequence[str], core: int) -> list[str]:
    """A command on the first or the last core."""
    return ["taskset", "-c", str(sorted(os.sched_getaffinity(0))[core]), *command]


@contextmanager
def serving(tree: Path, folder: Path) -> Iterator[Serving]:
    """An instance of the code of a tree, when it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    made = [
        sys.executable,
        "-c",
        _MAKE,
        str(tree / "benchmarks"),
        str(folder),
        *map(str, (NUM_USERS, NUM_ITEMS, LONGEST)),
    ]
    subprocess.run(made, env=environment, cwd=folder, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model_s, script = folder / "model_s", folder / "load.lua"
    script.write_text(_SCRIPT)
    model_s.write_bytes(bytes(8))
    flags = ["--port", str(port), "--admin-port", "0", "--name", "i1", "--trigger.budget-ms", f"{DEADLINE_MS:g}"]
    command = [sys.executable, "-c", _CHILD, str(model_s), "serve", str(folder / "run"), *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(pinned(command, 0), env=environment, cwd=folder, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the instance of {tree} did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        bodies = {one: write_bodies(folder / f"bodies-{one:g}", one) for one in (DEADLINE_MS, HOPELESS_MS)}
        yield Serving(url, process.pid, model_s, bodies, script)
    finally:
        process.terminate()
        process.wait(timeout=30)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def write_bodies(path: Path, deadline_ms: float) -> Path:
    """Ranking requests of random users with 128 random candidates, one per line."""
    random, lines = np.random.default_rng(0), []
    for number in range(NUM_BODIES):
        body = {
            "user": int(random.integers(NUM_USERS)),
            "request": f"r{number}",
            "candidates": random.choice(NUM_ITEMS, 128, replace=False).tolist(),
            "k": 10,
            "deadline_ms": deadline_ms,
        }
        lines.append(json.dumps(body))
    path.write_text("\n".join(lines) + "\n")
    return path


def block(one: Serving, seconds: float) -> dict[str, float]:
    """All figures of one commit in one block."""
    few = one.wrk(FEW, seconds)
    capacity = few["useful"] / few["seconds"]
    many = one.wrk(MANY, seconds)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    for _ in range(LATE_TRIES):  # a generator that was late measured itself
        arrivals = open_loop.load(one.url, one.bodies[DEADLINE_MS], rate=OVER * capacity, seconds=seconds)
        if arrivals.lag_p99_ms() <= LATE_MS:
            break
        one.settle()
    hopeless = one.wrk(MANY, seconds, deadline_ms=HOPELESS_MS)
    one.settle()
    intake_ms, answer_ms = one.intake_ms(seconds)
    wrong = {name: found for name, found in (("few", few), ("many", many), ("hopeless", hopeless)) if found["other"]}
    if wrong or hopeless["useful"]:
        raise RuntimeError(f"unexpected answers: {wrong or hopeless}")
    return {
        "capacity": capacity,
        "answers_per_cpu_s": few["useful"] / few["cpu_s"],
        "closed": many["useful"] / many["seconds"] / capacity,
        "closed_p99_ms": many["p99_ms"],
        "open": arrivals.useful(DEADLINE_MS) / arrivals.seconds / capacity,
        "open_p99_ms": arrivals.p99_ms(),
        "open_lag_p99_ms": arrivals.lag_p99_ms(),
        "refusal_ms": 1e3 * hopeless["cpu_s"] / max(hopeless["refused"], 1),
        "intake_ms": intake_ms,
        "answer_ms": answer_ms,
    }


def figures(before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Medians with ranges, and verdicts."""
    found: dict[str, object] = {}

    def add(name: str, spread: measure.Spread, **bound: float) -> None:
        found.update({name: round(spread.median, 4), f"{name}_range": spread.range})
        if bound:
            found[f"{name}_verdict"] = measure.verdict(spread, **bound)

    of = lambda blocks, name: [one[name] for one in blocks]  # noqa: E731
    bounds: dict[str, dict[str, float]] = {
        "closed": {"at_least": AT_LEAST},
        "closed_p99_ms": {"at_most": DEADLINE_MS},
        "open": {"at_least": AT_LEAST},
        "open_p99_ms": {"at_most": DEADLINE_MS},
        "refusal_ms": {"at_most": REFUSAL_MS},
    }
    for name in before[0]:
        add(f"{name}_before", measure.Spread.of(of(before, name)))
        add(name, measure.Spread.of(of(after, name)), **bounds.get(name, {}))
    add("intake_ratio", measure.ratio(of(after, "intake_ms"), of(before, "intake_ms")), at_most=INTAKE)
    add("answers_ratio", measure.ratio(of(after, "answers_per_cpu_s"), of(before, "answers_per_cpu_s")), at_least=2.0)
    return found


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--blocks", type=int, default=measure.MIN_BLOCKS)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--quick", action="store_true", help="two short blocks, which do not count")
    return parser.parse_args()


def main() -> None:
    options = options_of()
    blocks, seconds = (2, 2.0) if options.quick else (options.blocks, options.seconds)
    found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, old = Path(name), Path(name) / "tree"
        git = ["git", "-C", str(measure.ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(old), options.before], check=True, capture_output=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(old)], check=True)
        arms = {}
        for arm, tree in (("before", old), ("after", measure.ROOT)):
            (folder / arm).mkdir()
            arms[arm] = stack.enter_context(serving(tree, folder / arm))
        affinity = os.sched_getaffinity(0)
        for number in range(-1, blocks):  # the first one warms up
            for arm, one in arms.items():
                os.sched_setaffinity(0, affinity)
                result = block(one, seconds if number >= 0 else 1.0)
                print(
                    f"block {number} {arm}: " + ", ".join(f"{key} {value:.3f}" for key, value in result.items()),
                    flush=True,
                )
                if number >= 0:
                    found[arm].append(result)
        os.sched_setaffinity(0, affinity)
    settings = {"before": options.before, "blocks": blocks, "seconds": seconds, "quick": options.quick}
    line = measure.record(
        seed=0, figures=figures(found["before"], found["after"]), settings=settings, packages=("uvicorn", "msgspec")
    )
    print(json.dumps(line["figures"], indent=1))
    if not options.quick:
        measure.append(NAME, line)


if __name__ == "__main__":
    main()
