"""Shell. A broker with faults below its code; each lasts while a file of its name lies beside the settings.

The system calls fail or answer wrongly, as on a bad disk and on a machine without a time service.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from qmq.broker.main import main

DISK_FAILS, CLOCK_IS_AHEAD = "disk fails now", "clock is wrong now"
AHEAD_S = 60


def is_on(trigger):
    return Path(sys.argv[sys.argv.index("--config") + 1]).with_name(trigger).exists()


def failing(call):
    def sync(descriptor):
        if is_on(DISK_FAILS):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor)

    return sync


def ahead(read, by):
    return lambda: read() + by * is_on(CLOCK_IS_AHEAD)


if __name__ == "__main__":
    os.fsync, os.fdatasync = failing(os.fsync), failing(os.fdatasync)
    time.time_ns = ahead(time.time_ns, AHEAD_S * 1_000_000_000)
    sys.exit(main())
