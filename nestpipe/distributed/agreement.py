"""Agreement of all ranks: a local action succeeds on every rank or raises on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar, cast

from nestpipe.distributed.process_group import Channel
from nestpipe.errors import CheckpointError, ConfigError, DataError, NestPipeError, TrainError

_ERRORS: dict[str, type[NestPipeError]] = {kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError)}

Result = TypeVar("Result")


def all_ranks_or_none(channel: Channel, name: str, act: Callable[[], Result]) -> Result:
    """The result of `act`, which must not communicate. Collective.

    If it raises on one rank, all ranks raise, and the others name that rank. Without the exchange they would only see
    that a peer has closed its connection.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = act()
    except (NestPipeError, OSError) as error:
        failure = error
    own = json.dumps([type(failure).__name__, str(failure)] if failure else None)
    outcomes = [json.loads(data) for data in channel.all_gather_bytes(own.encode(), name=name)]
    if failure:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome:
            raise _ERRORS.get(outcome[0], TrainError)(f"rank {rank} stopped: {outcome[1]}")
    return cast(Result, result)
