"""`python -m tests.training.dying_rank PLAN ARGUMENTS...`: the command line of nestpipe on a rank that may kill itself.

PLAN is JSON, [[rank, function, call], ...]: in the group's n-th life, that rank dies by SIGKILL at the n-th call of a
function of the checkpoint, the saver or the training loop. Lives beyond the plan are left alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from nestpipe import atomic_files
from nestpipe.checkpoint import async_writer, folders
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.cli import main
from nestpipe.training import loop


def arm(name: str, call: int) -> None:
    """Makes this process die at a call of a function."""
    module: Any = next(
        module
        for module in (atomic_files, folders, checkpoint_writer, async_writer, loop, loop._Loop)
        if hasattr(module, name)
    )
    original, calls = getattr(module, name), 0

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            print(f"rank {os.environ['RANK']} dies in {name}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(module, name, dying)


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life < len(plan) and plan[life][0] == int(os.environ["RANK"]):
        arm(*plan[life][1:])
    sys.exit(main(sys.argv[2:]))
