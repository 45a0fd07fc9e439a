"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_LINE_SECONDS = 15.0


class Progress:
    """Counts steps and tokens; shows rate, loss and time left on stderr unless it is quiet."""

    def __init__(self, num_steps: int | None, *, done: int, quiet: bool):
        self._num_steps, self._quiet, self._done = num_steps, quiet, done
        self._console = Console(stderr=True, highlight=False)
        self._started = self._last_line = time.monotonic()
        self._num_tokens = 0
        self._bar: Bar | None = None
        if not quiet and sys.stderr.isatty():
            columns = (
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("train", total=num_steps, completed=done, text="")
            self._bar.start()

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._started, 1e-9)

    def advance(self, *, num_tokens: int, epoch: int, loss: float | None) -> None:
        """One step is done."""
        self._done += 1
        self._num_tokens += num_tokens
        text = (
            f"epoch {epoch} · loss {'-' if loss is None else format(loss, '.4f')} · {self.tokens_per_s:,.0f} tokens/s"
        )
        if self._bar:
            self._bar.update(self._task, advance=1, text=text)
        elif not self._quiet and time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"step {self._done:,}{f' of {self._num_steps:,}' if self._num_steps else ''} · {text}")

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(line)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
