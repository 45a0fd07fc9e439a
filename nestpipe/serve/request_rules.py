"""The rules of an HTTP request: its fields, on top of the named set that it asks for."""

from __future__ import annotations

from msgspec import Struct

from nestpipe.rules.rule_book import RequestRules, RuleBook
from nestpipe.rules.rule_set import RULE_FIELDS, RuleError, parse_rules


def requested_rules(book: RuleBook, request: Struct) -> RequestRules:
    """Raises RuleError for rules that are not understood."""
    fields = {name: getattr(request, name, None) for name in RULE_FIELDS}
    return book.of(
        parse_rules({name: one for name, one in fields.items() if one is not None}), getattr(request, "rules", None)
    )


def refuse_rules(error: Exception) -> tuple[int, str] | None:
    """The status and code of a request whose rules are not understood."""
    return (400, f"bad_{error.field}") if isinstance(error, RuleError) else None
