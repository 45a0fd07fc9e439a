"""Progress of `nestpipe think`: one line that is updated on a terminal, a line every 15 s elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from nestpipe.generative.llm_provider import OpenAICompatibleProvider
from nestpipe.generative.prompt_builder import InstructionProvider

_LINE_S = 15.0


class ProgressLine:
    """`text()` is the state of the work, `remaining()` how many of its units are left."""

    def __init__(
        self,
        provider: InstructionProvider,
        *,
        text: Callable[[], list[str]],
        remaining: Callable[[], int],
        quiet: bool,
    ):
        self._provider, self._state, self._remaining, self._quiet = provider, text, remaining, quiet
        self._began = self._said = time.monotonic()
        self._first: int | None = None
        self._moves = sys.stderr.isatty()

    def show(self, _: object = None) -> None:
        if self._first is None:
            self._began, self._first = time.monotonic(), self._remaining()  # the first batch includes loading
        if self._moves and not self._quiet:
            print(f"\r{self._text()}\x1b[K", end="", file=sys.stderr, flush=True)
        elif not self._quiet and time.monotonic() - self._said > _LINE_S:
            self._said = time.monotonic()
            print(self._text(), file=sys.stderr, flush=True)

    def end(self) -> None:
        if not self._quiet:
            print(("\r\x1b[K" if self._moves else "") + self._text(), file=sys.stderr, flush=True)

    def _text(self) -> str:
        parts = [*self._state(), *model_state(self._provider)]
        if left := self._left():
            parts.append(left)
        return "think: " + " · ".join(parts)

    def _left(self) -> str:
        """The expected time, from the speed so far."""
        remaining, seconds = self._remaining(), time.monotonic() - self._began
        if seconds < 5 or not remaining or self._first is None or self._first <= remaining:
            return ""
        left_s = remaining * seconds / (self._first - remaining)
        return f"about {left_s / 60:.0f} min left" if left_s > 90 else f"about {left_s:.0f} s left"


def model_state(provider: InstructionProvider) -> list[str]:
    """Speed, cost and failures of a language model; nothing for a template."""
    if not isinstance(provider, OpenAICompatibleProvider):
        return []
    used = provider.usage
    seen = ", ".join(f"{name} {count:,}" for name, count in sorted(provider.counts.items()) if count)
    parts = [f"endpoint: {seen or 'no calls'}"]
    if used.texts:
        tokens = f"{used.prompt_tokens:,} + {used.completion_tokens:,} tokens"
        parts.append(f"{used.texts_per_s:.2f} texts/s, {tokens} (prompt + answer)")
    return parts
