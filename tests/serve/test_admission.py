"""Admission: when bytes arrived, how long a request would wait, and what a full service answers."""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest

from nestpipe.serve.admission import WaitEstimate, measured
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import body_parser, parse
from nestpipe.serve.requests import BusyError, LateError
from nestpipe.serve.route_headers import FORWARDED_HEADER
from nestpipe.serve.schemas import (
    RankedItems,
    RankRequest,
    limited,
)
from nestpipe.serve.worker_thread import replied
from tests.serve.small_rankers import Clock
from tests.serve.small_services import KINDS, serving


def answer(**fields):
    return RankedItems(items=[], scores=[], path="full", model="m", **fields)


def queued(estimate, works, deadline=0.0):
    """Requests of these sizes; returns their replies."""
    replies = [Future() for _ in works]
    for reply, work in zip(replies, works, strict=True):
        estimate.queue(reply, work, deadline=deadline)
    return replies


def test_the_wait_is_the_queued_work_at_the_measured_speed():
    clock = Clock()
    estimate = WaitEstimate(clock)
    assert estimate.wait_s() == 0, "nothing is measured, so nothing is refused"
    kept = standing(estimate, clock)
    replies = queued(estimate, [1.0, 3.0])
    assert estimate.wait_s() == 0
    estimate.observe(2.0, 0.5, is_full=True)
    assert estimate.wait_s() == pytest.approx(1.0)
    assert estimate.exceeds(1.99)
    assert not estimate.exceeds(2.01), "half of the time in a queue that stands for long"
    replies[1].set_result(answer())
    assert estimate.wait_s() == pytest.approx(0.25)
    replies[0].cancel()
    kept.cancel()
    assert estimate.wait_s() == 0, "an idle worker refuses nothing"


def standing(estimate, clock):
    """A request that takes no time, so that the queue is not empty for ten seconds."""
    (reply,) = queued(estimate, [1e-12])
    clock.now += 10.0
    return reply


def test_predictions_that_were_wrong_leave_more_room():
    clock = Clock()
    estimate = WaitEstimate(clock)
    kept = standing(estimate, clock)

    def queue_one():
        estimate.observe(1.0, 0.1, is_full=True)
        return queued(estimate, [1.0])[0]

    def answer_all(num, *, late_s):
        for _ in range(num):
            reply = queue_one()
            clock.now += 0.1 + late_s
            reply.set_result(answer())

    def needed_ms():
        reply = queue_one()
        found = next(left_ms for left_ms in range(2000) if not estimate.exceeds(left_ms / 1000))
        reply.cancel()
        return found

    answer_all(64, late_s=0.0)
    assert needed_ms() == 223, "a wait of 100 ms and 100 ms of its own, of 0.9 of the time"
    answer_all(5, late_s=0.2)
    answer_all(3, late_s=0.0)
    assert needed_ms() == 223, "a moment is no rule"
    answer_all(64, late_s=0.2)
    assert needed_ms() == 445, "200 ms more"
    answer_all(64, late_s=0.45)
    assert needed_ms() == 556, "the process did not run: four times the expected time"
    kept.cancel()
    assert not estimate.exceeds(0.0), "an idle worker refuses nothing"
    standing(estimate, clock)
    answer_all(64, late_s=-0.2)
    assert needed_ms() == 200, "to be early promises nothing: a wait of 100 ms, of half of the time"
    answer_all(64, late_s=0.2)
    clock.now += 60.0
    assert needed_ms() <= 200, "what was a minute ago says nothing"


def test_a_burst_is_no_overload():
    """A tenth of the predictions was very wrong, but the queue was empty less than a deadline ago."""
    clock = Clock()
    estimate = WaitEstimate(clock)
    for number in range(64):
        estimate.observe(1.0, 0.1, is_full=True)
        (reply,) = queued(estimate, [1.0])
        clock.now += 0.1 if number % 8 else 0.4
        reply.set_result(answer())
    assert (estimate._errors.median_s(), estimate._errors.few_s()) == (pytest.approx(0.1), pytest.approx(0.4))
    replies = queued(estimate, [1.0, 1.0])
    assert estimate.wait_s() == pytest.approx(0.2)
    assert not estimate.exceeds(0.38)
    assert estimate.exceeds(0.37), "0.2 s, and 0.1 s as half of the others, of 0.8 of the time"
    clock.now += 0.37
    assert not estimate.exceeds(0.38)
    clock.now += 0.02
    assert estimate.exceeds(0.38), "the queue has not been empty for as long"
    replies[0].set_result(answer())
    queued(estimate, [1.0])
    assert estimate.exceeds(0.38), "it was never empty"


