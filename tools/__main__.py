"""Shell. `python -m tools <Command> --option=value`."""

from __future__ import annotations

import os
import sys

from tools.main import main

status = main()
try:
    sys.stdout.flush()
except OSError:  # main has said so; Python would try once more when it ends, and end with a status of its own
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
sys.exit(status)
