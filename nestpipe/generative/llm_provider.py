"""Providers of instruction texts: a template, or a language model behind an OpenAI-compatible endpoint.

Only the near-line job calls a provider; the request path reads the store. Each text of a model's answer is validated. An
invalid or missing text is counted and replaced by the template's text, whose provenance says so. A circuit breaker stops
calling an endpoint that keeps failing.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import re
import ssl
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nestpipe.errors import ConfigError
from nestpipe.generative.config import EndpointConfig
from nestpipe.generative.prompt_builder import Action, InstructionRequest, InstructionResult

if TYPE_CHECKING:
    from httpx import AsyncClient  # an optional package

_STOP = frozenset({"and", "for", "from", "into", "the", "this", "that", "with", "without", "your", "our", "set", "new"})
_DECAY = 0.9  # factor of an action's weight per later action
_RECENT = 6  # latest actions that are searched for compared items
_BACKOFF_S = 0.5  # before the first retry; doubles with each further one
_PROMPT = (
    "You write one short instruction per shopper for a recommender: what they want next and why, in plain words, at most "
    "{max_chars} characters. Use the actions (oldest first, stronger ones weigh more), the trigger item, its complements and the season. "
    'Answer with JSON: {{"results": [{{"id": number, "text": string}}]}}, one result for each id.'
)
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
                "required": ["id", "text"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["results"],
    "additionalProperties": False,
}


class TemplateProvider:
    """Text from a template: interests weighted by recency and behaviour, compared items, complements of the trigger, season."""

    provenance = "template/1"

    def generate(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        return [InstructionResult(text=self.text(one), provenance=self.provenance) for one in requests]

    def text(self, request: InstructionRequest) -> str:
        """Deterministic: the same text for the same request, on every machine."""
        phrases = []
        if interests := _interests(request.actions):
            phrases.append(f"interested in {', '.join(interests)}")
        if compared := _compared(request.actions):
            phrases.append(f"compares {compared[0]} with {compared[1]}")
        if request.complements:
            phrases.append(f"{', '.join(request.complements)} may go with {request.trigger}")
        elif request.trigger:
            phrases.append(f"looked at {request.trigger}")
        if request.season:
            phrases.append(f"season {request.season}")
        return "; ".join(phrases) or "nothing is known yet"


def _words(text: str) -> list[str]:
    """The distinct content words of a title."""
    found = re.findall(r"[^\W\d_]{3,}", text.lower())
    return [word for word in dict.fromkeys(found) if word not in _STOP] or [text.lower()]


def _interests(actions: Sequence[Action], most: int = 5) -> list[str]:
    weights: dict[str, float] = defaultdict(float)
    for age, action in enumerate(reversed(actions)):
        for word in _words(action.text):
            weights[word] += action.weight * _DECAY**age
    return sorted(weights, key=lambda word: (-weights[word], word))[:most]


def _compared(actions: Sequence[Action]) -> tuple[str, str] | None:
    """The last two different items of one kind that were viewed, unless an item of that kind was carted or ordered."""
    recent = list(reversed(actions[-_RECENT:]))
    bought = {word for action in recent if action.level > 1 for word in _words(action.text)}
    for place, last in enumerate(recent):
        kinds = set(_words(last.text)) - bought
        for other in recent[place + 1 :]:
            if other.text != last.text and kinds & set(_words(other.text)):
                return last.text, other.text
    return None


class _RetryableError(Exception):
    """A failed call that may be retried; the text is the name of its counter."""


class _BadAnswerError(Exception):
    """An invalid answer; the text is the name of its counter."""


class OpenAICompatibleProvider:
    """Calls a language model; `counts` has the number of accepted and replaced texts and of each failure."""

    def __init__(self, config: EndpointConfig, *, api_key: str = "", clock: Callable[[], float] = time.monotonic):
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError("an endpoint needs the package 'httpx': pip install 'nestpipe[serve]'.") from None
        if problems := list(config.problems()):
            raise ConfigError("the endpoint: " + "; ".join(problems) + ".")
        self._config, self._clock = config, clock
        self._template = TemplateProvider()
        self.provenance = f"model/{config.model}"
        self.counts: Counter[str] = Counter()
        self._failures, self._open_until = 0, -math.inf
        # A compressed body could be far larger than max_bytes once decoded.
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        # Loading certificates is slow and every batch has its own client, so the context is shared.
        verify = ssl.create_default_context() if config.url.startswith("https:") else False
        self._client = functools.partial(
            httpx.AsyncClient, headers=headers, verify=verify, trust_env=False, timeout=None
        )
        self._unreachable = httpx.HTTPError, httpx.InvalidURL, OSError

    def generate(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        return asyncio.run(self._all(requests))

    async def _all(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        size, slots = self._config.requests_per_call, asyncio.Semaphore(self._config.concurrency)
        async with self._client() as http:
            calls = [self._call(http, slots, requests[first : first + size]) for first in range(0, len(requests), size)]
            return [result for results in await asyncio.gather(*calls) for result in results]

    async def _call(
        self, http: AsyncClient, slots: asyncio.Semaphore, requests: Sequence[InstructionRequest]
    ) -> list[InstructionResult]:
        """One call; the template writes the texts that it did not return."""
        texts: dict[int, str] = {}
        try:
            async with slots:
                answer = await self._answer(http, self._body(requests))
            texts = self._texts(answer, len(requests))
        except (_RetryableError, _BadAnswerError) as problem:
            self.counts[str(problem)] += 1
        self.counts["accepted"] += len(texts)
        self.counts["replaced"] += len(requests) - len(texts)
        return [
            InstructionResult(text=texts[place], provenance=self.provenance)
            if place in texts
            else InstructionResult(text=self._template.text(request), provenance=self._template.provenance)
            for place, request in enumerate(requests)
        ]

    async def _answer(self, http: AsyncClient, body: dict[str, Any]) -> bytes:
        """The body of the response; raises _RetryableError when all attempts have failed."""
        for attempt in itertools.count():
            if self._clock() < self._open_until:
                raise _RetryableError("circuit_open")
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    answer = await self._post(http, body)
                self._failures = 0
                return answer
            except (TimeoutError, _RetryableError, *self._unreachable) as error:
                problem = _problem(error)
            self._failures += 1
            if self._failures >= self._config.max_failures:
                self._failures, self._open_until = 0, self._clock() + self._config.cooldown_s
            if attempt >= self._config.retries:
                raise _RetryableError(problem)
            self.counts[problem] += 1
            await asyncio.sleep(min(_BACKOFF_S * 2**attempt, self._config.timeout_s))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _post(self, http: AsyncClient, body: dict[str, Any]) -> bytes:
        chunks, size = [], 0
        async with http.stream("POST", f"{self._config.url.rstrip('/')}/chat/completions", json=body) as answer:
            if answer.status_code in {408, 429} or answer.status_code >= 500:
                raise _RetryableError(f"status_{answer.status_code}")
            if answer.status_code != 200:
                raise _BadAnswerError(f"status_{answer.status_code}")
            async for chunk in answer.aiter_raw():
                size += len(chunk)
                if size > self._config.max_bytes:
                    raise _BadAnswerError("oversize")
                chunks.append(chunk)
        return b"".join(chunks)

    def _body(self, requests: Sequence[InstructionRequest]) -> dict[str, Any]:
        shoppers = [{"id": place, **request.content()} for place, request in enumerate(requests)]
        return {
            "model": self._config.model,
            "temperature": 0,
            "max_tokens": 64 + len(requests) * self._config.max_chars,
            "messages": [
                {"role": "system", "content": _PROMPT.format(max_chars=self._config.max_chars)},
                {"role": "user", "content": json.dumps(shoppers, ensure_ascii=False)},
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "instructions", "strict": True, "schema": _SCHEMA},
            },
        }

    def _texts(self, answer: bytes, num_requests: int) -> dict[int, str]:
        """Valid texts by request; raises _BadAnswerError if the whole answer is invalid."""
        try:
            content = json.loads(json.loads(answer)["choices"][0]["message"]["content"])
        except (ValueError, RecursionError):
            raise _BadAnswerError("invalid_json") from None
        except (KeyError, IndexError, TypeError):
            raise _BadAnswerError("wrong_schema") from None
        results = content.get("results") if isinstance(content, dict) else None
        if not isinstance(results, list):
            raise _BadAnswerError("wrong_schema")
        found: dict[int, str] = {}
        seen: Counter[int] = Counter()
        for one in results:
            place, text = (one.get("id"), one.get("text")) if isinstance(one, dict) else (None, None)
            if type(place) is not int or not isinstance(text, str) or not 0 <= place < num_requests:
                self.counts["wrong_schema"] += 1
                continue
            seen[place] += 1
            if (valid := self._valid(text)) is None:
                self.counts["bad_text"] += 1
            else:
                found[place] = valid
        for place in [place for place, times in seen.items() if times > 1]:
            self.counts["duplicate"] += 1  # ambiguous, so neither is used
            found.pop(place, None)
        self.counts["missing"] += num_requests - len(seen)
        return found

    def _valid(self, text: str) -> str | None:
        """The text on one line; None if it is empty, too long or not printable."""
        line = " ".join(text.split())
        return line if line.isprintable() and 0 < len(line) <= self._config.max_chars else None


def _problem(error: Exception) -> str:
    """The name of its counter."""
    if isinstance(error, _RetryableError):
        return str(error)
    return "timeout" if isinstance(error, TimeoutError) else "unreachable"