def test_a_queue_that_stands_is_kept_short():
    """A long one gives no more answers: it takes more of their time, and more of them are late if the worker becomes slower."""
    clock = Clock()
    estimate = WaitEstimate(clock)
    estimate.observe(1.0, 0.1, is_full=True)
    estimate._measured_at = clock.now + 60  # stays fresh

    def most_s(left_s):
        """The longest wait with which a request is queued."""
        found = [0.01 * num + 0.005 for num in range(100) if not exceeds_after(0.1 * num + 0.05, left_s)]
        return max(found)

    def exceeds_after(work, left_s):
        (reply,) = queued(estimate, [work], deadline=clock.now)
        found = estimate.exceeds(left_s)
        reply.cancel()
        return found

    queued(estimate, [1e-12], deadline=clock.now)  # the queue is not empty from now on
    assert most_s(0.5) == pytest.approx(0.395), "a burst"
    clock.now += 0.6
    assert most_s(0.5) == pytest.approx(0.445), "not empty for a deadline"
    clock.now += 0.6
    assert most_s(0.5) == pytest.approx(0.245), "nor for two"
    assert most_s(0.7) == pytest.approx(0.625), "that are longer"


def test_what_waits_for_a_busy_loop_leaves_more_room():
    clock = Clock()
    estimate = WaitEstimate(clock)
    estimate.observe(1.0, 0.1, is_full=True)
    queued(estimate, [1.0])
    assert not estimate.exceeds(0.13), "0.1 s, of 0.8 of the time"
    for _ in range(8):
        estimate.note_delivery(0.05)
    assert estimate.exceeds(0.18), "and 0.05 s until it is taken"
    assert not estimate.exceeds(0.19)
    clock.now += 60
    estimate.observe(1.0, 0.1, is_full=True)
    assert not estimate.exceeds(0.13), "a minute ago"


def test_an_answer_is_taken_when_the_loop_has_time():
    estimate = WaitEstimate()

    async def body():
        for number in range(8):
            reply = Future()
            taken = asyncio.create_task(replied(reply, estimate))
            await asyncio.sleep(0)
            reply.set_result(number)
            time.sleep(0.02)  # the loop is busy
            assert await taken == number

    asyncio.run(body())
    assert 0.02 <= estimate._deliveries.few_s() < 1


def test_the_time_that_a_step_took_so_far_is_no_wait():
    clock = Clock()
    estimate = WaitEstimate(clock)
    estimate.observe(1.0, 0.1, is_full=True)
    queued(estimate, [1.0, 2.0])

    def step():
        clock.now += 0.06
        assert estimate.wait_s() == pytest.approx(0.24)
        clock.now += 0.2
        assert estimate.wait_s() == pytest.approx(0.2), "no more than was expected of the first request"
        return True

    assert measured(estimate, step, num_waiting=2, max_batch=1)
    assert estimate.wait_s() == pytest.approx(0.3)


def test_late_and_degraded_answers_say_that_a_prediction_was_wrong():
    clock, late = Clock(), []
    estimate = WaitEstimate(clock)
    for number in range(64):
        estimate.observe(1.0, 0.1, is_full=True)
        (reply,) = queued(estimate, [1.0])
        clock.now += 0.3
        if number % 2:
            reply.set_exception(LateError("late"))
        else:
            reply.set_result(answer(degraded=True))
        late.append(estimate._errors.few_s())
    assert late[-1] == pytest.approx(0.3)
    for reply in queued(estimate, [0.0] * 64):  # prefill hints
        reply.set_result(answer())
    assert estimate._errors.few_s() == pytest.approx(0.3)
    refused = queued(estimate, [1.0] * 64)
    for reply in refused:
        reply.set_exception(BusyError("a request's own mistake, or a full queue"))
    assert estimate._errors.few_s() == pytest.approx(0.3)


def test_a_request_waits_for_those_with_earlier_deadlines():
    clock = Clock()
    estimate = WaitEstimate(clock)
    estimate.observe(1.0, 0.01, is_full=True)
    bulk = queued(estimate, [1.0] * 12, deadline=clock.now + 60)
    assert not estimate.exceeds(0.1), "it is answered before them"
    urgent = queued(estimate, [1.0] * 4, deadline=clock.now + 0.1)
    assert estimate.wait_s(clock.now + 0.1) == pytest.approx(0.04)
    assert estimate.wait_s(clock.now + 90) == pytest.approx(0.16)
    clock.now += 0.5
    for reply in [*urgent, *bulk]:
        reply.set_result(answer())
    assert estimate._errors._seconds[-1] == pytest.approx(0.04 * 4), "capped; the overtaken ones say nothing"
    assert sum(one > 0 for one in estimate._errors._seconds) == 4
    assert estimate.wait_s() == 0
    (fresh,) = queued(estimate, [1.0], deadline=clock.now + 0.1)
    queued(estimate, [1.0] * 4, deadline=clock.now + 0.06)
    clock.now += 0.03
    fresh.set_result(answer())
    assert estimate._errors._seconds[-1] == pytest.approx(0.03), (
        "equal ones that waited unread overtake as often as before"
    )


