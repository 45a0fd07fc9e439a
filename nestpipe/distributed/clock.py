"""Time as a parameter: deadlines and polling use a `Clock`, so that tests need not sleep."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic time and sleep. The standard `time` module is one."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...
