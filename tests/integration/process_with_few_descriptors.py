"""Shell. A process with a small hard limit of file descriptors. Its settings file is named after it."""

from __future__ import annotations

import resource
import sys
from importlib import import_module
from pathlib import Path

LIMIT = 256

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    sys.exit(import_module(f"qmq.{Path(sys.argv[-1]).stem}.__main__").main())
