"""What each rank of train_step.py runs: arms that train the same model on the same batches, block by block."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice

import measure
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nestpipe.distributed.process_group import Channel, World
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import Chunking, DenseConfig, EmbeddingConfig
from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
from nestpipe.embedding.row_optimizer import AdaGrad
from nestpipe.embedding.sharding import ShardedTables
from nestpipe.embedding.table import Table
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import HSTUConfig
from nestpipe.models.contract import Coupling, Output
from nestpipe.models.hstu import HSTU
from nestpipe.pipeline import stages
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import MicroBatchConfig
from nestpipe.pipeline.dense_params import DenseParams
from nestpipe.pipeline.runner import BatchFeed, Runner
from nestpipe.pipeline.schedule import Schedule
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates, TrainState
from nestpipe.profiling.overlap import CAUSES, steps_of
from nestpipe.profiling.overlap_report import waited_for_others_ns
from nestpipe.profiling.recorder import Recorder
from nestpipe.rng import Rng
from nestpipe.training.process import exact_arithmetic, keep_freed_memory

NUM_ROWS, DIM, LENGTH, ZIPF, SEED, LR = 1_000_000, 64, 50, 1.05, 0, 0.01
NUM_BATCHES = 24  # distinct batches, which then repeat
RATES = Rates(dense=1e-3, rows=LR)
_WARM_UP = 2  # steps at the start of a block that are left out of the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a measurement."""

    samples: int = 512  # per rank
    dense: str = "mlp"  # mlp, hstu, sleep:MS
    micro_batches: int = 4
    depth: int = 1
    ramp: float = 1.0
    chunks: Chunking = 1  # nested: of the last gradients, the update and the next first rows
    groups: int = 1  # of the arms sequential-groups and nested-groups
    arms: Sequence[str] = ()
    num_blocks: int = 9
    num_steps: int = 10  # of a block


def batches(settings: Settings, rank: int, *, length: int = LENGTH) -> list[Batch]:
    """Zipf ids spread over the table, so that frequent ids are not neighbours; the label is the sample's parity."""
    rng = np.random.default_rng([SEED, rank])
    weights = 1.0 / np.arange(1, NUM_ROWS + 1) ** ZIPF
    edges = np.cumsum(weights / weights.sum())
    place = np.random.default_rng(SEED).permutation(NUM_ROWS)
    offsets = torch.arange(settings.samples + 1) * length
    found = []
    for number in range(NUM_BATCHES):
        ids = torch.from_numpy(place[np.searchsorted(edges, rng.random(settings.samples * length))])
        sample_ids = torch.arange(settings.samples) + (number * 64 + rank) * settings.samples
        found.append(Batch(cursor=Cursor(0, number), sample_ids=sample_ids, items=Jagged(ids, offsets, length)))
    return found


class Pooled(nn.Module):
    """The small dense part: mean of a sample's vectors, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, vectors: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = self.layers(vectors.view(batch.num_samples, batch.items.max_len, DIM).mean(1)).squeeze(1)
        return logits


class Attended(nn.Module):
    """The large one: two HSTU units over the sequence, then its last state."""

    def __init__(self) -> None:
        super().__init__()
        config = HSTUConfig(dim=DIM, num_blocks=2, num_heads=2, qk_dim=32, v_dim=32, dropout=0.0)
        self.backbone, self.out = HSTU(config, max_len=LENGTH), nn.Linear(DIM, 1)

    def forward(self, vectors: Tensor, batch: Batch) -> Tensor:
        hidden = self.backbone(vectors, batch, None)
        logits: Tensor = self.out(hidden.index_select(0, batch.items.offsets[1:] - 1)).squeeze(1)
        return logits


class Waiting(nn.Module):
    """A linear dense part that sleeps for a given time per batch instead of computing, so the core is free."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.s_per_sample = float(settings.dense.partition(":")[2]) / 1e3 / settings.samples
        self.out = nn.Linear(DIM, 1)

    def forward(self, vectors: Tensor, batch: Batch) -> Tensor:
        time.sleep(self.s_per_sample * batch.num_samples)
        logits: Tensor = self.out(vectors.view(batch.num_samples, batch.items.max_len, DIM).mean(1)).squeeze(1)
        return logits


def new_dense(settings: Settings) -> nn.Module:
    torch.manual_seed(SEED)
    if settings.dense.startswith("sleep:"):
        return Waiting(settings)
    return {"mlp": Pooled, "hstu": Attended}[settings.dense]()


