"""Prints a summary of a sequence folder: counts, time span, features, quarantine, history lengths."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nestpipe.data.schema import Feature
from nestpipe.data.sequences import QUARANTINE, Sequences, StoredFeature

_BAR = 40


def describe(sequences: Sequences, *, histogram: bool = False) -> None:
    """Prints counts, time span, features and quarantine; on request how long the histories are."""
    console = Console()
    counts = sequences.meta["counts"]
    console.print(f"[bold]{escape(str(sequences.path))}[/bold]  digest {sequences.digest[:16]}", highlight=False)
    parts = [
        f"{counts[name]:,} {name}"
        for name in ("kept", "quarantined", "filtered", "duplicates")
        if counts[name] or name == "kept"
    ]
    console.print(f"{counts['read']:,} records read = {' + '.join(parts)}", highlight=False)
    unseen = counts["items"] - counts["logged_items"]
    more = f" ({unseen:,} of them only in the item table)" if unseen else ""
    console.print(
        f"{counts['users']:,} users, {counts['items']:,} items{more}, {counts['events']:,} events", highlight=False
    )
    if (span := sequences.meta["time_span_ms"]) is not None:
        console.print(f"from {_date(span[0])} to {_date(span[1])} UTC; {sequences.meta['tie_rule']}", highlight=False)
    for scope, table in sequences.meta["tables"].items():
        if scope == "text":
            console.print(
                f"item texts: {table['kept']:,} of {table['read']:,} records kept, {table['not_in_log']:,} of items that are not in the "
                f"log; {table['without_attributes']:,} items without text",
                highlight=False,
            )
            continue
        console.print(
            f"{scope} table: {table['kept']:,} of {table['read']:,} records kept, {table['not_in_log']:,} of them not in the log; "
            f"{table['without_attributes']:,} {scope}s without attributes",
            highlight=False,
        )
    _print_reasons(sequences, console)
    for note in sequences.meta["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False, style="yellow")
    if sequences.schema.features:
        console.print(_feature_table(sequences))
    if histogram:
        console.print(_length_table(np.diff(sequences.offsets)))


def _date(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _print_reasons(sequences: Sequences, console: Console) -> None:
    meta = sequences.meta
    sheets = {
        "log": meta["quarantine"],
        **{f"{scope} table": table["reasons"] for scope, table in meta["tables"].items() if scope != "text"},
    }
    for where, reasons in sheets.items():
        for reason, count in reasons.items():
            console.print(f"  quarantined from the {where}: {count:,} x {reason}", highlight=False, markup=False)
    for reason, count in meta["tables"].get("text", {}).get("reasons", {}).items():
        console.print(f"  left out of the item texts: {count:,} x {reason}", highlight=False, markup=False)
    for reason, count in meta["filtered"].items():
        console.print(f"  filtered: {count:,} x {reason}", highlight=False, markup=False)
    if any(sheets.values()):
        console.print(f"  the records are in {sequences.path / QUARANTINE}", highlight=False, markup=False)


def _feature_table(sequences: Sequences) -> Table:
    table = Table("feature", "kind", "scope", "rows", "missing", "details")
    stored = {"event": sequences.event_features, "item": sequences.item_features, "user": sequences.user_features}
    for feature in sequences.schema.features:
        values = stored[feature.scope][feature.name] if feature.scope in stored else None
        rows, missing = ("-", "-") if values is None else _rows_and_missing(values)
        table.add_row(feature.name, feature.kind, feature.scope, rows, missing, _details(feature, values))
    return table


def _rows_and_missing(stored: StoredFeature) -> tuple[str, str]:
    if stored.offsets is not None:
        return f"{len(stored.offsets) - 1:,}", f"{int((np.diff(stored.offsets) == 0).sum()):,}"
    first = stored.values if stored.values.ndim == 1 else stored.values[:, 0]
    return f"{len(first):,}", f"{int(np.isnan(first).sum()):,}"


def _details(feature: Feature, stored: StoredFeature | None) -> str:
    if feature.kind in {"id", "ids"}:
        return feature.encoding
    if feature.kind == "vector":
        return f"dim {feature.dim}"
    if stored is None or np.isnan(stored.values).all():
        return feature.transform
    low, high = np.nanmin(stored.values), np.nanmax(stored.values)
    return f"{low:g} to {high:g}, {feature.transform}"


def _length_table(lengths: np.ndarray) -> Table:
    """How many users have 1, 2 to 3, 4 to 7, ... events."""
    table = Table(
        "events",
        "users",
        "",
        title=f"lengths: median {np.median(lengths):g}, mean {lengths.mean():.1f}, max {lengths.max():,}",
    )
    power = np.log2(lengths).astype(int)
    counts = np.bincount(power)
    for index in np.flatnonzero(counts):
        bar = "█" * max(1, round(_BAR * counts[index] / counts.max()))
        table.add_row(f"{2**index:,} to {2 ** (index + 1) - 1:,}", f"{counts[index]:,}", bar)
    return table
