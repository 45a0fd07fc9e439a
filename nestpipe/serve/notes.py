"""What an instance was told to serve, in a file: if its process ends, the next one goes on with that, not with the command line's."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from nestpipe.errors import NestPipeError
from nestpipe.metrics import replace_file
from nestpipe.serve.engine import Engine
from nestpipe.serve.lineup import Lineup
from nestpipe.serve.swap import Load

_log = logging.getLogger("nestpipe.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Folders and steps of the models of a lineup; no `run` is the one that the process was started with."""

    run: str | None = None
    step: int | None = None
    compared: str | None = None
    compared_step: int | None = None
    share: float = 0.0


class Notes:
    """Without a file they end with the process."""

    def __init__(self, path: Path | None = None, *, first: Told | None = None):
        """`first` is what the command line says; what is in the file goes before it."""
        self._path, self._first = path, first or Told()
        self.told = _read(path) or self._first

    def keep(self, told: Told) -> None:
        """Raises OSError, and then nothing has changed."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, (json.dumps(asdict(told), indent=2) + "\n").encode())
        self.told = told

    def follow(self, engine: Engine, load: Load) -> None:
        """Gives an engine the models; if those of the file cannot be had, those of the command line. Raises what loading raises."""
        before = engine.lineup
        try:
            _use(engine, self.told, load)
        except (NestPipeError, OSError) as error:
            if self.told == self._first:
                raise
            _log.warning("what %s says cannot be served (%s); the models of the command line are", self._path, error)
            engine.use(before)
            self.told = self._first
            _use(engine, self.told, load)


def _use(engine: Engine, told: Told, load: Load) -> None:
    if told.run is not None:
        engine.use(Lineup(load(Path(told.run), told.step)))
    if told.compared is not None:
        engine.use(Lineup(engine.lineup.main, load(Path(told.compared), told.compared_step), told.share))


def _read(path: Path | None) -> Told | None:
    try:
        return None if path is None or not path.exists() else Told(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        _log.warning("%s cannot be read (%s); the models of the command line are served", path, error)
        return None
