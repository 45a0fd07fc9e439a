"""What each rank of simulate.py runs: sequential and nested of train_arms.py in turn, and on request a trace of each.

simulate_ranks.py SETTINGS [FOLDER]      FOLDER/sequential and FOLDER/nested are then folders of traces
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import measure
import torch
import train_arms

from nestpipe.comm import World
from nestpipe.process import exact_arithmetic, keep_freed_memory
from nestpipe.run import Lanes
from nestpipe.trace import Recorder

SERIAL = {"sequential": "serial", "nested": "nested"}  # the schedule whose events are those of an arm


def main() -> None:
    settings, folder = train_arms.Settings(**json.loads(sys.argv[1])), sys.argv[2]
    keep_freed_memory()
    with exact_arithmetic(1):
        world = World.from_environment()
        lanes = Lanes.of(world)
        data = train_arms.batches(settings, world.rank)
        arms = {
            name: train_arms.OurArm(name, settings, train_arms.our_state(settings, lanes), data, Recorder.off())
            for name in settings.arms
        }
        cpu_s: dict[str, list[float]] = {name: [] for name in arms}

        def timed(name: str) -> Callable[[], float]:
            def block() -> float:
                lanes.control.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                arms[name].run(settings.num_steps)
                cpu_s[name].append((time.process_time() - cpu) / settings.num_steps)
                own = round((time.perf_counter() - start) * 1e9)
                return max(row[0] for row in lanes.control.all_gather_ints([own])) / 1e9 / settings.num_steps

            return block

        times = measure.alternate({name: timed(name) for name in arms}, num_blocks=settings.num_blocks)
        digests = {train_arms.digest(arm.state) for arm in arms.values()}
        equal = all(row[0] for row in lanes.control.all_gather_ints([len(digests) == 1]))
        peer_s = 0.0
        if folder:
            peer_s = peer_seconds(world)
            for name, arm in arms.items():
                trace(arm, SERIAL[name], world, Path(folder) / name)
        lanes.control.barrier()
        cpu_ms = {name: 1e3 * statistics.median(one) for name, one in cpu_s.items()}
        print(json.dumps({"times": times, "cpu_ms": cpu_ms, "bitwise_equal": equal, "peer_s": peer_s}))
        world.close()


def peer_seconds(world: World, *, num: int = 300) -> float:
    """CPU time of this thread for one more peer of a message that is opened or sent: two ranks beside a lane of one."""
    found = []
    for lane in (world.lane("alone", ranks=[world.rank]), world.lane("pair")):
        send = [torch.zeros(64) for _ in range(lane.world.size)]
        rooms = [torch.empty(64) for _ in send]
        lane.exchange("probe", send, rooms).wait()
        start = time.thread_time()
        for _ in range(num):
            lane.exchange("probe", send, rooms).wait()
        found.append((time.thread_time() - start) / num / 2)
    return max(found[1] - found[0], 0.0) / (world.size - 1)


def trace(arm: train_arms.OurArm, mode: str, world: World, folder: Path) -> None:
    """Records some more steps of an arm, as events of a schedule."""
    recorder = Recorder(world.rank, world.size, capacity=1 << 15, run=folder.name)
    traced = replace(arm, name=mode, recorder=recorder)
    arm.state.control.barrier()
    traced.run(3 * arm.settings.num_steps)
    recorder.save(folder)


if __name__ == "__main__":
    main()
