"""Shell. A data directory belongs to one process at a time, and to one place."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from qmq.errors import QmqError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Drawn at random by each start of the kernel."""


@contextmanager
def one_process(data: Path, name: str) -> Iterator[str]:
    """Hold the directory's lock; yield the directory's instance. Two processes on one directory would destroy it.

    Raises:
        QmqError: another `name` has it.
    """
    with open(data / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QmqError(f"another {name} runs on {data}; stop it first") from None
        yield _instance(file)


def _instance(lock: IO[Any]) -> str:
    """Return a name of this directory at this place, until the machine starts again.

    A process that restarts on its directory has the same instance, and the lock proves that the one before it has
    ended. A copy of the directory has another one: its lock is another file, or the kernel was started another time.
    """
    try:
        kernel = BOOT_ID.read_text().strip()
    except OSError:  # not on Linux: each start counts as another place
        kernel = secrets.token_hex(16)
    found = os.fstat(lock.fileno())
    return blake2b(f"{kernel} {found.st_dev} {found.st_ino}".encode(), digest_size=8).hexdigest()
