"""Shell. `python -m qmq.watchdog`."""

from __future__ import annotations

import sys

from qmq.watchdog.main import main

if __name__ == "__main__":
    sys.exit(main())