def loss_sum(dense: nn.Module, vectors: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(dense(vectors, batch), (batch.sample_ids % 2).float(), reduction="sum")


class Clicks(nn.Module):
    """The dense part behind our contract."""

    coupling: Coupling = "none"

    def __init__(self, dense: nn.Module):
        super().__init__()
        self.dense = dense
        self.tables = (TableSpec(name="item", dim=DIM),)

    def lookups(self, batch: Batch, rng: Rng) -> dict[str, Lookup]:
        return {"items": Lookup(table="item", ids=batch.items.values)}

    def weight(self, batch: Batch) -> float:
        return float(batch.num_samples)

    def forward(self, rows: dict[str, Rows], batch: Batch, rng: Rng) -> Output:
        return Output(loss_sum(self.dense, rows["items"].gather(), batch))


@dataclass(slots=True, eq=False)
class OurArm:
    """One way to run our step, with a state of its own."""

    name: str
    settings: Settings
    state: TrainState
    data: list[Batch]
    recorder: Recorder

    def run(self, num_steps: int) -> None:
        stream = islice(self._endless(), self.state.num_steps, None)
        name = self.name.removesuffix("-groups")
        if name.startswith("sequential"):
            for batch in islice(stream, num_steps):
                step(self.state, batch, RATES)
            return
        stale = name == "stale"
        schedule = Schedule.of(
            "nested" if stale else name,
            self.settings.micro_batches,
            depth=self.settings.depth + stale,
            stale=stale,
            chunks=self.settings.chunks if name == "nested" else 1,
            groups=self.state.embedding.replicas is not None,
        )
        observer = self.recorder.observer(self.state.num_steps, channels=self.state.channels)
        runner = Runner(self.state, schedule, observe=observer)
        runner.run(BatchFeed(batches=stream, rates=lambda number: RATES, num_batches=num_steps))
        for stream in self.state.channels:
            stream.watch = None

    def _endless(self) -> Iterator[Batch]:
        return (self.data[number % len(self.data)] for number in count())


def our_state(settings: Settings, channels: Channels) -> TrainState:
    model = Clicks(new_dense(settings))
    config = EmbeddingConfig(optimizer="adagrad", lr=LR, eps=1e-8)
    table = Table(model.tables[0], AdaGrad(config), seed=SEED, config=config)
    owners = Owners(64, channels.rows.world.size)
    return TrainState(
        model=model,
        embedding=ShardedTables({"item": table}, channels.keys, channels.rows, owners, channels.replicas),
        dense=DenseParams(model, DenseConfig(optimizer="adam"), channels.dense),
        control=channels.control,
        seed=SEED,
        micro_batching=MicroBatchConfig(micro_batches=settings.micro_batches, ramp=settings.ramp),
    )


def create_rows(state: TrainState, ids: Tensor) -> None:
    """Creates the rows that this rank owns, so that no measured step does."""
    own = ids.index_select(0, (state.embedding.owners.owner_of(ids) == state.embedding.rank).nonzero().flatten())
    state.embedding.tables["item"].advance(own, 0)


def dense_only(state: TrainState, data: list[Batch]) -> Callable[[int], None]:
    """The same micro-batches on local rows, with dense gradient sum and dense step: the work that no overlap can hide."""
    works = [stages.read(state, batch, RATES, number) for number, batch in enumerate(data)]
    sizes = {
        work.plan.tables["item"].num_local(micro_batch)
        for work in works
        for micro_batch in range(state.micro_batching.micro_batches)
    }
    rows = {size: torch.randn(size, DIM) for size in sorted(sizes)}
    numbers = count()

    def run(num_steps: int) -> None:
        for number in islice(numbers, num_steps):
            work = works[number % NUM_BATCHES]
            state.dense.zero_grads()
            for micro_batch in range(state.micro_batching.micro_batches):
                leaf = rows[work.plan.tables["item"].num_local(micro_batch)].requires_grad_()
                output = state.model.forward(
                    work.plan.rows(micro_batch, {"item": leaf}), work.micro_batches[micro_batch], work.rng
                )
                (output.loss_sum / work.batch.num_samples).backward()
                leaf.grad = None
            stages.dense_sum(state, work)
            stages.dense_step(state, work)

    return run


def digest(state: TrainState) -> str:
    """A digest of this rank's state after training."""
    found = hashlib.sha256()
    for content in (state.dense.export(), state.embedding.tables["item"].export()):
        for name in sorted(content):
            found.update(name.encode() + content[name].numpy().tobytes())
    return found.hexdigest()


def same_bits(arms: Sequence[OurArm], control: Channel) -> bool:
    """Whether the arms are bitwise identical on every rank."""
    return all(row[0] for row in control.all_gather_ints([len({digest(arm.state) for arm in arms}) == 1]))


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of a step on this rank, median of blocks: of the process and of the calling thread."""

    process_s: float
    thread_s: float


def timed(
    runs: Mapping[str, Callable[[int], None]], settings: Settings, control: Channel
) -> tuple[dict[str, list[float]], dict[str, Cpu]]:
    """Seconds per step by arm and block on the slowest rank, and CPU seconds on this rank."""
    used: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}

    def block(name: str) -> float:
        control.barrier()
        # Peers run as they are; ours as training runs them (exact_arithmetic).
        torch.use_deterministic_algorithms(not name.startswith("torchrec"))
        start, process_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
        runs[name](settings.num_steps)
        used[name].append((time.process_time() - process_s, time.thread_time() - thread_s))
        own = round((time.perf_counter() - start) * 1e9)
        return max(row[0] for row in control.all_gather_ints([own])) / 1e9 / settings.num_steps

    times = measure.alternate({name: partial(block, name) for name in runs}, num_blocks=settings.num_blocks)
    columns = {name: zip(*one, strict=True) for name, one in used.items()}
    return times, {
        name: Cpu(*(statistics.median(column) / settings.num_steps for column in own)) for name, own in columns.items()
    }


def rank_program(settings: Settings) -> None:
    keep_freed_memory()
    with exact_arithmetic(1):
        _measure(settings)


def _measure(settings: Settings) -> None:
    """Run by each rank; prints seconds per step by arm and block (of the slowest rank), and the overlap from traces."""
    world = World.from_environment()
    channels, everyones = Channels.of(world), [batches(settings, rank) for rank in range(world.size)]
    data, ids = everyones[world.rank], torch.cat([one.items.values for own in everyones for one in own]).unique()
    del everyones
    grouped = channels.in_groups(settings.groups)
    ours: dict[str, OurArm] = {}
    runs: dict[str, Callable[[int], None]] = {}
    for name in settings.arms:
        if name.startswith("torchrec"):
            runs[name] = _peer(settings, data, world, pipelined=name == "torchrec")
        elif name == "dense-only":
            runs[name] = dense_only(our_state(settings, channels), data)
        else:
            own = replace(settings, micro_batches=1, ramp=1.0) if name == "sequential-1" else settings
            recorder = Recorder(world.rank, world.size, capacity=1 << 15, on=name.startswith("nested"))
            state = our_state(own, grouped if name.endswith("-groups") else channels)
            ours[name] = OurArm(name, own, state, data, recorder)
            create_rows(ours[name].state, ids)
            runs[name] = ours[name].run

    times, cpu = timed(runs, settings, channels.control)
    exact = [arm for name, arm in ours.items() if name not in ("stale", "sequential-1")]
    grids = [[arm for arm in exact if arm.name.endswith("-groups") == grouped] for grouped in (False, True)]
    traces = {name: _trace(arm, channels.control) for name, arm in ours.items() if name.startswith("nested")}
    result = {
        "times": times,
        "cpu_ms": _of_ranks({name: one.process_s for name, one in cpu.items()}, channels.control),
        "compute_ms": _of_ranks({name: one.thread_s for name, one in cpu.items()}, channels.control),
        "bitwise_equal": all(same_bits(arms, channels.control) for arms in grids if arms) if len(exact) > 1 else None,
    }
    gathered = [json.loads(one) for one in channels.control.all_gather_bytes(json.dumps(traces).encode())]
    result["traces"] = {name: [own[name] for own in gathered] for name in traces}
    channels.control.barrier()
    print(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
    world.close()


def _of_ranks(seconds: Mapping[str, float], control: Channel) -> dict[str, float]:
    """Milliseconds by arm, the mean of all ranks."""
    ranks = control.all_gather_floats([1e3 * one for one in seconds.values()])
    return {name: round(statistics.fmean(own), 2) for name, own in zip(seconds, zip(*ranks, strict=True), strict=True)}


def _peer(settings: Settings, data: list[Batch], world: World, *, pipelined: bool) -> Callable[[int], None]:
    from torchrec_arm import peer_steps

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size)
    return peer_steps(
        new_dense(settings),
        loss_sum,
        lambda: (data[number % NUM_BATCHES] for number in count()),
        num_rows=NUM_ROWS,
        dim=DIM,
        lr=LR,
        pipelined=pipelined,
    )


def _trace(arm: OurArm, control: Channel) -> dict[str, object]:
    """Sums over the recorded steps of a nested arm. Every rank must call it."""
    # A block starts with an empty pipeline after other arms ran, so its first steps are left out.
    every = arm.settings.num_steps
    found = [one for one in steps_of(arm.recorder.snapshot(every)) if one.batch % every >= _WARM_UP]
    ends = control.all_gather_bytes(json.dumps({one.batch: one.computed_ns for one in found}).encode())
    computed = [json.loads(own) for own in ends]
    untils = [max(own.get(str(one.batch), 0) for own in computed) for one in found]
    time_ns = {cause: sum(step.time_ns(cause) for step in found) for cause in CAUSES}
    seen_ns = {cause: sum(step.seen_ns.get(cause, 0) for step in found) for cause in CAUSES}
    edges = (("rows", 0), ("grads", arm.settings.micro_batches - 1))
    # The further chunks too, unless they hold the rows that neighbouring batches do not share, which are hidden.
    chunks = () if arm.settings.chunks == "shared" else ("chunk rows", "chunk grads")
    at_edges = [
        span for span in arm.recorder.snapshot().spans if (span.kind, span.micro_batch) in edges or span.kind in chunks
    ]
    kinds = ("rows", "grads", "keys")
    return {
        "num_steps": len(found),
        "total_ns": sum(step.total_ns for step in found),
        "time_ns": time_ns,
        "seen_ns": seen_ns,
        "others_ns": sum(map(waited_for_others_ns, found, untils)),
        "edge_bytes": sum(span.num_bytes for span in at_edges) / len({span.batch for span in at_edges}),
        "num_rows": {kind: sum(step.num_rows.get(kind, 0) for step in found) for kind in kinds},
        "num_bytes": sum(sum(step.num_bytes.values()) for step in found),
    }
