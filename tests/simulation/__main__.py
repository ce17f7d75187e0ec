"""Entry of `python -m tests.simulation`."""

from __future__ import annotations

import sys

from tests.simulation.run import main

if __name__ == "__main__":
    sys.exit(main())
