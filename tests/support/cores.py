"""Shell. Scheduling parameters of a thread, as the kernel reports them."""

from __future__ import annotations

import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

import pytest

needs_slices = pytest.mark.skipif(
    tuple(map(int, platform.release().split("-")[0].split(".")[:2])) < (6, 12),
    reason="slices of a thread's own came with Linux 6.12",
)


def nice_of(thread: int | None = None) -> int:
    """Return how nice a thread is, or this one."""
    return os.getpriority(os.PRIO_PROCESS, thread or threading.get_native_id())


def slice_ns(thread: int | None = None) -> int:
    """Return for how long a thread may run before others that want its core, or this one."""
    lines = Path(f"/proc/{thread or threading.get_native_id()}/sched").read_text().splitlines()
    return next(int(line.split(":")[1]) for line in lines if line.startswith("se.slice"))


def nices_of(pid: int) -> set[int]:
    """Return how nice the threads of a process are; those of gRPC come and go."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            found.add(nice_of(int(task.name)))
    return found
