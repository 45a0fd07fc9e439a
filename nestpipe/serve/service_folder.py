"""RUN/serve, shared by the instances of a run: the event log, the secret of tickets, the admin token, the prefix stores."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from nestpipe.errors import ConfigError

EVENTS = "events.log"
PREFIXES = "prefixes"  # folder of prefix stores
_ELSEWHERE = "prefix-stores.txt"  # stores outside of it, one path per line
_SECRET_BYTES = 32


def kept_secret(path: Path) -> str:
    """The secret in a file that only its owner reads, created once for all instances of a run. Raises ConfigError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())  # an empty file would be a secret that everybody knows
    try:
        os.link(draft, path)  # unless another instance was first
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    secret = path.read_text().strip()
    if len(secret) < 2 * _SECRET_BYTES:
        raise ConfigError(
            f"{path} has {len(secret)} characters, so it was truncated or changed and could be guessed. Remove it; the next start creates a new one."
        )
    return secret


def note_store(serve: Path, folder: Path) -> None:
    """Records a prefix store outside of RUN/serve, so that 'nestpipe forget' finds it."""
    if folder.resolve() not in store_folders(serve):
        serve.mkdir(parents=True, exist_ok=True)
        with (serve / _ELSEWHERE).open("a") as file:
            file.write(f"{folder.resolve()}\n")


def store_folders(serve: Path) -> list[Path]:
    """The prefix stores of a run."""
    inside, elsewhere = serve / PREFIXES, serve / _ELSEWHERE
    found = [one.resolve() for one in inside.iterdir() if one.is_dir()] if inside.is_dir() else []
    return found + ([Path(line) for line in elsewhere.read_text().splitlines()] if elsewhere.exists() else [])
