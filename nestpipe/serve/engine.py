"""One instance: ranks are answered by the best path they can afford, prefixes are computed when nobody waits.

    hit_device -> join -> hit_host -> extend -> full -> shorter -> fallback -> 503

The first path whose cost fits into what is left of the deadline is taken. The first five give the same scores; `shorter` (the
last events alone) and `fallback` (the order of the caller) are degraded, and say so. Losing a prefix, a ticket or a tier
leads to `full`, never to an error. One thread takes the steps; requests come from any thread and wait for a future.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from nestpipe.models.kv_prefix import KVPrefix, PrefixKey
from nestpipe.serve.config import EngineConfig, TriggerConfig
from nestpipe.serve.kv_cache import EntryState, KVCache, settle
from nestpipe.serve.model_versions import ModelVersions
from nestpipe.serve.prefill import HistoryRequest, ServedModel, copy_prefix
from nestpipe.serve.prefill_policy import ADMITTED, InstanceLoad, Kind, TokenBucket, decide
from nestpipe.serve.requests import (
    DEGRADED,
    HITS,
    HintDecision,
    LateError,
    PrefillHint,
    PrefillWork,
    RankingPath,
    RankingPlan,
    RankingRequest,
    RecentTimes,
    choose,
    length_of,
)
from nestpipe.serve.schemas import RankedItems
from nestpipe.serve.user_history import UserHistories
from nestpipe.serve.worker_thread import WorkerThread

_log = logging.getLogger("nestpipe.serve")
_LOOK_S = 0.5  # between two looks for what has expired
_BREAKER_S = 5.0  # how far the breaker looks back
_PROBE_EVERY = 16  # signals that the breaker stops; the last of them is let through
_QUEUE_S = 30.0  # how far back what ranks waited is looked at


class Engine(WorkerThread):
    """Answers ranks and signals."""

    def __init__(
        self,
        served: ServedModel,
        histories: UserHistories,
        *,
        config: EngineConfig,
        trigger: TriggerConfig,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__("engine", max_queue=config.max_queue)
        self.versions, self.histories = ModelVersions(served), histories
        self.models, self._known = WeakSet([served]), {served.name}  # also old ones that something refers to
        self.config, self.trigger, self.clock = config, trigger, clock
        self.cache = KVCache[KVPrefix](
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            device_ttl_s=config.device_ttl_s,
            host_ttl_s=config.host_ttl_s,
            copy=copy_prefix,
            clock=clock,
        )
        self.counts: Counter[tuple[str, str]] = Counter()  # ('path' or 'reason', which): how often
        self._latencies = RecentTimes(clock, window_s=_BREAKER_S)
        self._waits = RecentTimes(clock, window_s=_QUEUE_S)  # of ranks for their turn
        self.queue_ms = 0.0  # their 99th percentile
        self._bucket = TokenBucket(per_s=trigger.rate_ms_per_s, most=trigger.burst_ms, now=clock())
        self._inbox: deque[RankingRequest | PrefillHint] = deque()
        self._ranks: list[RankingRequest] = []  # a heap by deadline
        self._works: deque[PrefillWork] = deque()
        self._evictable: deque[PrefixKey] = deque()  # to demote
        self._held: dict[str, tuple[ServedModel, PrefixKey, float]] = {}  # request -> what waits for it, until when
        self._looked, self._num_removals = -math.inf, histories.num_removals

    # From any thread.

    def submit(self, job: RankingRequest | PrefillHint) -> None:
        """Queues a job, whose `reply` will have the answer; raises BusyError."""
        with self.while_open():
            if isinstance(job, RankingRequest):
                job.arrived = self.clock()
            self._inbox.append(job)

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self._ranks)

    def release(self, request: str) -> bool:
        """Lets go of the prefix that is held for a request which will not come."""
        if (held := self._held.pop(request, None)) is not None:
            self.cache.unpin(held[1], request)
        return held is not None

    def use(self, versions: ModelVersions) -> None:
        """Answers new requests with other models; what was begun with a model is ended with it."""
        self.models = WeakSet([*self.models, versions.main, versions.other or versions.main])
        self.versions = versions

    def rank_p99_ms(self) -> float:
        """Of late."""
        return self._latencies.p99()

    # The engine's own thread.

    def step(self) -> bool:
        """One turn; False if there was nothing to do."""
        self._take_in()  # 1 signals are decided, ranks wait by deadline
        plans = self._next_batch()  # 2 the most urgent ranks, each with the best path that fits before its deadline
        if plans and plans[0].choice.path == "join":
            return self._prefill(plans[0].asked.key)  # the most urgent one waits for its prefix: all that is left of it
        if plans:
            for mates in self._get_prefixes(plans):  # 3 found on the device, copied from the host, or made longer
                self._score(mates)  # 4 together: one call of each model with prefixes, and one without
            if len(self._evictable) > self.config.max_batch:
                self._demote()  # someone always waits, but the host must get its share
            return True
        return self._demote() or self._prefill()  # 5 nobody waits: one copy to the host, or one chunk of a prefill

    def _take_in(self) -> None:
        for _ in range(len(self._inbox)):  # and not those that come meanwhile: ranks must get their turn
            job = self._inbox.popleft()
            if job.reply.cancelled():
                self.release(job.request)
                continue
            try:
                self._look_around()
                since = self.cache.num_invalidations  # what is made of the events is of that time
                events = self.histories.of(job.user) if job.history is None else job.history
                held = self._held.get(job.request)  # what was begun with a model is ended with it
                served = held[0] if held else self.versions.of(job.user)
                asked = served.ask(events, job.query_time)
                if isinstance(job, PrefillHint):
                    if not settle(job.reply, self._decide(job, asked)):
                        self.release(job.request)
                else:
                    job.candidates = served.candidates(job.items, self.histories.sequences)
                    job.asked, job.since = asked, since
                    heapq.heappush(self._ranks, job)
            except Exception as error:
                if isinstance(job, RankingRequest):
                    self.release(job.request)
                settle(job.reply, error)

    def _look_around(self) -> None:
        """Others may have written, and time has passed: what nobody may see any more goes."""
        self.histories.refresh()
        if self.histories.num_removals != self._num_removals:
            self._num_removals = self.histories.num_removals
            self.cache.invalidate()
        if (now := self.clock()) - self._looked > _LOOK_S:
            self._looked = now
            self.queue_ms = self._waits.p99()
            before, self._known = self._known, {one.name for one in self.models}
            is_other = before != self._known
            self.cache.sweep((lambda key: any(one.ranker.made(key) for one in self.models)) if is_other else None)
            known = self.cache.peek_state
            self._evictable = deque(key for key in self._evictable if known(key) is not None)
            self._works = deque(work for work in self._works if known(work.asked.key) is not None)
            self._held = {request: held for request, held in list(self._held.items()) if held[2] > now}

    # Signals and prefills.

    def _decide(self, signal: PrefillHint, asked: HistoryRequest) -> HintDecision:
        key, costs, now = asked.key, asked.served.costs, self.clock()
        is_live = self.cache.peek_state(key) is not None
        begun = None if is_live else self._begun(asked)
        work_ms = costs.pre_ms(key.length, length_of(begun))
        view = InstanceLoad(
            is_live=is_live,
            has_room=self.cache.has_room(asked.num_bytes),
            tokens_ms=self._bucket.level(now),
            work_ms=work_ms,
            wait_ms=self._backlog_ms(key) if is_live else self._backlog_ms() + work_ms,
            rank_p99_ms=self.rank_p99_ms(),
            queue_ms=self.queue_ms,
        )
        reason = decide(self.trigger, costs, view, num_events=asked.num_events, num_candidates=signal.num_candidates)
        num_stopped = self.counts["reason", "breaker"] + self.counts["reason", "probe"]
        if reason == "breaker" and self.trigger.mode == "on" and num_stopped % _PROBE_EVERY == _PROBE_EVERY - 1:
            reason = "probe"  # or nobody would see that prefixes help again
        self.counts["reason", reason] += 1
        if reason in ADMITTED:
            lease = self.cache.reserve(key, user=signal.user, num_bytes=asked.num_bytes)
            assert lease is not None, "there was room a moment ago, and this thread alone reserves"
            self._works.append(PrefillWork(asked, lease, begun))
            self._bucket.take(work_ms, now)
        if reason not in ADMITTED | {"already_live"}:
            return HintDecision(reason)
        self.cache.pin(key, signal.request, until=signal.until)
        self._held[signal.request] = asked.served, key, signal.until
        return HintDecision(reason, key.digest)

    def _backlog_ms(self, key: PrefixKey | None = None) -> float:
        """Until all prefills are done, or that of a key; nothing if that is done already."""
        keys = [work.asked.key for work in self._works]
        end = len(keys) if key is None else keys.index(key) + 1 if key in keys else 0
        return sum(work.asked.served.costs.pre_ms(*work.rest) for work in list(self._works)[:end])

    def _begun(self, asked: HistoryRequest) -> KVPrefix | None:
        """The longest kept prefix of the user with which the one asked for begins."""
        kept = sorted(self.cache.peek_user(asked.key.user), key=lambda one: -one.key.length)
        return next((one for one in kept if asked.served.ranker.begins(one, asked.prefix)), None)

    def _work_on(self, key: PrefixKey) -> PrefillWork | None:
        return next((work for work in self._works if work.asked.key == key), None)

    def _prefill(self, key: PrefixKey | None = None) -> bool:
        """One chunk of what was asked for first; or all that is left for a key, because a rank waits for it."""
        work = self._work_on(key) if key else self._works[0] if self._works else None
        if work is None:
            return False
        began, (length, before), costs = time.perf_counter(), work.rest, work.asked.served.costs
        try:
            if self.cache.start(work.lease):
                chunk = length if key else self.config.chunk
                work.kept = work.asked.served.fill(work.asked, work.kept, chunk=chunk)
                done = length_of(work.kept)
                expected = costs.expected("pre", done, 0) - costs.expected("pre", before, 0)
                costs.observe("pre", 1000 * (time.perf_counter() - began) - expected)
                if done < length:
                    return True
                self.cache.finish(work.lease, work.kept)
        except Exception:
            _log.exception("a prefill failed; its user will be ranked in full")
            self.cache.fail(work.lease)
        self._works.remove(work)
        return True

    def _demote(self) -> bool:
        return any(self.cache.demote(self._evictable.popleft()) for _ in range(len(self._evictable)))

    # Ranks.

    def _next_batch(self) -> list[RankingPlan]:
        """Ranks by deadline, as long as all of them together are done before the first deadline."""
        plans: list[RankingPlan] = []
        total_ms, until_ms = 0.0, math.inf
        while self._ranks and len(plans) < self.config.max_batch:
            rank = heapq.heappop(self._ranks)
            slack_ms = 1000 * (rank.deadline - self.clock())
            if rank.reply.cancelled():
                self.release(rank.request)
            elif slack_ms <= 0:
                self.release(rank.request)
                self._latencies.note(1000 * (self.clock() - rank.arrived))
                settle(rank.reply, LateError("the deadline passed before the request could be ranked."))
            elif (plan := self._plan(rank, slack_ms - total_ms)).choice.path == "join":
                heapq.heappush(self._ranks, rank)
                if not plans:
                    self._join(rank)
                    plans.append(plan)
                break
            elif plans and (total_ms + plan.choice.cost_ms > until_ms or plan.choice.path in DEGRADED):
                heapq.heappush(self._ranks, rank)
                break
            elif plan.choice.path == "fallback":
                self._reply(plan, np.zeros(len(rank.items)))
            else:
                self._note_wait(rank)
                plans.append(plan)
                total_ms += plan.choice.cost_ms
                until_ms = min(until_ms, slack_ms)
        return plans

    def _plan(self, rank: RankingRequest, slack_ms: float) -> RankingPlan:
        assert rank.asked is not None
        asked, state = rank.asked, self.cache.peek_state(rank.asked.key)
        begun: KVPrefix | None = None
        if state is None:
            begun = self._begun(asked)
        elif state in {EntryState.RESERVED, EntryState.COMPUTING}:
            work = self._work_on(asked.key)
            begun = work.kept if work else None
        choice = choose(
            asked.served.costs,
            state=state,
            slack_ms=slack_ms,
            num_events=asked.num_events,
            num_candidates=len(rank.items),
            num_bytes=asked.num_bytes,
            begun=length_of(begun),
            block=max(asked.served.max_len // 8, 1),
        )
        return RankingPlan(rank, asked, choice, begun if choice.path == "extend" else None)

    def _join(self, rank: RankingRequest) -> None:
        """Its prefix is in work, which goes on at once."""
        assert rank.asked is not None
        if rank.joined is None:
            self._note_wait(rank)
            rank.joined = self.cache.join(rank.asked.key)

    def _note_wait(self, rank: RankingRequest) -> None:
        if rank.joined is None:
            self._waits.note(1000 * (self.clock() - rank.arrived))

    def _get_prefixes(self, plans: Sequence[RankingPlan]) -> list[list[RankingPlan]]:
        """Pins what is on the device, or brings it there; what is lost meanwhile is ranked in full. Who is scored together."""
        groups: dict[tuple[ServedModel, bool], list[RankingPlan]] = {}
        for plan in plans:
            key = plan.asked.key
            try:
                match plan.choice.path:
                    case "hit_device" | "hit_host":
                        self.cache.promote(key)  # nothing happens to what is there, perhaps brought by a mate
                        plan.prefix = self.cache.pin(key, plan.rank)
                    case "extend":
                        plan.prefix = self.cache.pin(key, plan.rank) or self._extend(plan)
                    case "shorter":
                        plan.asked = plan.asked.served.shorter(plan.asked, plan.choice.num_events)
            except Exception:
                _log.exception("a prefix could not be had; its user is ranked in full")
                plan.prefix = None
            if plan.choice.path in HITS and plan.prefix is None:
                plan.choice = RankingPath("full", plan.choice.cost_ms)
            elif plan.choice.path == "hit_device" and plan.rank.joined is not None:
                plan.choice = RankingPath("join", plan.choice.cost_ms)
            groups.setdefault((plan.asked.served, plan.prefix is None), []).append(plan)
        return sorted(groups.values(), key=lambda mates: mates[0].prefix is None)

    def _extend(self, plan: RankingPlan) -> KVPrefix:
        """The longer prefix; it takes the place of the shorter one if there is room for both while it is made."""
        asked = plan.asked
        lease = None
        if plan.rank.since == self.cache.num_invalidations:
            lease = self.cache.reserve(asked.key, user=asked.key.user, num_bytes=asked.num_bytes)
        try:
            made = asked.served.fill(asked, plan.prefix, chunk=asked.key.length)
        except Exception:
            if lease is not None:
                self.cache.fail(lease)
            raise
        if lease is not None:
            self.cache.finish(lease, made)
        return made

    def _score(self, plans: Sequence[RankingPlan]) -> None:
        """One call for all of them, who share a model and the kind of path; if that fails, one in full for each."""
        kind: Kind = "hit" if plans[0].prefix else "full"
        costs, began = plans[0].asked.served.costs, time.perf_counter()
        try:
            found = self._call(plans)
        except Exception:
            _log.exception("a batch failed; its requests are ranked one by one, in full")
            found = [self._alone(plan) for plan in plans]
        expected = sum(costs.expected(kind, plan.asked.num_events, len(plan.rank.items)) for plan in plans)
        costs.observe(kind, (1000 * (time.perf_counter() - began) - expected) / len(plans))
        for plan, scores in zip(plans, found, strict=True):
            self._reply(plan, scores)
        for plan in plans:
            self._keep(plan)

    def _call(self, plans: Sequence[RankingPlan]) -> list[Any]:
        candidates = [plan.rank.candidates for plan in plans if plan.rank.candidates is not None]
        prefixes = [plan.prefix for plan in plans if plan.prefix is not None]
        served, asked = plans[0].asked.served, [plan.asked for plan in plans]
        if keeping := [number for number, plan in enumerate(plans) if self._pays(plan)]:
            found, prefix_of = served.scores_and_prefixes(asked, candidates)
            for number in keeping:
                plans[number].take_made = partial(prefix_of, number)
        else:
            found = served.scores(asked, candidates, prefixes or None)
        return [scores.numpy().astype(np.float64) for scores in found]

    def _pays(self, plan: RankingPlan) -> bool:
        """Whether to keep what full inference makes: somebody asked for it, or the next request would take half as long."""
        asked, num_candidates = plan.asked, len(plan.rank.items)
        if plan.choice.path != "full" or asked.served.ranker.model.anchored:
            return False
        if self.trigger.mode == "on" and asked.served.costs.halves(asked.num_events, num_candidates, asked.num_bytes):
            return True
        return self._work_on(asked.key) is not None

    def _keep(self, plan: RankingPlan) -> None:
        """Nobody waits for this any more: one copy to the host; or the end of a prefill that came too late for its rank."""
        if plan.take_made is None:
            return
        key = plan.asked.key
        work = self._work_on(key)
        try:
            if work is not None:
                self._works.remove(work)
                self.cache.finish(work.lease, plan.take_made())
            elif self.cache.peek_state(key) is None:
                num_bytes, since = plan.asked.num_bytes, plan.rank.since
                self.cache.keep(key, user=key.user, num_bytes=num_bytes, make=plan.take_made, since=since)
        except Exception:
            _log.exception("a prefix that was made could not be kept")
            if work is not None:
                self.cache.fail(work.lease)

    def _alone(self, plan: RankingPlan) -> Any:
        plan.prefix = None
        if plan.choice.path != "shorter":  # that stays what it is
            plan.choice = RankingPath("full", plan.choice.cost_ms)
        try:
            return self._call([plan])[0]
        except Exception:
            _log.exception("a request could not be ranked; it gets its own order back")
            return np.full(len(plan.rank.items), np.nan)

    def _reply(self, plan: RankingPlan, scores: Any) -> None:
        rank, path = plan.rank, plan.choice.path
        if path == "fallback" or not np.isfinite(scores).all():
            path, plan.prefix, scores = "fallback", None, np.zeros(len(rank.items))
        if path in DEGRADED:
            plan.asked.served.costs.relax()
        self.cache.unpin(plan.asked.key, rank, consumed=path in HITS)
        if path in HITS and plan.asked.key not in self._evictable:
            self._evictable.append(plan.asked.key)
        self.release(rank.request)
        total_ms = 1000 * (self.clock() - rank.arrived)
        self._latencies.note(total_ms)
        self.counts["path", path] += 1
        plan.asked.served.counts[path] += 1
        order = np.argsort(-scores, kind="stable")[: rank.k]
        times_ms = {"total": total_ms, "estimated": plan.choice.cost_ms}
        answer = RankedItems(
            items=[int(rank.items[place]) for place in order],
            scores=scores[order].tolist(),
            path=path,
            prefix_len=length_of(plan.prefix),
            degraded=path in DEGRADED,
            model=plan.asked.served.name,
            times_ms={name: round(ms, 3) for name, ms in times_ms.items()},
        )
        settle(rank.reply, answer)
