"""Section: what each rank held and did, and how much memory it all takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nestpipe.embedding.buckets import Owners
from nestpipe.report.inputs import Missing, RunFacts, SavedCheckpoint, TracedSteps
from nestpipe.report.number_format import count, milliseconds, num_bytes, share, significant
from nestpipe.report.svg import Markup, note, paragraph, table

_MOST_RANKS = 64


def balance(facts: RunFacts) -> Iterator[Markup]:
    yield from _ranks(facts)
    if isinstance(facts.saved, Missing):
        yield note(facts.saved.text)
        return
    yield _tables(facts.saved)


def _ranks(facts: RunFacts) -> Iterator[Markup]:
    """A row per rank with whatever was recorded about it."""
    number = facts.num_ranks
    if number is None:
        yield note("How many ranks trained is not recorded; runs of earlier versions did not keep it.")
        return
    columns = {head: values for head, values in _columns(facts, number).items() if values}
    if columns:
        rows = [(str(rank), *(values[rank] for values in columns.values())) for rank in range(min(number, _MOST_RANKS))]
        yield table(("rank", *columns), rows, caption="Balance over ranks")
        yield paragraph(_evenness(facts, number), kind="soft")
    if number > _MOST_RANKS:
        yield note(f"{number - _MOST_RANKS:,} more ranks are not listed.")
    if "ranks" not in facts.summary:
        yield note("Memory and tokens of each rank are written when a run ends; there are none yet.")


def _columns(facts: RunFacts, number: int) -> dict[str, list[str]]:
    own = of_ranks(facts, number)
    found = {
        "tokens": [count(one["num_tokens"]) for one in own],
        "peak memory": [num_bytes(one["memory_bytes"]) for one in own],
        "rows": [count(rows) for rows in rows_of_ranks(facts, number)],
    }
    if isinstance(facts.traced, TracedSteps) and len(facts.traced.report.ranks) == number:
        ranks = facts.traced.report.ranks.values()
        found["median step, ms"] = [milliseconds(one.step_ms.median) for one in ranks]
        found["busy"] = [share(one.share["busy"]) for one in ranks]
    return found


def _evenness(facts: RunFacts, number: int) -> str:
    """The fullest rank over the mean: 1 is even."""
    own = of_ranks(facts, number)
    per_rank: dict[str, list[float]] = {
        "tokens": [one["num_tokens"] for one in own],
        "rows": list(rows_of_ranks(facts, number)),
    }
    shown = [
        f"{name} {significant(max(values) * len(values) / sum(values))}"
        for name, values in per_rank.items()
        if sum(values)
    ]
    return f"Fullest rank over the mean, 1 is even: {', '.join(shown) or 'nothing to compare'}. Tokens are those since the last start."


def of_ranks(facts: RunFacts, number: int) -> list[dict[str, Any]]:
    """What the ranks wrote at the end; empty if they did not, or were others."""
    found = facts.summary.get("ranks", [])
    return found if len(found) == number else []


def rows_of_ranks(facts: RunFacts, number: int) -> list[int]:
    """Embedding rows that each rank owns, by the latest checkpoint."""
    if isinstance(facts.saved, Missing) or not facts.saved.tables:
        return []
    buckets = [sum(rows) for rows in zip(*(one.rows_per_bucket for one in facts.saved.tables), strict=True)]
    if number > len(buckets):
        return []
    owners = Owners(len(buckets), number)
    return [sum(buckets[bucket] for bucket in owners.buckets_of(rank)) for rank in range(number)]


def _tables(saved: SavedCheckpoint) -> Markup:
    rows = []
    for one in saved.tables:
        number = sum(one.rows_per_bucket)
        sizes = (count(number), count(one.dim), count(number * one.dim), num_bytes(one.num_bytes))
        rows.append((f"table {one.name}", *sizes, ", ".join(one.state) or "none"))
    dense = num_bytes(saved.manifest.files["dense.safetensors"]["bytes"])
    rows.append(("dense part", "–", "–", count(saved.num_dense), dense, "–"))
    heads = ("part", "rows", "dim", "weights", "size on disk, with state", "state beside each row")
    return table(heads, rows, caption=f"What is learned, by the checkpoint of step {saved.manifest.step:,}")
