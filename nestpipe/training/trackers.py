"""Trackers of a run's metrics: a JSON-lines file, TensorBoard, and the progress on the terminal.

    {"step": 10, "loss": 7.21, "tokens_per_s": 81234.0}      one line per `log`
    {"summary": {"hr@10": 0.204}}                            one line per `summary`

Each line is one write, so a kill leaves at most one partial line; `JsonlTracker.resume` removes it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from nestpipe.atomic_files import raw_records, replace_file
from nestpipe.errors import ConfigError, TrainError


class Tracker(Protocol):
    """Receives the metrics of a training loop."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step; steps never decrease."""
        ...

    def summary(self, values: Mapping[str, Any]) -> None:
        """Records the final values of a run."""
        ...

    def close(self) -> None:
        """Flushes and closes; called once, last."""
        ...


class JsonlTracker:
    """One JSON object per line."""

    def __init__(self, path: Path) -> None:
        """Starts a new file; raises TrainError if it is not empty."""
        if path.exists() and path.stat().st_size:
            raise TrainError(
                f"{path} already holds the metrics of another run. "
                "Continue it with JsonlTracker.resume, or choose another folder."
            )
        self._open(path)

    @classmethod
    def resume(cls, path: Path, step: int) -> JsonlTracker:
        """Continues after `step`: drops lines of later steps, summaries and a partial last line."""
        if path.exists():
            lines = [json.dumps(record) for record in raw_records(path) if record.get("step", math.inf) <= step]
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
        self._file.write(json.dumps(_to_json(record), allow_nan=False) + "\n")


class TensorBoardTracker:
    """TensorBoard event files in a folder."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """With `resume_step`, events that an interrupted run wrote after that step are hidden; raises ConfigError."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard events in {folder} need a package that cannot be imported ({error}). "
                "Install it with: pip install 'nestpipe[tensorboard]', or turn train.tensorboard off."
            ) from error
        first_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)

    def summary(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(_to_json(values), indent=2)
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
        """Closes all, even if one of them raises."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


def _to_json(value: Any) -> Any:
    """Converts to JSON types; numbers of numpy and torch become floats, everything else text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner) for inner in value]
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return str(value)


_LINE_SECONDS = 15.0


def open_trackers(folder: Path, num_steps: int, *, tensorboard: bool) -> Trackers:
    """New files for a new run; an interrupted one continues after its last saved step."""
    trackers: list[Tracker] = [JsonlTracker.resume(folder / "metrics.jsonl", num_steps)]
    if tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard", resume_step=num_steps or None))
    return Trackers(trackers)


class Progress:
    """Counts steps and tokens; shows loss, rate and time left on stderr unless `quiet`."""

    def __init__(
        self,
        num_steps: int | None,
        max_seconds: float,
        *,
        done: int,
        quiet: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`num_steps` None and `max_seconds` 0 mean no limit; `done` steps were trained before; `clock` returns seconds."""
        self._num_steps, self._max_seconds, self._quiet = num_steps, max_seconds, quiet
        self._done = self._first = done
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._clock = clock
        self._started = self._last_line = clock()
        self.num_tokens = 0
        self._bar: Bar | None = None
        if not quiet and sys.stderr.isatty():
            columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("train", total=num_steps, completed=done, text="")
            self._bar.start()

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self._elapsed()

    def advance(self, *, num_tokens: int, epoch: int, loss: float | None, spent_s: float) -> None:
        """Counts one step; `spent_s` is the training time that counts against the limit."""
        self._done += 1
        self.num_tokens += num_tokens
        parts = [f"epoch {epoch}", f"{self.tokens_per_s:,.0f} tokens/s"]
        if loss is not None:
            parts.insert(1, f"loss {loss:.4f}")
        if (left := self._seconds_left(spent_s)) is not None:
            parts.append(f"{timedelta(seconds=round(left))} left")
        text = " · ".join(parts)
        if self._bar:
            self._bar.update(self._task, advance=1, text=text)
        elif not self._quiet and self._clock() - self._last_line > _LINE_SECONDS:
            self._last_line = self._clock()
            self.say(f"step {self._done:,}{f' of {self._num_steps:,}' if self._num_steps else ''} · {text}")

    def say(self, line: str) -> None:
        """Prints a line that stays above the progress bar."""
        if not self._quiet:
            self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    def _elapsed(self) -> float:
        return max(self._clock() - self._started, 1e-9)

    def _seconds_left(self, spent_s: float) -> float | None:
        """Until the first known limit, at the current rate."""
        limits = []
        if self._num_steps:
            limits.append((self._num_steps - self._done) * self._elapsed() / (self._done - self._first))
        if self._max_seconds:
            limits.append(self._max_seconds - spent_s)
        return max(min(limits), 0.0) if limits else None
