"""One generative instance: requests are answered before their deadline, by the best that is there.

    memory         hit_device -> hit_host -> full -> shorter -> narrow -> 503
    instruction    of the scenario -> of the user -> the model's default

What the encoder made of a history is kept in the relay's cache, so the next request of the user, in any scenario, only decodes.
`shorter` (the last events alone) and `narrow` (fewer beams) are degraded, and say so. Instructions are read from the store and nowhere
else: nothing here knows a language model, and a store that is missing, stale or damaged means the default. One thread takes the
steps; requests come from any thread and wait for a future.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from nestpipe.data.sequences import Sequences
from nestpipe.errors import NestPipeError
from nestpipe.generative.instruction_store import ANY, Instructions
from nestpipe.models.kv_prefix import PrefixKey
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.generation_model import EncoderMemory, EncoderRequest, GeneratedList, GenerativeModel, Steering
from nestpipe.serve.kv_cache import EntryState, KVCache, settle
from nestpipe.serve.latency_model import DEGRADED, GenerationCosts, GenerationPath, MemoryPath, choose
from nestpipe.serve.requests import LateError
from nestpipe.serve.schemas import GeneratedItems, Provenance
from nestpipe.serve.user_history import UserHistories
from nestpipe.serve.worker_thread import WorkerThread

_log = logging.getLogger("nestpipe.serve")
_LOOK_S = 0.5  # between two looks for what has expired


class FailedError(NestPipeError):
    """The model failed on a request; the log says why."""


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationRequest:
    """A request to generate before a deadline."""

    user: int
    k: int
    deadline: float
    scenario: str | None = None
    trigger: int | None = None
    history: Sequences | None = None
    reply: Future[GeneratedItems] = field(default_factory=Future)
    # What the generator notes.
    arrived: float = 0.0

    def __lt__(self, other: GenerationRequest) -> bool:
        return self.deadline < other.deadline


@dataclass(slots=True, eq=False)
class _GenerationPlan:
    """A request on its way."""

    job: GenerationRequest
    asked: EncoderRequest
    choice: GenerationPath
    steering: Steering
    provenance: Provenance
    times_ms: dict[str, float]
    memory: EncoderMemory | None = None


class Generator(WorkerThread):
    """Answers requests to generate. `scenarios` are their names, by the numbers that the model knows."""

    def __init__(
        self,
        served: GenerativeModel,
        histories: UserHistories,
        instructions: Instructions | None,
        estimates: GenerationCosts,
        *,
        config: EngineConfig,
        scenarios: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__("generator", max_queue=config.max_queue)
        self.served, self.histories, self.instructions = served, histories, instructions
        self.estimates, self.config, self.clock = estimates, config, clock
        self.scenarios = {name: number for number, name in enumerate(scenarios)}
        self.cache = KVCache[EncoderMemory](
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            device_ttl_s=config.device_ttl_s,
            host_ttl_s=config.host_ttl_s,
            copy=lambda one: replace(one, memory=one.memory.clone()),
            clock=clock,
        )
        self.counts: Counter[tuple[str, str]] = Counter()  # ('path' or 'instruction', which): how often
        self._queue: list[GenerationRequest] = []  # a heap by deadline
        self._evictable: deque[PrefixKey] = deque()  # to demote
        self._looked, self._num_removals = -math.inf, histories.num_removals

    # From any thread.

    def submit(self, job: GenerationRequest) -> None:
        """Queues a job, whose `reply` will have the answer; raises BusyError."""
        with self.while_open():
            job.arrived = self.clock()
            heapq.heappush(self._queue, job)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    # The generator's own thread.

    def step(self) -> bool:
        """One turn; False if there was nothing to do."""
        plans = self._next_batch()  # 1 the most urgent requests, each with an instruction and the best path that fits
        ready = [plan for plan in plans if self._remember(plan)]  # 2 memories: found, copied from the host, or encoded
        for width in sorted({plan.choice.width for plan in ready}):
            self._decode([plan for plan in ready if plan.choice.width == width], width)  # 3 one search for all of them
        while len(self._evictable) > self.config.max_batch:
            self._demote()  # someone always waits, but the host must get its share
        return bool(plans) or self._demote()  # 4 nobody waits: a memory that was used goes to the host

    def _look_around(self) -> None:
        """Others may have written, and time has passed: what nobody may see any more goes."""
        self.histories.refresh()
        if self.histories.num_removals != self._num_removals:
            self._num_removals = self.histories.num_removals
            self.cache.invalidate()
            self._evictable.clear()
        if (now := self.clock()) - self._looked > _LOOK_S:
            self._looked = now
            self.cache.sweep()

    def _next_batch(self) -> list[_GenerationPlan]:
        """Requests by deadline, as long as all of them together are done before the first deadline."""
        plans: list[_GenerationPlan] = []
        total_ms = 0.0
        while self._queue and len(plans) < self.config.max_batch:
            with self._news:
                job = heapq.heappop(self._queue)
            if job.reply.cancelled():
                continue
            try:
                plan = self._plan(job, total_ms)
            except LateError as error:
                if plans:  # perhaps because of its mates
                    self._put_back(job)
                    break
                self.estimates.relax()
                settle(job.reply, error)
                continue
            except Exception as error:
                settle(job.reply, _blamed(error, "a request could not be read"))
                continue
            slack_ms = 1000 * ((plans[0].job if plans else job).deadline - self.clock())
            if plans and (plan.choice.is_degraded or total_ms + plan.choice.cost_ms > slack_ms):
                self._put_back(job)
                break
            plans.append(plan)
            total_ms += plan.choice.cost_ms
        return plans

    def _put_back(self, job: GenerationRequest) -> None:
        with self._news:
            heapq.heappush(self._queue, job)

    def _plan(self, job: GenerationRequest, before_ms: float) -> _GenerationPlan:
        """What a request will use; raises LateError if nothing fits before its deadline."""
        self._look_around()
        times = {"queue": 1000 * (self.clock() - job.arrived)}
        began = time.perf_counter()
        steering, provenance = self._steer(job)
        times["instruction"] = 1000 * (time.perf_counter() - began)
        asked = self.served.ask(self.histories.of(job.user) if job.history is None else job.history, steering)
        choice = choose(
            self.estimates,
            state=self.cache.peek_state(asked.key),
            slack_ms=1000 * (job.deadline - self.clock()) - before_ms,
            num_events=asked.num_events,
            beam=self.served.model.config.beam,
            k=job.k,
            block=max(self.served.max_len // 8, 1),
        )
        if choice is None:
            raise LateError("not even the narrowest search fits before the deadline.")
        if choice.num_events < asked.num_events:
            asked = self.served.shorter(asked, choice.num_events)
        return _GenerationPlan(job, asked, choice, steering, provenance, times)

    def _remember(self, plan: _GenerationPlan) -> bool:
        """Gives a plan the memory of its history; False if that failed, and the request has its answer."""
        began = time.perf_counter()
        try:
            plan.memory, path = self._memory(plan.job, plan.asked, plan.choice)
        except Exception as error:
            settle(plan.job.reply, _blamed(error, "a request could not be encoded"))
            return False
        plan.choice = plan.choice._replace(path=path)
        plan.times_ms["encode"] = 1000 * (time.perf_counter() - began)
        return True

    def _memory(
        self, job: GenerationRequest, asked: EncoderRequest, choice: GenerationPath
    ) -> tuple[EncoderMemory, MemoryPath]:
        """The memory of a history and where it came from; it is kept for the user's next request."""
        key, path = asked.key, choice.path
        if self.cache.peek_state(key) == EntryState.HOST:
            self.cache.promote(key)
        memory = self.cache.pin(key, job)
        if memory is not None:
            self.cache.unpin(key, job, consumed=True)
            self._spend(key)
            return memory, "hit_device" if path == "full" else path  # what was encoded for a mate is there by now
        is_kept = not choice.is_degraded and self.cache.peek_state(key) is None
        lease = self.cache.reserve(key, user=job.user, num_bytes=self.served.num_bytes(asked)) if is_kept else None
        began = time.perf_counter()
        try:
            memory = self.served.encode(asked)
        except Exception:
            if lease is not None:
                self.cache.fail(lease)
            raise
        self.estimates.observe(1000 * (time.perf_counter() - began), self.estimates.encode(asked.num_events))
        if lease is not None:
            self.cache.finish(lease, memory)
            self._spend(key)
        return memory, "full" if path in {"hit_device", "hit_host"} else path

    def _spend(self, key: PrefixKey) -> None:
        if key not in self._evictable:
            self._evictable.append(key)

    def _steer(self, job: GenerationRequest) -> tuple[Steering, Provenance]:
        number = None if job.scenario is None else self.scenarios[job.scenario]
        steering = Steering(scenario=number, trigger=job.trigger)
        if job.trigger is not None:
            self.served.trie.positions(torch.tensor([job.trigger]))  # raises for an item that nobody knows
        if self.instructions is None:
            return steering, Provenance(source="default", reason="not used")
        found, reason = self.instructions.of(job.user, job.scenario or ANY)
        if found is None:
            return steering, Provenance(source="default", reason=reason)
        vector = torch.from_numpy(found.vector)
        source: Literal["scenario", "any"] = "any" if found.scenario == ANY else "scenario"
        provenance = Provenance(source=source, reason=reason, written_by=found.provenance, written_s=found.written_s)
        return replace(steering, vector=vector), provenance

    def _decode(self, plans: Sequence[_GenerationPlan], width: int) -> None:
        """One search for all of them; if that fails, one for each."""
        began = time.perf_counter()
        found: list[GeneratedList | Exception]
        try:
            found = list(self._search(plans, width))
        except Exception:
            _log.exception("a search failed; its requests are searched for one by one")
            found = [self._alone(plan, width) for plan in plans]
        took_ms = 1000 * (time.perf_counter() - began)
        self.estimates.observe(took_ms / len(plans), self.estimates.decode(width))
        for plan, result in zip(plans, found, strict=True):
            if isinstance(result, Exception):
                settle(plan.job.reply, result)
            else:
                self._reply(plan, result, took_ms)

    def _search(self, plans: Sequence[_GenerationPlan], width: int) -> list[GeneratedList]:
        return self.served.generate(
            [plan.asked for plan in plans],
            [plan.memory for plan in plans if plan.memory is not None],
            [plan.steering for plan in plans],
            width=width,
            k=[plan.job.k for plan in plans],
        )

    def _alone(self, plan: _GenerationPlan, width: int) -> GeneratedList | Exception:
        try:
            return self._search([plan], width)[0]
        except Exception as error:
            return _blamed(error, "a request could not be searched for")

    def _reply(self, plan: _GenerationPlan, found: GeneratedList, decode_ms: float) -> None:
        path, job = plan.choice.path, plan.job
        self.counts["path", path] += 1
        if self.instructions is not None:
            self.counts["instruction", plan.provenance.reason] += 1
        times_ms = {**plan.times_ms, "decode": decode_ms, "total": 1000 * (self.clock() - job.arrived)}
        answer = GeneratedItems(
            items=found.items,
            log_probabilities=found.log_probabilities,
            path=path,
            degraded=path in DEGRADED,
            instruction=plan.provenance,
            num_events=plan.asked.num_events,
            beam=plan.choice.width,
            model=self.served.name,
            semantic_ids=self.served.trie.version,
            times_ms={name: round(ms, 3) for name, ms in times_ms.items()},
        )
        settle(job.reply, answer)

    def _demote(self) -> bool:
        while self._evictable:
            if self.cache.demote(self._evictable.popleft()):
                return True
        return False


def _blamed(error: Exception, what: str) -> NestPipeError:
    """What the client is told; an error that is not ours goes to the log."""
    if isinstance(error, NestPipeError):
        return error
    _log.error("%s", what, exc_info=error)
    return FailedError("the model failed on the request; ask again, or look into the log.")
