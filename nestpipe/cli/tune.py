"""`nestpipe tune WHAT`: measures on this machine and says which settings fit. A list of what can be tuned; each has a file."""

from __future__ import annotations

import difflib
import importlib

from nestpipe.errors import ConfigError

TUNERS = {
    "balance": (
        "nestpipe.cli.tune_balance",
        "what samples cost by their length, for ranks of equal cost (data.balance)",
    ),
    "pipeline": (
        "nestpipe.cli.tune_pipeline",
        "parts, ramp, depth and pool of the pipeline, from a few steps of a recipe",
    ),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        rows = "\n".join(f"  {name:<12}{text}" for name, (_, text) in TUNERS.items())
        example = "Example: nestpipe tune pipeline tiny"
        print(f"usage: nestpipe tune WHAT ...\n\n{rows}\n\n{example}\n'nestpipe tune WHAT --help' says more.")
        return 0
    name, *rest = argv
    if name not in TUNERS:
        nearest = difflib.get_close_matches(name, TUNERS, n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(TUNERS)}"
        raise ConfigError(f"'{name}' cannot be tuned; {hint}")
    code: int = importlib.import_module(TUNERS[name][0]).main(rest)
    return code
