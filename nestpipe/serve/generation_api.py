"""A generative instance over HTTP. Requests are parsed and limits are applied before anything is queued.

POST /v1/generate /v1/events /v1/invalidate      GET /healthz /readyz /metrics /openapi.json
admin, on its own port with a token:  GET /state, POST /drain
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, cast

from msgspec.structs import replace

from nestpipe.data.sequences import Sequences
from nestpipe.serve.config import Limits
from nestpipe.serve.generation_engine import GenerationRequest, Generator
from nestpipe.serve.http_instance import HttpInstance
from nestpipe.serve.openapi import generative_calls
from nestpipe.serve.prometheus import GenerationMetrics
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import Run
from nestpipe.serve.schemas import GeneratedItems, GenerateRequest


class GenerativeInstance(HttpInstance):
    """The handlers of one process."""

    title = "A generative instance of nestpipe"

    def __init__(self, generator: Generator, *, name: str, budget_ms: float, limits: Limits | None = None):
        """`budget_ms` is the deadline of requests that name none."""
        self.generator, self.metrics, self._budget_ms = generator, GenerationMetrics(generator), budget_ms
        limits, beam = limits or Limits(), generator.served.model.config.beam
        calls = generative_calls(limits, beam=beam, scenarios=list(generator.scenarios))
        super().__init__(generator, self.metrics, name=name, calls=calls, limits=limits)

    def _handlers(self) -> dict[str, Run]:
        return {"generate": self._generate}

    def state(self) -> dict[str, Any]:
        """The state of the process, for /state; it names no user."""
        generator = self.generator
        return {
            "instance": self.name,
            "model": generator.served.name,
            "semantic_ids": generator.served.trie.version,
            "scenarios": list(generator.scenarios),
            "draining": self.is_draining,
            "waiting": generator.num_waiting,
            "entries": len(generator.cache),
            "device": asdict(generator.cache.device),
            "host": asdict(generator.cache.host),
            "estimates": asdict(generator.estimates),
        }

    async def _generate(self, request: GenerateRequest) -> GeneratedItems:
        generator, arrived = self.generator, self.generator.clock()
        if request.scenario is not None and request.scenario not in generator.scenarios:
            names = ", ".join(generator.scenarios) or "none"
            raise BadRequestError(
                f"there is no scenario {request.scenario!r}; there are: {names}.", code="bad_scenario"
            )
        deadline_ms, user = request.deadline_ms or self._budget_ms, self._ids.user(request.user)
        job = GenerationRequest(
            user=user,
            k=request.k,
            deadline=arrived + deadline_ms / 1000,
            scenario=request.scenario,
            trigger=None if request.trigger is None else self._ids.item(request.trigger),
            history=await self._history(user, request.history),
        )
        generator.submit(job)
        answer = await asyncio.wrap_future(job.reply)
        self.metrics.generate_seconds.observe(answer.times_ms["total"] / 1e3)
        return replace(answer, items=self._ids.own_items(cast(list[int], answer.items)))

    def _check(self, events: Sequences) -> None:
        self.generator.served.prepare(events)

    def _forget_inputs(self, user: int) -> int:
        return self.generator.cache.invalidate(user)
