"""`--shard i/n`: which users one of several workers writes instructions for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nestpipe.errors import ConfigError
from nestpipe.rng import mix64


@dataclass(frozen=True, slots=True)
class WorkShard:
    """Worker `number` of 1 .. `count`; every user belongs to exactly one worker."""

    number: int = 1
    count: int = 1

    @staticmethod
    def parse(text: str) -> WorkShard:
        """Reads "i/n"; raises ConfigError unless 1 <= i <= n."""
        found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        number, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= number <= count:
            raise ConfigError(f"--shard is {text!r}; it must be i/n with i from 1 to n, such as 2/4.")
        return WorkShard(number, count)

    def has(self, user: int) -> bool:
        return self.count == 1 or mix64(user) % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"
