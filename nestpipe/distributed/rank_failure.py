"""Why a rank ended, in the file that torchrun's agent names: for the launcher's last line, and for its decision to restart.

No torch in here: the command line writes it.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nestpipe.errors import CommError, NestPipeError

_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a rank ended; `is_consequence` if it only lost another one, or was stopped because of it."""

    rank: int
    exit_code: int  # negative: the signal
    message: str
    is_consequence: bool


def record_failure(message: str, error: BaseException) -> None:
    """Writes the message of a rank; nothing outside torchrun. Best effort: the rank has printed it too."""
    if not (path := os.environ.get(_FILE)):
        return
    is_lost_peer = isinstance(error, CommError)
    content = {
        "message": message,
        "timestamp": int(time.time()),
        "lost_peer": is_lost_peer,
        # A mistake of configuration or data would be the same after a restart.
        "permanent": isinstance(error, NestPipeError) and not is_lost_peer,
    }
    with suppress(OSError):
        Path(path).write_text(json.dumps(content))
