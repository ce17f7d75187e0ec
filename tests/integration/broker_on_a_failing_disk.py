"""Shell. A broker with an fsync that fails with EIO once a file TRIGGER lies beside its settings.

The system call fails; all code above it is the shipped one.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from qmq.broker.main import main

TRIGGER = "disk fails now"


def failing(call):
    trigger = Path(sys.argv[sys.argv.index("--config") + 1]).with_name(TRIGGER)

    def sync(descriptor):
        if trigger.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor)

    return sync


if __name__ == "__main__":
    os.fsync, os.fdatasync = failing(os.fsync), failing(os.fdatasync)
    sys.exit(main())
