"""The trigger's arithmetic: which reason, in which order, at which cost."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.serve.config import TriggerConfig
from nestpipe.serve.kv_cache import EntryState
from nestpipe.serve.latency_model import LatencySample, fit
from nestpipe.serve.prefill_policy import InstanceLoad, RankingCosts, TokenBucket, decide, decide_early, helps_nobody
from nestpipe.serve.requests import RecentTimes, choose
from tests.serve.small_rankers import Clock, costs

CONFIG = TriggerConfig(budget_ms=20.0, lead_ms=35.0)
OPEN = {
    "is_live": False,
    "has_room": True,
    "tokens_ms": 1000.0,
    "work_ms": 40.0,
    "wait_ms": 40.0,
    "recent_wait_ms": 5.0,
}
OPEN |= {"queue_ms": 0.0}
RISKY = {"full": 50.0, "hit": 5.0, "pre": 40.0}
# Each case also has every problem that is looked at later, so that only the order can make it the answer.
LATER = (
    ("breaker", {}, {"recent_wait_ms": 21.0}),
    ("over_rate", {}, {"tokens_ms": 39.0}),
    ("no_room", {}, {"has_room": False}),
    ("already_live", {}, {"is_live": True}),
    ("too_late", {}, {"wait_ms": 50.1}),
    ("no_rescue", {"hit": 21.0}, {}),
    ("not_at_risk", {"full": 19.0}, {}),
)


def test_every_reason_in_its_order():
    known, view = dict(RISKY), dict(OPEN)
    assert decide(CONFIG, costs(**known), InstanceLoad(**view), num_events=9, num_candidates=9) == "admitted"
    for reason, cost, seen in LATER:
        known, view = known | cost, view | seen
        assert decide(CONFIG, costs(**known), InstanceLoad(**view), num_events=9, num_candidates=9) == reason
        alone = decide(CONFIG, costs(**(RISKY | cost)), InstanceLoad(**(OPEN | seen)), num_events=9, num_candidates=9)
        assert alone == reason


def test_what_ranks_wait_for_their_turn_is_part_of_the_risk():
    def found(queue_ms, **known):
        view = InstanceLoad(**(OPEN | {"queue_ms": queue_ms}))
        return decide(CONFIG, costs(**(RISKY | known)), view, num_events=9, num_candidates=9)

    assert found(0.0, full=15.0) == "not_at_risk"
    assert found(6.0, full=15.0) == "admitted", "15 ms behind a queue of 6 ms are more than 20 ms"
    assert found(18.0, full=15.0) == "admitted", (
        "the worst wait and the worst hit seldom meet: a hit may still be in time"
    )
    assert found(6.0, full=15.0, hit=8.0) == "no_rescue", "more than half as long is not worth computing twice"


def test_no_signals_are_needed_where_nobody_is_at_risk_or_nobody_can_be_rescued():
    def is_quiet(queue_ms, hit=5.0, **options):
        own, known = TriggerConfig(budget_ms=20.0, **options), costs(full=15.0, hit=hit)
        return helps_nobody(own, known, queue_ms=queue_ms, max_events=9, num_candidates=9)

    assert [is_quiet(0.0), is_quiet(6.0), is_quiet(6.0, hit=8.0)] == [True, False, True]
    assert is_quiet(6.0, mode="off")
    assert not is_quiet(6.0, hit=8.0, mode="always")


def test_what_helps_nobody_holds_for_fewer_candidates_too():
    """A gateway takes it so: one request with many candidates must not silence the signals of all others."""
    sized = [
        LatencySample(kind, n, c, {"full": 2 + 0.05 * n + 0.1 * c, "hit": 1 + 0.1 * c, "pre": 0.05 * n}[kind])
        for n in (8, 64, 512)
        for c in (1, 64, 2048)
        for kind in KINDS
    ]
    known, own = fit(sized), TriggerConfig(budget_ms=20.0)
    ask = {"queue_ms": 0.0, "max_events": 512}
    assert decide_early(own, known, queue_ms=0.0, num_events=512, num_candidates=2048) == "no_rescue"
    assert decide_early(own, known, queue_ms=0.0, num_events=512, num_candidates=64) is None
    assert not helps_nobody(own, known, num_candidates=2048, **ask)


def test_what_is_kept_must_halve_the_next_request():
    sized = [
        LatencySample(kind, n, c, true_ms(kind, n, c))
        for n in (64, 512, 4096)
        for c in (16, 256, 2048)
        for kind in KINDS
    ]
    known = fit(sized, copy_ms_per_byte=1e-6)
    assert known.halves(4096, 128, 4_000_000)
    assert not known.halves(64, 128, 64_000), "full inference takes no time either"
    assert not known.halves(512, 8192, 500_000), "most of it are the candidates"
    assert not known.halves(4096, 128, 400_000_000), "so much is not copied for nothing"


def test_shadow_decides_off_does_not_and_always_asks_for_room_and_rate_alone():
    def found(mode, known=RISKY, **seen):
        return decide(
            TriggerConfig(mode=mode, budget_ms=20.0),
            costs(**known),
            InstanceLoad(**(OPEN | seen)),
            num_events=9,
            num_candidates=9,
        )

    assert found("shadow") == "shadow"
    assert found("shadow", has_room=False) == "no_room"
    assert found("off") == "off"
    assert found("always", RISKY | {"full": 1.0, "hit": 90.0}, wait_ms=999.0, recent_wait_ms=99.0) == "admitted"
    assert found("always", has_room=False) == "no_room"
    assert found("always", tokens_ms=1.0) == "over_rate"
    assert found("always", is_live=True) == "already_live"


KINDS = ("full", "hit", "pre")


def true_ms(kind, n, c):
    return {"full": 2 + 0.01 * (n + c) + 1e-5 * n * n + 2e-5 * n * c, "hit": 1 + 0.02 * c, "pre": 0.5 + 0.02 * n}[kind]


def test_constants_are_found_again_and_depend_on_both_sizes():
    sizes = [(n, c) for n in (64, 512, 4096) for c in (16, 256, 2048)]
    known = fit([LatencySample(kind, n, c, true_ms(kind, n, c)) for n, c in sizes for kind in ("full", "hit", "pre")])
    for n, c in ((100, 100), (3000, 1000)):
        assert known.full_ms(n, c) == pytest.approx(true_ms("full", n, c), rel=1e-6)
        assert known.hit_ms(n, c) == pytest.approx(true_ms("hit", n, c), rel=1e-6)
        assert known.pre_ms(n) == pytest.approx(true_ms("pre", n, c), rel=1e-6)
    assert known.pre_ms(3000, 1000) == pytest.approx(40, rel=1e-6)
    few, many = (
        decide(TriggerConfig(budget_ms=250), known, InstanceLoad(**OPEN), num_events=4096, num_candidates=c)
        for c in (256, 4096)
    )
    assert (few, many) == ("not_at_risk", "admitted"), "by length alone both would be the same"


def test_noise_never_gives_negative_costs():
    rng = np.random.default_rng(0)
    for _ in range(30):
        sizes = [(n, c) for n in (2, 8, 32) for c in (1, 4)]
        noisy = [LatencySample(kind, n, c, rng.uniform(1, 2)) for n, c in sizes for kind in ("full", "hit", "pre")]
        known = fit(noisy)
        assert known.full_ms(100_000, 1) >= known.full_ms(0, 0) >= 0


def test_corrections_follow_the_tail_and_fade_when_nothing_is_tried():
    known = costs(full=10.0)
    for turn in range(64):
        known.observe("full", 30.0 if turn % 10 == 0 else 0.0)
    assert known.full_ms(2, 2) == pytest.approx(40.0, abs=2.0)
    assert known.usual_ms("full", 2, 2) == pytest.approx(10.0), "most of the time it is no more"
    assert known.hit_ms(2, 2) == pytest.approx(1.0), "of one kind alone"
    tail = choose(known, state=None, slack_ms=11.0, num_events=2, num_candidates=2, num_bytes=9, begun=0, block=1)
    assert tail.path == "full", "a worse path for certain is no answer to a tail that may not come"
    for _ in range(100):
        known.relax()
    assert known.full_ms(2, 2) == pytest.approx(10.0, abs=0.1)


def test_tokens_are_milliseconds_of_compute():
    bucket = TokenBucket(per_s=100.0, most=50.0, now=0.0)
    bucket.take(45.0, 0.0)
    assert bucket.level(0.1) == pytest.approx(15.0)
    assert bucket.level(0.05) == pytest.approx(15.0), "a clock that goes back gives nothing"
    assert bucket.level(9.0) == 50.0


FREE = {"num_events": 9, "num_candidates": 9, "num_bytes": 100, "begun": 0, "block": 2}
SIZED = [
    LatencySample(kind, n, c, ms)
    for n, c in ((1, 1), (9, 9), (5, 3), (3, 9))
    for kind, ms in (("full", 5.0 * (n + c)), ("hit", 2.0), ("pre", 9.0 * n))
]


@pytest.mark.parametrize(
    ("state", "slack", "more", "path"),
    [
        (EntryState.READY, 2.0, {}, "hit_device"),
        (EntryState.PINNED, 2.0, {}, "hit_device"),
        (EntryState.COMPUTING, 75.0, {}, "shorter"),
        (EntryState.COMPUTING, 12.0, {"begun": 7}, "join"),
        (EntryState.COMPUTING, 100.0, {"begun": 1}, "join"),
        (EntryState.RESERVED, 100.0, {}, "full"),
        (EntryState.HOST, 3.0, {}, "hit_host"),
        (None, 12.0, {"begun": 7}, "extend"),
        (None, 100.0, {}, "full"),
        (EntryState.COMPUTING, 71.0, {}, "shorter"),
        (None, 71.0, {}, "shorter"),
        (EntryState.READY, 1.0, {}, "fallback"),
        (None, 5.0, {}, "fallback"),
    ],
)
def test_the_first_path_that_fits(state, slack, more, path):
    slack += 1e-6  # costs are fitted, and their last bits depend on the processor
    found = choose(fit(SIZED, copy_ms_per_byte=0.01), state=state, slack_ms=slack, **(FREE | more))
    assert found.path == path
    assert found.cost_ms <= slack
    if path == "shorter":
        assert found.num_events == 5, "as much as fits, in blocks"


def test_nothing_is_promoted_that_is_cheaper_to_compute():
    dear = choose(fit(SIZED, copy_ms_per_byte=1.0), state=EntryState.HOST, slack_ms=1000.0, **FREE)
    assert dear.path == "full"


class Exact:
    """Costs without a fit, so that a limit can be met exactly."""

    def __new__(cls, **ms):
        known = costs()
        known.expected = lambda kind, length, candidates: ms[kind]
        return known


def test_limits_that_are_met_exactly_are_kept():
    def decided(known, **load):
        own = InstanceLoad(**(OPEN | load))
        return decide(CONFIG, Exact(**(RISKY | known)), own, num_events=2, num_candidates=9)

    assert decided({"full": 20.0}) == "not_at_risk", "it just fits into the budget"
    assert decided({"full": 20.001, "hit": 10.0}) == "admitted", "a hit takes less than half as long"
    assert decided({"full": 40.0, "hit": 20.0}, wait_ms=35.0) == "admitted", "half as long, and just inside the budget"
    assert decided({"full": 50.0, "hit": 20.001}) == "no_rescue"
    assert decided({}, wait_ms=50.0) == "admitted", "it is ready when the hit must begin"
    assert decided({}, tokens_ms=40.0) == "admitted"
    assert decided({}, recent_wait_ms=20.0) == "admitted"
    early = decide_early(CONFIG, Exact(**RISKY), queue_ms=0.0, num_events=1, num_candidates=9)
    assert early == "not_at_risk", "one event has no prefix"


def test_a_path_that_takes_exactly_the_time_that_is_left_is_taken():
    known = Exact(full=5.0, hit=2.0, pre=9.0)
    own = {"num_events": 9, "num_candidates": 9, "num_bytes": 0, "begun": 0, "block": 2}
    assert choose(known, state=EntryState.READY, slack_ms=2.0, **own).path == "hit_device"
    assert choose(known, state=None, slack_ms=5.0, **own).path == "full"
    assert choose(known, state=None, slack_ms=4.999, **own).path == "fallback"
    assert choose(known, state=None, slack_ms=5.0, **(own | {"begun": 1})).path == "extend"
    equal = Exact(full=5.0, hit=5.0, pre=9.0)
    assert choose(equal, state=None, slack_ms=5.0, **(own | {"begun": 1})).path == "extend", "no worse than full"


def test_a_percentile_needs_enough_recent_measurements():
    clock = Clock()
    times = RecentTimes(clock, window_s=5.0)
    for _ in range(31):
        times.note(7.0)
    assert times.p99() == 0.0
    times.note(7.0)
    assert times.p99() == 7.0
    clock.now += 5.0
    assert times.p99() == 0.0, "the window is over"


def test_a_shorter_history_that_takes_exactly_the_time_that_is_left_is_taken():
    known = costs()
    known.expected = lambda kind, length, candidates: float(length)
    found = choose(known, state=None, slack_ms=7.0, **FREE)
    assert (found.path, found.num_events, found.cost_ms) == ("shorter", 7, 7.0)
    none = choose(known, state=None, slack_ms=0.0, **(FREE | {"num_events": 8}))
    assert none.path == "fallback", "a history without events is no history"


def flat(*, full: float, hit: float) -> RankingCosts:
    """Costs that depend on no size; copying 100 bytes takes 1 ms, reading 1 ms."""
    constants = {"full": (full, 0, 0, 0), "hit": (hit, 0, 0), "pre": (4, 0, 0), "read": (1, 0)}
    return RankingCosts({kind: np.array(own, float) for kind, own in constants.items()}, copy_ms_per_byte=0.01)


@pytest.mark.parametrize(
    ("costs", "state", "begun", "stored", "wanted"),
    [
        (flat(full=10, hit=2), EntryState.READY, 0, 0, ("hit_device", 2)),
        (flat(full=10, hit=2), EntryState.HOST, 0, 0, ("hit_host", 3)),
        (flat(full=10, hit=2), EntryState.COMPUTING, 3, 0, ("join", 2)),
        (flat(full=10, hit=2), EntryState.RESERVED, 0, 3, ("join", 3)),
        (flat(full=10, hit=2), EntryState.RESERVED, 0, 0, ("full", 10)),
        (flat(full=10, hit=2), EntryState.DEMOTING, 3, 3, ("full", 10)),
        (flat(full=10, hit=2), None, 3, 3, ("extend", 2)),
        (flat(full=10, hit=2), None, 0, 3, ("hit_store", 3)),
        (flat(full=5, hit=9), EntryState.COMPUTING, 3, 0, ("join", 9)),
        (flat(full=5, hit=9), EntryState.RESERVED, 0, 3, ("full", 5)),
        (flat(full=5, hit=9), None, 3, 0, ("full", 5)),
        (flat(full=5, hit=9), None, 0, 3, ("full", 5)),
    ],
)
def test_each_state_has_its_path_and_its_cost(costs, state, begun, stored, wanted):
    sizes = {"num_events": 4, "num_candidates": 2, "num_bytes": 100, "block": 1}
    found = choose(costs, state=state, slack_ms=100.0, begun=begun, stored=stored, **sizes)
    assert (found.path, found.cost_ms) == wanted
    assert choose(costs, state=state, slack_ms=wanted[1], begun=begun, stored=stored, **sizes) == found
    less = choose(costs, state=state, slack_ms=wanted[1] - 0.01, begun=begun, stored=stored, **sizes)
    assert less.cost_ms < wanted[1], "a path that does not fit is not taken"
