"""One generative instance: requests take the best path that fits before their deadline.

    memory         hit_device -> hit_host -> full -> shorter -> narrow -> 503
    instruction    of the request -> of the scenario -> of the user -> the model's default

The encoder memory of a history is cached, so the user's next request, in any scenario, only decodes. `shorter` (the last events
alone) and `narrow` (fewer beams) are degraded, and say so. Instructions are read from the instruction store: no language model is
called here, and a store that is missing, stale or damaged means the default. One thread takes the steps; requests come from any
thread and wait for a future.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from nestpipe.data.sequences import Sequences
from nestpipe.generative.instruction_store import ANY, Instructions
from nestpipe.generative.scenarios import Scenario
from nestpipe.models.kv_prefix import PrefixKey
from nestpipe.rules.rule_book import RequestRules
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.generation_model import EncoderInputs, EncoderMemory, GeneratedList, GenerativeModel, Steering
from nestpipe.serve.kv_cache import EntryState, KVCache, settle
from nestpipe.serve.latency_model import DEGRADED, GenerationCosts, GenerationPath, MemoryPath, choose
from nestpipe.serve.request_instruction import UNTRAINED, RequestInstruction, RequestTexts
from nestpipe.serve.requests import LateError, public_error
from nestpipe.serve.schemas import GeneratedItems, Provenance
from nestpipe.serve.user_history import UserHistories
from nestpipe.serve.versioned_worker import VersionedWorker

_log = logging.getLogger("nestpipe.serve")
_SWEEP_S = 0.5  # between two sweeps of expired entries


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationRequest:
    """Generate items before a deadline."""

    user: int
    k: int
    deadline: float
    scenario: str | None = None
    trigger: int | None = None
    instruction: RequestInstruction | None = None
    history: Sequences | None = None
    rules: RequestRules = field(default_factory=RequestRules)
    reply: Future[GeneratedItems] = field(default_factory=Future)
    version: GenerativeVersion | None = None  # that answers; set by the instance or the generator
    arrived: float = 0.0  # set by the generator

    def __lt__(self, other: GenerationRequest) -> bool:
        return self.deadline < other.deadline


@dataclass(slots=True, eq=False)
class _GenerationPlan:
    """A request with the path that answers it."""

    job: GenerationRequest
    version: GenerativeVersion
    inputs: EncoderInputs
    choice: GenerationPath
    steering: Steering
    provenance: Provenance
    times_ms: dict[str, float]
    memory: EncoderMemory | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class GenerativeVersion:
    """A model in use, the instructions that it reads, and its costs on this machine."""

    served: GenerativeModel
    instructions: Instructions | None
    costs: GenerationCosts
    texts: RequestTexts = field(default_factory=lambda: RequestTexts(None, refusal=UNTRAINED))

    @property
    def name(self) -> str:
        return self.served.name


class Generator(VersionedWorker[GenerativeVersion]):
    """Answers generation requests. `scenarios` are the model's scenario numbers by name."""

    def __init__(
        self,
        served: GenerativeModel,
        histories: UserHistories,
        instructions: Instructions | None,
        estimates: GenerationCosts,
        *,
        config: EngineConfig,
        scenarios: Mapping[str, int] | None = None,
        records: Mapping[str, Scenario] | None = None,
        texts: RequestTexts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`records` are those of the run's scenario file, if it has one."""
        version = GenerativeVersion(served, instructions, estimates)
        version.texts = texts or version.texts
        super().__init__("generator", version, histories, config=config, clock=clock)
        self._known = {version.name}
        self.scenarios = dict(scenarios or {})
        self.records = dict(records or {})
        self.cache = KVCache[EncoderMemory](
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            device_ttl_s=config.device_ttl_s,
            host_ttl_s=config.host_ttl_s,
            copy=lambda one: replace(one, memory=one.memory.clone()),
            clock=clock,
        )
        self.counts: Counter[tuple[str, str]] = Counter()  # ('path' or 'instruction', value)
        self._queue: list[GenerationRequest] = []  # a heap by deadline
        self._evictable = OrderedDict[PrefixKey, None]()  # used memories, to demote to the host, oldest first
        self._swept_at, self._num_removals = -math.inf, histories.num_removals

    # From any thread.

    def submit(self, job: GenerationRequest) -> None:
        """Queues a job, whose `reply` gets the answer; raises BusyError."""
        with self.admitting(job.reply, deadline=job.deadline):
            job.arrived = self.clock()
            job.version = self.version_of(job)
            heapq.heappush(self._queue, job)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def version_of(self, job: GenerationRequest) -> GenerativeVersion:
        """The version that answers a request."""
        return job.version or self.versions.of(job.user)

    # The generator's own thread.

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        plans = self._next_batch()  # 1 the most urgent requests, each with an instruction and the best path that fits
        ready = [
            plan for plan in plans if self._fetch_memory(plan)
        ]  # 2 from the device, copied from the host, or encoded
        for group in self._alike(ready):
            self._decode(group)  # 3 one beam search for each model and width; reply
        while len(self._evictable) > self.config.max_batch:
            self._demote()  # under constant load too, memories must reach the host
        return bool(plans) or self._demote()  # 4 idle: one copy to the host

    def _alike(self, plans: Sequence[_GenerationPlan]) -> list[list[_GenerationPlan]]:
        """Plans of one model and width."""
        groups: dict[tuple[int, int], list[_GenerationPlan]] = {}
        for plan in plans:
            groups.setdefault((id(plan.version), plan.choice.width), []).append(plan)
        return [groups[key] for key in sorted(groups, key=lambda key: key[1])]

    def _refresh(self) -> None:
        """Reads new events, and drops what was invalidated, expired or belongs to a model that is gone."""
        self.histories.refresh()
        if self.histories.num_removals != self._num_removals:
            self._num_removals = self.histories.num_removals
            self.cache.invalidate()
            self._evictable.clear()
        if (now := self.clock()) - self._swept_at > _SWEEP_S:
            self._swept_at = now
            before, self._known = self._known, {one.name for one in self.models}
            made = [one.served.made for one in self.models] if before != self._known else None
            self.cache.sweep(None if made is None else lambda key: any(one(key) for one in made))

    def _next_batch(self) -> list[_GenerationPlan]:
        """Requests by deadline, as long as all of them together finish before the first deadline."""
        plans: list[_GenerationPlan] = []
        total_ms = 0.0
        while self._queue and len(plans) < self.config.max_batch:
            with self._queueing:
                job = heapq.heappop(self._queue)
            if job.reply.cancelled():
                continue
            try:
                plan = self._plan(job, total_ms)
            except LateError as error:
                if plans:  # perhaps only because of the requests before it
                    self._put_back(job)
                    break
                self.version_of(job).costs.relax()
                settle(job.reply, error)
                continue
            except Exception as error:
                settle(job.reply, public_error(error, "a request could not be read"))
                continue
            slack_ms = 1000 * ((plans[0].job if plans else job).deadline - self.clock())
            if plans and (plan.choice.is_degraded or total_ms + plan.choice.cost_ms > slack_ms):
                self._put_back(job)
                break
            plans.append(plan)
            total_ms += plan.choice.cost_ms
        return plans

    def _put_back(self, job: GenerationRequest) -> None:
        with self._queueing:
            heapq.heappush(self._queue, job)

    def _plan(self, job: GenerationRequest, before_ms: float) -> _GenerationPlan:
        """The plan of a request; raises LateError if no path fits before its deadline."""
        self._refresh()
        times = {"queue": 1000 * (self.clock() - job.arrived)}
        began = time.perf_counter()
        events = self.histories.of(job.user) if job.history is None else job.history
        record = self.records.get(job.scenario or "")
        steering, provenance = self.steer(job)
        times["instruction"] = 1000 * (time.perf_counter() - began)
        version = self.version_of(job)
        served = version.served
        inputs = served.prepare(events, steering, rules=job.rules)
        choice = choose(
            version.costs,
            state=self.cache.peek_state(inputs.key),
            slack_ms=1000 * (job.deadline - self.clock()) - before_ms,
            num_events=inputs.num_events,
            beam=served.model.config.beam if record is None else min(record.beam, served.model.config.beam),
            k=job.k,
            block=max(served.max_len // 8, 1),
        )
        if choice is None:
            raise LateError("not even the narrowest search fits before the deadline.")
        if choice.num_events < inputs.num_events:
            inputs = served.shorter(inputs, choice.num_events)
        return _GenerationPlan(job, version, inputs, choice, steering, provenance, times)

    def _fetch_memory(self, plan: _GenerationPlan) -> bool:
        """Sets the memory of a plan; False if that failed, and the request was answered with the error."""
        began = time.perf_counter()
        try:
            plan.memory, path = self._memory(plan)
        except Exception as error:
            settle(plan.job.reply, public_error(error, "a request could not be encoded"))
            return False
        plan.choice = plan.choice._replace(path=path)
        plan.times_ms["encode"] = 1000 * (time.perf_counter() - began)
        return True

    def _memory(self, plan: _GenerationPlan) -> tuple[EncoderMemory, MemoryPath]:
        """The memory of a history and its path; it is cached for the user's next request."""
        job, inputs, served, costs = plan.job, plan.inputs, plan.version.served, plan.version.costs
        key, path = inputs.key, plan.choice.path
        if self.cache.peek_state(key) == EntryState.HOST:
            self.cache.promote(key)
        memory = self.cache.pin(key, job)
        if memory is not None:
            self.cache.unpin(key, job, consumed=True)
            self._evictable.setdefault(key)
            return memory, "hit_device" if path == "full" else path  # encoded for another request of the batch
        is_cached = not plan.choice.is_degraded and self.cache.peek_state(key) is None
        lease = self.cache.reserve(key, user=job.user, num_bytes=served.num_bytes(inputs)) if is_cached else None
        began = time.perf_counter()
        try:
            memory = served.encode(inputs)
        except Exception:
            if lease is not None:
                self.cache.fail(lease)
            raise
        costs.observe(1000 * (time.perf_counter() - began), costs.encode(inputs.num_events))
        if lease is not None:
            self.cache.finish(lease, memory)
            self._evictable.setdefault(key)
        return memory, "full" if path in {"hit_device", "hit_host"} else path

    def steer(self, job: GenerationRequest) -> tuple[Steering, Provenance]:
        """What steers a request, and where its instruction comes from; raises DataError for an unknown trigger."""
        version, number = self.version_of(job), None if job.scenario is None else self.scenarios[job.scenario]
        steering = Steering(scenario=number, trigger=self._trigger(job))
        if steering.trigger is not None:
            version.served.trie.positions(torch.tensor([steering.trigger]))
        if (given := job.instruction) is not None:
            made = version.served.instruction_version
            provenance = Provenance(source="request", reason="given", kind="request", version=made, text=given.text)
            return replace(steering, vector=given.vector), provenance
        if version.instructions is None:
            return steering, Provenance(source="default", reason="not used")
        instruction, reason = version.instructions.of(job.user, job.scenario or ANY)
        if instruction is None:
            return steering, Provenance(source="default", reason=reason)
        vector = torch.from_numpy(instruction.vector)
        source: Literal["scenario", "any"] = "any" if instruction.scenario == ANY else "scenario"
        provenance = Provenance(
            source=source,
            reason=reason,
            kind="template" if instruction.provenance.startswith("template") else "model",
            version=instruction.version,
            text=instruction.text,
            written_by=instruction.provenance,
            written_s=instruction.written_s,
        )
        return replace(steering, vector=vector), provenance

    def _trigger(self, job: GenerationRequest) -> int | None:
        """The trigger item of a request by the rule of its scenario, if the run has a scenario file."""
        if (record := self.records.get(job.scenario or "")) is None:
            return job.trigger
        events = self.histories.of(job.user) if job.history is None else job.history
        return record.trigger_of(job.trigger, events.items[-1:].tolist())

    def _decode(self, plans: Sequence[_GenerationPlan]) -> None:
        """One beam search for all requests of a model and a width; if it fails, one for each."""
        began, costs = time.perf_counter(), plans[0].version.costs
        results: list[GeneratedList | Exception]
        try:
            results = list(self._search(plans))
        except Exception:
            _log.exception("a beam search failed; its requests are decoded one by one")
            results = [self._search_alone(plan) for plan in plans]
        took_ms = 1000 * (time.perf_counter() - began)
        costs.observe(took_ms / len(plans), costs.decode(plans[0].choice.width))
        for plan, result in zip(plans, results, strict=True):
            if isinstance(result, Exception):
                settle(plan.job.reply, result)
            else:
                self._reply(plan, result, took_ms)

    def _search(self, plans: Sequence[_GenerationPlan]) -> list[GeneratedList]:
        return plans[0].version.served.generate(
            [plan.inputs for plan in plans],
            [plan.memory for plan in plans if plan.memory is not None],
            [plan.steering for plan in plans],
            width=plans[0].choice.width,
            k=[plan.job.k for plan in plans],
        )

    def _search_alone(self, plan: _GenerationPlan) -> GeneratedList | Exception:
        try:
            return self._search([plan])[0]
        except Exception as error:
            return public_error(error, "a request could not be decoded")

    def _reply(self, plan: _GenerationPlan, generated: GeneratedList, decode_ms: float) -> None:
        path, job = plan.choice.path, plan.job
        self.counts["path", path] += 1
        if plan.version.instructions is not None:
            self.counts["instruction", plan.provenance.reason] += 1
        times_ms = {**plan.times_ms, "decode": decode_ms, "total": 1000 * (self.clock() - job.arrived)}
        answer = GeneratedItems(
            items=list(generated.items),
            log_probabilities=generated.log_probabilities,
            path=path,
            degraded=path in DEGRADED,
            instruction=plan.provenance,
            num_events=plan.inputs.num_events,
            beam=plan.choice.width,
            model=plan.version.name,
            semantic_ids=plan.version.served.trie.version,
            times_ms={name: round(ms, 3) for name, ms in times_ms.items()},
            allowed=generated.allowed,
        )
        settle(job.reply, answer)

    def _demote(self) -> bool:
        while self._evictable:
            if self.cache.demote(self._evictable.popitem(last=False)[0]):
                return True
        return False
