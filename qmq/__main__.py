"""Shell. `python -m qmq`, where the command `qmq` is not on the path."""

from __future__ import annotations

import sys

from qmq.cli import main

if __name__ == "__main__":
    sys.exit(main())
