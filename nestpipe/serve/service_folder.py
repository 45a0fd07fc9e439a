"""RUN/serve: what the instances of a run share: the event log, the secret for tickets, the token for administration."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from nestpipe.errors import ConfigError

EVENTS = "events.log"


_SECRET_BYTES = 32


def kept_secret(path: Path) -> str:
    """The secret in a file that only its owner reads; made once, so that all instances of a run share it. Raises ConfigError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())  # a name without content would be a secret that everybody knows
    try:
        os.link(draft, path)  # unless another instance was first
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    found = path.read_text().strip()
    if len(found) < 2 * _SECRET_BYTES:
        raise ConfigError(
            f"{path} has {len(found)} characters, so it was cut or changed, and others could guess it. Remove it; it is made anew."
        )
    return found
