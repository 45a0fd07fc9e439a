"""Section: tokens, rows and memory of each rank, and the sizes of what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nestpipe.embedding.buckets import Owners
from nestpipe.profiling.svg import Markup
from nestpipe.report.html import note, paragraph, table
from nestpipe.report.inputs import Missing, RunFacts, SavedCheckpoint, TracedSteps
from nestpipe.report.number_format import count, milliseconds, num_bytes, share, significant

_MOST_RANKS = 64


def balance(facts: RunFacts) -> Iterator[Markup]:
    yield from _ranks(facts)
    if isinstance(facts.saved, Missing):
        yield note(facts.saved.text)
        return
    yield _tables(facts.saved)


def _ranks(facts: RunFacts) -> Iterator[Markup]:
    """A row per rank with what was recorded about it."""
    number = facts.num_ranks
    if number is None:
        yield note("The number of ranks is not recorded; earlier versions did not store it.")
        return
    columns = {head: values for head, values in _columns(facts, number).items() if values}
    if columns:
        rows = [(str(rank), *(values[rank] for values in columns.values())) for rank in range(min(number, _MOST_RANKS))]
        yield table(("rank", *columns), rows, caption="Balance over ranks")
        yield paragraph(_imbalance(facts, number), kind="soft")
    if number > _MOST_RANKS:
        yield note(f"{number - _MOST_RANKS:,} more ranks are not listed.")
    if "ranks" not in facts.summary:
        yield note("Memory and tokens of each rank are written at the end of a run; there are none yet.")


def _columns(facts: RunFacts, number: int) -> dict[str, list[str]]:
    own = of_ranks(facts, number)
    columns = {
        "tokens": [count(one["num_tokens"]) for one in own],
        "peak memory": [num_bytes(one["memory_bytes"]) for one in own],
        "rows": [count(rows) for rows in rows_of_ranks(facts, number)],
    }
    if isinstance(facts.traced, TracedSteps) and len(facts.traced.report.ranks) == number:
        ranks = facts.traced.report.ranks.values()
        columns["median step, ms"] = [milliseconds(one.step_ms.median) for one in ranks]
        columns["busy"] = [share(one.share["busy"]) for one in ranks]
    return columns


def _imbalance(facts: RunFacts, number: int) -> str:
    """Largest rank over the mean; 1 is balanced."""
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
    return f"Largest rank over the mean, 1 is balanced: {', '.join(shown) or 'nothing to compare'}. Tokens count from the last start."


def of_ranks(facts: RunFacts, number: int) -> list[dict[str, Any]]:
    """The summary of each rank; empty if there is none, or of another number of ranks."""
    ranks = facts.summary.get("ranks", [])
    return ranks if len(ranks) == number else []


def rows_of_ranks(facts: RunFacts, number: int) -> list[int]:
    """Embedding rows that each rank owns, from the latest checkpoint."""
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
    dense = num_bytes(sum(blob.num_bytes for blob in saved.manifest.blobs if not blob.table))
    rows.append(("dense part", "–", "–", count(saved.num_dense), dense, "–"))
    heads = ("part", "rows", "dim", "weights", "size on disk, with state", "optimizer state")
    return table(heads, rows, caption=f"Learned parameters, from the checkpoint of step {saved.manifest.step:,}")
