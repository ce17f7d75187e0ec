"""Shell. `python -m qmq.tools <Command> --option=value`."""

from __future__ import annotations

import os
import sys

try:
    from qmq.tools.main import main

    status = main()
except KeyboardInterrupt:  # Interrupts while modules load; `main` handles later ones.
    print("tools.sh: interrupted before anything was changed", file=sys.stderr)
    sys.exit(1)
try:
    sys.stdout.flush()
except OSError:  # main has reported the error; without this, Python would flush again at exit and change the status
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
sys.exit(status)
