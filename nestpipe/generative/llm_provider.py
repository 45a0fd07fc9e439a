"""Provider of instruction texts from a language model behind an OpenAI-compatible endpoint.

Only the near-line job calls a provider; the request path reads the store. Each text of a model's answer is validated. An
invalid or missing text is counted and replaced by the template's text, whose provenance says so. What happens when the
endpoint fails is a choice:

    default         bounded retries, then the template; a circuit breaker stops calling an endpoint that keeps failing
    config.wait     retry until the model answers; a refusal such as status 401 is an error
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.config import EndpointConfig
from nestpipe.generative.fitted_size import FittedSize
from nestpipe.generative.instruction_template import TemplateProvider
from nestpipe.generative.llm_prompt import BadAnswerError, chat_body, read_answer, valid_texts
from nestpipe.generative.prompt_builder import InstructionRequest, InstructionResult

if TYPE_CHECKING:
    from httpx import AsyncClient, Response  # an optional package

_log = logging.getLogger(__name__)
_BACKOFF_S = 0.5  # before the first retry; doubles with each further one
_LONGEST_WAIT_S = 30.0  # between two attempts of a provider that waits
_LONGEST_CALL_S = 3600.0  # deadline of a call of a provider that waits: doubles with each timeout
_MOST_PER_CALL = 8
_SCHEMA_WORDS = (b"schema", b"response_format", b"grammar")  # of a status 400 that refuses the bounded schema


class _RetryableError(Exception):
    """A failed call that may be retried; the text is the name of its counter."""


class _SchemaRefusedError(Exception):
    """The endpoint does not know the bounded schema."""


@dataclass(slots=True)
class LlmUsage:
    """What a model has cost."""

    texts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def texts_per_s(self) -> float:
        return self.texts / self.seconds if self.seconds > 0 else 0.0


class OpenAICompatibleProvider:
    """Calls a language model; `counts` has the number of accepted and replaced texts and of each failure."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        api_key: str = "",
        template: TemplateProvider | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError("an endpoint needs the package 'httpx': pip install 'nestpipe[serve]'.") from None
        if problems := list(config.problems()):
            raise ConfigError("the endpoint: " + "; ".join(problems) + ".")
        self._config, self._clock = config.filled(), clock
        self._template = template or TemplateProvider()
        self.provenance = f"model/{config.model}"
        self.counts: Counter[str] = Counter()
        self.usage = LlmUsage()
        self._failures, self._open_until = 0, -math.inf
        self._is_bounded = True
        fixed = config.requests_per_call
        self._size = FittedSize(target_s=config.timeout_s / 3, least=fixed or 1, most=fixed or _MOST_PER_CALL)
        # A compressed body could be far larger than max_bytes once decoded.
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        # Loading certificates is slow and every batch has its own client, so the context is shared.
        verify = ssl.create_default_context() if config.url.startswith("https:") else False
        self._client = functools.partial(
            httpx.AsyncClient, headers=headers, verify=verify, trust_env=False, timeout=None
        )
        self._unreachable = httpx.HTTPError, httpx.InvalidURL, OSError

    def generate(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        """One result for each request; raises DataError if the provider waits and the endpoint refuses its calls."""
        began = time.monotonic()
        texts = asyncio.run(self._all(requests))
        self.usage.seconds += time.monotonic() - began
        self.usage.texts += len(texts)
        self.counts["accepted"] += len(texts)
        self.counts["replaced"] += len(requests) - len(texts)
        return [
            InstructionResult(text=texts[place], provenance=self.provenance)
            if place in texts
            else InstructionResult(text=self._template.text(request), provenance=self._template.provenance)
            for place, request in enumerate(requests)
        ]

    async def _all(self, requests: Sequence[InstructionRequest]) -> dict[int, str]:
        """The model's texts by place."""
        waiting, texts = deque(enumerate(requests)), dict[int, str]()

        async def work(http: AsyncClient) -> None:
            while waiting:
                taken = [waiting.popleft() for _ in range(min(self._size.value, len(waiting)))]
                texts.update(await self._texts(http, taken))

        async with self._client() as http:
            await asyncio.gather(*(work(http) for _ in range(self._config.concurrency)))
        return texts

    async def _texts(self, http: AsyncClient, wanted: Sequence[tuple[int, InstructionRequest]]) -> dict[int, str]:
        """Texts of one call; a provider that waits repeats what is missing, one request per call."""
        found: dict[int, str] = {}
        calls = [list(wanted)]
        for attempt in range(1 + self._config.retries if self._config.wait else 1):
            for call in calls:
                found |= await self._call(http, call, attempt)
            calls = [[one] for one in wanted if one[0] not in found]
        return found

    async def _call(
        self, http: AsyncClient, wanted: Sequence[tuple[int, InstructionRequest]], attempt: int
    ) -> dict[int, str]:
        requests = [request for _, request in wanted]
        try:
            try:
                answer = await self._answer(http, requests, attempt)
            except _SchemaRefusedError:
                self._is_bounded = False
                self.counts["schema_refused"] += 1
                answer = await self._answer(http, requests, attempt)
            results, tokens = read_answer(answer)
        except (_RetryableError, BadAnswerError) as problem:
            self.counts[str(problem)] += 1
            if str(problem) == "truncated":
                self._size.halve()
            return {}
        self.usage.prompt_tokens += tokens.get("prompt_tokens", 0)
        self.usage.completion_tokens += tokens.get("completion_tokens", 0)
        texts = valid_texts(results, len(requests), self._config.max_chars, self.counts)
        return {wanted[place][0]: text for place, text in texts.items()}

    async def _answer(self, http: AsyncClient, requests: Sequence[InstructionRequest], attempt: int) -> bytes:
        """The body of the response; raises _RetryableError when all attempts have failed."""
        is_bounded = self._is_bounded
        body = chat_body(requests, self._config, bounded=is_bounded, attempt=attempt)
        waits, deadline_s, timeout_s = self._config.wait, self._config.timeout_s, self._config.timeout_s
        for number in itertools.count():
            if self._clock() < self._open_until:
                raise _RetryableError("circuit_open")
            began = time.monotonic()
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await self._post(http, body, is_bounded)
                self._failures = 0
                self._size.add(len(requests), time.monotonic() - began)
                return answer
            except (TimeoutError, _RetryableError, *self._unreachable) as error:
                problem = _problem(error)
            if problem == "timeout":
                self._size.halve()
                deadline_s = min(2 * deadline_s, _LONGEST_CALL_S) if waits else deadline_s
            self._failures += 1
            if self._failures >= self._config.max_failures and not waits:
                self._failures, self._open_until = 0, self._clock() + self._config.cooldown_s
            if number >= self._config.retries and not waits:
                raise _RetryableError(problem)
            self.counts[problem] += 1
            if waits and number == self._config.retries:
                _log.warning("%s does not answer (%s); waiting for it.", self._config.url, problem)
            await asyncio.sleep(min(_BACKOFF_S * 2 ** min(number, 20), _LONGEST_WAIT_S if waits else timeout_s))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _post(self, http: AsyncClient, body: dict[str, Any], is_bounded: bool) -> bytes:
        chunks, size = [], 0
        async with http.stream("POST", f"{self._config.url.rstrip('/')}/chat/completions", json=body) as answer:
            if answer.status_code in {408, 429} or answer.status_code >= 500:
                raise _RetryableError(f"status_{answer.status_code}")
            if answer.status_code != 200:
                await self._refuse(answer, is_bounded)
            async for chunk in answer.aiter_raw():
                size += len(chunk)
                if size > self._config.max_bytes:
                    raise BadAnswerError("oversize")
                chunks.append(chunk)
        return b"".join(chunks)

    async def _refuse(self, answer: Response, is_bounded: bool) -> None:
        """Raises the exception that a refusal means."""
        said = b""
        async for chunk in answer.aiter_raw():
            said += chunk[: 1000 - len(said)]
            if len(said) >= 1000:
                break
        if is_bounded and answer.status_code == 400 and any(word in said.lower() for word in _SCHEMA_WORDS):
            raise _SchemaRefusedError
        if self._config.wait:
            raise DataError(
                f"the endpoint {self._config.url} refuses a call with status {answer.status_code}: "
                f"{said.decode(errors='replace')[:300]!r}. Waiting would not help. What was written before is kept: fix "
                "--endpoint.url, --endpoint.model or --api-key-file and start again."
            )
        raise BadAnswerError(f"status_{answer.status_code}")


def _problem(error: Exception) -> str:
    """The name of its counter."""
    if isinstance(error, _RetryableError):
        return str(error)
    return "timeout" if isinstance(error, TimeoutError) else "unreachable"
