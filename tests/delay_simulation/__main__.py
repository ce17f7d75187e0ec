"""Entry of `python -m tests.delay_simulation`."""

from __future__ import annotations

import sys

from tests.delay_simulation.run import main

if __name__ == "__main__":
    sys.exit(main())
