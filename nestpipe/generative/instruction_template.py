"""Instruction texts without a language model: a template, of one's own for a scenario or the built-in one.

A template is text with the fields below in braces. It is a list of phrases between semicolons, and a phrase is left out if a
field of it is empty: "wants what goes with {trigger}; season {season}".
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import defaultdict
from collections.abc import Mapping, Sequence

from nestpipe.generative.prompt_builder import Action, InstructionRequest, InstructionResult

FIELDS = ("interests", "compared", "trigger", "complements", "season", "scenario")
_STOP = frozenset({"and", "for", "from", "into", "the", "this", "that", "with", "without", "your", "our", "set", "new"})
_DECAY = 0.9  # factor of an action's weight per later action
_RECENT = 6  # latest actions that are searched for compared items


def template_problem(template: str) -> str | None:
    """What is wrong with a template, or None."""
    try:
        fields = [name for _, name, spec, conversion in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        return f"is no template ({error})"
    if unknown := [name for name in fields if name not in FIELDS]:
        return f"has the field {{{unknown[0]}}}; there are {', '.join(f'{{{name}}}' for name in FIELDS)}"
    return None if template.strip() else "is empty"


class TemplateProvider:
    """Text from a template: interests weighted by recency and behaviour, compared items, complements of the trigger, season."""

    def __init__(self, templates: Mapping[str, str] | None = None):
        """`templates` by scenario; others, and `*`, have the built-in one."""
        self._templates = dict(templates or {})
        content = json.dumps(sorted(self._templates.items())).encode()
        own = f"+{hashlib.blake2b(content, digest_size=4).hexdigest()}" if self._templates else ""
        self.provenance = f"template/1{own}"

    def generate(self, requests: Sequence[InstructionRequest]) -> list[InstructionResult]:
        return [InstructionResult(text=self.text(one), provenance=self.provenance) for one in requests]

    def text(self, request: InstructionRequest) -> str:
        """Deterministic: the same text for the same request, on every machine."""
        template = self._templates.get(request.scenario)
        phrases = _built_in(request) if template is None else _filled(template, request)
        return "; ".join(phrases) or "nothing is known yet"


def _built_in(request: InstructionRequest) -> list[str]:
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
    return phrases


def _filled(template: str, request: InstructionRequest) -> list[str]:
    values = {
        "interests": ", ".join(_interests(request.actions)),
        "compared": " and ".join(_compared(request.actions) or ()),
        "trigger": request.trigger,
        "complements": ", ".join(request.complements),
        "season": request.season,
        "scenario": request.scenario,
    }
    phrases = []
    for phrase in template.split(";"):
        names = [name for _, name, _, _ in string.Formatter().parse(phrase) if name is not None]
        if all(values[name] for name in names) and phrase.strip():
            phrases.append(phrase.strip().format_map(values))
    return phrases


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
