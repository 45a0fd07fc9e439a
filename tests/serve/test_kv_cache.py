"""Both tiers keep their books under any order of operations, from any number of threads."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nestpipe.serve.kv_cache import EntryState, KVCache, LostError
from tests.serve.small_rankers import Clock

KEYS, USERS = range(6), range(3)


def make(device=100, host=100, clock=None, copy=list, **ttls):
    return KVCache(device_bytes=device, host_bytes=host, clock=clock or Clock(), copy=copy, **ttls)


def fill(cache, key, num_bytes=10, user=None):
    lease = cache.reserve(key, user=hash(key) if user is None else user, num_bytes=num_bytes)
    assert lease is not None
    assert cache.start(lease)
    assert cache.finish(lease, [key])
    return lease


def user_of(key):
    return key % len(USERS)


class Books(RuleBasedStateMachine):
    """Any operation on any key in any state; what must hold is checked after each."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.cache = make(50, 40, self.clock, device_ttl_s=5.0, host_ttl_s=9.0)
        self.leases, self.joins, self.held = [], [], set()

    key = st.sampled_from(KEYS)

    @rule(key=key, num_bytes=st.integers(0, 60))
    def reserve(self, key, num_bytes):
        if self.cache.peek_state(key) is not None:
            with pytest.raises(ValueError, match="join it"):
                self.cache.reserve(key, user=user_of(key), num_bytes=num_bytes)
            return
        has_room = self.cache.has_room(num_bytes)
        pinned = self.pinned()
        lease = self.cache.reserve(key, user=user_of(key), num_bytes=num_bytes)
        assert (lease is not None) == has_room
        assert self.pinned() == pinned, "what is held is never evicted"
        if lease is not None:
            self.leases.append(lease)

    def pinned(self):
        return {key for key in KEYS if self.cache.peek_state(key) == EntryState.PINNED}

    @precondition(lambda self: self.leases)
    @rule(end=st.sampled_from(["start", "finish", "fail"]), place=st.integers(0, 99))
    def work(self, end, place):
        lease = self.leases[place % len(self.leases)]
        if end == "start":
            self.cache.start(lease)
            return
        self.leases.remove(lease)
        if end == "fail":
            self.cache.fail(lease)
        else:
            self.cache.start(lease)
            self.cache.finish(lease, [lease.key])

    @rule(key=key)
    def join(self, key):
        joined = self.cache.join(key)
        assert (joined is not None) == (self.cache.peek_state(key) in {EntryState.RESERVED, EntryState.COMPUTING})
        if joined is not None:
            self.joins.append((key, joined))

    @precondition(lambda self: self.joins)
    @rule(place=st.integers(0, 99))
    def cancel(self, place):
        self.joins[place % len(self.joins)][1].cancel()

    @rule(key=key, holder=st.integers(0, 2), seconds=st.sampled_from([1.0, 20.0]))
    def pin(self, key, holder, seconds):
        value = self.cache.pin(key, holder, until=self.clock.now + seconds)
        assert value is None or value == [key]

    @rule(key=key, holder=st.integers(0, 2), consumed=st.booleans())
    def unpin(self, key, holder, consumed):
        self.cache.unpin(key, holder, consumed=consumed)

    @rule(key=key, num_bytes=st.integers(0, 60))
    def keep(self, key, num_bytes):
        is_new, pinned = self.cache.peek_state(key) is None, self.pinned()
        since = self.cache.num_invalidations
        done = self.cache.keep(key, user=user_of(key), num_bytes=num_bytes, make=lambda: [key], since=since)
        assert is_new or not done
        assert not done or self.cache.peek_state(key) == EntryState.HOST
        assert self.pinned() == pinned, "what is held is never evicted"

    @rule(key=key)
    def demote(self, key):
        could = self.cache.peek_state(key) == EntryState.READY
        done = self.cache.demote(key)
        assert could or not done
        assert not done or self.cache.peek_state(key) == EntryState.HOST

    @rule(key=key)
    def promote(self, key):
        could = self.cache.peek_state(key) == EntryState.HOST
        done = self.cache.promote(key)
        assert could or not done
        assert not done or self.cache.pin(key, "look", until=self.clock.now + 0.1) == [key]

    @rule(user=st.sampled_from(USERS))
    def invalidate(self, user):
        self.cache.invalidate(user)
        assert not self.cache.peek_user(user)
        assert all(self.cache.peek_state(key) is None for key in KEYS if user_of(key) == user)
        assert all(joined.done() for key, joined in self.joins if user_of(key) == user)

    @rule(seconds=st.sampled_from([0.5, 4.0, 30.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.cache.sweep()

    @invariant()
    def books_balance(self):
        self.cache.check()
        for tier in (self.cache.device, self.cache.host):
            assert 0 <= tier.used + tier.reserved <= tier.cap

    def teardown(self):
        for lease in self.leases:
            self.cache.fail(lease)
        assert all(joined.done() for _, joined in self.joins), "nobody waits for ever"
        self.cache.invalidate()
        for tier in (self.cache.device, self.cache.host):
            assert (tier.used, tier.reserved) == (0, 0)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBooks = Books.TestCase


def test_the_order_in_which_entries_go():
    """Expired, then consumed by last use, then unconsumed by last use; pinned ones never."""
    clock = Clock()
    cache = make(50, 0, clock, device_ttl_s=100.0)
    for key in range(5):
        clock.now += 1
        fill(cache, key)
    cache.pin(0, "somebody")
    cache.unpin(3, "nobody", consumed=True)
    cache.unpin(2, "nobody", consumed=True)
    gone = []
    for new in range(10, 14):
        assert cache.reserve(new, user=1, num_bytes=10) is not None
        gone += [key for key in range(5) if cache.peek_state(key) is None and key not in gone]
    assert gone == [2, 3, 1, 4]
    assert not cache.has_room(10)
    assert cache.reserve(20, user=1, num_bytes=10) is None, "what is pinned or in work stays"
    assert cache.peek_state(0) == EntryState.PINNED


def test_the_expired_go_before_the_consumed():
    clock = Clock()
    cache = make(30, 0, clock, device_ttl_s=10.0)
    fill(cache, "old")
    clock.now += 11
    fill(cache, "consumed")
    cache.unpin("consumed", "", consumed=True)
    fill(cache, "new")
    cache.reserve("next", user=1, num_bytes=10)
    assert [cache.peek_state(key) for key in ("old", "consumed", "new")] == [None, EntryState.READY, EntryState.READY]


def test_moves_are_copies_that_are_counted():
    made = []
    cache = make(copy=lambda value: made.append(list(value)) or made[-1])
    fill(cache, "a", 10)
    first = cache.pin("a", "x")
    cache.unpin("a", "x", consumed=True)
    assert cache.demote("a")
    assert (cache.device.used, cache.host.used, cache.host.copies, cache.host.copied_bytes) == (0, 10, 1, 10)
    assert cache.pin("a", "x") is None, "what is on the host must be promoted first"
    assert cache.peek_user(hash("a"))[0] is made[0], "the host has memory of its own"
    assert cache.promote("a")
    second = cache.pin("a", "x")
    assert second == first
    assert second is made[1], "and so has the device"
    assert (cache.device.used, cache.host.used, cache.device.copies) == (10, 10, 1)
    cache.unpin("a", "x")
    assert cache.demote("a")
    assert (cache.device.used, cache.host.used, cache.host.copies) == (0, 10, 1), "the host still had it"


def test_a_copy_on_the_host_outlives_eviction_from_the_device():
    cache = make(10, 10)
    fill(cache, "a")
    cache.demote("a")
    cache.promote("a")
    fill(cache, "b")
    assert cache.peek_state("a") == EntryState.HOST
    cache.check()


def test_pins_run_out_and_entries_expire():
    clock = Clock()
    cache = make(clock=clock, device_ttl_s=3.0, host_ttl_s=50.0)
    fill(cache, "a")
    fill(cache, "b")
    cache.pin("a", "request", until=clock.now + 10)
    cache.demote("b")
    clock.now += 5
    cache.sweep()
    assert cache.peek_state("a") == EntryState.PINNED
    assert not cache.demote("a")
    clock.now += 6
    assert cache.peek_state("a") == EntryState.READY
    cache.sweep()
    assert (cache.peek_state("a"), cache.peek_state("b")) == (None, EntryState.HOST)
    clock.now += 50
    cache.sweep()
    assert not len(cache)


def test_a_new_prefix_takes_the_place_of_what_the_user_had():
    cache = make()
    for key in ("old", "held", "host"):
        fill(cache, key, user=hash(key))
        cache._entries[key].user = 1
        cache._of_user.setdefault(1, {})[key] = cache._of_user.pop(hash(key))[key]
    cache.pin("held", "somebody")
    cache.demote("host")
    fill(cache, "other", user=2)
    fill(cache, "new", user=1)
    states = [cache.peek_state(key) for key in ("old", "held", "host", "other", "new")]
    assert states == [None, EntryState.PINNED, None, EntryState.READY, EntryState.READY]
    cache.check()


def test_joiners_get_the_value_and_cancelling_one_cancels_nothing_else():
    cache = make()
    lease = cache.reserve("a", user=0, num_bytes=10)
    cache.start(lease)
    first, second, third = (cache.join("a") for _ in range(3))
    second.cancel()
    cache.pin("a", "holds it from when it is done")
    assert cache.finish(lease, "value")
    assert (first.result(0), third.result(0)) == ("value", "value")
    with pytest.raises(CancelledError):
        second.result(0)
    assert cache.peek_state("a") == EntryState.PINNED
    assert cache.join("a") is None


def test_failed_and_invalidated_work_frees_its_bytes_and_tells_who_joined():
    cache = make()
    for end in ("fail", "invalidate"):
        lease = cache.reserve("a", user=7, num_bytes=10)
        joined = cache.join("a")
        cache.fail(lease) if end == "fail" else cache.invalidate(7)
        with pytest.raises(LostError, match="the prefix is gone"):
            joined.result(0)
        assert cache.device.reserved == 0
        assert not cache.start(lease)
        again = cache.reserve("a", user=7, num_bytes=10)
        assert not cache.finish(lease, "late"), "a lease that was taken away brings nothing in"
        assert cache.device.used == 0
        cache.fail(again)


def test_invalidated_while_it_moves():
    """The user goes while the copy is made: nothing comes back, and the books balance."""
    for move, before in (("demote", ()), ("promote", ("demote",))):
        cache = make(copy=list)
        fill(cache, "a", user=3)
        for step in before:
            getattr(cache, step)("a")
        cache._copy = cache._promoted = lambda value, cache=cache: cache.invalidate(3) and list(value)
        assert not getattr(cache, move)("a")
        cache.check()
        assert (cache.device.used, cache.device.reserved, cache.host.used, cache.host.reserved) == (0, 0, 0, 0)


def test_a_copy_that_fails_leaves_nothing_moving():
    for move, before in (("demote", ()), ("promote", ("demote",))):
        cache = make(copy=list)
        fill(cache, "a", user=3)
        for step in before:
            getattr(cache, step)("a")
        cache._copy = cache._promoted = lambda value: 1 / 0
        with pytest.raises(ZeroDivisionError):
            getattr(cache, move)("a")
        cache.check()
        assert cache.peek_state("a") is None
        assert cache.device.free == cache.host.free == 100


def test_single_flight_and_books_under_threads(scale):
    """Eight threads ask for the same keys: each is computed by one at a time, and everybody gets its value."""
    cache = make(300, 200, clock=lambda: 0.0)
    in_work, wrong, lock = set(), [], threading.Lock()

    def ask(seed):
        for turn in range(scale(150, 5000)):
            key = (seed * 7 + turn * 5) % 12
            try:
                got = once(key, turn)
            except LostError:
                continue
            if got is not None and got != [key]:
                wrong.append((key, got))
            cache.check()

    def once(key, turn):
        if turn % 29 == 0 and key < 4:  # work that was invalidated may be done again while it still runs
            cache.invalidate(key)
        if (joined := cache.join(key)) is not None:
            if turn % 7 == 0:
                joined.cancel()
                return None
            return joined.result(30)
        cache.promote(key)
        if (value := cache.pin(key, threading.get_ident())) is not None:
            cache.unpin(key, threading.get_ident(), consumed=True)
            cache.demote(key)
            return value
        try:
            lease = cache.reserve(key, user=key, num_bytes=40)
        except ValueError:
            return None
        if lease is None:
            return None
        return compute(key, lease)

    def compute(key, lease):
        with lock:
            if key >= 4 and key in in_work:
                wrong.append(("twice", key))
            in_work.add(key)
        cache.start(lease)
        with lock:
            in_work.discard(key)
        cache.finish(lease, [key])
        return [key]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    cache.check()


# What was computed without a lease.


def kept(cache, key=1, *, since=0, num_bytes=10, make=lambda: ["value"]):
    return cache.keep(key, user=7, num_bytes=num_bytes, make=make, since=since)


@pytest.mark.parametrize("user", [7, 8, None])
def test_a_value_computed_before_an_invalidation_is_not_kept(user):
    """Of another user too: nobody knows whose events it was made of, and the next request computes it again."""
    cache = make()
    since = cache.num_invalidations
    cache.invalidate(user)
    assert not kept(cache, since=since)
    assert (len(cache), cache.host.used, cache.host.reserved) == (0, 0, 0)
    assert kept(cache, since=cache.num_invalidations), "what is computed afterwards is"
    assert cache.peek_user(7) == [["value"]]


def test_a_value_whose_user_is_invalidated_while_it_is_copied_is_not_kept():
    cache = make()

    def copy():
        assert cache.invalidate(7) == 1
        return ["value"]

    assert not kept(cache, make=copy)
    assert not cache.peek_user(7)
    assert (len(cache), cache.host.used, cache.host.reserved) == (0, 0, 0)
    cache.check()


def test_a_kept_value_is_on_the_host_consumed_and_expires_as_others_do():
    clock = Clock()
    cache = make(host=20, clock=clock, host_ttl_s=9.0)
    fill(cache, "other", num_bytes=10, user=8)
    assert cache.demote("other")
    clock.now += 1
    assert kept(cache, 1)
    assert (cache.host.used, cache.host.copies, cache.host.copied_bytes) == (20, 2, 20)
    fill(cache, 3, num_bytes=10, user=9)
    assert cache.demote(3)
    assert (cache.peek_state(1), cache.peek_state("other")) == (None, EntryState.HOST), "consumed, so it goes first"
    clock.now += 8.0 - 0.001
    cache.sweep()
    assert cache.peek_state("other") == EntryState.HOST
    clock.now += 0.001
    cache.sweep()
    assert cache.peek_state("other") is None, "at its time, not after it"


def test_a_value_that_exactly_fits_is_kept_and_one_byte_more_is_not():
    cache = make(host=10)
    assert not kept(cache, num_bytes=11)
    assert kept(cache, num_bytes=10)
    assert not kept(cache, num_bytes=10), "its key is live"
    assert cache.has_room(100)
    assert not cache.has_room(101)


def test_a_pin_ends_at_its_time():
    clock = Clock()
    cache = make(clock=clock)
    fill(cache, 1)
    assert cache.pin(1, "holder", until=clock.now + 1) == [1]
    clock.now += 0.999
    assert cache.peek_state(1) == EntryState.PINNED
    clock.now += 0.001
    assert cache.peek_state(1) == EntryState.READY


def test_a_kept_value_stays_for_the_time_of_the_host():
    clock = Clock()
    cache = make(clock=clock, host_ttl_s=9.0)
    assert kept(cache)
    clock.now += 8.999
    cache.sweep()
    assert cache.peek_state(1) == EntryState.HOST
    clock.now += 0.001
    cache.sweep()
    assert cache.peek_state(1) is None


def test_everything_is_evicted_for_an_entry_that_exactly_fits_and_nothing_for_a_larger_one():
    cache = make(device=30)
    fill(cache, 1, num_bytes=10)
    fill(cache, 2, num_bytes=20)
    assert not cache.has_room(31)
    assert cache.reserve(3, user=3, num_bytes=31) is None
    assert len(cache) == 2
    assert cache.has_room(30)
    assert cache.reserve(3, user=3, num_bytes=30) is not None
    assert (len(cache), cache.num_evicted) == (1, 2)
