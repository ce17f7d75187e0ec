"""Shell. A broker as ever, but once a file named TRIGGER lies beside its settings, fsync fails with EIO.

The failure is raised where the system call is made: everything above it is what a user runs.
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
