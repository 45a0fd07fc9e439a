"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

_LINE_SECONDS = 15.0


class Progress:
    """Counts steps and tokens; shows loss, rate and time left on stderr unless it is quiet."""

    def __init__(self, num_steps: int | None, max_seconds: float, *, done: int, quiet: bool):
        """`num_steps` None and `max_seconds` 0 are unknown limits; `done` steps lie behind."""
        self._num_steps, self._max_seconds, self._quiet = num_steps, max_seconds, quiet
        self._done = self._first = done
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._started = self._last_line = time.monotonic()
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
        """One step is done; `spent_s` is the training time that counts against the limit."""
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
        elif not self._quiet and time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"step {self._done:,}{f' of {self._num_steps:,}' if self._num_steps else ''} · {text}")

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    def _elapsed(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def _seconds_left(self, spent_s: float) -> float | None:
        """Until the first limit that is known, at the present rate."""
        limits = []
        if self._num_steps:
            limits.append((self._num_steps - self._done) * self._elapsed() / (self._done - self._first))
        if self._max_seconds:
            limits.append(self._max_seconds - spent_s)
        return max(min(limits), 0.0) if limits else None
