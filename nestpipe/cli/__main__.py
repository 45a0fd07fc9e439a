"""`python -m nestpipe.cli` is the `nestpipe` program; torchrun starts it this way."""

import sys

from nestpipe.cli import main

sys.exit(main())
