"""Agreement of all ranks: an action that may fail on one of them succeeds on all or raises on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar, cast

from nestpipe.distributed.process_group import Channel
from nestpipe.errors import CheckpointError, ConfigError, DataError, NestPipeError, TrainError

_ERRORS: dict[str, type[NestPipeError]] = {kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError)}


Result = TypeVar("Result")


def all_ranks_or_none(channel: Channel, name: str, act: Callable[[], Result]) -> Result:
    """What `act` returns, on every rank or on none: where one is refused, all raise, and the others say which rank it was.

    Without this the others would only see that a rank has gone. `act` must not talk to other ranks.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = act()
    except (NestPipeError, OSError) as error:
        failure = error
    own = json.dumps([type(failure).__name__, str(failure)] if failure else None)
    said = [json.loads(data) for data in channel.all_gather_bytes(own.encode(), name=name)]
    if failure:
        raise failure
    for rank, problem in enumerate(said):
        if problem:
            raise _ERRORS.get(problem[0], TrainError)(f"rank {rank} stopped: {problem[1]}")
    return cast(Result, result)
