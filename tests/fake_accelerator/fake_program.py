"""`nestpipe` on a machine with the fake accelerator: python -m tests.fake_accelerator.fake_program doctor --device fake"""

from __future__ import annotations

import sys

from tests.fake_accelerator import accelerator

if __name__ == "__main__":
    accelerator.load(delay_us=20, seed=1)
    from nestpipe.cli import doctor_runs, main  # they import torch, which must know the device first

    doctor_runs.PROGRAM = (sys.executable, "-m", "tests.fake_accelerator.fake_program")
    code = main(sys.argv[1:])
    accelerator.check()
    sys.exit(code)
