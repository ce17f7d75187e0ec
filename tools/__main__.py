"""Shell. `python -m qmq.tools <Command> --option=value`."""

from __future__ import annotations

import os
import sys

try:
    from qmq.tools.main import main

    status = main()
except KeyboardInterrupt:  # while modules are still read; `main` handles all later ones
    print("tools.sh: interrupted before anything was changed", file=sys.stderr)
    sys.exit(1)
try:
    sys.stdout.flush()
except OSError:  # main has said so; Python would try once more when it ends, and end with a status of its own
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
sys.exit(status)
