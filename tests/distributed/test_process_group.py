"""Exchanges between real gloo ranks, at world sizes 1 to 4, against what one process would compute."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.distributed.process_group import MAX_TAG, Channel, Handle, World
from nestpipe.errors import CommError
from tests.rank_pool import RankPool, RanksError, run_ranks

SIZES = (1, 2, 3, 4)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.uint8,
    torch.float8_e4m3fn,
)
every_size = pytest.mark.parametrize("size", SIZES)


def length(seed: int, source: int, target: int) -> int:
    """Of the message from source to target; about one in four is empty."""
    drawn = int(torch.randint(0, 400, (1,), generator=torch.Generator().manual_seed(seed * 64 + source * 8 + target)))
    return max(drawn - 100, 0)


def message(seed: int, source: int, target: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What source sends target: both can make it."""
    generator = torch.Generator().manual_seed(1 << 20 | seed * 64 + source * 8 + target)
    values = torch.randn(length(seed, source, target), 3, generator=generator) * 50
    return (
        values > 0
        if dtype == torch.bool
        else values.clamp(0, 255).to(dtype)
        if dtype == torch.uint8
        else values.to(dtype)
    )


def bits(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def sends(world: World, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [message(seed, world.rank, peer, dtype) for peer in range(world.size)]


def expected(world: World, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [message(seed, peer, world.rank, dtype) for peer in range(world.size)]


def assert_received(world: World, seed: int, receive: list[Tensor], dtype: torch.dtype = torch.float32) -> None:
    for peer, (got, want) in enumerate(zip(receive, expected(world, seed, dtype), strict=True)):
        assert got.shape == want.shape, f"from rank {peer}"
        assert bits(got) == bits(want), f"from rank {peer}"


class RecordingWatch:
    """A watch that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def launched(self, name: str, num_bytes: int, num_rows: int) -> None:
        self.calls.append(("launched", name, num_bytes, num_rows))

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        self.calls.append(("waiting", name))
        yield
        self.calls.append(("waited", name))


def watched_exchange(world: World) -> None:
    channel, send, receive = (
        world.channel("rows"),
        sends(world, 3),
        [torch.empty_like(one) for one in expected(world, 3)],
    )
    channel.watch = watch = RecordingWatch()
    handle = channel.exchange("rows/item", send, receive)
    num_bytes = sum(one.nbytes for peer, one in enumerate(send) if peer != world.rank)
    assert watch.calls == [("launched", "rows/item", num_bytes, sum(map(len, send)))]
    handle.wait()
    handle.wait()
    assert watch.calls[1:] == [("waiting", "rows/item"), ("waited", "rows/item")]
    assert_received(world, 3, receive)
    channel.watch = None
    channel.barrier()
    assert len(watch.calls) == 3


@pytest.mark.parametrize("size", [1, 3])
def test_a_watch_sees_launches_and_waits(size: int) -> None:
    run_ranks(size, watched_exchange)


def exchange_dtypes(world: World) -> None:
    channel = world.channel("rows")
    for seed, dtype in enumerate(DTYPES):
        receive = [torch.empty_like(one) for one in expected(world, seed, dtype)]
        channel.exchange(f"rows/{dtype}", sends(world, seed, dtype), receive).wait()
        assert_received(world, seed, receive, dtype)


@every_size
def test_exchange_of_uneven_and_empty_messages_in_every_dtype(size: int) -> None:
    assert any(length(0, a, b) == 0 for a in range(4) for b in range(4))
    run_ranks(size, exchange_dtypes)


def many_in_flight(world: World, count: int) -> None:
    channel = world.channel("rows")
    receives = [[torch.empty_like(one) for one in expected(world, seed)] for seed in range(count)]
    # Posted in another order than launched, and launched in another order than waited for: the tags keep them apart.
    posted = {seed: channel.post("rows", receives[seed], tag=seed) for seed in reversed(range(count))}
    counted = [torch.zeros(2) for _ in range(world.size)]
    untagged = channel.exchange("counted", [torch.full((2,), float(world.rank))] * world.size, counted)
    for seed in range(count):
        posted[seed].launch(sends(world, seed))
    for seed in torch.randperm(count, generator=torch.Generator().manual_seed(world.rank)).tolist():
        posted[seed].wait()
        posted[seed].wait()  # a second time is free
        assert_received(world, seed, receives[seed])
    untagged.wait()
    assert [one[0].item() for one in counted] == list(range(world.size))


@every_size
def test_many_exchanges_in_flight_are_told_apart_by_tag(size: int) -> None:
    run_ranks(size, many_in_flight, 24)


def drop_the_handles(world: World) -> None:
    """The channel keeps buffers alive although the caller drops the handle and the sends."""
    channel = world.channel("rows")
    received = []
    for value in range(20):
        receive = [torch.empty(50_000) for _ in range(world.size)]
        channel.exchange("rows", [torch.full((50_000,), float(value)) for _ in range(world.size)], receive)
        received.append(receive)
    channel.barrier()
    handles = list(channel.unfinished)
    assert len(handles) == 20
    for handle in handles:
        handle.wait()
    assert all(bool((one == value).all()) for value, receive in enumerate(received) for one in receive)


def test_buffers_live_until_the_exchange_is_done() -> None:
    run_ranks(2, drop_the_handles)


def two_channels(world: World, count: int) -> None:
    errors: list[BaseException] = []

    def work(channel_number: int) -> None:
        try:
            channel = channels[channel_number]
            for seed in range(channel_number, 2 * count, 2):  # the channels carry different messages
                receive = [torch.empty_like(one) for one in expected(world, seed)]
                channel.exchange("rows", sends(world, seed), receive).wait()
                assert_received(world, seed, receive)
        except BaseException as error:
            errors.append(error)

    channels = [world.channel("rows"), world.channel("keys")]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    with pytest.raises(CommError, match="channel 'rows' belongs to another thread"):
        channels[0].barrier()
    channels[0].hand_over()
    channels[0].barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_two_channels_from_two_threads_at_once(size: int) -> None:
    run_ranks(size, two_channels, 60)


def small_messages(world: World) -> None:
    channel = world.channel("keys")
    assert channel.all_gather_ints([world.rank, -(1 << 62)]) == [[rank, -(1 << 62)] for rank in range(world.size)]
    assert channel.all_gather_ints([]) == [[]] * world.size
    received = channel.exchange_sizes([[10 * world.rank + peer, peer] for peer in range(world.size)])
    assert received == [[10 * peer + world.rank, world.rank] for peer in range(world.size)]
    for source in range(world.size):
        assert (
            channel.broadcast_bytes(f"from {world.rank} \0".encode() * 1000, source)
            == f"from {source} \0".encode() * 1000
        )
        assert channel.broadcast_bytes(b"", source) == b""
    channel.barrier()
    channel.agree("version", "0.1.0")


@every_size
def test_small_messages(size: int) -> None:
    run_ranks(size, small_messages)


def disagree(world: World) -> tuple[str, tuple[int, ...]]:
    channel = world.channel("keys")
    with pytest.raises(CommError) as caught:
        channel.agree("configuration", "b7" if world.rank == 1 else "a5")
    channel.barrier()  # an error of agreement leaves the channel usable
    return str(caught.value), caught.value.ranks


def test_a_disagreement_names_the_ranks_and_both_values() -> None:
    answer = "configuration differs: ranks 0, 2 have 'a5', but rank 1 has 'b7'. All ranks must run the same.", (1,)
    assert run_ranks(3, disagree) == [answer] * 3


def wait_for_the_first(channel: Channel, handles: list[Handle]) -> None:
    empty = [torch.empty(0)] * channel.world.size
    handles.append(channel.exchange("rows/item", empty, empty, where="step 230, micro-batch 2"))
    handles.append(channel.exchange("rows/user", empty, empty))
    handles[0].wait()


def come_late(world: World, late: int, folder: str) -> tuple[str, tuple[int, ...]]:
    world = replace(world, deadline_s=1.0, stacks=Path(folder))
    channel = world.channel("rows")
    if world.rank == late:
        time.sleep(2.0)
    handles: list[Handle] = []
    with pytest.raises(CommError) as caught:
        wait_for_the_first(channel, handles)
    for second in handles[1:]:
        with pytest.raises(
            CommError, match=r"'rows/user' not finished .* its channel failed before: .*rows/item"
        ) as after:
            second.wait()
        assert after.value.ranks == caught.value.ranks
    with pytest.raises(CommError, match="channel 'rows' cannot be used any more: exchange 'rows/item'"):
        channel.barrier()
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize(("size", "late"), [(2, 0), (4, 2)])
def test_a_deadline_names_the_rank_that_never_entered(size: int, late: int, tmp_path: Path) -> None:
    answers = run_ranks(size, come_late, late, str(tmp_path))
    stacks = f"Stacks: {tmp_path}/stacks-*.txt"
    named = "exchange 'rows/item' (step 230, micro-batch 2)"
    for rank, (text, blamed) in enumerate(answers):
        assert blamed == (late,), text
        if rank == late:  # finds its connections closed, and the report that says why
            assert f"aborted: {named}: rank {late} never entered it." in text
        else:
            plain = re.sub(r"after 1\.\d s", "after 1 s", text)  # a busy machine adds to the deadline
            assert plain == f"{named} not finished after 1 s; rank {late} never entered it. {stacks}"
        assert "come_late" in (tmp_path / f"stacks-{rank}.txt").read_text()


def in_pairs(world: World, folder: str) -> tuple[list[list[int]], str, tuple[int, ...]]:
    """Ranks 0 and 2, 1 and 3 on channels of their own, of one name; then rank 3 is lost to its peer."""
    world = replace(world, deadline_s=1.0, stacks=Path(folder))
    channel = world.channel("rows", ranks=range(world.rank % 2, 4, 2))
    assert (channel.world.rank, channel.world.size, channel.world.global_rank(1)) == (
        world.rank // 2,
        2,
        world.rank % 2 + 2,
    )
    gathered_here = channel.all_gather_ints([world.rank])
    if world.rank == 3:
        return gathered_here, "", ()
    try:
        channel.barrier()
    except CommError as error:
        return gathered_here, str(error), error.ranks
    return gathered_here, "", ()


def test_a_subgroup_channel_blames_global_ranks(tmp_path: Path) -> None:
    answers = run_ranks(4, in_pairs, str(tmp_path))
    assert [gathered_here for gathered_here, *_ in answers] == [[[0], [2]], [[1], [3]]] * 2
    assert [blamed for *_, blamed in answers] == [(), (3,), (), ()]
    assert "rank 3" in answers[1][1]
    assert (tmp_path / "stacks-1.txt").exists()


def lose_one_of_two_channels(world: World, order: str) -> list[tuple[int, ...]]:
    """Rank 1 is lost to rank 2 on one channel, and so rank 2 is late for rank 0 on the other: whom each thread blames."""
    world = replace(world, deadline_s=1.0)
    channels = [world.channel("rows"), world.channel("keys")]
    blamed: list[tuple[int, ...]] = []

    def wait(channel: Channel, seconds: float) -> None:
        time.sleep(seconds)
        empty = [torch.empty(0)] * world.size
        try:
            handle = channel.exchange("counts", empty, empty)
            time.sleep(2.4 if world.rank == 1 else 0)  # as a process that is stopped
            handle.wait()
        except CommError as error:
            blamed.append(error.ranks)

    late = {"rows first": (0.3, 1.5), "keys first": (0.3, 1.1)}[order]
    starts = {0: (0.0, 0.0), 1: (2.4, 0.0), 2: late}[world.rank]
    threads = [threading.Thread(target=wait, args=one) for one in zip(channels, starts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return blamed


@pytest.mark.parametrize("order", ["rows first", "keys first"])
def test_reports_of_all_threads_of_a_late_rank_count(order: str) -> None:
    """Whichever channel of rank 2 fails first: rank 2 waits for rank 1 on one, and rank 0 waits for rank 2 on the other."""
    for rank, blamed in enumerate(run_ranks(3, lose_one_of_two_channels, order)):
        assert [1 in ranks for ranks in blamed] == [True, True], (rank, blamed)


def wrong_size(world: World) -> tuple[int, ...]:
    channel = replace(world, deadline_s=0.5).channel("rows")
    send = [torch.zeros(4 if world.rank else 8) for _ in range(world.size)]
    with pytest.raises(CommError) as caught:
        channel.exchange("rows", send, [torch.zeros_like(send[0]) for _ in send]).wait()
    return caught.value.ranks


def test_a_message_of_another_size_is_an_error_not_a_crash() -> None:
    assert run_ranks(2, wrong_size) == [(1,), (0,)]


def miss_the_channel(world: World) -> str:
    if world.rank == 1:
        return ""
    with pytest.raises(CommError) as caught:
        replace(world, deadline_s=0.5).channel("rows")
    assert caught.value.ranks == (1,)
    return str(caught.value)


def test_a_channel_that_one_rank_does_not_create() -> None:
    text = run_ranks(2, miss_the_channel)[0]
    assert text.startswith("channel 'rows' not created after ")
    assert text.endswith("; rank 1 never created it.")


def lose_a_rank(world: World, victim: int) -> tuple[str, tuple[int, ...]]:
    channel = world.channel("rows")
    channel.barrier()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    buffers = [torch.empty(1000) for _ in range(world.size)]
    with pytest.raises(CommError) as caught:
        channel.exchange("rows/item", buffers, [torch.empty(1000) for _ in buffers]).wait()
    return str(caught.value), caught.value.ranks


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 2), (4, 1)])
def test_a_killed_rank_ends_in_a_named_error_on_all_others(own_pool: RankPool, size: int, victim: int) -> None:
    outcomes = own_pool.outcomes(size, lose_a_rank, victim)
    assert outcomes.pop(victim).failure == "died with exit code -9"
    for outcome in outcomes:
        assert outcome.failure is None, outcome.failure
        text, ranks = outcome.value
        assert f"rank {victim} closed the connection: its process has ended." in text
        assert text.startswith("exchange 'rows/item' not finished after ")
        assert ranks == (victim,)


def abort_on_one(world: World) -> tuple[str, tuple[int, ...]]:
    """One rank aborts a channel while another thread of it waits, and so does its peer."""
    channel = world.channel("rows")
    errors: list[CommError] = []

    def wait() -> None:
        empty = [torch.empty(0)] * world.size
        try:
            channel.exchange("rows/item", empty, empty, tag=world.rank).wait()  # neither gets what it waits for
        except CommError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    if world.rank == 1:
        time.sleep(0.2)
        channel.abort("the disk is full")
    thread.join()
    with pytest.raises(CommError, match="channel 'rows' cannot be used any more"):
        channel.barrier()
    return str(errors[0]), errors[0].ranks


def test_abort_ends_all_waits_on_the_channel() -> None:
    peer, own = run_ranks(2, abort_on_one)
    assert peer[1] == own[1] == (1,)
    assert peer[0].endswith("rank 1 aborted: the disk is full.")
    assert "its channel failed before: aborted: the disk is full." in own[0]


def narrow(world: World) -> None:
    channel = world.channel("rows")
    for wire in (torch.float16, torch.bfloat16):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            receive = [torch.empty_like(one) for one in expected(world, 3, dtype)]
            channel.exchange("rows", sends(world, 3, dtype), receive, wire=wire).wait()
            wide = dtype in (torch.float32, torch.float64)
            for got, want in zip(receive, expected(world, 3, dtype), strict=True):  # the own buffer too
                assert bits(got) == bits(want.to(wire).to(dtype) if wide else want)


@pytest.mark.parametrize("size", [1, 3])
def test_the_sixteen_bit_wire_rounds_wide_floats_and_nothing_else(size: int) -> None:
    run_ranks(size, narrow)


def restart(world: World, path: str) -> list[list[int]]:
    """A group whose rank 1 is never gathered_here of again, then the restarted one on the same store."""
    store = dist.FileStore(path, world.size)
    if world.rank == 0:
        dead = World.from_store(store, 0, 2, restart=0, deadline_s=0.5)
        with pytest.raises(CommError, match="rank 1 never created it"):
            dead.channel("rows")
    alive = World.from_store(store, world.rank, 2, restart=1)
    return alive.channel("rows").all_gather_ints([world.rank + 5])


def test_a_restarted_group_does_not_see_the_dead_one(tmp_path: Path) -> None:
    assert run_ranks(2, restart, str(tmp_path / "store")) == [[[5], [6]]] * 2


def from_variables(world: World, port: int) -> tuple[int, int, list[list[int]]]:
    settings = {"RANK": world.rank, "WORLD_SIZE": world.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in settings.items()})
    try:
        found = World.from_environment(deadline_s=10)
        gathered = found.channel("keys").all_gather_ints([world.rank])
        world.channel("end").barrier()  # rank 0 hosts the store, so it stays until all have connected
        return found.rank, found.size, gathered
    finally:
        for name in settings:
            del os.environ[name]


def test_ranks_from_torchruns_variables() -> None:
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    assert run_ranks(2, from_variables, port) == [(0, 2, [[0], [1]]), (1, 2, [[0], [1]])]


def test_no_variables_is_a_world_of_one_and_some_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert (World.from_environment().rank, World.from_environment().size) == (0, 1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CommError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        World.from_environment()


def test_misuse_is_refused() -> None:
    world = World.single()
    channel = world.channel("rows")
    two = torch.zeros(2)
    with pytest.raises(ValueError, match="has 2 receives for 1 ranks"):
        channel.exchange("rows", [two], [two, two])
    with pytest.raises(ValueError, match="has 0 sends for 1 ranks"):
        channel.exchange("rows", [], [two])
    with pytest.raises(ValueError, match=r"sends itself torch\.float32"):
        channel.exchange("rows", [two], [torch.zeros(3)])
    with pytest.raises(ValueError, match="posted but not launched"):
        channel.post("rows", [two]).wait()
    with pytest.raises(ValueError, match="tags end below"):
        channel.post("rows", [two], tag=MAX_TAG)
    with pytest.raises(CommError, match="exists already"):
        world.channel("rows")
    with pytest.raises(CommError, match="rank 2 does not exist in a world of 2"):
        World.from_store(dist.HashStore(), 2, 2)
    with pytest.raises(CommError, match="no communication backend for device 'meta'"):
        World.single(device="meta")
    world.close()
    with pytest.raises(CommError, match="is closed"):
        channel.barrier()


def fail_on_one(world: World) -> int:
    if world.rank == 1:
        raise KeyError("only here")
    return world.rank


def hang_on_one(world: World) -> None:
    if world.rank == 1:
        time.sleep(100)


def test_the_pool_shows_tracebacks_and_stacks_and_survives_failures(own_pool: RankPool) -> None:
    with pytest.raises(RanksError, match=r"(?s)rank 0: finished.*rank 1: Traceback.*KeyError: 'only here'"):
        own_pool.run(2, fail_on_one)
    with pytest.raises(RanksError, match=r"(?s)rank 1: did not finish; stacks:.*in hang_on_one"):
        own_pool.run(2, hang_on_one, deadline_s=2)
    own_pool.run(2, small_messages)
