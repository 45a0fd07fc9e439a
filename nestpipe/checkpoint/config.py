"""Settings of checkpoints; torch-free, for the command line."""

from __future__ import annotations

from typing import Literal

Word = Literal["added", "dropped", "reshaped", "optimizer", "model", "data"]
"""What may differ between a new run and the one that it is initialised from (`--init-from --allow`)."""
