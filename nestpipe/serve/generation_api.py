"""A generative instance over HTTP. Requests are parsed and limits are applied before anything is queued.

POST /v1/recommend /v1/similar /v1/generate /v1/events /v1/invalidate
GET  /v1/recommend/{user}?k=10 /healthz /readyz /metrics /openapi.json
admin, on its own port with a token:  GET /state, POST /drain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from nestpipe.data.sequences import Sequences
from nestpipe.rules.compiled_rules import CompiledRules
from nestpipe.serve.config import Limits
from nestpipe.serve.generation_engine import GenerationRequest, GenerativeVersion, Generator
from nestpipe.serve.known_items import KnownItems, ScoredItems
from nestpipe.serve.openapi import generative_calls
from nestpipe.serve.prometheus import GenerationMetrics
from nestpipe.serve.recommendation import RecommendationAnswer, RecommendationJob
from nestpipe.serve.recommending import HistoryScores, RecommendingInstance
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import Run
from nestpipe.serve.request_instruction import RequestInstruction
from nestpipe.serve.request_rules import requested_rules
from nestpipe.serve.schemas import GeneratedItems, GenerateRequest, InstanceRecommendRequest, SteeredRecommendRequest
from nestpipe.serve.worker_thread import replied


class GenerativeInstance(RecommendingInstance):
    """The handlers of one process."""

    title = "A generative instance of nestpipe"

    def __init__(self, generator: Generator, *, name: str, budget_ms: float, limits: Limits | None = None):
        """`budget_ms` is the deadline of requests that name none."""
        self.generator, self.metrics = generator, GenerationMetrics(generator)
        limits, beam = limits or Limits(), generator.versions.main.served.model.config.beam
        calls = generative_calls(limits, beam=beam, scenarios=list(generator.scenarios))
        super().__init__(generator, self.metrics, name=name, calls=calls, limits=limits, budget_ms=budget_ms)

    def _handlers(self) -> dict[str, Run]:
        return {"generate": self._generate, **super()._handlers()}

    def state(self) -> dict[str, Any]:
        """The state of the process, for /state; it names no user."""
        generator = self.generator
        main = generator.versions.main
        return {
            "instance": self.name,
            **generator.describe_versions(),
            "semantic_ids": main.served.trie.version,
            "scenarios": list(generator.scenarios),
            "draining": self.is_draining,
            "waiting": generator.num_waiting,
            "entries": len(generator.cache),
            "device": asdict(generator.cache.device),
            "host": asdict(generator.cache.host),
            "estimates": asdict(main.costs),
        }

    async def _generate(self, request: GenerateRequest) -> GeneratedItems:
        arrived = self._arrived()
        self._check_scenario(request.scenario)
        record = self.generator.records.get(request.scenario or "")
        budget_ms = self._budget_ms if record is None else record.latency_ms
        deadline_ms, user = request.deadline_ms or budget_ms, self._ids.user(request.user)
        version, instruction = await self._instruction(user, request.instruction)
        rules = requested_rules(self.rules, request)
        compiled = rules.on(self._known(user).items)
        job = GenerationRequest(
            user=user,
            k=request.k,
            deadline=arrived + deadline_ms / 1000,
            rules=rules,
            scenario=request.scenario,
            trigger=None if request.trigger is None else self._ids.item(request.trigger),
            instruction=instruction,
            history=await self._history(user, request.history),
            version=version,
        )
        answer = await self._generated(job)
        found = self._shown(ScoredItems(cast(list[int], answer.items), answer.log_probabilities))
        return replace(
            answer,
            items=self._ids.own_items(found.items),
            log_probabilities=found.scores,
            unknown=compiled.unknown,
            allowed=None if rules.is_empty else answer.allowed,
        )

    async def _generated(self, job: GenerationRequest) -> GeneratedItems:
        self.generator.submit(job)
        answer = await replied(job.reply, self._worker.waits)
        self.metrics.generate_seconds.observe(answer.times_ms["total"] / 1e3)
        return answer

    async def _instruction(self, user: int, text: str | None) -> tuple[GenerativeVersion, RequestInstruction | None]:
        """The model that answers a user, and the text of a request as it reads it."""
        version = self.generator.versions.of(user)
        return version, None if text is None else await run_in_threadpool(version.texts.of, text)

    async def _steer(self, job: RecommendationJob, request: InstanceRecommendRequest) -> None:
        assert isinstance(request, SteeredRecommendRequest)
        self._check_scenario(request.scenario)
        job.scenario = request.scenario
        job.trigger = None if request.trigger is None else self._ids.item(request.trigger)
        job.served, job.instruction = await self._instruction(job.user, request.instruction)

    def _check_scenario(self, scenario: str | None) -> None:
        if scenario is not None and scenario not in self.generator.scenarios:
            names = ", ".join(self.generator.scenarios) or "none"
            raise BadRequestError(f"there is no scenario {scenario!r}; there are: {names}.", code="bad_scenario")

    async def _find(self, job: RecommendationJob) -> RecommendationAnswer:
        if (popular := self._popular(job, self._model_name(job.user))) is not None:
            return popular
        answer = await self._generated(_generation(job))
        return RecommendationAnswer(
            found=ScoredItems(cast(list[int], answer.items), answer.log_probabilities, answer.allowed or 0),
            path=answer.path if answer.degraded else "generated",
            model=answer.model,
            times_ms=answer.times_ms,
            degraded=answer.degraded,
            instruction=answer.instruction,
        )

    def _popular_rules(self, job: RecommendationJob, known: KnownItems) -> CompiledRules:
        """Within the pool of the scenario."""
        rules, masks = super()._popular_rules(job, known), self.generator.versions.of(job.user).served.scenarios
        number = self.generator.scenarios.get(job.scenario or "", 0)
        return rules if masks is None else rules.within(masks[number].numpy())

    def _scorer(self, job: RecommendationJob) -> HistoryScores:
        generator = self.generator
        version = job.served = generator.versions.of(job.user)

        def score(histories: Sequence[Sequences], items: Sequence[int]) -> Tensor:
            steering, _ = generator.steer(_generation(job))
            return version.served.scores(histories, items, steering=steering)

        return score

    def _known(self, user: int | None = None) -> KnownItems:
        return self.generator.versions.of(user).served.known

    def _max_len(self) -> int:
        return self.generator.versions.main.served.max_len

    def _model_name(self, user: int | None = None) -> str:
        return self.generator.versions.of(user).name

    def _check(self, events: Sequences) -> None:
        for version in self.generator.models:
            version.served.prepare(events)

    def _forget_inputs(self, user: int) -> int:
        return self.generator.cache.invalidate(user)


def _generation(job: RecommendationJob) -> GenerationRequest:
    return GenerationRequest(
        user=job.user,
        k=job.k,
        deadline=job.deadline,
        scenario=job.scenario,
        trigger=job.trigger,
        instruction=job.instruction,
        history=job.history,
        rules=job.rules,
        version=job.served,
    )
