"""Shell. A process for the tests of the local runner: prints "up", then runs until SIGTERM."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    deaf = "deaf" in Path(sys.argv[-1]).read_text()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda number, frame: sys.exit(0))
    print("up", flush=True)
    while True:
        signal.pause()
