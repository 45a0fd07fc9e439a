"""Own ids that came after ingestion, with their numbers: what the vocabularies of the sequence folder do not have yet."""

from __future__ import annotations

from collections.abc import Mapping

from nestpipe.state.service_state import Entry


class GrownIds:
    """Texts and numbers of 'user', 'item' and id features. A forgotten text is gone; its number is never given out again."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {}
        self._texts: dict[str, dict[int, str]] = {}
        self._next: dict[str, int] = {}

    def add(self, entry: Entry) -> None:
        """Takes an entry {"of", "number", "text"}."""
        name, number, text = entry["of"], int(entry["number"]), entry["text"]
        texts, numbers = self._texts.setdefault(name, {}), self._numbers.setdefault(name, {})
        if (before := texts.pop(number, None)) is not None:
            numbers.pop(before, None)
        if text is not None:
            texts[number], numbers[text] = text, number
        if entry.get("counted", True):  # hashes are no counters
            self._next[name] = max(self._next.get(name, 0), number + 1)

    def number_of(self, name: str, text: str) -> int | None:
        return self._numbers.get(name, {}).get(text)

    def text_of(self, name: str, number: int) -> str | None:
        return self._texts.get(name, {}).get(number)

    def next_number(self, name: str) -> int:
        """The first number that was not given out here."""
        return self._next.get(name, 0)

    def next_numbers(self) -> Mapping[str, int]:
        return self._next

    def tables(self) -> Mapping[str, Mapping[int, str]]:
        """The texts by number of each name."""
        return self._texts
