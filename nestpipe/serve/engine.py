"""One instance: ranking requests take the best path they can afford; KV prefixes are prefilled while no request waits.

    hit_device -> join -> hit_host -> extend -> hit_store -> full -> shorter -> fallback -> 503

A request takes the first path whose cost fits before its deadline. The first six give the same scores. `shorter` (the last events
alone) and `fallback` (the caller's order) are degraded, and say so. A lost prefix, ticket or tier leads to `full`, never to an
error. One thread takes the steps; requests come from any thread and wait for a future.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from nestpipe.models.kv_prefix import KVPrefix, PrefixKey
from nestpipe.serve.config import EngineConfig, TriggerConfig
from nestpipe.serve.kv_cache import EntryState, KVCache, settle
from nestpipe.serve.nearline_prefill import NearlinePrefill
from nestpipe.serve.prefill import HistoryInputs, PrefillQueue, PrefillTask, ServedModel, length_of
from nestpipe.serve.prefill_policy import ADMITTED, Floats, InstanceLoad, Kind, TokenBucket, decide
from nestpipe.serve.prefix_moves import prefix_moves
from nestpipe.serve.prefix_store import ReadPrefix, StoredMatch
from nestpipe.serve.prefix_tiers import PrefixTiers
from nestpipe.serve.requests import (
    DEGRADED,
    HITS,
    HintDecision,
    LateError,
    PrefillHint,
    RankingPath,
    RankingPlan,
    RankingRequest,
    RecentTimes,
    choose,
    public_error,
)
from nestpipe.serve.schemas import RankedItems
from nestpipe.serve.stored_prefixes import StoredPrefixes
from nestpipe.serve.user_history import NOBODY, UserHistories
from nestpipe.serve.versioned_worker import VersionedWorker

_log = logging.getLogger("nestpipe.serve")
_SWEEP_S = 0.5  # between two sweeps of expired entries
_BREAKER_S = 5.0  # window of the queueing times that open the breaker, and of reported latencies
_PROBE_EVERY = 16  # prefill hints that an open breaker refuses; the last of them is admitted
_QUEUE_S = 30.0  # window of queueing times
_BATCH_MS = 20.0  # longer requests gain nothing from company, and whoever arrives meanwhile would wait


class Engine(VersionedWorker[ServedModel]):
    """Answers ranking requests and prefill hints."""

    def __init__(
        self,
        served: ServedModel,
        histories: UserHistories,
        *,
        config: EngineConfig,
        trigger: TriggerConfig,
        stored: StoredPrefixes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`stored` is the disk tier, if there is one."""
        super().__init__("engine", served, histories, config=config, clock=clock)
        self.trigger, self._known = trigger, set[str]()
        moves = prefix_moves(served.ranker.device)
        self.cache = KVCache[KVPrefix](
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            device_ttl_s=config.device_ttl_s,
            host_ttl_s=config.host_ttl_s,
            copy=moves.demoted,
            promoted=moves.promoted,
            clock=clock,
        )
        self.counts: Counter[tuple[str, str]] = Counter()  # ('path' or 'reason', value)
        self.latencies = RecentTimes(clock, window_s=_BREAKER_S)
        self._waits = RecentTimes(clock, window_s=_QUEUE_S)
        # A request that misses the budget by its own work is no reason against prefills: they would spare it that work.
        self._recent_waits = RecentTimes(clock, window_s=_BREAKER_S)
        self.queue_ms = 0.0  # P99 of the waits
        self._bucket = TokenBucket(per_s=trigger.rate_ms_per_s, most=trigger.burst_ms, now=clock())
        self._inbox: deque[RankingRequest | PrefillHint] = deque()
        self._requests: list[RankingRequest] = []  # a heap by deadline
        self._prefills = PrefillQueue(self.cache, chunk=config.chunk)
        self.tiers = PrefixTiers(self.cache, self._prefills, stored, moves)
        self.nearline: NearlinePrefill | None = None
        if stored is not None:
            rate = trigger.nearline_ms_per_s
            self.nearline = NearlinePrefill(
                stored, histories, model_of=self._model_of, chunk=config.chunk, rate_ms_per_s=rate, clock=clock
            )
        self._evictable = OrderedDict[PrefixKey, None]()  # used prefixes, to demote to the host, oldest first
        self._pinned: dict[str, tuple[HistoryInputs, float]] = {}  # request id -> inputs of its prefix, until when
        self._swept_at, self._num_removals = -math.inf, -1  # what was removed before is not known yet

    # From any thread.

    def submit(self, job: RankingRequest | PrefillHint) -> None:
        """Queues a job, whose `reply` gets the answer; raises BusyError."""
        work = job.work_ms(self.histories, self.versions.of(job.user))
        with self.admitting(job.reply, deadline=job.deadline, work=work):
            if isinstance(job, RankingRequest):
                job.arrived = self.clock()
            self._inbox.append(job)

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self._requests)

    def invalidate(self, user: int) -> int:
        """Drops the KV prefixes of a user from all tiers; returns their number."""
        return self.tiers.invalidate(user)

    def stop(self) -> None:
        super().stop()
        if self.tiers.stored is not None:
            self.tiers.stored.close()

    def release(self, request: str) -> bool:
        """Unpins the prefix of a request; False if there is none."""
        if (pinned := self._pinned.pop(request, None)) is not None:
            self.cache.unpin(pinned[0].key, request)
        return pinned is not None

    # The engine's own thread.

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        self._accept()  # 1 decide prefill hints; queue ranking requests by deadline
        plans = self._next_batch()  # 2 the most urgent requests, each with the best path that fits before its deadline
        if plans and plans[0].choice.path == "join":
            return self._prefills.run(plans[0].inputs.key)  # the first request waits for its prefill: finish that
        for batch in self._fetch_prefixes(plans):  # 3 from the device, copied from the host, or extended
            self._score(batch)  # 4 one call of each model with prefixes, one without; reply
        if plans and len(self._evictable) > self.config.max_batch:
            self._demote()  # under constant load too, prefixes must reach the host
        # 5 idle: one copy to the host, one prefill chunk, or one of a near-line prefill
        return bool(plans) or self._demote() or self._prefills.run() or bool(self.nearline and self.nearline.run())

    def _accept(self) -> None:
        is_fresh = False
        for _ in range(len(self._inbox)):  # not those that arrive meanwhile: queued requests must get their turn
            job = self._inbox.popleft()
            if job.reply.cancelled():
                self.release(job.request)
                continue
            try:
                if not is_fresh:
                    self._refresh()
                    is_fresh = True
                pinned = self._pinned.get(job.request)  # a request keeps the model of its hint
                served = pinned[0].served if pinned else self.versions.of(job.user)
                if isinstance(job, PrefillHint):
                    events = self.histories.of(job.user) if job.history is None else job.history
                    if not settle(job.reply, self._decide(job, served.prepare(events, job.query_time))):
                        self.release(job.request)
                else:
                    job.served, job.since = served, self.cache.num_invalidations  # before the events are read
                    heapq.heappush(self._requests, job)
            except Exception as error:
                if isinstance(job, RankingRequest):
                    self.release(job.request)
                settle(job.reply, error)

    def _model_of(self, user: int) -> ServedModel:
        return self.versions.of(user)

    def _refresh(self) -> None:
        """Reads new events, and drops what was invalidated, expired or belongs to a model that is gone."""
        self.histories.refresh()
        if self.histories.num_removals != self._num_removals:
            self._num_removals = self.histories.num_removals
            self.tiers.retain_users(self.histories)
            if self.nearline is not None:
                self.nearline.start_over()  # the folder may have grown
        if self.nearline is not None:
            self.nearline.follow_events()
        if (now := self.clock()) - self._swept_at > _SWEEP_S:
            self._swept_at = now
            self.queue_ms = self._waits.p99()
            before, self._known = self._known, {one.name for one in self.models}
            has_changed = before != self._known
            self.cache.sweep((lambda key: any(one.ranker.made(key) for one in self.models)) if has_changed else None)
            if has_changed:
                self.tiers.retain_models(one.ranker.made_by for one in self.models)
            for key in [key for key in self._evictable if self.cache.peek_state(key) is None]:
                del self._evictable[key]
            self._prefills.prune()
            self._pinned = {request: pinned for request, pinned in list(self._pinned.items()) if pinned[1] > now}

    # Prefill hints and prefills.

    def _decide(self, hint: PrefillHint, inputs: HistoryInputs) -> HintDecision:
        key, costs, now = inputs.key, inputs.served.costs, self.clock()
        is_live = self.cache.peek_state(key) is not None
        begun = None if is_live else inputs.longest_begun(self.cache.peek_user(inputs.key.user))
        stored = None if is_live or begun else self.tiers.find_stored(inputs)
        num_stored = stored.key.length if stored else 0
        work_ms = costs.pre_ms(key.length, length_of(begun) or num_stored)
        load = InstanceLoad(
            is_live=is_live,
            has_room=hint.user != NOBODY and self.cache.has_room(inputs.num_bytes),
            tokens_ms=self._bucket.level(now),
            work_ms=work_ms,
            wait_ms=self._prefills.backlog_ms(key)
            if is_live
            else self._prefills.backlog_ms() + work_ms + costs.read_ms(num_stored),
            recent_wait_ms=self._recent_waits.p99(),
            queue_ms=self.queue_ms,
        )
        reason = decide(self.trigger, costs, load, num_events=inputs.num_events, num_candidates=hint.num_candidates)
        num_stopped = self.counts["reason", "breaker"] + self.counts["reason", "probe"]
        if reason == "breaker" and self.trigger.mode == "on" and num_stopped % _PROBE_EVERY == _PROBE_EVERY - 1:
            reason = "probe"  # measures whether prefixes help again
        self.counts["reason", reason] += 1
        if reason in ADMITTED:
            lease = self.cache.reserve(key, user=hint.user, num_bytes=inputs.num_bytes)
            assert lease is not None, "has_room was true, and only this thread reserves"
            self._prefills.append(PrefillTask(inputs, lease, begun, stored, self._read_ahead(stored)))
            self._bucket.take(work_ms, now)
        if reason not in ADMITTED | {"already_live"}:
            return HintDecision(reason)
        self.cache.pin(key, hint.request, until=hint.until)
        self._pinned[hint.request] = inputs, hint.until
        return HintDecision(reason, key.digest)

    def _read_ahead(self, stored: StoredMatch | None) -> Future[ReadPrefix] | None:
        if stored is None or self.tiers.stored is None:
            return None
        reading = self.tiers.stored.launch_read(stored)
        reading.add_done_callback(lambda _: self.wake())
        return reading

    def _demote(self) -> bool:
        return any(self.cache.demote(self._evictable.popitem(last=False)[0]) for _ in range(len(self._evictable)))

    # Ranking requests.

    def _next_batch(self) -> list[RankingPlan]:
        """Requests by deadline, as long as all of them together are short, and finish before the first deadline."""
        plans: list[RankingPlan] = []
        total_ms, until_ms = 0.0, math.inf
        while self._requests and len(plans) < self.config.max_batch:
            request = heapq.heappop(self._requests)
            slack_ms = 1000 * (request.deadline - self.clock())
            if request.reply.cancelled() or slack_ms <= 0:
                self.release(request.request)
                if settle(request.reply, LateError("the deadline passed before the request could be ranked.")):
                    self.latencies.note(waited_ms := 1000 * (self.clock() - request.arrived))
                    self._recent_waits.note(waited_ms)
                continue
            if (plan := self._try_plan(request, slack_ms - total_ms)) is None:
                continue
            path, cost_ms = plan.choice.path, plan.choice.cost_ms
            if plans and (path == "join" or path in DEGRADED or total_ms + cost_ms > min(until_ms, _BATCH_MS)):
                heapq.heappush(self._requests, request)
                break
            if path == "fallback":
                self._reply(plan, np.zeros(len(request.items)))
                continue
            if request.joined is None:
                for waits in (self._waits, self._recent_waits):
                    waits.note(1000 * (self.clock() - request.arrived))
            plans.append(plan)
            if path == "join":
                heapq.heappush(self._requests, request)
                request.joined = request.joined or self.cache.join(plan.inputs.key)
                break
            total_ms += cost_ms
            until_ms = min(until_ms, slack_ms)
        return plans

    def _try_plan(self, job: RankingRequest, slack_ms: float) -> RankingPlan | None:
        """Reads history and candidates when it is a request's turn; None if it cannot be read or planned, and was refused."""
        served = job.served or self.versions.of(job.user)
        try:
            if job.inputs is None:
                events = self.histories.of(job.user) if job.history is None else job.history
                job.inputs = served.prepare(events, job.query_time, earlier=self._pinned.get(job.request, (None,))[0])
                job.candidates = served.candidates(job.items, self.histories.sequences)
            return self._plan(job, job.inputs, slack_ms)
        except Exception as error:
            self.release(job.request)
            settle(job.reply, public_error(error, "a request could not be read"))
            return None

    def _plan(self, request: RankingRequest, inputs: HistoryInputs, slack_ms: float) -> RankingPlan:
        begun, stored, num_stored = None, None, 0
        knows_user = self.cache.knows_user(request.user)
        state = self.cache.peek_state(inputs.key) if knows_user else None
        if state is None and (knows_user or self.tiers.stored is not None):
            begun = inputs.longest_begun(self.cache.peek_user(request.user))
            stored = None if begun else self.tiers.find_stored(inputs)
            num_stored = stored.key.length if stored else 0
        elif state in {EntryState.RESERVED, EntryState.COMPUTING}:
            task = self._prefills.of(inputs.key)
            begun, num_stored = (task.prefix, task.num_reading) if task else (None, 0)
        choice = choose(
            inputs.served.costs,
            state=state,
            slack_ms=slack_ms,
            num_events=inputs.num_events,
            num_candidates=len(request.items),
            num_bytes=inputs.num_bytes,
            begun=length_of(begun),
            block=max(inputs.served.max_len // 8, 1),
            stored=num_stored,
        )
        return RankingPlan(request, inputs, choice, begun if choice.path == "extend" else None, stored)

    def _fetch_prefixes(self, plans: Sequence[RankingPlan]) -> list[list[RankingPlan]]:
        """Brings prefixes to the device and pins them; a lost one means full inference. Returns batches to score together."""
        batches: dict[tuple[ServedModel, bool], list[RankingPlan]] = {}
        for plan in plans:
            try:
                self.tiers.fetch(plan)
            except Exception:
                _log.exception("a prefix could not be fetched; its user is ranked in full")
                plan.prefix = None
            if plan.choice.path in HITS and plan.prefix is None:
                plan.choice = RankingPath("full", plan.choice.cost_ms)
            elif plan.choice.path == "hit_device" and plan.request.joined is not None:
                plan.choice = RankingPath("join", plan.choice.cost_ms)
            batches.setdefault((plan.inputs.served, plan.prefix is None), []).append(plan)
        return sorted(batches.values(), key=lambda batch: batch[0].prefix is None)

    def _score(self, plans: Sequence[RankingPlan]) -> None:
        """One call for a batch of one model and one kind of path; if it fails, one call in full for each request."""
        kind: Kind = "hit" if plans[0].prefix else "full"
        costs, start = plans[0].inputs.served.costs, time.perf_counter()
        try:
            scores = self._call(plans)
        except Exception:
            _log.exception("a batch failed; its requests are ranked one by one, in full")
            scores = [self._score_alone(plan) for plan in plans]
        expected = sum(costs.expected(kind, plan.inputs.num_events, len(plan.request.items)) for plan in plans)
        costs.observe(kind, (1000 * (time.perf_counter() - start) - expected) / len(plans))
        for plan, own in zip(plans, scores, strict=True):
            self._reply(plan, own)
        for plan in plans:
            self.tiers.keep(plan)

    def _call(self, plans: Sequence[RankingPlan]) -> list[Floats]:
        candidates = [plan.request.candidates for plan in plans if plan.request.candidates is not None]
        prefixes = [plan.prefix for plan in plans if plan.prefix is not None]
        served, inputs = plans[0].inputs.served, [plan.inputs for plan in plans]
        is_worth_keeping = partial(self.tiers.is_worth_keeping, if_it_pays=self.trigger.mode == "on")
        if kept := [number for number, plan in enumerate(plans) if is_worth_keeping(plan)]:
            scores, prefix_of = served.scores_and_prefixes(inputs, candidates)
            for number in kept:
                plans[number].take_prefix = partial(prefix_of, number)
        else:
            scores = served.scores(inputs, candidates, prefixes or None)
        return [one.numpy().astype(np.float64) for one in scores]

    def _score_alone(self, plan: RankingPlan) -> Floats:
        plan.prefix = None
        if plan.choice.path != "shorter":
            plan.choice = RankingPath("full", plan.choice.cost_ms)
        try:
            return self._call([plan])[0]
        except Exception:
            _log.exception("a request could not be ranked; it keeps the caller's order")
            return np.full(len(plan.request.items), np.nan)

    def _reply(self, plan: RankingPlan, scores: Floats) -> None:
        request, served, key, path = plan.request, plan.inputs.served, plan.pinned, plan.choice.path
        if path == "fallback" or np.count_nonzero(np.isfinite(scores)) < len(scores):
            path, plan.prefix, scores = "fallback", None, np.zeros(len(request.items))
        if path in DEGRADED:
            served.costs.relax()
        if key is not None:
            self.cache.unpin(key, request, consumed=path in HITS)
            if path in HITS:
                self._evictable.setdefault(key)
        self.release(request.request)
        total_ms = 1000 * (self.clock() - request.arrived)
        self.latencies.note(total_ms)
        self.counts["path", path] += 1
        served.counts[path] += 1
        order = np.argsort(-scores, kind="stable")[: request.k]
        answer = RankedItems(
            items=np.asarray(request.items)[order].tolist(),
            scores=scores[order].tolist(),
            path=path,
            prefix_len=length_of(plan.prefix),
            degraded=path in DEGRADED,
            model=served.name,
            times_ms={"total": round(total_ms, 3), "estimated": round(plan.choice.cost_ms, 3)},
        )
        settle(request.reply, answer)
