"""The rules of a service: named sets, and the compiler of what requests bring."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nestpipe.errors import ConfigError
from nestpipe.rules.compiled_rules import CompiledRules, RuleCompiler, no_rules
from nestpipe.rules.item_attributes import AttributeSource, Ints
from nestpipe.rules.rule_set import RuleError, Rules, named_rules, read_rule_sets


class RequestRules:
    """The rules of one request, compiled for the items of whichever model answers it."""

    def __init__(self, compiler: RuleCompiler | None = None, rules: Rules | None = None):
        self._compiler, self._rules = compiler, rules or Rules()
        self._compiled: tuple[Ints, CompiledRules] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the caller has named no rule."""
        return self._rules == Rules()

    def on(self, items: Ints) -> CompiledRules:
        """The rules for items [I]; raises RuleError."""
        if self._compiler is None:
            return no_rules(len(items))
        if self._compiled is None or self._compiled[0] is not items:
            self._compiled = (items, self._compiler.compile(self._rules, items))
        return self._compiled[1]


class RuleBook:
    """Compiles the rules of requests, with named sets."""

    def __init__(self, source: AttributeSource, sets: Mapping[str, Rules] | None = None):
        """Raises ConfigError if a set names what does not exist."""
        self._compiler, self.sets = RuleCompiler(source), dict(sets or {})
        for name, rules in self.sets.items():
            try:
                self._compiler.check(rules)
            except RuleError as error:
                raise ConfigError(f"the set of rules {name!r}: {error}") from None

    @staticmethod
    def open(source: AttributeSource, path: Path | None) -> RuleBook:
        """With the named sets of a file; raises ConfigError that names it."""
        try:
            return RuleBook(source, None if path is None else read_rule_sets(path))
        except ConfigError as error:
            raise ConfigError(str(error) if str(error).startswith(f"{path}") else f"{path}: {error}") from None

    def of(self, rules: Rules, name: str | None = None) -> RequestRules:
        """The rules of a request on top of a named set; raises RuleError for a set that does not exist."""
        return RequestRules(self._compiler, rules if name is None else rules.over(named_rules(self.sets, name)))
