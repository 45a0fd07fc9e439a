"""How close is our exchange to wire speed? 8 MiB per rank between two ranks at 1 Gbit/s, vs. gloo's all_to_all_single.

Half of the 8 MiB is local, so 4 MiB are sent and 4 MiB received. A full-duplex wire needs bytes / rate = 33.6 ms. Frame headers
take 4.4 % of the rate, and the acknowledgements of one direction share the wire with the data of the other. Aim: at most 1.15x.

A sender waits until the receive is posted, and the wire is idle meanwhile. So there are two arms of ours: `at once` posts the
receives of an exchange and starts its sends in one call; `ahead` posts the receives of the next exchange, into another buffer,
before it starts this one, as a pipeline does that knows its sizes. Both measure all of that work, wait for one exchange before
they start the next, and deliver the same bytes.

The loopback figures measure CPU work alone. Needs root for the network lab.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import measure
import netlab
import torch
import torch.distributed as dist

from nestpipe.distributed.process_group import World

NUM_BYTES = 8 << 20
RATE = "1gbit"
SIZE = 2
SEED = 0
LIMIT = 1.15
_TITLES = {
    "ours": "ours, at once: irecv, then isend",
    "ahead": "ours, ahead: next irecv, then isend",
    "gloo": "gloo all_to_all_single",
}


def rank_program(num_blocks: int, num_repeats: int) -> None:
    """Run by each rank: prints seconds per exchange, by arm and block; the slowest rank counts."""
    torch.set_num_threads(1)
    world = World.from_environment()
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size)
    stream = world.channel("rows")
    generator = torch.Generator().manual_seed(SEED + world.rank)
    send = torch.randn(NUM_BYTES // 4, generator=generator)
    at_once, gloo, *ahead = (torch.zeros_like(send) for _ in range(4))

    def exchange() -> None:
        for _ in range(num_repeats):
            stream.exchange("rows", send.chunk(world.size), at_once.chunk(world.size)).wait()

    def exchange_ahead() -> None:
        posted = stream.post("rows", ahead[0].chunk(world.size))
        for number in range(1, num_repeats + 1):
            present = posted
            if number < num_repeats:
                posted = stream.post("rows", ahead[number % 2].chunk(world.size))
            present.launch(send.chunk(world.size)).wait()

    def all_to_all() -> None:
        for _ in range(num_repeats):
            dist.all_to_all_single(gloo, send)

    def timed(work: Callable[[], None]) -> Callable[[], float]:
        def block() -> float:
            stream.barrier()
            start = time.perf_counter()
            work()
            nanoseconds = round((time.perf_counter() - start) * 1e9)
            return max(row[0] for row in stream.all_gather_ints([nanoseconds])) / 1e9 / num_repeats

        return block

    arms = {"ours": timed(exchange), "ahead": timed(exchange_ahead), "gloo": timed(all_to_all)}
    found = measure.alternate(arms, num_blocks=num_blocks)
    assert all(torch.equal(gloo, one) for one in (at_once, *ahead)), "the arms did not deliver the same"
    stream.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()
    world.close()


def times_on(network: netlab.Loopback, num_blocks: int, num_repeats: int) -> dict[str, list[float]]:
    command = [
        sys.executable,
        str(Path(__file__)),
        "--as-rank",
        "--blocks",
        str(num_blocks),
        "--repeats",
        str(num_repeats),
    ]
    found: dict[str, list[float]] = json.loads(network.run(command)[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks; under 50 seconds")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--repeats", type=int)
    options = parser.parse_args()
    num_blocks = options.blocks or (9 if options.quick else 25)
    num_repeats = options.repeats or (10 if options.quick else 20)
    if options.as_rank:
        rank_program(num_blocks, num_repeats)
        return
    netlab.end_on_sigterm()
    with netlab.Lab(SIZE, rate=RATE) as lab:
        payload_rate = netlab.measured(lab)["rate"]
        shaped = times_on(lab, num_blocks, num_repeats)
    loopback = times_on(netlab.Loopback(SIZE), num_blocks, num_repeats)
    report(
        shaped, loopback, payload_rate, {"num_blocks": num_blocks, "num_repeats": num_repeats, "quick": options.quick}
    )


def report(
    shaped: dict[str, list[float]], loopback: dict[str, list[float]], payload_rate: float, settings: dict[str, object]
) -> None:
    num_bytes = NUM_BYTES * (SIZE - 1) // SIZE
    wire_s = num_bytes * 8 / netlab.bits_per_s(RATE)
    rows, over = [], {}
    for network, times in ((RATE, shaped), ("loopback", loopback)):
        for arm, title in _TITLES.items():
            spread = measure.ratio(times[arm], wire_s)
            over[network, arm] = spread
            shown = str(spread) if network == RATE else "-"
            milliseconds = measure.Spread.of([1e3 * seconds for seconds in times[arm]])
            rows.append([f"{title}, {network}", f"{milliseconds.median:.1f} ms", shown])
    rows.append(["wire: bytes / rate", f"{1e3 * wire_s:.1f} ms", "1.000"])
    payload_s = num_bytes * 8 / payload_rate
    rows.append(["one plain TCP stream, one way", f"{1e3 * payload_s:.1f} ms", f"{payload_s / wire_s:.3f}"])
    ours, ahead, gloo = (over[RATE, arm] for arm in _TITLES)
    loopback_ratio = measure.ratio(loopback["ours"], loopback["gloo"])
    verdicts = {"verdict": measure.verdict(ours, at_most=LIMIT), "ahead_verdict": measure.verdict(ahead, at_most=LIMIT)}
    figures = {
        "over_wire": round(ours.median, 4),
        "over_wire_range": ours.range,
        "ahead_over_wire": round(ahead.median, 4),
        "ahead_over_wire_range": ahead.range,
        "gloo_over_wire": round(gloo.median, 4),
        "gloo_over_wire_range": gloo.range,
        "loopback_over_gloo": round(loopback_ratio.median, 4),
        "loopback_over_gloo_range": loopback_ratio.range,
        "stream_over_wire": round(payload_s / wire_s, 4),
        **verdicts,
    }
    measure.append("exchange", measure.record(seed=SEED, figures=figures, settings=settings))
    print(f"{NUM_BYTES >> 20} MiB per rank, {SIZE} ranks; median of blocks (10-90 %)")
    print(measure.table(["", "per exchange", "over the wire"], rows))
    print(f"loopback, ours over gloo: {loopback_ratio}")
    print(f"at most {LIMIT} over the wire: at once {verdicts['verdict']}, ahead {verdicts['ahead_verdict']}")
    print(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as problem:
        sys.exit(str(problem))
