"""`python -m tests.training.launch_dying PLAN OPTIONS... COMMAND...`: nestpipe launch, whose ranks are those of dying_rank."""

import sys
from dataclasses import replace

from nestpipe.cli import launch

if __name__ == "__main__":
    given = launch.parse(sys.argv[2:])
    sys.exit(launch.main(replace(given, module=("tests.training.dying_rank", sys.argv[1]))))
