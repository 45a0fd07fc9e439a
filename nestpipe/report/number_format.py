"""One way to write each kind of number, everywhere in the report."""

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
    """Four digits that say something: 3.065, 6,668, 0.0002, 1.5e-06."""
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


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most so many; raises ValueError unless low < high."""
    if not low < high:
        raise ValueError(f"an axis from {low} to {high} has no ticks")
    power = math.floor(math.log10((high - low) / most))
    sizes = (digit * 10.0**exponent for exponent in (power, power + 1) for digit in (1, 2, 5))
    for size in sizes:
        first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
        if last - first < most:
            return [round(number * size, 12 - power) for number in range(first, last + 1)]
    raise ValueError(f"an axis from {low} to {high} has no ticks")


def _not_finite(number: float) -> str:
    return "not a number" if math.isnan(number) else "∞" if number > 0 else "−∞"