@dataclass(order=True)
class Job:
    """A request of a simulation: queued by deadline; `work_ms` alone on the worker."""

    deadline: float
    number: int
    work_ms: float = field(compare=False)
    kind: str = field(compare=False)
    reply: Future = field(compare=False, default_factory=Future)


def simulated(kinds, *, load, seconds=40.0, refuses=True):
    """Answers by kind and outcome of one worker: `kinds` has (name, work in ms, deadline in ms); each has an equal share."""
    random, clock, found = np.random.default_rng(0), Clock(), Counter()
    estimate, waiting, began = WaitEstimate(clock), [], clock.now
    mean_s = sum(work for _, work, _ in kinds) / len(kinds) / 1000
    times = clock.now + np.cumsum(random.exponential(mean_s / load, int(seconds * load / mean_s)))
    arrivals = deque(zip(times.tolist(), random.integers(0, len(kinds), len(times)).tolist(), strict=True))

    def arrive(until):
        while arrivals and arrivals[0][0] <= until:
            at, which = arrivals.popleft()
            clock.now = max(clock.now, at)
            kind, work_ms, deadline_ms = kinds[which]
            if refuses and estimate.exceeds(deadline_ms / 1000):
                found[kind, "refused"] += 1
                continue
            job = Job(at + deadline_ms / 1000, len(arrivals), work_ms, kind)
            estimate.queue(job.reply, work_ms, deadline=job.deadline)
            heapq.heappush(waiting, job)

    while arrivals or waiting:
        if not waiting:
            arrive(arrivals[0][0])
            continue
        job, start = heapq.heappop(waiting), clock.now
        estimate.begin_step()
        left_ms = 1000 * (job.deadline - start)
        is_degraded = left_ms < job.work_ms  # as the engine: what cannot be done in time is done in part
        if left_ms <= 0:
            job.reply.set_exception(LateError("late"))
            found[job.kind, "late"] += 1
            continue
        end = start + min(job.work_ms, left_ms) / 1000
        arrive(end)
        clock.now = end
        job.reply.set_result(answer(degraded=is_degraded))
        if not is_degraded:
            estimate.observe(job.work_ms, end - start, is_full=True)
        found[job.kind, "degraded" if is_degraded else "useful"] += 1
    return found, found.total(), (clock.now - began) / mean_s


@pytest.mark.parametrize("work_ms", [5.0, 20.0, 40.0])
def test_at_three_times_its_capacity_a_worker_answers_nearly_as_much(work_ms):
    """Also if a request takes much of its deadline, which short requests do not show."""
    found, _, capacity = simulated([("all", work_ms, 100.0)], load=3.0)
    assert found["all", "useful"] >= 0.97 * capacity
    assert found["all", "late"] + found["all", "degraded"] <= 0.02 * capacity


@pytest.mark.parametrize("kinds", [[("cached", 8.0, 48.0)] * 9 + [("full", 30.0, 48.0)], [("full", 15.0, 48.0)]])
@pytest.mark.parametrize("load", [0.2, 0.35, 0.5])
def test_nearly_nobody_is_refused_in_vain_at_a_moderate_load(kinds, load):
    """Requests that take much of their deadline: a worker that refuses nobody is the reference."""
    found, total, _ = simulated(kinds, load=load)
    tried, _, _ = simulated(kinds, load=load, refuses=False)
    useful, most = (sum(one[kind, "useful"] for kind in {name for name, _, _ in kinds}) for one in (found, tried))
    assert most - useful <= 0.03 * total


def test_requests_that_have_time_do_not_keep_urgent_ones_out():
    found, total, _ = simulated([("bulk", 10.0, 10_000.0), ("urgent", 10.0, 100.0)], load=0.9)
    assert found["bulk", "useful"] + found["urgent", "useful"] >= 0.99 * total
    found, _, capacity = simulated([("bulk", 10.0, 10_000.0), ("urgent", 10.0, 100.0)], load=1.2)
    assert found["urgent", "useful"] >= 0.45 * capacity, "they are 0.6 of it, and old requests become urgent too"


def test_sums_of_fractions_leave_no_wait():
    estimate = WaitEstimate(Clock())
    estimate.observe(1.0, 1.0, is_full=True)
    for reply in queued(estimate, [0.1, 0.2, 0.3]):
        reply.set_result(answer())
    assert 0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 > 0
    assert estimate.wait_s() == 0


