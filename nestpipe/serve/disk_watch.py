"""A full disk: writes are refused with 503 `disk_full`, and the service is not ready until a write succeeds again."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from msgspec import Struct

from nestpipe.serve.request_errors import BadRequestError

_log = logging.getLogger("nestpipe.serve")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PROBE_BYTES = 1 << 16  # that must fit before writes are tried again


class DiskWatch:
    """Whether the disk of a folder took the last write."""

    def __init__(self, folder: Path | None):
        """None: nothing is written on this machine."""
        self._folder = folder
        self.is_full = False

    def guarding(self, run: Callable[[Any], Awaitable[Struct]]) -> Callable[[Any], Awaitable[Struct]]:
        """A call that writes, with an answer for a full disk: the caller knows that nothing was stored, and may repeat it."""

        async def guarded(request: Any) -> Struct:
            try:
                answer = await run(request)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not self.is_full:
                    _log.error("the disk of %s is full: writes are refused", self._folder)
                self.is_full = True
                message = (
                    "the disk is full and nothing of this request was stored; free some space, then send it again."
                )
                raise BadRequestError(message, status=503, code="disk_full") from error
            self.is_full = False
            return answer

        return guarded

    def check(self) -> bool:
        """Whether the disk takes writes; after a refusal this is tried. Blocks."""
        if self.is_full and self._folder is not None:
            try:
                with TemporaryFile(dir=self._folder) as probe:
                    probe.write(bytes(_PROBE_BYTES))
                    probe.flush()
                    os.fsync(probe.fileno())
                self.is_full = False
            except OSError as error:
                if error.errno not in _FULL:
                    raise
        return not self.is_full
