"""Where a run's numbers go: a tracker with three methods, and the file and the viewer behind it.

    {"step": 10, "loss": 7.21, "tokens_per_s": 81234.0}      one line per `log`
    {"summary": {"hr@10": 0.204}}                            one line per `summary`

A line is written whole and at once, so a kill loses at most the line in progress; `JsonlTracker.resume` removes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from nestpipe.errors import ConfigError, DataError, TrainError

_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers; they are written as these strings


class Tracker(Protocol):
    """What the trainer needs to report its numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one step; steps never decrease."""
        ...

    def summary(self, values: Mapping[str, Any]) -> None:
        """What the run came to."""
        ...

    def close(self) -> None:
        """Writes what is pending; nothing is tracked afterwards."""
        ...


class JsonlTracker:
    """One JSON object per line."""

    def __init__(self, path: Path) -> None:
        """Starts a new file; raises TrainError if there are lines in it already."""
        if path.exists() and path.stat().st_size:
            raise TrainError(
                f"{path} already holds the metrics of a run, which a new one would mix with its own. "
                "Continue with JsonlTracker.resume, or choose another folder."
            )
        self._open(path)

    @classmethod
    def resume(cls, path: Path, step: int) -> JsonlTracker:
        """Continues after `step`: drops lines of later steps, summaries and a half-written last line."""
        if path.exists():
            lines = [json.dumps(record) for record in _records(path) if record.get("step", math.inf) <= step]
            replace_file(path, "".join(line + "\n" for line in lines).encode())
        tracker = cls.__new__(cls)
        tracker._open(path)
        return tracker

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "step" in values or "summary" in values:
            raise ValueError(f"metrics at step {step} use a reserved name, 'step' or 'summary': {sorted(values)}")
        self._write({"step": step, **values})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._write({"summary": values})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_legal(record), allow_nan=False) + "\n")


class TensorBoardTracker:
    """TensorBoard event files in a folder."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """With `resume_step`, events that an interrupted run wrote after that step are hidden; raises ConfigError."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard events were asked for in {folder}, but the package does not import ({error}). "
                "Install it with: pip install 'nestpipe[tensorboard]', or switch the events off."
            ) from error
        first_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)

    def summary(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(_legal(values), indent=2)
        self._writer.add_text("summary", f"```json\n{text}\n```")

    def close(self) -> None:
        self._writer.close()


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def summary(self, values: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.summary(values)

    def close(self) -> None:
        """Closes all, also if one of them fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, with nan and inf as numbers again; a half-written last line is left out.

    Raises DataError, with the line number, if any other line is broken.
    """
    records = _records(path)
    for record in records:
        record.update({name: float(value) for name, value in record.items() if value in _NOT_FINITE})
    return records


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a crash, finds the old or the new content and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break was not finished
    return [_record(path, number, line) for number, line in enumerate(lines, start=1)]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is not JSON ({error}): {line[:80]!r}. Remove the line.") from error
    if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
        raise DataError(f"{path}, line {number} is not a JSON object: {line[:80]!r}. Remove the line.")
    return record


def _legal(value: Any) -> Any:
    """The same value in the types that JSON has; numbers of numpy and torch become floats, the rest its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _legal(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_legal(inner) for inner in value]
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return str(value)