def test_answers_that_are_late_or_degraded_promise_no_speed():
    estimate = WaitEstimate(Clock())
    replies = queued(estimate, [1.0] * 4)
    replies[0].set_exception(BusyError("late"))
    replies[1].set_result(answer(degraded=True))
    replies[2].cancel()
    assert (estimate.answered, estimate.num_answered) == (0, 0)
    replies[3].set_result(answer())
    assert (estimate.answered, estimate.num_answered) == (1, 1)


def test_small_batches_do_not_make_a_service_look_slow():
    """They cost more per request; believed, they would keep batches small for ever."""
    clock = Clock()
    estimate = WaitEstimate(clock)
    estimate.observe(8.0, 0.8, is_full=True)
    queued(estimate, [1.0])
    for _ in range(50):
        estimate.observe(1.0, 0.3, is_full=False)
    assert estimate.wait_s() == pytest.approx(0.1)
    estimate.observe(8.0, 80.0, is_full=True)  # the process did not run
    assert estimate.wait_s() < 0.4
    clock.now += 5.0
    assert estimate.wait_s() < 0.01, "without measurements the estimate becomes optimistic"


def test_a_step_is_full_if_it_took_a_batch_or_left_requests():
    estimate, seen = WaitEstimate(Clock()), []
    estimate.observe = lambda work, seconds, is_full: seen.append((work, is_full))

    def step_of(num):
        def step():
            for reply in queued(estimate, [2.0] * num):
                reply.set_result(answer())
            return bool(num)

        return step

    for num, waiting in ((4, 4), (2, 3), (2, 2), (0, 1)):
        assert measured(estimate, step_of(num), num_waiting=waiting, max_batch=4) == bool(num)
    assert seen == [(8.0, True), (4.0, True), (4.0, False)]


def test_a_body_is_parsed_as_its_json_object_is():
    """The fast way and the one that explains mistakes accept the same, and give the same."""
    kind = limited(RankRequest, candidates=3, history=2)
    whole = b'{"user": 1, "request": "r", "candidates": ["a", 2], "history": [{"item": 1, "x": 2.0}], "deadline_ms": 3}'
    assert body_parser(kind)(whole) == parse(json.loads(whole), kind)
    for wrong in (b"{", b"[]", b'{"user": 1}', whole.replace(b'"r"', b'"\\u0001"'), whole.replace(b"2]", b"2, 3, 4]")):
        with pytest.raises(BadRequestError):
            body_parser(kind)(wrong)
    for wrong, reason in (
        (whole.replace(b'"user"', b'"usr"'), "unknown field 'usr'"),
        (whole.replace(b'"item"', b'"i"'), "item"),
    ):
        with pytest.raises(BadRequestError, match=reason):
            body_parser(kind)(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_would_wait_too_long_is_refused_before_its_history_is_read(runs_of, tmp_path, kind):
    """Of every kind of engine; with room again it is answered, and a gateway is refused at once."""
    with serving(kind, runs_of, tmp_path) as service:
        worker = service.worker
        user = int(service.run.sequences.users[0])
        usual = service.recommend(user=user, k=3, deadline_ms=60_000)
        reply = Future()
        worker.waits.queue(reply, 1.0, deadline=0.0)
        worker.waits._busy_s, worker.waits._worked = 10.0, 1.0  # one request is queued, and takes ten seconds
        read, of = [], worker.histories.of
        worker.histories.of = lambda user: read.append(user) or of(user)

        def ask(**headers):
            body, began = {"user": user, "k": 3, "deadline_ms": 300}, time.monotonic()
            found = httpx.post(f"{service.http.base_url}/v1/recommend", json=body, headers=headers, timeout=30)
            return found, time.monotonic() - began

        worker.waits._measured_at = worker.clock() + 3600  # stays fresh
        found, took_s = ask()
        assert (found.status_code, found.json()["error"]["code"]) == (429, "overloaded"), found.text
        assert found.headers["retry-after"] == "1"
        assert took_s >= 0.09, "held: a closed loop would ask again at once"
        found, took_s = ask(**{FORWARDED_HEADER: "1"})
        assert found.status_code == 429
        assert not read, "no history is read for a refusal"
        with ThreadPoolExecutor(1) as threads:
            late = threads.submit(service.recommend, user=user, k=3, deadline_ms=12_000)
            while not service.instance._guard.num_held and not late.done():
                time.sleep(0.002)
            reply.set_result(None)  # there is room while it is held
            again = late.result()
        assert again["items"] == usual["items"]
