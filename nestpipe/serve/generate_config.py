"""Names and sizes of what generates."""

from __future__ import annotations

INSTRUCTIONS = "instructions.sqlite"
LEDGER = "think.sqlite"
