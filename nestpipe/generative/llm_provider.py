"""Who writes instructions: a template that is always there, or a language model behind an OpenAI-compatible endpoint.

Only the near-line job has a provider; the request path reads what is in the store. A model's answer is taken apart text by text, and
whatever is not a legal answer to its request is counted and replaced by the template's, which says so in its provenance.
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
_DECAY = 0.9  # of an action's weight for every action behind it
_RECENT = 6  # actions among which somebody compares
_PAUSE_S = 0.5  # before the second attempt; twice as long before each further one
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
    """Interests weighted by recency and behaviour, what is being compared, what goes with the trigger, the season."""

    provenance = "template/1"

    def generate(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        return [InstructionResult(text=self.text(one), provenance=self.provenance) for one in requests]

    def text(self, request: InstructionRequest) -> str:
        """The same for the same request, on every machine."""
        parts = []
        if interests := _interests(request.actions):
            parts.append(f"interested in {', '.join(interests)}")
        if compared := _compared(request.actions):
            parts.append(f"compares {compared[0]} with {compared[1]}")
        if request.complements:
            parts.append(f"{', '.join(request.complements)} may go with {request.trigger}")
        elif request.trigger:
            parts.append(f"looked at {request.trigger}")
        if request.season:
            parts.append(f"season {request.season}")
        return "; ".join(parts) or "nothing is known yet"


def _words(text: str) -> list[str]:
    """The words of a title that may say what it is, each once."""
    found = re.findall(r"[^\W\d_]{3,}", text.lower())
    return [word for word in dict.fromkeys(found) if word not in _STOP] or [text.lower()]


def _interests(actions: Sequence[Action], most: int = 5) -> list[str]:
    weights: dict[str, float] = defaultdict(float)
    for age, action in enumerate(reversed(actions)):
        for word in _words(action.text):
            weights[word] += action.weight * _DECAY**age
    return sorted(weights, key=lambda word: (-weights[word], word))[:most]


def _compared(actions: Sequence[Action]) -> tuple[str, str] | None:
    """The last two different items of a kind that were only looked at, if none of the kind was taken in the end."""
    recent = list(reversed(actions[-_RECENT:]))
    taken = {word for action in recent if action.level > 1 for word in _words(action.text)}
    for place, last in enumerate(recent):
        kinds = set(_words(last.text)) - taken
        for other in recent[place + 1 :]:
            if other.text != last.text and kinds & set(_words(other.text)):
                return last.text, other.text
    return None


class _NoAnswerError(Exception):
    """A call that may be tried again; the text is what is counted."""


class _BadAnswerError(Exception):
    """An answer that is none; the text is what is counted."""


class OpenAICompatibleProvider:
    """Asks a language model; `counts` says what came of it how often."""

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
        self._failures, self._rests_until = 0, -math.inf
        # What comes packed could be a thousand times as large as what was counted.
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        # Certificates take long to load, and every batch has a client of its own.
        verify = ssl.create_default_context() if config.url.startswith("https:") else False
        self._client = functools.partial(
            httpx.AsyncClient, headers=headers, verify=verify, trust_env=False, timeout=None
        )
        self._unreachable = httpx.HTTPError, httpx.InvalidURL, OSError

    def generate(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        return asyncio.run(self._all(requests))

    async def _all(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        size, turns = self._config.per_call, asyncio.Semaphore(self._config.concurrency)
        async with self._client() as http:
            calls = [self._call(http, turns, requests[first : first + size]) for first in range(0, len(requests), size)]
            return [result for results in await asyncio.gather(*calls) for result in results]

    async def _call(
        self, http: AsyncClient, turns: asyncio.Semaphore, requests: Sequence[InstructionRequest]
    ) -> list[InstructionResult]:
        """One call; the template's results for whatever it did not bring."""
        texts: dict[int, str] = {}
        try:
            async with turns:
                answer = await self._answer(http, self._body(requests))
            texts = self._texts(answer, len(requests))
        except (_NoAnswerError, _BadAnswerError) as problem:
            self.counts[str(problem)] += 1
        self.counts["taken"] += len(texts)
        self.counts["replaced"] += len(requests) - len(texts)
        return [
            InstructionResult(text=texts[place], provenance=self.provenance)
            if place in texts
            else InstructionResult(text=self._template.text(request), provenance=self._template.provenance)
            for place, request in enumerate(requests)
        ]

    async def _answer(self, http: AsyncClient, body: dict[str, Any]) -> bytes:
        """The body of an answer, after at most so many attempts."""
        for attempt in itertools.count():
            if self._clock() < self._rests_until:
                raise _NoAnswerError("resting")
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    answer = await self._post(http, body)
                self._failures = 0
                return answer
            except (TimeoutError, _NoAnswerError, *self._unreachable) as error:
                problem = _problem(error)
            self._failures += 1
            if self._failures >= self._config.give_up:
                self._failures, self._rests_until = 0, self._clock() + self._config.rest_s
            if attempt >= self._config.retries:
                raise _NoAnswerError(problem)
            self.counts[problem] += 1
            await asyncio.sleep(min(_PAUSE_S * 2**attempt, self._config.timeout_s))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, http: AsyncClient, body: dict[str, Any]) -> bytes:
        parts, size = [], 0
        async with http.stream("POST", f"{self._config.url.rstrip('/')}/chat/completions", json=body) as answer:
            if answer.status_code in {408, 429} or answer.status_code >= 500:
                raise _NoAnswerError(f"status_{answer.status_code}")
            if answer.status_code != 200:
                raise _BadAnswerError(f"status_{answer.status_code}")
            async for part in answer.aiter_raw():
                size += len(part)
                if size > self._config.max_bytes:
                    raise _BadAnswerError("oversize")
                parts.append(part)
        return b"".join(parts)

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
        """Legal texts by request; raises _BadAnswerError if the answer is none at all."""
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
            if (legal := self._legal(text)) is None:
                self.counts["bad_text"] += 1
            else:
                found[place] = legal
        for place in [place for place, times in seen.items() if times > 1]:
            self.counts["twice"] += 1  # nobody can tell which one is meant
            found.pop(place, None)
        self.counts["missing"] += num_requests - len(seen)
        return found

    def _legal(self, text: str) -> str | None:
        """The text on one line, if it is one that can be kept."""
        line = " ".join(text.split())
        return line if line.isprintable() and 0 < len(line) <= self._config.max_chars else None


def _problem(error: Exception) -> str:
    """What is counted."""
    if isinstance(error, _NoAnswerError):
        return str(error)
    return "timeout" if isinstance(error, TimeoutError) else "unreachable"
