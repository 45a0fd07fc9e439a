"""Rendezvous and failure reports on a clock that advances without waiting."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from nestpipe.distributed.failure_report import FailureReport, collect, publish, root_causes
from nestpipe.distributed.rendezvous import rendezvous
from nestpipe.errors import CommError


class FakeClock:
    """Time passes only in `sleep`; `at` runs an action when its time has come."""

    def __init__(self) -> None:
        self.now_s, self._actions = 100.0, list[tuple[float, object]]()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        self.now_s += seconds
        for due in [one for one in self._actions if one[0] <= self.now_s]:
            self._actions.remove(due)
            due[1]()  # type: ignore[operator]

    def at(self, seconds: float, action: object) -> None:
        self._actions.append((100.0 + seconds, action))


@pytest.mark.parametrize("rank", [0, 2])
def test_the_deadline_names_the_absent_ranks(rank: int) -> None:
    clock, store = FakeClock(), dist.HashStore()
    store.set("hello/1", "of a dead rank")  # answered, but never acknowledged
    with pytest.raises(CommError) as caught:
        rendezvous(store, rank, 3, deadline_s=60.0, clock=clock)
    assert caught.value.ranks == ((1, 2) if rank == 0 else (0,))
    assert "after 60 s" in str(caught.value)
    assert 160.0 < clock.now_s < 160.1


def test_stale_keys_of_a_dead_group_are_not_taken_for_answers() -> None:
    store, names = dist.HashStore(), dict[int, str]()
    for rank in (1, 2):
        store.set(f"hello/{rank}", "dead")
        store.set(f"reply/{rank}/dead", "dead incarnation")
        store.set(f"ack/dead incarnation/{rank}", "")

    def enter(rank: int) -> None:
        names[rank] = rendezvous(store, rank, 3, deadline_s=30.0)

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 3
    assert len(set(names.values())) == 1
    assert names[0] != "dead incarnation"


def report(exchange: str, by: int, *ranks: int) -> FailureReport:
    return FailureReport(exchange, f"rank {by} waited", ranks, by)


def test_collect_waits_for_a_report_about_another_exchange() -> None:
    clock, store = FakeClock(), dist.HashStore()
    publish(store, 1, report("rows", 1, 0))
    clock.at(0.5, lambda: publish(store, 1, report("ids", 1, 2)))
    assert collect(store, [1], not_about="rows", within_s=1.0, clock=clock) == [report("ids", 1, 2)]
    assert 100.5 <= clock.now_s < 100.6
    assert collect(store, [1, 3], within_s=1.0, clock=clock) == [report("rows", 1, 0), report("ids", 1, 2)]
    assert 101.5 <= clock.now_s < 101.7  # rank 3 has none: the wait ends at its limit


def test_root_causes_follow_the_chain_but_not_two_ranks_that_miss_each_other() -> None:
    store = dist.HashStore()
    publish(store, 1, report("ids", 1, 2))
    publish(store, 2, report("ids", 2, 1))
    assert root_causes(store, [report("rows", 0, 1)]) == (1, 2)
    publish(store, 2, report("dense", 2, 3))
    assert root_causes(store, [report("rows", 0, 1)]) == (1, 2, 3)
