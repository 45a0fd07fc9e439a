"""What each rank of simulate.py runs: sequential and nested of train_arms.py in turn, and on request a trace of each.

simulate_ranks.py SETTINGS [FOLDER]      FOLDER/sequential and FOLDER/nested are then folders of traces
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import train_arms

from nestpipe.distributed.process_group import Channel, World
from nestpipe.pipeline.channels import Channels
from nestpipe.profiling.recorder import Recorder
from nestpipe.simulate.calibrate import Probes
from nestpipe.training.process import exact_arithmetic, keep_freed_memory

SERIAL = {"sequential": "serial", "nested": "nested"}  # the schedule whose events are those of an arm


def main() -> None:
    settings, folder = train_arms.Settings(**json.loads(sys.argv[1])), sys.argv[2]
    keep_freed_memory()
    with exact_arithmetic(1):
        world = World.from_environment()
        channels = Channels.of(world)
        idle = idle_share(channels.control) if folder else 0.0
        data = train_arms.batches(settings, world.rank)
        arms = {
            name: train_arms.OurArm(name, settings, train_arms.our_state(settings, channels), data, Recorder.off())
            for name in settings.arms
        }
        for arm in arms.values():
            see_all_rows(arm)
        times, cpu = train_arms.timed({name: arm.run for name, arm in arms.items()}, settings, channels.control)
        result = {"times": times, "bitwise_equal": train_arms.same_bits(list(arms.values()), channels.control)}
        if folder:
            for name, arm in arms.items():
                trace(arm, SERIAL[name], world, Path(folder) / name)
            probes = Probes(
                background_s=cpu["sequential"].process_s - cpu["sequential"].thread_s,
                idle_share=idle,
                peer_s=peer_seconds(world, channels.control),
            )
            result["probes"] = asdict(probes)
        channels.control.barrier()
        print(json.dumps(result))
        world.close()


def see_all_rows(arm: train_arms.OurArm) -> None:
    """Trains on every batch once without the wait: a row is made when it is first seen, which later steps do not pay for."""
    waiting = arm.state.model.dense  # type: ignore[attr-defined]
    seconds, waiting.s_per_sample = waiting.s_per_sample, 0.0
    arm.run(train_arms.NUM_BATCHES)
    waiting.s_per_sample = seconds


def idle_share(control: Channel, *, seconds: float = 2.0) -> float:
    """CPU share of an idle rank with open channels: its threads poll for messages."""
    control.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - start)


def peer_seconds(world: World, pair: Channel, *, at_once: int = 17, rounds: int = 20, tries: int = 5) -> float:
    """CPU time of this thread for one more peer of a message that is opened or sent: more messages at once to the same one.

    Less what the same calls take without a peer; the least of some tries.
    """

    def more_s(stream: Channel) -> float:
        send = [torch.zeros(64) for _ in range(stream.world.size)]
        rooms = [[torch.empty(64) for _ in send] for _ in range(at_once)]

        def took(number: int) -> float:
            start = time.thread_time()
            for _ in range(rounds):
                for handle in [stream.exchange("probe", send, room) for room in rooms[:number]]:
                    handle.wait()
            return (time.thread_time() - start) / rounds

        return min(took(at_once) for _ in range(tries)) - min(took(1) for _ in range(tries))

    local = more_s(world.channel("alone", ranks=[world.rank]))
    return max(more_s(pair) - local, 0.0) / (at_once - 1) / 2 / (world.size - 1)


def trace(arm: train_arms.OurArm, mode: str, world: World, folder: Path) -> None:
    """Records some more steps of an arm, as events of a schedule."""
    recorder = Recorder(world.rank, world.size, capacity=1 << 15, run=folder.name)
    traced = replace(arm, name=mode, recorder=recorder)
    arm.state.control.barrier()
    traced.run(3 * arm.settings.num_steps)
    recorder.save(folder)


if __name__ == "__main__":
    main()
