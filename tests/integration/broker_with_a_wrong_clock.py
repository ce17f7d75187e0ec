"""Shell. A broker on a machine with a wrong clock while a file TRIGGER lies beside its settings.

The process reads a shifted time, as on a machine without a time service.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from qmq.broker.main import main

TRIGGER = "clock is wrong now"
AHEAD_S = 60


def wrong(read, ahead):
    trigger = Path(sys.argv[sys.argv.index("--config") + 1]).with_name(TRIGGER)
    return lambda: read() + ahead * trigger.exists()


if __name__ == "__main__":
    time.time_ns = wrong(time.time_ns, AHEAD_S * 1_000_000_000)
    sys.exit(main())
