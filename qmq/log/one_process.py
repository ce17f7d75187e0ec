"""Shell. A data directory belongs to one process at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qmq.errors import QmqError


@contextmanager
def one_process(data: Path, name: str) -> Iterator[None]:
    """Two processes on one data directory would destroy it. Raises QmqError: another `name` has it."""
    with open(data / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QmqError(f"another {name} runs on {data}; stop it first") from None
        yield
