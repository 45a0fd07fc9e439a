"""Numbers as text: one format per kind of number."""

from __future__ import annotations

import math

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def count(number: float) -> str:
    """12,345"""
    return f"{number:,.0f}" if math.isfinite(number) else _not_finite(number)


def metric(number: float) -> str:
    """0.8437"""
    return f"{number:.4f}" if math.isfinite(number) else _not_finite(number)


def interval(mean: float, low: float, high: float) -> str:
    """0.8437 [0.8303, 0.8577]"""
    return f"{metric(mean)} [{metric(low)}, {metric(high)}]"


def share(part: float) -> str:
    """94.1 %"""
    return f"{100 * part:.1f} %" if math.isfinite(part) else _not_finite(part)


def significant(number: float) -> str:
    """Four significant digits: 3.065, 6,668, 0.0002, 1.5e-06."""
    if not math.isfinite(number):
        return _not_finite(number)
    size = abs(number)
    if size >= 1000:
        return f"{number:,.0f}"
    if size and size < 1e-3:
        return f"{number:.3g}"
    return f"{number:.4g}"


def milliseconds(number: float) -> str:
    """12.34"""
    return f"{number:,.2f}"


def duration(seconds: float) -> str:
    """94.1 s, 12 min 05 s, 3 h 20 min"""
    if not math.isfinite(seconds):
        return _not_finite(seconds)
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def num_bytes(number: float) -> str:
    """1.26 MB; steps of 1,000."""
    size, unit = float(number), 0
    while size >= 999.5 and unit + 1 < len(_BYTES):
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_BYTES[unit]}" if not unit else f"{size:.3g} {_BYTES[unit]}"


def _not_finite(number: float) -> str:
    return "not a number" if math.isnan(number) else "∞" if number > 0 else "−∞"
