"""Shell. `python -m watchdog`."""

from __future__ import annotations

import sys

from watchdog.main import main

if __name__ == "__main__":
    sys.exit(main())
