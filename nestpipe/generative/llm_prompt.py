"""What a language model is asked, and which of its texts are taken.

The schema of an answer is bounded: as many results as requests, each with its own id, each text of a limited length. A small
model under an unbounded schema lists until its tokens are used up, and the JSON ends in the middle.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nestpipe.generative.config import EndpointConfig
from nestpipe.generative.instruction_store import ANY
from nestpipe.generative.prompt_builder import InstructionRequest

_PROMPT = (
    "You write one short instruction per shopper for a recommender: what they want next and why, in plain words, at most "
    "{max_chars} characters. Use the actions (oldest first, stronger ones weigh more), the trigger item, its complements and the season. "
    'Answer with JSON on one line: {{"results":[{{"id":number,"text":string}}]}}, one result for each id.'
)


class BadAnswerError(Exception):
    """An invalid answer; the text is the name of its counter."""


def chat_body(
    requests: Sequence[InstructionRequest], config: EndpointConfig, *, bounded: bool = True, attempt: int = 0
) -> dict[str, Any]:
    """The body of a call of /chat/completions; a later attempt has another temperature, hence other texts."""
    shoppers = [{"id": place, **_content(one, config.max_actions)} for place, one in enumerate(requests)]
    return {
        "model": config.model,
        "temperature": min(0.4 * attempt, 1.2),
        "max_tokens": 64 + len(requests) * (config.max_chars + 32),
        "messages": [
            {"role": "system", "content": _PROMPT.format(max_chars=config.max_chars)},
            {"role": "user", "content": json.dumps(shoppers, ensure_ascii=False)},
        ],
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "instructions",
                "strict": True,
                "schema": answer_schema(len(requests) if bounded else None, config.max_chars),
            },
        },
    }


def _content(request: InstructionRequest, max_actions: int) -> dict[str, Any]:
    """A request without what says nothing: every token of a prompt takes time."""
    content = request.content()
    actions = request.actions[-max_actions:]
    if all((one.level, one.weight) == (0, 1.0) for one in actions):
        content["actions"] = [{"text": one.text} for one in actions]
    else:
        content["actions"] = [{"text": one.text, "level": one.level, "weight": one.weight} for one in actions]
    return {name: value for name, value in content.items() if value and value != ANY}


def answer_schema(num_requests: int | None, max_chars: int) -> dict[str, Any]:
    """JSON schema of an answer: bounded to a number of requests, or for endpoints that refuse bounds."""
    text: dict[str, Any] = {"type": "string"}
    if num_requests is None:
        results: dict[str, Any] = {"type": "array", "items": _object(id={"type": "integer"}, text=text)}
    else:
        text |= {"minLength": 1, "maxLength": max_chars}
        results = {
            "type": "array",
            "prefixItems": [_object(id={"const": place}, text=text) for place in range(num_requests)],
            "minItems": num_requests,
            "maxItems": num_requests,
        }
    return _object(results=results)


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_answer(answer: bytes) -> tuple[list[Any], dict[str, int]]:
    """The results of an answer, and its numbers of tokens; raises BadAnswerError if the whole answer is invalid."""
    try:
        body = json.loads(answer)
        choice = body["choices"][0]
        message = choice["message"]["content"]
        is_cut = choice.get("finish_reason") == "length"
    except (ValueError, RecursionError):
        raise BadAnswerError("invalid_json") from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise BadAnswerError("wrong_schema") from None
    if is_cut:
        raise BadAnswerError("truncated")
    try:
        content = json.loads(message)
    except (ValueError, RecursionError):
        raise BadAnswerError("invalid_json") from None
    except TypeError:
        raise BadAnswerError("wrong_schema") from None
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise BadAnswerError("wrong_schema")
    return results, _tokens(body.get("usage"))


def _tokens(usage: Any) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens")
    found = {name: usage.get(name) for name in names} if isinstance(usage, dict) else {}
    return {name: count for name, count in found.items() if type(count) is int and count > 0}


def valid_texts(results: Sequence[Any], num_requests: int, max_chars: int, counts: Counter[str]) -> dict[int, str]:
    """Valid texts by request; `counts` gets why others are not taken."""
    found: dict[int, str] = {}
    seen: Counter[int] = Counter()
    for one in results:
        place, text = (one.get("id"), one.get("text")) if isinstance(one, dict) else (None, None)
        if type(place) is not int or not isinstance(text, str) or not 0 <= place < num_requests:
            counts["wrong_schema"] += 1
            continue
        seen[place] += 1
        # A small model may continue with JSON inside of the text.
        line = " ".join(re.split(r"[{}]", text)[0].split()).rstrip(" ,;:")
        if line.isprintable() and 0 < len(line) <= max_chars:
            found[place] = line
        else:
            counts["bad_text"] += 1
    for place in [place for place, times in seen.items() if times > 1]:
        counts["duplicate"] += 1  # ambiguous, so neither is used
        found.pop(place, None)
    counts["missing"] += num_requests - len(seen)
    return found
