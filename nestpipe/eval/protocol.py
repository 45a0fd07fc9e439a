"""The protocol of an evaluation as data: what was ranked against what. Figures of two protocols are not comparable.

split       which event of a user is the target, and which events were held out of training
ties        order of events with equal times, which decides what the last event is
seen        items removed from the ranking
candidates  what the target is ranked against
history     what a model may read; declared inputs of the request, such as its time, are listed by the audit
targets     test or validation, one per user or every event, all users or a sample
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from nestpipe.config import Config
from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from nestpipe.models.config import DCNConfig, RankingConfig

Target = Literal["test", "validation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How a figure was measured, in words that two figures must share to stand side by side."""

    split: str
    ties: str
    seen: str
    candidates: str
    history: str
    targets: str

    def __str__(self) -> str:
        return "; ".join(f"{name} {value}" for name, value in asdict(self).items())

    @staticmethod
    def from_json(content: dict[str, Any] | None) -> Protocol | None:
        """None for a report of an earlier version, which has no protocol."""
        return None if content is None else Protocol(**content)


def protocol_of(sequences: Sequences, config: Config, target: Target) -> Protocol:
    """The protocol under which the settings of a run evaluate it on its data."""
    data, own = config.data, config.eval
    by_label = isinstance(config.model, RankingConfig | DCNConfig)
    split = "last event" if data.split == "last" else f"first event since {data.split_time}"
    if by_label:
        split = "last event" if data.split == "last" else f"events since {data.split_time}"
    split += ", the event before held out for validation" if data.validation else ", all before trained on"
    # How much a model reads is its own choice, unless that decides which items are removed.
    history = "all events before the target"
    if own.seen == "input" and not by_label:
        history = f"at most {data.max_len} events before the target, cut at multiples of {data.truncate_block}"
    users = f"a fixed sample of {own.max_users:,} users" if own.max_users else "all users"
    return Protocol(
        split=split,
        ties=sequences.ties,
        seen="-" if by_label else own.seen,
        candidates="logged events" if by_label else f"all {len(sequences.catalogue):,} items",
        history=history,
        targets=f"{target}, {'every event' if by_label else 'one per user'}, {users}",
    )


def differences(protocols: Sequence[Protocol | None], names: Sequence[str]) -> list[str]:
    """Every field in which a protocol differs from the first one, with both values."""
    first, found = protocols[0], list[str]()
    for other, name in zip(protocols[1:], names[1:], strict=True):
        if first is None or other is None:
            if first is not other:
                found.append(f"the protocol of {names[0] if first is None else name} is not recorded")
            continue
        found += [
            f"{one.name}: {getattr(first, one.name)} in {names[0]}, {getattr(other, one.name)} in {name}"
            for one in fields(Protocol)
            if getattr(first, one.name) != getattr(other, one.name)
        ]
    return found


def require_same(protocols: Sequence[Protocol | None], names: Sequence[str]) -> None:
    """Raises DataError that names every difference: figures of two protocols must not stand side by side."""
    if found := differences(protocols, names):
        raise DataError(
            "the evaluations have different protocols, so their figures cannot be compared:\n"
            + "\n".join(f"  - {line}" for line in found)
            + "\nEvaluate both in one protocol: ingest with the same --ties, and use the same split and --seen."
        )
