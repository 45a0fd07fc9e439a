"""Rules on the command line: --filter FIELD=VALUE ..., and a named set of --rules FILE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError
from nestpipe.rules.rule_set import Rules, named_rules, parse_rules, read_rule_sets


def given_rules(filters: Sequence[str], path: Path | None, name: str, sequences: Sequences) -> Rules:
    """The rules of the flags: the named set, and filters on top of it. Raises ConfigError or RuleError."""
    kinds = {feature.name: feature.kind for feature in sequences.schema.of_scope("item")}
    own = parse_rules({"filter": dict(_filter(word, kinds) for word in filters)})
    if path is None:
        if name:
            raise ConfigError(f"--rule-set {name} is a set of a file; name it with --rules FILE.")
        return own
    sets = read_rule_sets(path)
    if not name and len(sets) != 1:
        raise ConfigError(f"{path} has {len(sets)} sets; name one with --rule-set: {', '.join(sets) or 'none'}.")
    return own.over(named_rules(sets, name or next(iter(sets))))


def _filter(word: str, kinds: dict[str, Any]) -> tuple[str, Any]:
    field, equals, text = word.partition("=")
    if not equals or not field or not text:
        raise ConfigError(
            f"--filter {word!r} is no filter; write FIELD=VALUE, FIELD=VALUE,VALUE or FIELD=LOW..HIGH, such as price=5..20."
        )
    if kinds.get(field) != "number":
        return field, text.split(",")
    low, dots, high = text.partition("..")
    if dots:
        return field, {name: _number(word, one) for name, one in (("gte", low), ("lte", high)) if one}
    return field, [_number(word, one) for one in text.split(",")]


def _number(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--filter {word!r}: {text!r} is no number, but the field holds numbers.") from None
